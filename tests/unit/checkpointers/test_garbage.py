# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What goes, and what never does: the last save of work that is not proven to go on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, garbage

NOW = 1_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def save(store: Path, name: str, expires: float | None = NOW - 1, node: str = "node1") -> None:
    staged = artefact.stage(store, name)
    (staged / "pages").write_bytes(b"x")
    artefact.publish(staged, name, {"expires": expires, "node": node})


def remember(tmp_path: Path, side: str, name: str, state: str) -> None:
    path = tmp_path / "state" / side / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"workload": name, "artefact": name, "state": state}))


def collect(tmp_path: Path, shared: bool = False, check: bool = False) -> tuple[list[str], dict[str, str]]:
    return garbage.collect(tmp_path / "store", tmp_path / "state", NOW, "node1", shared, check)


def there(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


def test_what_has_expired_goes_and_nothing_else(tmp_path: Path, store: Path) -> None:
    save(store, "old")
    save(store, "new", NOW + 1)
    save(store, "eternal", None)
    assert collect(tmp_path, check=True) == (["old"], {})
    assert there(store) == ["eternal", "new", "old"]
    assert collect(tmp_path) == (["old"], {})
    assert there(store) == ["eternal", "new"]
    assert collect(tmp_path) == ([], {})


STATES = {
    ("checkpoints", "frozen"): False,
    ("checkpoints", "published"): False,
    ("checkpoints", "committing"): False,
    ("checkpoints", "committed"): False,
    ("checkpoints", "aborted"): True,
    ("checkpoints", "thawed"): True,
    ("checkpoints", "returned"): True,
    ("restores", "prepared"): True,
    ("restores", "starting"): False,
    ("restores", "unlocking"): False,
    ("restores", "unpacking"): False,
    ("restores", "failed"): False,
    ("restores", "leaving"): False,
    ("restores", "left"): False,
    ("restores", "running"): True,
    ("restores", "home"): True,
}


@pytest.mark.parametrize(("record", "goes"), STATES.items(), ids=["-".join(one) for one in STATES])
def test_what_work_waits_for_stays_however_old(
    tmp_path: Path, store: Path, record: tuple[str, str], goes: bool
) -> None:
    side, state = record
    save(store, "work")
    remember(tmp_path, side, "work", state)
    removed, kept = collect(tmp_path)
    assert (removed, there(store)) == ((["work"], []) if goes else ([], ["work"]))
    assert goes or kept["work"].startswith("work ")


def test_a_damaged_record_keeps_everything(tmp_path: Path, store: Path) -> None:
    save(store, "work")
    path = tmp_path / "state/checkpoints/other.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"workload": ')
    assert "record of other is damaged" in collect(tmp_path)[1]["work"]
    assert there(store) == ["work"]


def test_in_a_shared_store_each_removes_only_its_own(tmp_path: Path, store: Path) -> None:
    save(store, "mine")
    save(store, "theirs", node="node2")
    (store / ".stage-theirs").mkdir()
    os.utime(store / ".stage-theirs", (0, 0))
    removed, kept = collect(tmp_path, shared=True)
    assert removed == ["mine"]
    assert "node2 made it" in kept["theirs"]
    assert there(store) == [".stage-theirs", "theirs"]


def test_what_was_never_finished_goes_after_a_day(tmp_path: Path, store: Path) -> None:
    for name, age in ((".stage-a", 90000), (".stage-b", 1000)):
        (store / name / "images").mkdir(parents=True)
        os.utime(store / name, (NOW - age, NOW - age))
    assert collect(tmp_path)[0] == [".stage-a"]
    assert there(store) == [".stage-b"]


def test_what_is_not_ours_stays(tmp_path: Path, store: Path) -> None:
    """A store may be a directory that has other things, too."""
    save(store, "old")
    for name in ("photos", ".stage", ".ssh"):
        (store / name).mkdir()
        (store / name / "file").write_text("precious")
        os.utime(store / name, (0, 0))
    (store / "manifest.json").write_text("{}")
    assert collect(tmp_path) == (["old"], {})
    assert there(store) == [".ssh", ".stage", "manifest.json", "photos"]


def test_a_removal_that_was_cut_off_is_carried_out(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, "old")
    monkeypatch.setattr(artefact, "_clear", lambda dummy: None)
    collect(tmp_path)
    monkeypatch.undo()
    assert there(store) == [".stage-old"]
    os.utime(store / ".stage-old", (0, 0))
    assert collect(tmp_path) == ([".stage-old"], {})
    assert there(store) == []


def test_a_store_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert collect(tmp_path) == ([], {})
