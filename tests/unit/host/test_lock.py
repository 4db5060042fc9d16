# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.host import lock
from ansible_collections.gpufleet.driver.plugins.module_utils.host.lock import Clock, Lease, Lock, LockError
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError

BOOT, OTHER_BOOT = "boot-1", "boot-2"
HELD = Lease("r1", "ops on deploy-1", 1000.0, 2000.0, 5000.0, BOOT, 4000.0)
HOURS = 9 * 3600.0


def at(seconds: float, wrong: float = 0.0, boot: str = BOOT) -> Clock:
    """The clock of a node at a time; it was booted at second 1000 and its clock is so many seconds wrong."""
    return Clock(seconds + wrong, seconds - 1000.0, boot)


@pytest.mark.parametrize(
    ("held", "ended", "run_id", "takeover", "clock", "since", "warning", "then_ended"),
    [
        pytest.param(None, (), "r2", None, at(3000), 3000.0, "", (), id="free"),
        pytest.param(HELD, (), "r1", None, at(3000), 1000.0, "", (), id="renewed"),
        pytest.param(HELD, (), "r1", None, at(9000), 1000.0, "", (), id="renewed after it ran out"),
        pytest.param(
            HELD, (), "r2", "r1", at(3000), 3000.0, "took the fleet over from run r1", ("r1",), id="taken over"
        ),
        pytest.param(HELD, (), "r2", None, at(5000), 5000.0, "lock had run out", ("r1",), id="ran out"),
        pytest.param(HELD, (), "r2", "r9", at(5000), 5000.0, "lock had run out", ("r1",), id="ran out, other takeover"),
        pytest.param(HELD, ("r1",), "r2", None, at(3000), 3000.0, "", ("r1",), id="of a run that ended elsewhere"),
        pytest.param(None, ("r2",), "r2", None, at(3000), 3000.0, "", (), id="free, the same id once more"),
        pytest.param(None, (), "r2", "r1", at(3000), 3000.0, "", (), id="takeover of a free one"),
        pytest.param(HELD, (), "r2", None, at(5000, -HOURS), 5000.0 - HOURS, "run out", ("r1",), id="clock set back"),
        pytest.param(HELD, (), "r2", None, at(5000, 0, OTHER_BOOT), 5000.0, "run out", ("r1",), id="booted meanwhile"),
    ],
)
def test_taken(
    held: Lease | None,
    ended: tuple[str, ...],
    run_id: str,
    takeover: str | None,
    clock: Clock,
    since: float,
    warning: str,
    then_ended: tuple[str, ...],
) -> None:
    after, warnings = lock.decide(Lock(held, ended), run_id, "me", 60, takeover, clock)
    assert after.lease == Lease(run_id, "me", since, clock.now, clock.now + 60, clock.boot_id, clock.uptime + 60)
    assert after.ended == then_ended
    assert [warning in text for text in warnings] == ([True] if warning else [])


@pytest.mark.parametrize(
    "clock",
    [
        pytest.param(at(4999.9), id="not yet"),
        pytest.param(at(3000, HOURS), id="clock set ahead"),
        pytest.param(at(4999.9, 0, OTHER_BOOT), id="booted meanwhile"),
        pytest.param(at(4999.9, 0, ""), id="boot unknown"),
    ],
)
def test_refused_with_everything_a_person_needs(clock: Clock) -> None:
    with pytest.raises(LockError) as caught:
        lock.decide(Lock(HELD), "r2", "me", 60, None, clock)
    assert str(caught.value) == (
        "the fleet is locked by run r1 by ops on deploy-1 since 1970-01-01 00:16:40Z, valid until "
        "1970-01-01 01:23:20Z. Let it finish, or, if you are sure that it no longer runs, take over with: "
        "-e gpu_lock_takeover=r1"
    )
    assert caught.value.knows.lease == HELD


def test_a_lease_left_by_a_run_that_ended_elsewhere_does_not_count() -> None:
    after, warnings = lock.decide(Lock(HELD), "r2", "me", 60, None, at(3000), elsewhere=["r0", "r1"])
    assert after.lease and after.lease.run_id == "r2" and after.ended == ("r1",) and not warnings
    with pytest.raises(LockError):
        lock.decide(Lock(HELD), "r2", "me", 60, None, at(3000), elsewhere=["r0"])


def test_a_takeover_is_of_the_named_run_only() -> None:
    with pytest.raises(LockError, match="gpu_lock_takeover names r0, but the fleet is locked by run r1"):
        lock.decide(Lock(HELD), "r2", "me", 60, "r0", at(3000))


