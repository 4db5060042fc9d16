# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and directories that travel with a workload, packed at one place and put where they were at the other.

What is there already is set aside, and comes back if the work does not.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import ctypes
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
            packed.add(path, arcname=path.lstrip("/"), filter=_no_device)


def _no_device(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    if entry.ischr() or entry.isblk():
        raise CarriedError(f"/{entry.name} is a device")
    return entry


def unpack(
    place: Path, paths: Sequence[str], aside: list[dict[str, Any]], suffix: str, save: Callable[[], None]
) -> None:
    """Put what was packed where it was. ``aside`` is a record of what was moved away for it, written by ``save`` before
    anything is, so that an interrupted unpacking can be repeated or undone. What was unpacked survives a power cut.

    :raises CarriedError: if the pack holds anything but ``paths``, or something that leads out of them.
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
    links: list[str] = []
    with tarfile.open(place / PACK) as packed:
        for entry in packed:
            name = f"/{entry.name}"
            if not below(name, paths) or ".." in Path(name).parts:
                raise CarriedError(f"{place / PACK} holds {entry.name}, which is not below {', '.join(paths)}")
            if below(name, links) or (entry.islnk() and not below(f"/{entry.linkname}", paths)):
                raise CarriedError(f"{place / PACK} holds {entry.name}, which leads out of {', '.join(paths)}")
            _no_device(entry)
            links += [name] if entry.issym() else []
            if hasattr(tarfile, "fully_trusted_filter"):  # it was hashed, and owners and modes must come back
                packed.extract(entry, "/", numeric_owner=True, filter="fully_trusted")
            else:
                packed.extract(entry, "/", numeric_owner=True)
    for folder in sorted({str(Path(path).parent) for path in paths}):
        _sync_all(folder)


def _sync_all(folder: str) -> None:
    """Write down all that was changed on the file system of a directory (syncfs(2))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    finally:
        os.close(descriptor)


def undo(aside: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put back what :func:`unpack` set aside; what could not be, each with its ``trouble``."""
    left = []
    for one in aside:
        try:
            if one["existed"] and not os.path.lexists(one["kept"]):
                continue  # it was never moved
            remove(one["path"])
            if one["existed"]:
                Path(one["kept"]).rename(one["path"])
        except OSError as exc:
            left.append({**one, "trouble": str(exc)})
    return left


def remove(path: str) -> None:
    """Remove a file or a tree, if it is there."""
    if Path(path).is_dir() and not Path(path).is_symlink():
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)
