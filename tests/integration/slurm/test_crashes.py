# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm on real daemons: we die after any single change, and the next call finishes what was begun."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
from slurm_cluster import NEW, OLD, Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Fate, Mark
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm import Slurm
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_commands import Commands

R1 = Mark("run-1", 1.0)


class Died(BaseException):
    pass


@dataclass
class Mortal(Commands):
    changes_left: int = 0

    def change(self, *words: str, timeout: float | None = None) -> Completed:
        if not self.changes_left:
            raise Died
        self.changes_left -= 1
        return super().change(*words, timeout=timeout)


def mortal(slurm: Cluster, changes: int) -> Slurm:
    return Slurm(Mortal(execution.run, timeout=20, conf=str(slurm.state / "etc/slurm.conf"), changes_left=changes))


@pytest.mark.parametrize("changes", range(7))
def test_no_job_is_lost_or_held_for_ever(slurm: Cluster, changes: int) -> None:
    """Signal, note, note, requeue held, bind, release, note: we die before each of them."""
    name = f"crash{changes}"
    job = slurm.counter(name, node="gpu-1")
    slurm.running(job)
    until(lambda: int(slurm.text(f"{name}.now") or 0) > 1, "a step")
    slurm.backend(versions=dict.fromkeys(slurm.names, OLD)).cordon(["gpu-1"], R1)
    fates = [Fate(f"job {job}", "move")]
    with pytest.raises(Died):
        mortal(slurm, changes).evacuate(["gpu-1"], R1, fates, time.time() + 3600, 30)
    result = slurm.backend().evacuate(["gpu-1"], R1, fates, time.time() + 3600, 30)["gpu-1"]
    assert not result.failed and not result.waiting
    found = slurm.job(job)
    assert found is not None and not found.held and found.constraint == f"driver-{OLD}"
    assert int(slurm.text(name)) > 0


def test_a_driver_that_slurmctld_forgets_before_work_is_bound_to_it_holds_nothing(slurm: Cluster) -> None:
    """We die when the job is held and noted to be bound; meanwhile slurmctld is started again."""
    job = slurm.counter("forgot", node="gpu-1")
    slurm.running(job)
    until(lambda: int(slurm.text("forgot.now") or 0) > 1, "a step")
    slurm.backend(versions=dict.fromkeys(slurm.names, OLD)).cordon(["gpu-1"], R1)
    fates = [Fate(f"job {job}", "move")]
    with pytest.raises(Died):
        mortal(slurm, 4).evacuate(["gpu-1"], R1, fates, time.time() + 3600, 30)
    until(lambda: slurm.job(job).state == "PENDING", "it is held in the queue")
    assert slurm.job(job).held and f"feature=driver-{OLD}" in slurm.job(job).admin_comment
    slurm.lab("stop", "slurmctld")
    slurm.lab("start", "slurmctld")
    result = slurm.backend().evacuate(["gpu-1"], R1, fates, time.time() + 3600, 30)["gpu-1"]
    assert not result.failed and not result.waiting
    assert not slurm.job(job).held and slurm.job(job).constraint == ""


class Deaf(Commands):
    def change(self, *words: str, timeout: float | None = None) -> Completed:
        said = super().change(*words, timeout=timeout)
        return replace(said, rc=1, stderr="Connection reset by peer") if "requeuehold" in words else said


def test_a_job_that_was_held_though_slurm_seemed_to_refuse_is_let_go(slurm: Cluster) -> None:
    job = slurm.counter("deaf", node="gpu-1")
    slurm.running(job)
    until(lambda: int(slurm.text("deaf.now") or 0) > 1, "a step")
    slurm.backend().cordon(["gpu-1"], R1)
    deaf = Slurm(Deaf(execution.run, timeout=20, conf=slurm.commands.conf))
    result = deaf.evacuate(["gpu-1"], R1, [Fate(f"job {job}", "move")], time.time() + 3600, 30)["gpu-1"]
    assert [end.how for end in result.ends] == ["requeued"] and not result.waiting
    assert not slurm.job(job).held and "step=done" in slurm.job(job).admin_comment


@pytest.mark.parametrize("changes", range(5))
def test_no_node_goes_to_work_unproven(slurm: Cluster, changes: int) -> None:
    """Reserve, resume, drain, end the reservation, features: we die before each of them, and settle."""
    slurm.backend().cordon(["gpu-1"], R1)
    (slurm.state / "nodes/gpu-1.driver").write_text(f"{NEW}\n")
    eager = slurm.submit("sleep 300", "--gres=gpu:1", user="daemon", node="gpu-1")
    with pytest.raises(Died):
        mortal(slurm, changes).validate(["gpu-1"], R1, {}, 60)
    slurm.backend().settle(R1)
    assert slurm.node("gpu-1").drain and not slurm.commands.reservations()
    assert slurm.job(eager).state == "PENDING"


def test_a_proof_cut_short_keeps_others_out_until_the_node_is_proven(slurm: Cluster) -> None:
    """We die when the node was resumed; nobody settles."""
    slurm.backend().cordon(["gpu-1"], R1)
    eager = slurm.submit("sleep 300", "--gres=gpu:1", user="daemon", node="gpu-1")
    with pytest.raises(Died):
        mortal(slurm, 2).validate(["gpu-1"], R1, {}, 60)
    assert not slurm.node("gpu-1").drain
    assert slurm.commands.reservations()["gpufleet-gpu-1"].end > time.time() + 86400, "it would open by itself"
    back = slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"]
    again = slurm.backend().validate(["gpu-1"], R1, {}, 60)["gpu-1"]
    assert back.failed and "proof was cut short" in back.msg
    assert again.failed and "proof was cut short" in again.msg
    assert slurm.backend().cordon(["gpu-1"], R1)["gpu-1"].changed and not slurm.commands.reservations()
    assert slurm.state_of(eager) == "PENDING"
    assert not slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 60)["gpu-1"].failed
    assert slurm.state_of(eager) == "PENDING"
