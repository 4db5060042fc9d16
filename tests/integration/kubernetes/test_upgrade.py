# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``upgrade.yml`` from end to end on a cluster whose drivers are the GPU Operator's, while it is at work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Object, until
from fleet import Fleet, Played
from operator_cluster import DRIVERS, NEW, OLD, OTHER, POLICIES, OperatorCluster, loaded
from standin import SKIP

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.gpu_operator_objects import LAST
from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import Api
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_lease import (
    NAME,
    ClusterLease,
    LeaseError,
)

STEERING = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{NAME}"


class Operated:
    """A cluster at work, and the playbooks for it."""

    def __init__(self, cluster: OperatorCluster, directory: Path) -> None:
        self.cluster = cluster
        self.names = cluster.names
        hosts: dict[str, dict] = {name: {} for name in self.names}
        of_nodes = {  # as docs/gpu-operator.md has them: not for localhost
            "gpu_driver_owner": "gpu_operator",
            "gpu_scheduler": "kubernetes",
            "gpu_scheduler_options": {
                "kubeconfig": str(cluster.kubeconfig),
                "validation_image": "lab.gpufleet/ends:1",
                "validation_namespace": cluster.namespace,
            },
        }
        (directory / "inventory.yml").write_text(yaml.safe_dump({"gpu_nodes": {"hosts": hosts, "vars": of_nodes}}))
        self.fleet = Fleet("kubernetes", directory, self.names)
        self.variables: dict[str, Any] = {
            "gpu_driver_version": NEW,
            "gpu_operator_timeout": 300,
            "gpu_state_dir": str(directory / "state"),
            "gpu_workload_wait": 120,
        }

    def load(self, share: float) -> None:
        """Work on ``share`` of the GPUs, in pods of different sizes, that may be evicted."""
        quarter = int(8 * len(self.names) * share) // 4
        self.work = {"serve-4": (4, quarter // 2), "serve-2": (2, quarter // 2), "serve-1": (1, quarter)}
        for name, (size, count) in self.work.items():
            self.cluster.apps("deployments", name, replicas=count, gpus=size, wait=False)
        self.until("all work runs", self.all_at_work)

    def all_at_work(self) -> bool:
        return all(self.cluster.are_ready("deployments", name) for name in self.work)

    def upgrade(self, **variables: Any) -> Played:
        return self.fleet.play("upgrade", timeout=600, **{**self.variables, **variables})

    def nodes(self) -> dict[str, Object]:
        selector = f"lab.gpufleet/test={self.cluster.namespace}"
        items = self.cluster.api.get("/api/v1/nodes", labelSelector=selector)["items"]
        found = {node["metadata"]["name"]: node for node in items}
        return {name: found[name] for name in self.names}

    def loaded(self) -> dict[str, str | None]:
        return {name: loaded(node) for name, node in self.nodes().items()}

    def closed(self) -> list[str]:
        nodes = self.nodes().items()
        return [name for name, node in nodes if node["spec"].get("unschedulable") or node["spec"].get("taints")]

    def until_closed_are(self, *names: str) -> None:
        """A controller takes the taint of a cordon away a moment after the node is uncordoned."""
        self.until(
            f"{' '.join(names) or 'nothing'} is out of service", lambda: sorted(self.closed()) == sorted(names), 30
        )

    def until(self, what: str, holds: Callable[[], Any], seconds: float = 240) -> None:
        until(what, holds, seconds, every=0.3)


def disturbed(
    operated: OperatorCluster, run: Operated, outcomes: dict[str, str], killed: bool = False, **variables: Any
) -> None:
    """Upgrade 12 nodes at 85 % load; if ``killed``, the controller dies before the canary is proven. Nodes to be left
    out are cordoned by hand before, the canary after it was upgraded; the API server is restarted in the middle of a
    batch. What is ours is given back, and nothing else."""
    run.load(0.85)
    by_hand = [name for name, outcome in outcomes.items() if outcome == "skipped"]
    operated.cordon(*by_hand)
    variables |= {**run.variables, "gpu_batch_size": 6, "gpu_max_unavailable": 8}
    if not killed:
        foretold = run.fleet.play("plan", **variables)
        assert foretold.rc == 0 and "operator: list order, some at a time, work evicted" in foretold.output, (
            foretold.output
        )
    playing = run.fleet.begin("upgrade", **variables)
    run.until("the canary is there", lambda: NEW in run.loaded().values())
    if killed:
        playing.kill()
        dead = operated.api.get(LEASE)["spec"]["holderIdentity"]
        playing = run.fleet.begin("upgrade", gpu_lock_takeover=dead, **variables)
    late = next(name for name, version in run.loaded().items() if version == NEW)
    run.until("the canary is in service again", lambda: late not in run.closed())
    operated.cordon(late)
    with pytest.raises(LeaseError, match="locked by run"):
        ClusterLease(Api(str(operated.kubeconfig)), "default").hold("another", None, 60, None)
    run.until("a batch is under way", lambda: sum(v == NEW for v in run.loaded().values()) > 1)
    operated.lab("kill", "kube-apiserver")
    operated.lab("start", "kube-apiserver")
    played = playing.end(1200)
    assert played.outcomes == outcomes, played.output[-6000:]
    upgraded = [name for name, outcome in outcomes.items() if outcome == "upgraded"]
    assert run.loaded() == {name: NEW if name in upgraded else OLD for name in run.names}
    assert all("cordoned by somebody-else" in played.nodes[name]["reason"] for name in by_hand)
    run.until_closed_are(*by_hand, late)
    run.until("all work runs", run.all_at_work)
    for name, node in run.nodes().items():
        meta = node["metadata"]
        ours = {key for key in meta["annotations"] if key.startswith(objects.PREFIX)} - {LAST}
        # held, since the operator itself would upgrade one at once that is cordoned, or has another version
        held = name not in upgraded
        assert (meta["labels"].get(SKIP), bool(ours)) == ("true" if held else None, held), name
        assert (LAST in meta["annotations"]) is not held, "it can go back"
        assert not any(label.startswith(objects.STEERED) for label in meta["labels"]), name
    assert operated.api.find(LEASE) is None and operated.api.get(STEERING)["items"] == []


def test_a_fleet_at_work_with_a_cluster_policy(operated: OperatorCluster, tmp_path: Path) -> None:
    names = operated.begin(12, settings={"round_seconds": 0.5})
    policy = operated.api.get(f"{POLICIES}/cluster-policy")["spec"]["driver"]["upgradePolicy"]
    outcomes = {name: "skipped" if name == names[3] else "upgraded" for name in names}
    disturbed(operated, Operated(operated, tmp_path), outcomes, killed=True)
    assert operated.api.get(f"{POLICIES}/cluster-policy")["spec"]["driver"]["upgradePolicy"] == policy


def test_a_fleet_at_work_with_pools_of_nvidia_drivers(operated: OperatorCluster, tmp_path: Path) -> None:
    """On one node the driver does not load: it goes back. Afterwards another is sent back by hand."""
    pools = {"pool-a": {"pool": "a"}, "pool-b": {"pool": "b"}}
    settings = {"release": "v26.7.0", "round_seconds": 0.5}
    names = operated.begin(12, pools=pools, settings=settings)
    by_hand, broken = names[3], names[10]
    operated.set(broken={NEW: [broken]}, **settings)
    own = {"autoUpgrade": True, "maxParallelUpgrades": 3, "drain": {"enable": True, "timeoutSeconds": 77}}
    for pool in pools:
        operated.api.patch(f"{DRIVERS}/{pool}", {"spec": {"upgradePolicy": own}})
    policies = [item["spec"]["upgradePolicy"] for item in operated.api.get(DRIVERS)["items"]]
    run = Operated(operated, tmp_path)
    outcomes = {**dict.fromkeys(names, "upgraded"), by_hand: "skipped", broken: "rolled back"}
    disturbed(operated, run, outcomes, gpu_max_failed=1)
    assert {i["spec"]["version"] for i in operated.api.get(DRIVERS)["items"]} == {NEW}
    one = next(name for name, outcome in outcomes.items() if outcome == "upgraded" and name not in run.closed())
    before, out = run.loaded(), run.closed()
    back = run.fleet.play("rollback", gpu_hosts=one, **{**run.variables, "gpu_workload_wait": 2})
    assert back.rc == 0 and back.outcomes == {one: "rolled back"}, back.output[-6000:]
    assert run.loaded() == {**before, one: OLD} and operated.label(one, SKIP) == "true"
    run.until_closed_are(*out)
    specs = [item["spec"] for item in operated.api.get(DRIVERS)["items"]]
    assert {spec["version"] for spec in specs} == {NEW} and [spec["upgradePolicy"] for spec in specs] == policies
    run.until("all work runs", run.all_at_work)


def test_a_run_that_lost_the_fleet_leaves_it_to_the_other(operated: OperatorCluster, tmp_path: Path) -> None:
    """Another took over in the middle of a batch, and somebody wrote another version: both stay as they are."""
    operated.begin(3)
    run = Operated(operated, tmp_path)
    playing = run.fleet.begin("upgrade", **run.variables)
    run.until("the version is written", lambda: operated.version() == NEW)
    holder = operated.api.get(LEASE)["spec"]["holderIdentity"]
    other = ClusterLease(Api(str(operated.kubeconfig)), "default")
    other.hold("another", None, 600, holder)
    try:
        operated.write_version(OTHER)
        played = playing.end()
    finally:
        other.release("another")
    assert played.rc != 0 and "locked by run another" in played.output
    assert "this run no longer has the fleet" in played.output, played.output[-6000:]
    assert operated.version() == OTHER and all(operated.label(name, SKIP) == "true" for name in operated.names)


def test_a_canary_whose_driver_does_not_load_goes_back(operated: OperatorCluster, tmp_path: Path) -> None:
    operated.begin(3)
    operated.set(broken={NEW: ["*"]})
    run = Operated(operated, tmp_path)
    run.load(0.6)
    played = run.upgrade()
    assert played.rc != 0
    assert sorted(played.outcomes.values()) == ["not started", "not started", "rolled back"], played.output[-6000:]
    assert set(run.loaded().values()) == {OLD} and operated.version() == OLD
    run.until_closed_are()
    assert not any(operated.label(name, SKIP) for name in operated.names)
    run.until("all work runs", run.all_at_work)
