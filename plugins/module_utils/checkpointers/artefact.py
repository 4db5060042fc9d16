# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A saved workload on disk: a directory named by its id, with a manifest that is written last and vouches for the rest.

CRIU's images carry no checksum (a flipped byte restores with success, a truncated file can spin for ever), so each file
is hashed in pieces of :data:`PIECE` bytes, on all cores at once, and compared before anything is restored. A directory
becomes an artefact by being renamed to its id; one without manifest is a leftover. Memory images hold secrets:
directories are 0700 and files 0600.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
PIECE = 16 << 20
MANIFEST = "manifest.json"
STAGED = ".stage-"
LEFTOVER_SECONDS = 86400.0
_READ = 1 << 20
_GLANCE = 0.01
"""Seconds between two looks at files that grow."""
_SYNCS = 8
"""Files whose way to the disk is waited for at the same time, so that one journal commit serves many."""
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_LIBC = ctypes.CDLL(None)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")


class ArtefactError(Exception):
    """An artefact that is missing, damaged or cannot be written; the text says which, what was found and expected."""


@dataclass(frozen=True)
class File:
    """A file of an artefact by its path below it, its bytes, and the SHA-256 of each piece."""

    path: str
    size: int
    pieces: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size, "pieces": list(self.pieces)}


def new_id(name: str, at: str, token: str) -> str:
    """An id for a save of workload ``name``, taken ``at`` (a time as text); unique by ``token``."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:80] or "work"
    return f"{slug}-{at}-{token}"


def place(store: str | Path, artefact: str) -> Path:
    """The directory of an artefact; :raises ArtefactError: if the id could lead out of the store."""
    if not _ID.fullmatch(artefact) or artefact in (".", ".."):
        raise ArtefactError(f"{artefact!r} is not the id of a checkpoint; expected letters, digits, dots, dashes")
    return Path(store) / artefact


def piece_count(size: int) -> int:
    return max(1, -(-size // PIECE))


def hash_piece(path: Path, index: int) -> str:
    """SHA-256 of the piece of that index, read in small blocks so that memory stays flat."""
    digest = hashlib.sha256()
    buffer = bytearray(_READ)
    view = memoryview(buffer)
    left, offset = PIECE, index * PIECE
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while left:
            got = os.preadv(descriptor, [view[: min(left, _READ)]], offset)
            if not got:
                break
            digest.update(view[:got])
            offset, left = offset + got, left - got
    finally:
        os.close(descriptor)
    return digest.hexdigest()


class Ahead:
    """Hashes the pieces that files have already, and has them written to disk, while they still grow at their ends.

    A piece that is changed after it was hashed is found wrong by whoever compares it: nothing is trusted for it.
    """

    def __init__(self, root: Path, pattern: str) -> None:
        self._root, self._pattern = root, pattern
        self._pieces: dict[str, list[str]] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._done.wait(_GLANCE):
            with contextlib.suppress(OSError):  # whoever publishes reads it again and says what is wrong
                for path in sorted(self._root.glob(self._pattern)):
                    self._take(path)

    def _take(self, path: Path) -> None:
        pieces = self._pieces.setdefault(str(path.relative_to(self._root)), [])
        while not self._done.is_set() and path.stat().st_size >= (len(pieces) + 1) * PIECE:
            start_writing(path, len(pieces) * PIECE, PIECE)
            pieces.append(hash_piece(path, len(pieces)))

    def end(self) -> dict[str, list[str]]:
        """The hashes of the first pieces of each file, by its path."""
        self._done.set()
        self._thread.join()
        return self._pieces


def start_writing(path: Path, offset: int, length: int) -> None:
    """Have the kernel begin to write a part of a file to disk (sync_file_range(2)); nothing waits for it."""
    call = getattr(_LIBC, "sync_file_range", None)
    if call is None:
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        call(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_WRITE))
    finally:
        os.close(descriptor)


def hash_files(
    root: Path, paths: Iterable[str], workers: int = 0, known: Mapping[str, Sequence[str]] | None = None
) -> list[File]:
    """Hash files below ``root``, ``workers`` pieces at a time (0: one a core); hashlib works outside Python's lock.
    ``known`` are the hashes of the first pieces of some, and need not be had again."""
    sizes = {path: (root / path).stat().st_size for path in paths}
    pieces = {path: list((known or {}).get(path, ()))[: size // PIECE] for path, size in sizes.items()}
    jobs = [(path, index) for path, size in sizes.items() for index in range(len(pieces[path]), piece_count(size))]
    with ThreadPoolExecutor(max_workers=workers or len(os.sched_getaffinity(0))) as pool:
        digests = list(pool.map(lambda job: hash_piece(root / job[0], job[1]), jobs))
    for (path, dummy), digest in zip(jobs, digests):
        pieces[path].append(digest)
    return [File(path, size, tuple(pieces[path])) for path, size in sizes.items()]


def contents(root: Path) -> list[str]:
    """Paths of the regular files below ``root``, but for the manifest; :raises ArtefactError: for anything else."""
    found = []
    for folder, folders, names in os.walk(root):
        for path in (Path(folder, name) for name in (*folders, *names)):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ArtefactError(f"{path} is not a regular file; nothing else belongs into an artefact")
        found += [str(Path(folder, name).relative_to(root)) for name in names]
    return sorted(path for path in found if path != MANIFEST)


def stage(store: str | Path, artefact: str) -> Path:
    """An empty private directory in the store, to become the artefact; what an earlier attempt left is removed.

    :raises ArtefactError: if it cannot be made, or somebody else may replace what is in the store.
    """
    final = place(store, artefact)
    directory = final.with_name(f"{STAGED}{artefact}")
    try:
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_open(final.parent)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
    except OSError as exc:
        raise ArtefactError(f"cannot make {directory}: {exc.strerror}") from exc
    return directory


def _refuse_open(store: Path) -> None:
    """A save holds what root runs, so nobody else may put another in its place: not the owner of the store, nor who may
    write there, unless nobody may take away what others have put there."""
    about = store.stat()
    if about.st_uid not in (0, os.geteuid()):
        raise ArtefactError(f"uid {about.st_uid} may replace what is in {store}; take that away: chown root {store}")
    if about.st_mode & stat.S_ISVTX:
        return
    if about.st_mode & stat.S_IWOTH:
        raise ArtefactError(f"everybody may replace what is in {store}; take that right away: chmod o-w {store}")
    if about.st_mode & stat.S_IWGRP and about.st_gid not in (0, os.getegid()):
        raise ArtefactError(f"gid {about.st_gid} may replace what is in {store}; take that away: chmod g-w {store}")


def own_directory(path: Path) -> None:
    """Make a directory that nobody else may look into or change; one that is there must be so.

    :raises OSError: if it cannot be made, or is somebody else's.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "is not a directory of our own that is closed to others", str(path))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _synced(root: Path, paths: Sequence[str]) -> Iterator[None]:
    """Have files on disk at the end of the block, and hash in it: writing out is waiting and hashing is computing."""
    for path in paths:
        start_writing(root / path, 0, 0)
    with ThreadPoolExecutor(max_workers=_SYNCS) as pool:
        synced = [pool.submit(_sync, root / path) for path in paths]
        yield
        for one in synced:
            one.result()


