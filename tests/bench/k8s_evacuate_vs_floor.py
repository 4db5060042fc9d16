# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wall time to empty 20 Kubernetes nodes of 80 pods, over the bare eviction calls at the same concurrency."""

from __future__ import annotations

import concurrent.futures
import json
import statistics
import time

import kube_fleet
from api import Api

AIM = 1.5
ROUNDS = 3
NODES, PODS, AT_A_TIME = 20, 80, 16


def evict(api: Api, pod: dict) -> None:
    meta = pod["metadata"]
    name, namespace = meta["name"], meta["namespace"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    api.post(f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)


def gone(api: Api, begun: float) -> float:
    """Seconds since ``begun`` when all pods are gone."""
    while api.get("/api/v1/pods", limit=1)["items"]:
        time.sleep(0.1)
    return time.monotonic() - begun


def main() -> None:
    kubeconfig = kube_fleet.start("small", NODES, 0)
    api = Api.of(kubeconfig)
    ours, peer, until_gone = [], [], []
    for dummy in range(ROUNDS):
        pods = kube_fleet.refill(api, NODES, PODS)
        begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(lambda pod: evict(api, pod), pods))
        peer.append(time.monotonic() - begun)
        until_gone.append(gone(api, begun))
        ours.append(kube_fleet.emptied(api, kubeconfig, NODES, PODS))
    result = {
        "bench": "k8s_evacuate_vs_floor",
        "ratio": round(statistics.median(ours) / statistics.median(peer), 2),
        "ours": round(statistics.median(ours), 2),
        "peer": round(statistics.median(peer), 2),
        "unit": "s",
        "aim": AIM,
        "peer_is": f"{PODS} eviction calls, {AT_A_TIME} at a time, without waiting for the pods to stop",
        "ratio_to_peer_waiting_until_they_are_gone": round(statistics.median(ours) / statistics.median(until_gone), 2),
        "ours_includes": "start of the module, finding the pods, and waiting until they are gone (they take 0.1 s)",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
