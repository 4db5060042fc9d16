# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What travels of a unit's files, and reloads that are shared."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import service

UNIT = "# /etc/systemd/system/work.service\n[Service]\nExecStart=/bin/work\n\n"
THEIRS = "# /etc/systemd/system/work.service.d/limits.conf\n[Service]\n# a remark\nLimitNOFILE=5\n\n"
OURS = "# /run/systemd/system/work.service.d/zz-gpufleet-frozen.conf\n# Made by us\n[Service]\nKillSignal=SIGKILL\n"


@pytest.mark.parametrize("text", [UNIT + THEIRS + OURS, UNIT + OURS + THEIRS, OURS + UNIT + THEIRS])
def test_what_this_machine_was_told_for_the_move_stays_here(text: str) -> None:
    assert service.without_ours(text) == UNIT + THEIRS


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