def test_only_the_last_ended_runs_are_remembered() -> None:
    knows = Lock()
    for number in range(60):
        knows = knows.with_ended(f"r{number}").with_ended("again")
    assert len(knows.ended) == lock.KEPT and knows.ended[-2:] == ("r59", "again")


def test_from_free_to_free(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    assert lock.acquire(state, "r1", "me", 60, at(1001)).changed
    change = lock.renew(state, "r1", 60, at(1002))
    assert change.before.lease and change.before.lease.expires == 1061.0
    assert change.after.lease == Lease("r1", "me", 1001.0, 1002.0, 1062.0, BOOT, 62.0)
    with pytest.raises(LockError):
        lock.acquire(state, "r2", "you", 60, at(1003))
    other = lock.release(state, "r2")
    assert not other.changed and "not released: the fleet is locked by run r1" in other.warnings[0]
    assert lock.release(state, "r1").after == Lock(None, ("r1",))
    assert not lock.release(state, "r1").changed
    assert lock.acquire(state, "r2", "you", 60, at(1004)).before == Lock(None, ("r1",))


def test_a_run_that_was_taken_over_cannot_renew_not_even_when_the_lock_is_free_again(tmp_path: Path) -> None:
    state = str(tmp_path)
    lock.acquire(state, "r1", "me", 60, at(1001))
    lock.acquire(state, "r2", "you", 60, at(1002), takeover="r1")
    with pytest.raises(LockError, match="run r1 no longer has the fleet: it is locked by run r2 by you"):
        lock.renew(state, "r1", 60, at(1003))
    lock.release(state, "r2")
    with pytest.raises(LockError, match="run r1 no longer has the fleet: it is free"):
        lock.renew(state, "r1", 60, at(1003))


def test_a_look_tells_a_lease_that_counts(tmp_path: Path) -> None:
    assert lock.look(str(tmp_path), at(3000)) == Lock() and not any(tmp_path.iterdir())
    lock.acquire(str(tmp_path), "r1", "ops", 3000, at(2000))
    held = lock.look(str(tmp_path), at(3000)).lease
    assert held is not None and held.run_id == "r1"
    assert lock.look(str(tmp_path), at(5000)) == Lock()
    lock.release(str(tmp_path), "r1")
    assert lock.look(str(tmp_path), at(3000)) == Lock(None, ("r1",))


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert lock.acquire(str(state), "r1", "me", 60, at(1001), check=True).changed and not state.exists()
    assert not lock.release(str(state), "r1", check=True).changed and not state.exists()
    lock.acquire(str(state), "r1", "me", 60, at(1001))
    content = (state / "lock.json").read_bytes()
    assert lock.release(str(state), "r1", check=True).changed
    assert lock.renew(str(state), "r1", 60, at(1002), check=True).changed
    with pytest.raises(LockError):
        lock.acquire(str(state), "r2", "you", 60, at(1002), check=True)
    assert (state / "lock.json").read_bytes() == content


def test_the_clock_of_this_machine() -> None:
    clock = Clock.read()
    assert clock.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip() and 0 < clock.uptime < clock.now
    assert Clock.read(proc="/nowhere").boot_id == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "is damaged", id="empty"),
        pytest.param(b"\xff\xfe", "is damaged", id="binary"),
        pytest.param(b"[]", "schema 'list'", id="a list"),
        pytest.param(b'{"schema": 7}', "schema 7", id="newer schema"),
        pytest.param(
            b'{"schema": 1, "lease": {"run_id": "r1"}, "ended": []}', "does not say who holds the fleet", id="no holder"
        ),
        pytest.param(
            b'{"schema": 1, "lease": {"run_id": "r1", "holder": "x", "since": "y"}, "ended": []}',
            "does not say who holds the fleet",
            id="no time",
        ),
        pytest.param(b'{"schema": 1, "lease": null, "ended": "r1"}', "ended is 'r1'", id="no list"),
    ],
)
def test_a_file_that_is_no_lock_locks_nobody_out_silently(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "lock.json"
    path.write_bytes(content)
    for act in (
        lambda: lock.acquire(str(tmp_path), "r1", "me", 60, at(1001)),
        lambda: lock.release(str(tmp_path), "r1"),
    ):
        with pytest.raises(StateFileError, match=message) as caught:
            act()
        assert f"mv {path} {path}.bad" in str(caught.value)
    assert path.read_bytes() == content


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    children = []
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                lock.acquire(str(tmp_path), f"r{number}", "me", 60, at(1001))
                os._exit(0)
            except LockError:
                os._exit(3)
            finally:
                os._exit(1)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert sorted(codes) == [0, *[3] * 7]
    assert json.loads((tmp_path / "lock.json").read_text())["lease"]["run_id"] == f"r{codes.index(0)}"
