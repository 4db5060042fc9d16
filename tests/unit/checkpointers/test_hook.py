# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An application's own save: asked for in three ways, and believed only when there is a new one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import CheckpointError, Work
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.hook import Hook, saves
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed


class World:
    """Time that passes in sleeps only, and an application that does something when it is asked."""

    def __init__(self, react: Callable[[World], None], rc: int = 0) -> None:
        self.seconds = 1000.0
        self.react = react
        self.rc = rc
        self.asked: list[list[str]] = []
        self.later: list[Callable[[World], None]] = []
        self.state, self.restarts = "active", 0
        self.open: list[IO[bytes]] = []

    def run(self, argv: Sequence[str], **dummy: Any) -> Completed:
        if argv[1:2] == ["show"]:
            return Completed(tuple(argv), 0, f"ActiveState={self.state}\nNRestarts={self.restarts}\n", "", 0.1)
        self.asked.append(list(argv))
        if argv[0] != "check":
            self.react(self)
        return Completed(tuple(argv), self.rc if argv[0] == "check" else 0, "", "bad", 0.1)

    def post(self, url: str) -> str:
        self.asked.append(["POST", url])
        self.react(self)
        return ""

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        for step in self.later[:1]:
            step(self)
        self.later = self.later[1:]

    def hook(self) -> Hook:
        return Hook(
            self.run,
            post=self.post,
            now_ns=lambda: int(self.seconds * 1e9),
            monotonic=lambda: self.seconds,
            sleep=self.sleep,
        )


