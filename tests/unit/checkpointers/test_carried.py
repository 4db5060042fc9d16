# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths that travel with work: what cannot is said before anything is stopped, or ended."""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import carried
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.carried import CarriedError
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.options import work_of


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{}/none", "something that exists"),
        ("data", "something that exists"),
        ("{}/data/../data", "something that exists"),
        ("/", "something that exists"),
        ("{}/link", "is a link; declare {}/data"),
        ("/proc", "is a mount point"),
    ],
)
def test_what_cannot_be_carried_is_refused(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    assert said.format(tmp_path) in carried.trouble([str(tmp_path / "data"), path.format(tmp_path)])
    with pytest.raises(CarriedError):
        carried.pack([path.format(tmp_path)], tmp_path)


def test_a_directory_goes_and_comes_over_what_is_there(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "steps").write_text("1\n2\n")
    assert carried.trouble([str(data)]) == ""
    carried.pack([str(data)], tmp_path)
    (data / "steps").write_text("other")
    aside: list[dict[str, object]] = []
    given = {"name": "work", "unit": "a", "ready": [], "ready_timeout": 1, "container": None, "engine": "podman"}
    declared = work_of({**given, "save": {"paths": [f"{data}/"]}}).save["paths"]
    carried.unpack(tmp_path, declared, aside, "before", lambda: None)
    assert (data / "steps").read_text() == "1\n2\n"
    assert (tmp_path / "data.before/steps").read_text() == "other"
    carried.undo(aside)
    assert (data / "steps").read_text() == "other"


def test_where_files_cannot_come_is_known_before_the_work_is_ended(tmp_path: Path) -> None:
    assert carried.no_place(1, [str(tmp_path / "new/deep")]) == ""
    assert "a mount point here" in carried.no_place(1, ["/proc"])
    assert "are needed" in carried.no_place(1 << 62, [str(tmp_path / "new")])


def entry(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, to
    return made


WAYS_OUT: dict[str, list[tuple[str, bytes, str]]] = {
    "beside": [("other", tarfile.REGTYPE, "")],
    "above": [("data/../other", tarfile.REGTYPE, "")],
    "behind-a-link": [("data/link", tarfile.SYMTYPE, "/etc"), ("data/link/passwd", tarfile.REGTYPE, "")],
    "through-a-link": [("data/link", tarfile.SYMTYPE, "/etc/passwd"), ("data/link", tarfile.REGTYPE, "")],
    "a-second-name": [("data/link", tarfile.LNKTYPE, "/etc/passwd")],
    "a-device": [("data/sda", tarfile.BLKTYPE, "")],
}


@pytest.mark.parametrize("entries", WAYS_OUT.values(), ids=WAYS_OUT)
def test_what_leads_out_of_the_paths_is_not_unpacked(tmp_path: Path, entries: list[tuple[str, bytes, str]]) -> None:
    (tmp_path / "files").mkdir()
    top = str(tmp_path).lstrip("/")
    with tarfile.open(tmp_path / carried.PACK, "w") as packed:
        for name, kind, to in entries:
            packed.addfile(entry(f"{top}/{name}", kind, to.lstrip("/") if kind == tarfile.LNKTYPE else to))
    with pytest.raises(CarriedError):
        carried.unpack(tmp_path, [str(tmp_path / "data")], [], "before", lambda: None)
    assert not (tmp_path / "other").exists()


def test_a_link_that_is_in_the_paths_comes_as_it_was(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "now").symlink_to("/etc/passwd")
    (data / "a").write_text("1")
    os.link(data / "a", data / "b")
    carried.pack([str(data)], tmp_path)
    carried.unpack(tmp_path, [str(data)], [], "before", lambda: None)
    assert (str((data / "now").readlink()), (data / "b").read_text()) == ("/etc/passwd", "1")


def test_a_device_is_refused_before_the_work_is_ended(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mknod(tmp_path / "data/null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    with pytest.raises(CarriedError, match="data/null is a device"):
        carried.pack([str(tmp_path / "data")], tmp_path)


def test_what_was_unpacked_is_written_down_before_the_save_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_text("1")
    carried.pack([str(tmp_path / "data")], tmp_path)
    (tmp_path / "data").unlink()
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(carried, "_sync_all", lambda folder: seen.append((folder, (tmp_path / "data").exists())))
    carried.unpack(tmp_path, [str(tmp_path / "data")], [], "before", lambda: None)
    assert seen == [(str(tmp_path), True)]
    monkeypatch.undo()
    carried._sync_all(str(tmp_path))
