# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What travels of a unit's files, and reloads that are shared."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import service
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.container import Podman
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed

UNIT = "# /etc/systemd/system/work.service\n[Service]\nExecStart=/bin/work\n\n"
THEIRS = "# /etc/systemd/system/work.service.d/limits.conf\n[Service]\n# a remark\nLimitNOFILE=5\n\n"
OURS = "# /run/systemd/system/work.service.d/zz-gpufleet-frozen.conf\n# Made by us\n[Service]\nKillSignal=SIGKILL\n"


@pytest.mark.parametrize("text", [UNIT + THEIRS + OURS, UNIT + OURS + THEIRS, OURS + UNIT + THEIRS])
def test_what_this_machine_was_told_for_the_move_stays_here(text: str) -> None:
    assert service.without_ours(text) == UNIT + THEIRS


class Timers:
    """Timers as ``systemctl`` and ``systemd-run`` know them."""

    def __init__(self, *active: str) -> None:
        self.active = list(active)
        self.least = 99
        self.fails = False

    def run(self, argv: Sequence[str], **dummy: object) -> Completed:
        names = list(argv[argv.index("--") + 1 :])
        said, rc = "", 0
        if argv[1] == "is-active":
            said = "\n".join("active" if name in self.active else "inactive" for name in names)
        elif argv[1] == "stop":
            self.active = [name for name in self.active if name not in names]
            self.least = min(self.least, len(self.active))
        else:
            (name,) = (word.partition("=")[2] + ".timer" for word in argv if word.startswith("--unit="))
            rc = 1 if self.fails or name in self.active else 0
            self.active += [] if rc else [name]
        return Completed(tuple(argv), rc, said, "", 0.1)


FIRST, SECOND = "gpufleet-thaw-work.service.1.timer", "gpufleet-thaw-work.service.2.timer"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("there", "then"), [([], [FIRST]), ([FIRST], [SECOND]), ([SECOND], [FIRST]), ([FIRST, SECOND], [SECOND])]
)
def test_work_that_stands_is_never_without_a_timer(there: list[str], then: list[str], fails: bool) -> None:
    timers = Timers(*there)
    timers.fails = fails
    work = service.Service(timers.run, "work.service")
    if fails:
        with pytest.raises(service.ServiceError, match="could not be set"):
            work.arm(["thaw"], 900)
        assert timers.active == there[:1]
    else:
        work.arm(["thaw"], 900)
        assert timers.active == then
    assert timers.least > 0
    work.disarm()
    assert timers.active == []


def test_no_two_kinds_of_work_share_a_timer() -> None:
    run = Timers().run
    named = [service.Service(run, name) for name in ("x.service", "container-x.service", "kubelet:x", "cedana:x")]
    names = [name for one in (*named, Podman(run, "podman:x")) for name in one.timers]
    assert len(set(names)) == len(names)


def test_who_waits_for_a_reload_shares_it() -> None:
    reloads = service._Reloads()
    begun, go_on = threading.Event(), threading.Event()
    count = 0

    def reload() -> None:
        nonlocal count
        count += 1
        begun.set()
        assert go_on.wait(30)

    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(reloads.once, reload)
        assert begun.wait(30)
        others = [pool.submit(reloads.once, reload) for dummy in range(4)]
        while reloads._asked < 5:
            pass
        go_on.set()
        for one in (first, *others):
            one.result(30)
    assert count == 2
    reloads.once(reload)
    assert count == 3