def saved(path: Path, at: float, size: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(f"{at}".encode()[:size].ljust(size, b"x"))
    os.utime(path, (at, at))


def work(tmp_path: Path, **save: Any) -> Work:
    return Work("trainer", "trainer.service", {"proof": str(tmp_path / "saves"), "deadline": 30, **save})


WAYS = {
    "command": ({"command": ["save"]}, ["save"]),
    "signal": (
        {"signal": "SIGUSR1"},
        ["systemctl", "kill", "--signal=SIGUSR1", "--kill-who=main", "--", "trainer.service"],
    ),
    "http": ({"http": "http://127.0.0.1/save"}, ["POST", "http://127.0.0.1/save"]),
}


@pytest.mark.parametrize(("save", "asked"), WAYS.values(), ids=WAYS)
def test_a_new_save_is_believed(tmp_path: Path, save: dict[str, Any], asked: list[str]) -> None:
    saved(tmp_path / "saves/step-1", 500)
    world = World(lambda world: world.later.append(lambda then: saved(tmp_path / "saves/step-2", then.seconds)))
    captured = world.hook().capture(work(tmp_path, **save))
    assert world.asked == [asked]
    assert captured.artefact == str(tmp_path / "saves/step-2")
    assert captured.source == "running"
    assert captured.evidence["before"] == str(tmp_path / "saves/step-1")


def growing(tmp_path: Path) -> Callable[[World], None]:
    def grow(world: World) -> None:
        for size in range(1, 200):
            world.later.append(lambda then, size=size: saved(tmp_path / "saves/big", then.seconds, size))  # type: ignore[misc]

    return grow


def copied(old: Path, new: Path) -> None:
    new.write_bytes(old.read_bytes())
    os.utime(new, (2000, 2000))


def paused(path: Path, at: float) -> IO[bytes]:
    """A save whose writer has stopped in the middle."""
    saved(path, at + 1)
    return path.open("r+b")


def died(world: World, path: Path, state: str, restarts: int) -> None:
    saved(path, world.seconds + 1)
    world.state, world.restarts = state, restarts


FAILURES: dict[str, tuple[Callable[[Path], Callable[[World], None]], str]] = {
    "nothing-is-saved": (lambda dummy: lambda world: None, "from before the request"),
    "an-empty-file": (
        lambda path: lambda world: saved(path / "saves/step-2", world.seconds + 1, 0),
        "from before the request",
    ),
    "an-old-file-appears": (lambda path: lambda world: saved(path / "saves/step-0", 400), "from before the request"),
    "it-never-stops-growing": (growing, "keeps changing"),
    "an-old-save-is-touched": (
        lambda path: lambda world: os.utime(path / "saves/step-1", (world.seconds + 1, world.seconds + 1)),
        "contents of a save from before the request",
    ),
    "an-old-save-is-copied": (
        lambda path: lambda world: copied(path / "saves/step-1", path / "saves/step-2"),
        "contents of a save from before the request",
    ),
    "its-writer-pauses": (
        lambda path: lambda world: world.open.append(paused(path / "saves/step-2", world.seconds)),
        "open for writing",
    ),
    "it-dies-of-the-request": (
        lambda path: lambda world: died(world, path / "saves/step-2", "failed", 0),
        "trainer.service is failed",
    ),
    "it-was-started-anew": (
        lambda path: lambda world: died(world, path / "saves/step-2", "active", 1),
        "started 1 times anew",
    ),
}


@pytest.mark.parametrize(("react", "said"), FAILURES.values(), ids=FAILURES)
def test_no_new_save_is_no_save(tmp_path: Path, react: Callable[[Path], Callable[[World], None]], said: str) -> None:
    saved(tmp_path / "saves/step-1", 500)
    world = World(react(tmp_path))
    with pytest.raises(CheckpointError, match=said) as caught:
        world.hook().capture(work(tmp_path, command=["save"]))
    for stream in world.open:
        stream.close()
    assert (caught.value.reason.reason, caught.value.reason.source) == ("checkpoint_failed", "running")
    assert world.seconds < 1040


def test_its_own_check_has_the_last_word(tmp_path: Path) -> None:
    world = World(lambda world: saved(tmp_path / "saves/step-2", world.seconds + 1), rc=3)
    with pytest.raises(CheckpointError, match="does not pass its own check"):
        world.hook().capture(work(tmp_path, command=["save"], check=["check", "-v"]))
    assert world.asked[-1] == ["check", "-v", str(tmp_path / "saves/step-2")]


DECLARATIONS = {
    "nothing-to-ask-with": {},
    "two-ways": {"command": ["a"], "signal": "SIGUSR1"},
    "no-such-signal": {"signal": "SIGSAVE"},
    "a-relative-proof": {"command": ["a"], "proof": "saves"},
}


@pytest.mark.parametrize("save", DECLARATIONS.values(), ids=DECLARATIONS)
def test_a_declaration_that_cannot_work_is_refused(tmp_path: Path, save: dict[str, Any]) -> None:
    (reason,) = Hook(World(lambda world: None).run).check(work(tmp_path, **save))
    assert reason.reason == "policy"


CLOCKS = {"the-file-server-is-behind": (500, 900), "an-old-file-is-from-the-future": (9000, 1001)}


@pytest.mark.parametrize(("old", "new"), CLOCKS.values(), ids=CLOCKS)
def test_a_new_save_is_believed_by_any_clock(tmp_path: Path, old: float, new: float) -> None:
    saved(tmp_path / "saves/step-1", old)
    world = World(lambda dummy: saved(tmp_path / "saves/step-2", new))
    assert world.hook().capture(work(tmp_path, command=["save"])).artefact == str(tmp_path / "saves/step-2")


def test_old_saves_may_vanish_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applications keep the last few saves, and remove the others."""
    for step in range(3):
        saved(tmp_path / f"saves/step-{step}/model", 500 + step)

    def scan(path: str, real: Callable[..., Any] = os.scandir) -> Any:
        if str(path).endswith("step-0"):
            shutil.rmtree(path, ignore_errors=True)
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert [Path(one.path).parent.name for one in saves(str(tmp_path / "saves"))] == ["step-2", "step-1"]


def test_the_newest_follows_patterns_and_directories(tmp_path: Path) -> None:
    saved(tmp_path / "run-1/a", 10)
    saved(tmp_path / "run-2/deep/b", 20)
    saved(tmp_path / "other/c", 30)
    assert [one.path for one in saves(str(tmp_path / "run-*"))] == [
        str(tmp_path / "run-2/deep/b"),
        str(tmp_path / "run-1/a"),
    ]
    assert saves(str(tmp_path / "none-*")) == []
