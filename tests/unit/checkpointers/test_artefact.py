# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Artefacts on disk: what is whole, what is not, and what a broken transfer leaves."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.artefact import ArtefactError

ID = "trainer-20260101T000000Z-abc123"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "PIECE", 1000)


def published(store: Path, name: str = ID, **more: Any) -> dict[str, Any]:
    staged = artefact.stage(store, name)
    (staged / "images").mkdir(mode=0o755)
    (staged / "images/pages-1.img").write_bytes(bytes(range(250)) * 10)
    (staged / "images/empty.img").write_bytes(b"")
    (staged / "dump.log").write_text("done\n")
    return artefact.publish(staged, name, {"workload": {"name": "trainer"}, "created": 1.0, **more})


def test_what_is_published_is_whole_and_private(tmp_path: Path) -> None:
    manifest = published(tmp_path)
    assert artefact.verify(tmp_path, ID) == []
    assert artefact.read(tmp_path, ID) == manifest
    assert {file["path"]: len(file["pieces"]) for file in manifest["files"]} == {
        "images/pages-1.img": 3,
        "images/empty.img": 1,
        "dump.log": 1,
    }
    assert manifest["total"] == 2505
    modes = {path.relative_to(tmp_path): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {oct(mode) for path, mode in modes.items() if (tmp_path / path).is_dir()} == {"0o700"}
    assert {oct(mode) for path, mode in modes.items() if (tmp_path / path).is_file()} == {"0o600"}


def flip(root: Path) -> None:
    data = bytearray((root / "images/pages-1.img").read_bytes())
    data[1234] ^= 1
    (root / "images/pages-1.img").write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a-flipped-byte": (flip, r"pages-1.img, piece 1: SHA-256"),
    "a-truncated-page-file": (
        lambda root: (root / "images/pages-1.img").write_bytes(b"x" * 100),
        r"pages-1.img, piece 0: 100 bytes instead of 2500",
    ),
    "a-missing-file": (lambda root: (root / "dump.log").unlink(), r"dump.log, piece 0: No such file"),
    "a-file-too-many": (lambda root: (root / "images/core-1.img").touch(), r"core-1.img is not in the manifest"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], Any], said: str) -> None:
    published(tmp_path)
    damage(tmp_path / ID)
    (problem,) = artefact.verify(tmp_path, ID)
    assert problem.startswith("images/") or "dump.log" in problem
    assert __import__("re").search(said, problem), problem


MANIFESTS = {
    "not-json": ("{", "cannot be read"),
    "another-schema": (json.dumps({"schema": 99}), "has schema 99"),
    "never-finished": (json.dumps({"schema": 1, "id": ID, "files": []}), "not the whole manifest"),
    "of-another": (json.dumps({"schema": 1, "id": "other", "files": [], "complete": True}), "not the whole manifest"),
}


