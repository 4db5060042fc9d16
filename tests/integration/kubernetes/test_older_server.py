# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server that knows no MutatingAdmissionPolicy, as before Kubernetes 1.34."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import LAB, RUN, Cluster, evacuate, go, skip_without_control_plane, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_steering as steering

POLICIES = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies"


@pytest.fixture
def older(tmp_path: Path) -> Iterator[Cluster]:
    skip_without_control_plane()
    if "GPUFLEET_TEST_KUBECONFIG" in os.environ:
        pytest.skip("a cluster that was given cannot be made to know less; unset GPUFLEET_TEST_KUBECONFIG")
    command = [str(LAB / "lab"), "up", "--nodes", "0", "--without-policies", "--state", str(tmp_path / "lab")]
    subprocess.run(command, check=True, timeout=300)
    try:
        made = Cluster(tmp_path / "lab", "older")
        made.api.post("/api/v1/namespaces", {"metadata": {"name": made.namespace}})
        until("the default account", lambda: made.api.find(made.path("serviceaccounts", "default")))
        yield made
    finally:
        subprocess.run([str(LAB / "lab"), "down", "--state", str(tmp_path / "lab")], check=True, timeout=100)


def test_evicted_work_is_led_by_a_taint_on_the_other_nodes(older: Cluster) -> None:
    nodes = older.nodes(6)
    assert older.api.find(POLICIES) is None
    pods = older.deployment("llama", replicas=2, gpus=2)
    sources = sorted({pod["spec"]["nodeName"] for pod in older.pods()})
    goal = next(node for node in reversed(nodes) if node not in sources)
    backend = older.backend()
    assert len(backend.snapshot([]).workloads) == 2
    backend.cordon(sources, RUN)
    results = evacuate(backend, sources, go(older, *pods, to=(goal,)))
    assert [end.reason for result in results.values() for end in result.ends] == [steering.NO_POLICIES] * 2
    until("all run again", lambda: older.are_ready("deployments", "llama"))
    assert {pod["spec"]["nodeName"] for pod in older.pods() if "deletionTimestamp" not in pod["metadata"]} == {goal}
    backend.uncordon(sources, RUN)
    taken = backend.settle(RUN)
    assert len([line for line in taken if line.startswith(f"taint {objects.ELSEWHERE['key']}")]) == 5
    # a controller takes its own taint away a moment after a node is uncordoned
    until("no taint is left", lambda: not any(older.node(name)["spec"].get("taints") for name in nodes))
    assert backend.settle(RUN) == []
