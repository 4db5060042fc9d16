# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and directories that travel with a workload, packed at one place and put where they were at the other.

What is there already is set aside, and comes back if the work does not.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.artefact import free_bytes

PACK = "files/carried.tar"
"""Where they are in an artefact."""


class CarriedError(Exception):
    """Files that cannot be packed or unpacked; the text says which and why."""


def below(path: str, places: Sequence[str]) -> bool:
    """Whether ``path`` is one of ``places`` or lies in one."""
    return any(path == place.rstrip("/") or path.startswith(place.rstrip("/") + "/") for place in places)


def size(paths: Sequence[str]) -> int:
    """Bytes of the files in ``paths``."""
    total = 0
    for path in map(Path, paths):
        if path.is_file():
            total += path.stat().st_size
        for folder, dummy, names in os.walk(path):
            total += sum(Path(folder, name).lstat().st_size for name in names)
    return total


def trouble(paths: Sequence[str]) -> str:
    """Why paths cannot be packed; empty if they can. A link would arrive without what it leads to."""
    for path in map(Path, paths):
        if not path.is_absolute() or ".." in path.parts or path == Path("/") or not os.path.lexists(path):
            return f"{path} is not an absolute path of something that exists"
        if path.is_symlink():
            return f"{path} is a link; declare {path.resolve()}"
        if os.path.ismount(path):
            return (
                f"{path} is a mount point, which could not be put back; declare what is in it, if nodes do not share it"
            )
    return ""


def no_place(need: int, paths: Sequence[str]) -> str:
    """Why ``need`` bytes in all cannot be put at ``paths`` here, with what is there set aside; empty if they can."""
    for path in map(Path, paths):
        if os.path.ismount(path):
            return f"{path} is a mount point here, so what is in it cannot be set aside"
        free = free_bytes(path.parent)
        if free < need:
            return f"{free} bytes free for {path}, {need} are needed"
    return ""


def pack(paths: Sequence[str], staged: Path) -> None:
    """:raises CarriedError: if one is not there; OSError if it cannot be read or written."""
    if not paths:
        return
    wrong = trouble(paths)
    if wrong:
        raise CarriedError(wrong)
    (staged / PACK).parent.mkdir(mode=0o700)
    with tarfile.open(staged / PACK, "w", format=tarfile.PAX_FORMAT) as packed:
        for path in paths:
            packed.add(path, arcname=path.lstrip("/"))


def unpack(
    place: Path, paths: Sequence[str], aside: list[dict[str, Any]], suffix: str, save: Callable[[], None]
) -> None:
    """Put what was packed where it was. ``aside`` is a record of what was moved away for it, written by ``save`` before
    anything is, so that an interrupted unpacking can be repeated or undone.

    :raises CarriedError: if the pack holds anything but ``paths``.
    """
    if not (place / PACK).exists():
        return
    for path in paths:
        known = next((one for one in aside if one["path"] == path), None)
        if known is None:
            known = {"path": path, "kept": f"{path}.{suffix}", "existed": os.path.lexists(path)}
            aside.append(known)
            save()
        if known["existed"] and not os.path.lexists(known["kept"]):
            Path(path).rename(known["kept"])
        else:
            remove(path)
    with tarfile.open(place / PACK) as packed:
        for entry in packed:
            if not below(f"/{entry.name}", paths) or ".." in Path(entry.name).parts:
                raise CarriedError(f"{place / PACK} holds {entry.name}, which is not below {', '.join(paths)}")
            if hasattr(tarfile, "fully_trusted_filter"):  # it was hashed, and owners and modes must come back
                packed.extract(entry, "/", numeric_owner=True, filter="fully_trusted")
            else:
                packed.extract(entry, "/", numeric_owner=True)


def undo(aside: Sequence[dict[str, Any]]) -> None:
    """Put back what :func:`unpack` set aside."""
    for one in aside:
        with contextlib.suppress(OSError):
            if one["existed"] and not os.path.lexists(one["kept"]):
                continue  # it was never moved
            remove(one["path"])
            if one["existed"]:
                Path(one["kept"]).rename(one["path"])


def remove(path: str) -> None:
    """Remove a file or a tree, if it is there."""
    if Path(path).is_dir() and not Path(path).is_symlink():
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)