@pytest.mark.parametrize(("text", "said"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_vouches_for_nothing(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / ID).mkdir()
    (tmp_path / ID / artefact.MANIFEST).write_text(text)
    with pytest.raises(ArtefactError, match=said):
        artefact.read(tmp_path, ID)


def test_a_directory_without_manifest_is_no_artefact(tmp_path: Path) -> None:
    artefact.stage(tmp_path, ID)
    with pytest.raises(ArtefactError, match="never finished"):
        artefact.read(tmp_path, ID)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-rf", "x\n"])
def test_an_id_cannot_lead_out_of_the_store(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArtefactError, match="not the id"):
        artefact.place(tmp_path, name)


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    manifest = {**published(tmp_path / "a"), "files": [{"path": "../../etc/passwd", "size": 1, "pieces": ["0"]}]}
    with pytest.raises(ArtefactError, match="leads out"):
        artefact.receive(tmp_path / "b", manifest)


def test_an_artefact_is_never_replaced(tmp_path: Path) -> None:
    published(tmp_path)
    with pytest.raises(ArtefactError, match="exists already"):
        published(tmp_path)
    assert artefact.verify(tmp_path, ID) == []


def test_a_full_disk_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(dummy: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artefact, "_sync", full)
    with pytest.raises(ArtefactError, match="No space left"):
        published(tmp_path)
    assert not (tmp_path / ID).exists()


def move(manifest: dict[str, Any], source: Path, target: Path, pieces: list[tuple[str, int]]) -> None:
    for path, index in pieces:
        with (source / ID / path).open("rb") as given, (target / f".stage-{ID}" / path).open("r+b") as taken:
            given.seek(index * artefact.PIECE)
            taken.seek(index * artefact.PIECE)
            taken.write(given.read(artefact.PIECE))


def test_a_transfer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    manifest = published(here)
    missing = artefact.receive(there, manifest)
    assert ("images/pages-1.img", 2) in missing
    assert ("images/empty.img", 0) not in missing
    move(manifest, here, there, missing[:2])
    rest = artefact.receive(there, manifest)
    assert sorted(rest) == sorted(missing[2:])
    with pytest.raises(ArtefactError, match="arrived wrong"):
        artefact.accept(there, manifest)
    assert not (there / ID).exists()
    move(manifest, here, there, rest)
    assert artefact.accept(there, manifest)
    assert artefact.verify(there, ID) == []
    assert artefact.receive(there, manifest) == []
    assert not artefact.accept(there, manifest)


def test_another_artefact_of_the_same_name_is_not_taken_for_it(tmp_path: Path) -> None:
    published(tmp_path / "there", created=2.0)
    with pytest.raises(ArtefactError, match="another artefact"):
        artefact.receive(tmp_path / "there", published(tmp_path / "here"))


def test_what_is_removed_is_gone(tmp_path: Path) -> None:
    published(tmp_path)
    assert artefact.remove(tmp_path, ID)
    assert not artefact.remove(tmp_path, ID)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_no_part_of_an_artefact(tmp_path: Path) -> None:
    staged = artefact.stage(tmp_path, ID)
    (staged / "images").symlink_to("/etc")
    (staged / "shadow").symlink_to("/etc/shadow")
    with pytest.raises(ArtefactError, match="not a regular file"):
        artefact.publish(staged, ID, {})


def test_what_was_hashed_while_it_grew_is_hashed_right(tmp_path: Path) -> None:
    """Of one file that grew, one that shrank afterwards, and one that nobody followed."""
    staged = artefact.stage(tmp_path, "save")
    contents = {name: os.urandom(2 * artefact.PIECE + 5) for name in ("pages-1.img", "pages-2.img", "other.img")}
    ahead = artefact.Ahead(staged, "pages-*.img")
    for name, data in contents.items():
        with (staged / name).open("wb") as stream:
            for offset in range(0, len(data), 1 << 20):
                stream.write(data[offset : offset + (1 << 20)])
                stream.flush()
    deadline = time.monotonic() + 30
    while [len(pieces) for pieces in ahead._pieces.values()] != [2, 2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    known = ahead.end()
    os.truncate(staged / "pages-2.img", artefact.PIECE + 1)
    manifest = artefact.publish(staged, "save", {}, known=known)
    assert {file["path"]: len(file["pieces"]) for file in manifest["files"]} == {
        "pages-1.img": 3,
        "pages-2.img": 2,
        "other.img": 3,
    }
    assert artefact.verify(tmp_path, "save") == []


def test_a_piece_that_changes_after_it_was_hashed_is_found(tmp_path: Path) -> None:
    staged = artefact.stage(tmp_path, "save")
    (staged / "pages-1.img").write_bytes(bytes(artefact.PIECE))
    ahead = artefact.Ahead(staged, "pages-*.img")
    deadline = time.monotonic() + 30
    while not ahead._pieces.get("pages-1.img"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (staged / "pages-1.img").write_bytes(b"x" * artefact.PIECE)
    artefact.publish(staged, "save", {}, known=ahead.end())
    assert "pages-1.img" in artefact.verify(tmp_path, "save")[0]


@pytest.mark.parametrize(
    ("mode", "owner", "group", "next_command"),
    [
        pytest.param(0o777, 0, 0, "chmod o-w", id="everybody"),
        pytest.param(0o770, 0, 65534, "chmod g-w", id="a group"),
        pytest.param(0o700, 65534, 0, "chown root", id="its owner"),
        pytest.param(0o1777, 65534, 0, "chown root", id="its owner, with a sticky bit"),
    ],
)
def test_a_store_in_which_somebody_else_may_replace_saves_is_refused(
    tmp_path: Path, mode: int, owner: int, group: int, next_command: str
) -> None:
    store = tmp_path / "store"
    manifest = artefact.publish(artefact.stage(store, ID), ID, {})
    store.chmod(mode)
    os.chown(store, owner, group)
    for refused in (artefact.stage, artefact.read, lambda place, dummy: artefact.receive(place, manifest)):
        with pytest.raises(artefact.ArtefactError, match=f"{next_command} {store}"):
            refused(store, ID)
    store.chmod(0o1777)
    os.chown(store, 0, 0)
    assert artefact.read(store, ID)["id"] == ID


def test_what_somebody_has_prepared_for_a_save_is_not_used(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    manifest = artefact.publish(artefact.stage(source, ID), ID, {})
    prepared = store / f"{artefact.STAGED}{ID}"
    prepared.mkdir(parents=True, mode=0o700)
    store.chmod(0o1777)
    os.chown(prepared, 65534, 65534)
    with pytest.raises(artefact.ArtefactError, match="not a directory of our own"):
        artefact.receive(store, manifest)
