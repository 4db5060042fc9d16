# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wall time to empty 20 Kubernetes nodes of 80 pods, over kubectl drain of the same nodes in one call."""

from __future__ import annotations

import json
import shutil
import statistics

import kube_fleet
from api import Api

AIM = 0.5
ROUNDS = 3
NODES, PODS = 20, 80


def main() -> None:
    if shutil.which("kubectl") is None:
        raise SystemExit("k8s_evacuate_vs_kubectl_drain: kubectl is missing; install it to have this measured")
    kubeconfig = kube_fleet.start("small", NODES, 0)
    api = Api.of(kubeconfig)
    nodes = [f"gpu-{number}" for number in range(1, NODES + 1)]
    drain = ["kubectl", "--kubeconfig", str(kubeconfig), "drain", "--force", "--delete-emptydir-data", *nodes]
    uncordon = ["kubectl", "--kubeconfig", str(kubeconfig), "uncordon", *nodes]
    ours, peer = [], []
    for dummy in range(ROUNDS):
        ours.append(kube_fleet.emptied(api, kubeconfig, NODES, PODS))
        kube_fleet.refill(api, NODES, PODS)
        peer.append(kube_fleet.process(drain).wall)
        kube_fleet.process(uncordon)
    result = {
        "bench": "k8s_evacuate_vs_kubectl_drain",
        "ratio": round(statistics.median(ours) / statistics.median(peer), 2),
        "ours": round(statistics.median(ours), 2),
        "peer": round(statistics.median(peer), 2),
        "unit": "s",
        "aim": AIM,
        "peer_is": "kubectl drain of all nodes in one call, which empties one node after the other",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