def publish(
    staged: Path,
    artefact: str,
    manifest: Mapping[str, Any],
    workers: int = 0,
    known: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Make a staged directory the artefact: private modes, hashes, everything on disk, manifest, and only then its
    name. The manifest as it was read back. ``known`` is what :class:`Ahead` had hashed.

    :raises ArtefactError: if the name is taken or the disk does not take it; the staged directory is left.
    """
    final = place(staged.parent, artefact)
    try:
        paths = contents(staged)
        for folder, dummy, names in os.walk(staged):
            Path(folder).chmod(0o700)
            for name in names:
                Path(folder, name).chmod(0o600)
        with _synced(staged, paths):
            files = hash_files(staged, paths, workers, known)
        whole = {
            **manifest,
            "schema": SCHEMA,
            "id": artefact,
            "piece": PIECE,
            "files": [file.as_dict() for file in files],
            "total": sum(file.size for file in files),
            "complete": True,
        }
        _write_manifest(staged, whole)
        if final.exists():
            raise ArtefactError(f"{final} exists already; an artefact is never replaced")
        staged.rename(final)
        _sync(final.parent)
    except OSError as exc:
        raise ArtefactError(f"cannot publish {final}: {exc.strerror} ({exc.filename or staged})") from exc
    return read(staged.parent, artefact)


def _write_manifest(staged: Path, manifest: Mapping[str, Any]) -> None:
    with (staged / MANIFEST).open("w") as stream:
        os.fchmod(stream.fileno(), 0o600)
        json.dump(manifest, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(staged)


def digest(store: str | Path, artefact: str) -> str:
    """SHA-256 of the manifest as it lies there. It vouches for all but itself, so whoever names a save to others tells
    this with it; :raises OSError: if it cannot be read."""
    return hashlib.sha256((place(store, artefact) / MANIFEST).read_bytes()).hexdigest()


def read(store: str | Path, artefact: str, known: str = "") -> dict[str, Any]:
    """The manifest; ``known`` is its :func:`digest`, if that is known.

    :raises ArtefactError: if it is not there, not whole, not the one that is known, or not one this release can read.
    """
    path = place(store, artefact) / MANIFEST
    try:
        text = path.read_bytes()
        seen = hashlib.sha256(text).hexdigest()
        if known and seen != known:
            raise ArtefactError(f"{path} is not what was written: SHA-256 {seen[:12]}… instead of {known[:12]}…")
        manifest = json.loads(text)
        _refuse_open(path.parents[1])
    except FileNotFoundError:
        raise ArtefactError(f"there is no {path}: no such checkpoint here, or it was never finished") from None
    except (OSError, ValueError) as exc:
        raise ArtefactError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise ArtefactError(f"{path} has schema {found!r}, this release reads {SCHEMA}")
    if not manifest.get("complete") or manifest.get("id") != artefact or not isinstance(manifest.get("files"), list):
        raise ArtefactError(f"{path} is not the whole manifest of {artefact}")
    return manifest


def wrong_pieces(root: Path, files: Sequence[Mapping[str, Any]], workers: int = 0) -> list[tuple[str, int, str]]:
    """Pieces below ``root`` that are not what the manifest says: path, index, and what was found."""
    wrong: list[tuple[str, int, str]] = []
    whole = []
    for file in files:
        name = str(file["path"])
        try:
            size = _inside(root, file).lstat().st_size
        except OSError as exc:
            wrong += [(name, index, str(exc.strerror)) for index in range(len(file["pieces"]))]
            continue
        if size != file["size"]:
            wrong += [(name, index, f"{size} bytes instead of {file['size']}") for index in range(len(file["pieces"]))]
        else:
            whole.append(file)
    jobs = [(file["path"], index, digest) for file in whole for index, digest in enumerate(file["pieces"])]
    with ThreadPoolExecutor(max_workers=workers or len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda job: hash_piece(root / job[0], job[1]), jobs)
        wrong += [
            (path, index, f"SHA-256 {seen[:12]}… instead of {digest[:12]}…")
            for (path, index, digest), seen in zip(jobs, found)
            if seen != digest
        ]
    return wrong


def receive(store: str | Path, manifest: Mapping[str, Any], workers: int = 0) -> list[tuple[str, int]]:
    """Make room for an artefact of another node; the pieces that are still to come, after an interrupted try not all.

    Empty if the whole artefact is here already. Nothing is compared that was not here before.

    :raises ArtefactError: if it is one this release cannot read, or the disk is too small.
    """
    name = str(manifest.get("id"))
    final = place(store, name)
    if manifest.get("schema") != SCHEMA or manifest.get("piece") != PIECE or not manifest.get("complete"):
        raise ArtefactError(f"{name} was not made by this release; save the work again")
    if final.exists():
        if read(store, name) != dict(manifest):
            raise ArtefactError(f"{final} is another artefact of that name; remove it: rm -r {final}")
        return []
    staged = final.with_name(f"{STAGED}{name}")
    begun = [file for file in manifest["files"] if not file["size"] or _inside(staged, file).exists()]
    try:
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_open(final.parent)
        own_directory(staged)
        held = sum(path.stat().st_blocks * 512 for path in staged.rglob("*") if path.is_file())
        missing = int(manifest["total"]) - held - free_bytes(staged)
        if missing > 0:
            raise ArtefactError(f"{staged}: {missing} bytes too little space for {name}; see: df -h {staged}")
        for file in manifest["files"]:
            path = _inside(staged, file)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("ab") as stream:
                os.fchmod(stream.fileno(), 0o600)
                stream.truncate(file["size"])
    except OSError as exc:
        raise ArtefactError(f"cannot make {staged}: {exc.strerror}") from exc
    wrong = {(path, index) for path, index, dummy in wrong_pieces(staged, begun, workers)}
    known = {file["path"] for file in begun}
    pieces = [(file["path"], index) for file in manifest["files"] for index in range(len(file["pieces"]))]
    return [one for one in pieces if one[0] not in known or one in wrong]


def accept(store: str | Path, manifest: Mapping[str, Any], workers: int = 0) -> bool:
    """Give a received artefact its name once every piece is right; False if it had it already.

    :raises ArtefactError: if a piece is wrong, or it cannot be written.
    """
    name = str(manifest.get("id"))
    final = place(store, name)
    if final.exists():
        return False
    staged = final.with_name(f"{STAGED}{name}")
    try:
        here = [file["path"] for file in manifest["files"] if _inside(staged, file).exists()]
        with _synced(staged, here):
            wrong = wrong_pieces(staged, manifest["files"], workers)
        if wrong:
            path, index, what = wrong[0]
            raise ArtefactError(
                f"{len(wrong)} pieces of {name} arrived wrong, among them {path}, piece {index}: {what}"
            )
        _write_manifest(staged, manifest)
        staged.rename(final)
        _sync(final.parent)
    except OSError as exc:
        raise ArtefactError(f"cannot publish {final}: {exc.strerror}") from exc
    return True


def _inside(root: Path, file: Mapping[str, Any]) -> Path:
    """:raises ArtefactError: if the name a manifest gives leads out of the artefact."""
    name = Path(str(file["path"]))
    if name.is_absolute() or ".." in name.parts:
        raise ArtefactError(f"the manifest names {str(name)!r}, which leads out of the artefact")
    return root / name


def verify(store: str | Path, artefact: str, workers: int = 0) -> list[str]:
    """What is wrong with an artefact, file by file; empty if it is exactly what was published.

    :raises ArtefactError: if there is no manifest to compare with.
    """
    manifest = read(store, artefact)
    root = place(store, artefact)
    problems = {
        path: f"{path}, piece {i}: {what}" for path, i, what in reversed(wrong_pieces(root, manifest["files"], workers))
    }
    known = {file["path"] for file in manifest["files"]}
    problems.update({path: f"{path} is not in the manifest" for path in contents(root) if path not in known})
    return [problems[path] for path in sorted(problems)]


def remove(store: str | Path, artefact: str) -> bool:
    """Remove an artefact, its name first, so that what a crash leaves is a leftover. False if there is none."""
    directory = place(store, artefact)
    staged = directory.with_name(f"{STAGED}{artefact}")
    there = directory.exists() or staged.exists()
    if directory.exists():
        _clear(staged)
        try:
            directory.rename(staged)
        except OSError as exc:
            raise ArtefactError(f"cannot remove {directory}: {exc.strerror}") from exc
    _clear(staged)
    return there


def _clear(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        raise ArtefactError(f"cannot remove {directory}; see what holds it: lsof +D {directory}")


def listing(store: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Manifests of the whole artefacts in a store, without their hashes and the text of the unit, which may hold
    secrets, and the names of the others."""
    whole, others = [], []
    for path in sorted(Path(store).glob("*")):
        if not path.is_dir():
            continue
        try:
            manifest = read(store, path.name)
        except ArtefactError:
            others.append(path.name)
            continue
        about = {key: value for key, value in manifest.get("workload", {}).items() if key != "fragment"}
        files = [{"path": file["path"], "size": file["size"]} for file in manifest["files"]]
        whole.append({**manifest, "workload": about, "files": files})
    return whole, others


def leftovers(store: str | Path, now: float) -> list[str]:
    """Names of what was begun in a store more than a day ago and never became an artefact, or was not wholly removed.
    Whatever else is there is somebody else's."""
    begun = [path for path in Path(store).glob(f"{STAGED}*") if _ID.fullmatch(path.name[len(STAGED) :])]
    old = [path for path in begun if path.is_dir() and now - path.stat().st_mtime > LEFTOVER_SECONDS]
    return sorted(path.name for path in old)


def remove_leftover(store: str | Path, name: str) -> None:
    """:raises ArtefactError: if it cannot be removed."""
    _clear(Path(store, name))


def free_bytes(path: str | Path) -> int:
    """Bytes that root may still write below the nearest existing parent of ``path``."""
    nearest = Path(path)
    while not nearest.exists():
        nearest = nearest.parent
    about = os.statvfs(nearest)
    return about.f_bfree * about.f_frsize
