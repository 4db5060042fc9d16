# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small JSON file that several processes and threads change one after another.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.journal import atomic_write

Save = Callable[[Mapping[str, Any]], None]


class StateFileError(Exception):
    """The file cannot be read, written or locked; the text says which and what to do about it."""


def read(path: Path, schema: int) -> dict[str, Any]:
    """The file's content without its schema number; empty if there is no file.

    :raises StateFileError: if it cannot be read or is not an object of this ``schema``.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise StateFileError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        content = json.loads(data)
    except ValueError as exc:
        raise StateFileError(f"{path} is damaged ({exc}); look at it, then move it away: mv {path} {path}.bad") from exc
    found = content.pop("schema", None) if isinstance(content, dict) else type(content).__name__
    if found != schema:
        raise StateFileError(
            f"{path} has schema {found!r}, this release reads {schema}; use the release that wrote it, "
            f"or move it away: mv {path} {path}.bad"
        )
    return content


@contextmanager
def locked(path: Path, schema: int, timeout: float = 10.0) -> Iterator[tuple[dict[str, Any], Save]]:
    """Hold the file for a moment: yields its content and a function that replaces it.

    The lock is on a file beside it, because the file itself is replaced. Waits at most ``timeout`` seconds for it.

    :raises StateFileError: as :func:`read`; also if it cannot be written, or the lock is not to be had.
    """
    beside = path.with_name(f"{path.name}.flock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise StateFileError(f"cannot open {beside}: {exc.strerror}; nothing was done") from exc
    try:
        _wait(descriptor, beside, timeout)
        yield read(path, schema), lambda content: _save(path, schema, content)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, beside: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StateFileError(
                    f"another process has held {beside} for {timeout:.0f} s; see which with: fuser -v {beside}"
                ) from None
            time.sleep(0.05)


def _save(path: Path, schema: int, content: Mapping[str, Any]) -> None:
    try:
        atomic_write(path, (json.dumps({**content, "schema": schema}, indent=1, sort_keys=True) + "\n").encode())
    except OSError as exc:
        raise StateFileError(f"cannot write {path}: {exc.strerror}; it is as it was") from exc
