# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import SchedulerError
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_commands import Commands

NODES = (Path(__file__).parent / "slurm-22.05/nodes.txt").read_text()


class Machine:
    """Answers as Slurm's commands do; ``up`` says for each ping in turn whether slurmctld is there (then the last)."""

    def __init__(self, *up: bool, missing: bool = False) -> None:
        self.up = list(up) or [True]
        self.missing = missing
        self.now = 0.0
        self.argvs: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []

    def run(self, argv: Sequence[str], *, timeout: float, env: Mapping[str, str]) -> Completed:
        self.argvs.append(list(argv))
        self.environments.append(env)
        if self.missing:
            return Completed(tuple(argv), 127, "", "scontrol: not found", 0)
        if "ping" in argv:
            up = self.up.pop(0) if len(self.up) > 1 else self.up[0]
            return Completed(tuple(argv), int(not up), f"Slurmctld(primary) at a is {'UP' if up else 'DOWN'}", "", 0)
        return Completed(tuple(argv), 0, NODES, "", 0)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def commands(self, **options: str) -> Commands:
        return Commands(self.run, timeout=10, clock=lambda: self.now, sleep=self.sleep, **options)  # type: ignore[arg-type]


def test_a_controller_that_is_back_in_time_is_asked() -> None:
    machine = Machine(False, False, False, True)
    assert len(machine.commands().nodes()) == 3
    assert [argv[-1] for argv in machine.argvs].count("ping") >= 3


# what scontrol ping of 22.05 says on standard output and standard error
DOWN = "Slurmctld(primary) at head is DOWN\n*****************************************\n"
NO_MUNGE = """\
scontrol: error: If munged is up, restart with --num-threads=10
scontrol: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory
scontrol: error: slurm_send_node_msg: auth_g_create: REQUEST_PING has authentication error
"""


@pytest.mark.parametrize(
    ("out", "err", "hangs", "said"),
    [
        (DOWN, "", False, "slurmctld has not answered for 10 s (Slurmctld(primary) at head is DOWN); see there: "),
        (
            DOWN,
            NO_MUNGE,
            False,
            "munge on this machine has not answered for 10 s (scontrol: error: Munge encode failed",
        ),
        (
            "",
            "",
            True,
            "munge on this machine, or slurmctld, has not answered for 10 s (scontrol ping: no answer within",
        ),
        (
            "",
            "scontrol: fatal: Could not establish a configuration source\n",
            False,
            "(scontrol ping: rc 1: scontrol: ",
        ),
    ],
    ids=["slurmctld is down", "munge is down", "munge has died", "no slurm.conf"],
)
def test_whoever_does_not_answer_is_named_and_nothing_else_is_asked(out: str, err: str, hangs: bool, said: str) -> None:
    now, asked = 0.0, []

    def run(argv: Sequence[str], *, timeout: float, env: Mapping[str, str]) -> Completed:
        nonlocal now
        asked.append(argv[1])
        now += timeout if hangs else 0.0
        return Completed(tuple(argv), 124 if hangs else 1, out, err, timeout, hangs)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    with pytest.raises(SchedulerError, match=re.escape(said)):
        Commands(run, timeout=10, clock=lambda: now, sleep=sleep).nodes()
    assert set(asked) == {"ping"} and now == 10


def test_a_machine_without_slurm_is_named_at_once() -> None:
    machine = Machine(missing=True)
    with pytest.raises(SchedulerError, match="gpu_scheduler_host"):
        machine.commands().nodes()
    assert machine.now == 0


def test_what_a_person_set_for_squeue_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    machine = Machine()
    machine.commands(conf="/c/slurm.conf", directory="/opt/slurm/bin").nodes(["gpu-1"])
    assert machine.argvs[-1][:4] == ["env", "-u", "SQUEUE_STATES", "/opt/slurm/bin/scontrol"]
    assert machine.environments[-1] == {"SLURM_TIME_FORMAT": "%s", "SLURM_CONF": "/c/slurm.conf"}


def test_many_nodes_are_updated_in_portions_and_read_at_once() -> None:
    machine = Machine()
    names = [f"gpu-{number}" for number in range(2500)]
    machine.commands().update_nodes(names, "state=drain")
    updates = [argv for argv in machine.argvs if "update" in argv]
    assert [len(argv[2].split(",")) for argv in updates] == [1000, 1000, 500]
    assert set(machine.commands().nodes(names)) == {"gpu-1", "gpu-2", "gpu-3"}
    assert machine.argvs[-1][-1] == "node"
