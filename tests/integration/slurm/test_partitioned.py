# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm on real daemons: the last of each node's four GPUs is seven MIG instances, which are a type of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import NEW, Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark

R1 = Mark("run-1", 1.0)
INSTANCE = "gpu:h100_1g.10gb"


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with Cluster.fresh("--mig", "7", nodes=2) as cluster:
        yield cluster


def test_instances_are_counted_apart_from_whole_gpus(slurm: Cluster) -> None:
    small = slurm.submit("sleep 300", f"--gres={INSTANCE}:2", node="gpu-1")
    mixed = slurm.submit("sleep 300", f"--gres=gpu:h100:1,{INSTANCE}:1", node="gpu-1")
    slurm.running(small)
    slurm.running(mixed)
    slurm.submit("sleep 300", f"--gres={INSTANCE}:7", node="gpu-1")
    seen = slurm.backend().snapshot([])
    node = next(node for node in seen.nodes if node.name == "gpu-1")
    assert node.gpus == 3 and node.gpu_model == "h100"
    assert (node.free["gpu"], node.free["mig-1g.10gb"]) == (2, 4)
    held = {work.name: dict(work.members[0].resources) for work in seen.workloads}
    assert held[f"job {small}"] == {"mig-1g.10gb": 2, "cpu": 1000}
    assert held[f"job {mixed}"] == {"gpu": 1, "mig-1g.10gb": 1, "cpu": 1000}
    assert seen.queue["h100"].gpus == pytest.approx(1.0), "seven instances are one GPU"


def test_a_partitioned_node_is_proven_with_all_it_has(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    (slurm.state / "nodes/gpu-1.driver").write_text(f"{NEW}\n")
    result = slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 60)["gpu-1"]
    assert not result.failed, result.msg
    assert slurm.node("gpu-1").active == ("lab", f"driver-{NEW}")


def test_instances_that_did_not_come_back_keep_the_node_out(slurm: Cluster) -> None:
    """As after a reboot that forgot the partitions: the whole GPUs are all there."""
    slurm.backend().cordon(["gpu-1"], R1)
    gres = slurm.state / "etc/gres.conf"
    before = gres.read_text()
    node, rest = before.split("NodeName=gpu-2", 1)
    try:
        slurm.lab("kill", "gpu-1")
        gres.write_text(f"{node.replace('nvidia-cap[0-6]', 'nvidia-cap[0-4]')}NodeName=gpu-2{rest}")
        slurm.lab("start", "gpu-1")
        until(lambda: "INVALID_REG" in slurm.node("gpu-1").state, "slurmctld refuses the node")
        result = slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 10)["gpu-1"]
        back = slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"]
        assert result.failed and "less than Slurm is configured for" in result.msg
        assert back.failed and slurm.node("gpu-1").drain
    finally:
        gres.write_text(before)
        slurm.lab("kill", "gpu-1")
        slurm.lab("start", "gpu-1")
        until(lambda: "INVALID_REG" not in slurm.node("gpu-1").state, "the node is whole again")
