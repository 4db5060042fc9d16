# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes of a cluster as Ansible hosts, by ansible-inventory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from cluster import RUN, Cluster

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects

TEXT = """\
plugin: gpufleet.driver.gpu_nodes
source: kubernetes
kubeconfig: {kubeconfig}
version: 580.95.05
domain_labels: {{room: room}}
compose: {{rack: gpu_inventory.domains.rack}}
keyed_groups: [{{key: gpu_inventory.domains.room, prefix: room}}]
cache: {cache}
cache_plugin: ansible.builtin.jsonfile
cache_connection: {directory}
"""


def listed(file: Path) -> dict[str, Any]:
    done = subprocess.run(["ansible-inventory", "-i", str(file), "--list"], capture_output=True, text=True, check=True)
    assert "WARNING" not in done.stderr, done.stderr
    return json.loads(done.stdout, object_hook=lambda found: found.get("__ansible_unsafe", found))


def written(cluster: Cluster, directory: Path, cache: bool = False) -> Path:
    file = directory / "lab.gpu_nodes.yml"
    file.write_text(TEXT.format(kubeconfig=cluster.kubeconfig, cache=str(cache).lower(), directory=directory))
    return file


def test_hosts_and_groups(cluster: Cluster, tmp_path: Path) -> None:
    old, new, out = cluster.nodes(3, labels={"room": "7x7"})
    cluster.change(new, metadata={"labels": {"nvidia.com/cuda.driver-version.full": "580.95.05", "agentpool": "a"}})
    cluster.change(out, spec={"unschedulable": True})
    cluster.api.patch(
        f"/api/v1/nodes/{old}/status", {"status": {"addresses": [{"type": "InternalIP", "address": "10.9.8.7"}]}}
    )
    inventory = listed(written(cluster, tmp_path))
    variables = inventory["_meta"]["hostvars"]
    assert variables[old]["ansible_host"] == "10.9.8.7" and "ansible_host" not in variables[new]
    assert variables[old]["rack"] == "rack-0"
    assert variables[new]["gpu_inventory"] == {
        "model": "NVIDIA-H100-80GB-HBM3",
        "gpus": 8,
        "driver": "580.95.05",
        "domains": {"zone": "zone-1", "rack": "rack-0", "nodepool": "a", "room": "7x7"},
        "schedulable": True,
        "cordoned_by": None,
        "needs_upgrade": False,
    }
    members = {name: sorted(group.get("hosts", ())) for name, group in inventory.items() if name != "_meta"}
    assert members["gpu_nodes"] == members["gpu_model_NVIDIA_H100_80GB_HBM3"] == [old, new, out]
    assert members["gpu_driver_580_95_05"] == members["gpu_pool_a"] == [new]
    assert members["gpu_driver_570_133_20"] == members["gpu_needs_upgrade"] == [old, out]
    assert members["gpu_cordoned"] == [out] and members["room_7x7"] == [old, new, out]


def test_a_cached_inventory_asks_nobody(cluster: Cluster, tmp_path: Path) -> None:
    (name,) = cluster.nodes(1)
    file = written(cluster, tmp_path, cache=True)
    first = listed(file)
    cluster.backend().cordon([name], RUN)
    assert objects.MARK in cluster.node(name)["metadata"]["annotations"]
    assert listed(file) == first


def test_no_cluster_is_said_in_words(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "lab.gpu_nodes.yml"
    file.write_text(f"plugin: gpufleet.driver.gpu_nodes\nsource: kubernetes\nkubeconfig: {tmp_path}/absent\n")
    done = subprocess.run(["ansible-inventory", "-i", str(file), "--list"], capture_output=True, text=True, check=False)
    assert "no inventory from kubernetes: no way to reach a cluster" in done.stderr and "Traceback" not in done.stderr
