# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU of a snapshot of 1,000 Kubernetes nodes and 4,000 pods, over listing them with the official client's models."""

from __future__ import annotations

import json
import sys

import kube_fleet

AIM = 0.3

PEER = """
import sys
from kubernetes import client, config
config.load_kube_config(sys.argv[1])
core = client.CoreV1Api()
print(len(core.list_pod_for_all_namespaces().items), len(core.list_node().items))
"""


def main() -> None:
    kubeconfig = str(kube_fleet.start("large", 1000, 4000))
    peer = kube_fleet.process([sys.executable, "-c", PEER, kubeconfig])
    options = {"kubeconfig": kubeconfig}
    ours = kube_fleet.module("fleet_snapshot_info", scheduler="kubernetes", scheduler_options=options)
    result = {
        "bench": "k8s_snapshot_vs_typed_client",
        "ratio": round(ours.cpu / peer.cpu, 2),
        "ours": round(ours.cpu, 2),
        "peer": round(peer.cpu, 2),
        "unit": "s CPU",
        "aim": AIM,
        "peer_is": "the official client listing pods and nodes as models, in a process of its own, judging nothing",
        "wall": round(ours.wall, 2),
        "peer_wall": round(peer.wall, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
