# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths that travel with work: what cannot is said before anything is stopped, or ended."""

from __future__ import annotations

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
