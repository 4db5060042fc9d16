# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.host import lock
from ansible_collections.gpufleet.driver.plugins.module_utils.host.lock import Lease, LockError
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError

HELD = Lease("r1", "ops on deploy-1", 1000.0, 2000.0, 5000.0)


@pytest.mark.parametrize(
    ("held", "run_id", "takeover", "now", "since", "warning"),
    [
        pytest.param(None, "r2", None, 3000.0, 3000.0, "", id="free"),
        pytest.param(HELD, "r1", None, 3000.0, 1000.0, "", id="renewed"),
        pytest.param(HELD, "r1", None, 9000.0, 1000.0, "", id="renewed after it ran out"),
        pytest.param(HELD, "r2", "r1", 3000.0, 3000.0, "took the fleet over from run r1", id="taken over"),
        pytest.param(HELD, "r2", None, 5000.0, 5000.0, "lock had run out", id="ran out"),
        pytest.param(HELD, "r2", "r9", 5000.0, 5000.0, "lock had run out", id="ran out, takeover of another"),
        pytest.param(None, "r2", "r1", 3000.0, 3000.0, "", id="takeover of a free one"),
    ],
)
def test_taken(held: Lease | None, run_id: str, takeover: str | None, now: float, since: float, warning: str) -> None:
    lease, warnings = lock.decide(held, run_id, "me", 60, takeover, now)
    assert lease == Lease(run_id, "me", since, now, now + 60)
    assert [warning in text for text in warnings] == ([True] if warning else [])


def test_refused_with_everything_a_person_needs() -> None:
    with pytest.raises(LockError) as caught:
        lock.decide(HELD, "r2", "me", 60, None, 4999.9)
    assert str(caught.value) == (
        "the fleet is locked by run r1 by ops on deploy-1 since 1970-01-01 00:16:40Z, valid until "
        "1970-01-01 01:23:20Z. Let it finish, or, if you are sure that it no longer runs, take over with: "
        "-e gpu_lock_takeover=r1"
    )


def test_a_takeover_is_of_the_named_run_only() -> None:
    with pytest.raises(LockError, match="gpu_lock_takeover names r0, but the fleet is locked by run r1"):
        lock.decide(HELD, "r2", "me", 60, "r0", 3000.0)


def test_from_free_to_free(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    assert lock.acquire(state, "r1", "me", 60, now=1.0).changed
    change = lock.acquire(state, "r1", "me", 60, now=2.0)
    assert change.changed and change.before and change.before.expires == 61.0 and change.after
    assert change.after == Lease("r1", "me", 1.0, 2.0, 62.0)
    with pytest.raises(LockError):
        lock.acquire(state, "r2", "you", 60, now=3.0)
    other = lock.release(state, "r2")
    assert not other.changed and "not released: the fleet is locked by run r1" in other.warnings[0]
    assert lock.release(state, "r1").changed
    assert lock.release(state, "r1") == lock.Change(None, None)
    assert lock.acquire(state, "r2", "you", 60, now=4.0).before is None


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert lock.acquire(str(state), "r1", "me", 60, now=1.0, check=True).changed and not state.exists()
    assert not lock.release(str(state), "r1", check=True).changed and not state.exists()
    lock.acquire(str(state), "r1", "me", 60, now=1.0)
    content = (state / "lock.json").read_bytes()
    assert lock.release(str(state), "r1", check=True).changed
    with pytest.raises(LockError):
        lock.acquire(str(state), "r2", "you", 60, now=2.0, check=True)
    assert (state / "lock.json").read_bytes() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "is damaged", id="empty"),
        pytest.param(b"\xff\xfe", "is damaged", id="binary"),
        pytest.param(b"[]", "schema 'list'", id="a list"),
        pytest.param(b'{"schema": 7}', "schema 7", id="newer schema"),
        pytest.param(b'{"schema": 1, "run_id": "r1"}', "does not say who holds the fleet", id="no holder"),
        pytest.param(
            b'{"schema": 1, "run_id": "r1", "holder": "x", "since": "y", "renewed": 1, "expires": 1}',
            "does not say who holds the fleet",
            id="no time",
        ),
    ],
)
def test_a_file_that_is_no_lock_locks_nobody_out_silently(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "lock.json"
    path.write_bytes(content)
    for act in (
        lambda: lock.acquire(str(tmp_path), "r1", "me", 60, now=1.0),
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
                lock.acquire(str(tmp_path), f"r{number}", "me", 60, now=1.0)
                os._exit(0)
            except LockError:
                os._exit(3)
            finally:
                os._exit(1)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert sorted(codes) == [0, *[3] * 7]
    assert json.loads((tmp_path / "lock.json").read_text())["run_id"] == f"r{codes.index(0)}"
