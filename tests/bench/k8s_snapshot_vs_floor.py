# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU of a snapshot of 1,000 Kubernetes nodes and 4,000 pods, over fetching and json.loads of the same lists."""

from __future__ import annotations

import json
import sys

import kube_fleet

AIM = 2.0
ROUNDS = 3

FLOOR = """
import http.client, json, ssl, sys
config = json.load(open(sys.argv[1]))
cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
context = ssl.create_default_context(cafile=cluster["certificate-authority"])
connection = http.client.HTTPSConnection(cluster["server"].removeprefix("https://"), context=context)
size = 0
for path in sys.argv[2:]:
    connection.request("GET", path, headers={"Authorization": "Bearer " + user["token"]})
    data = connection.getresponse().read()
    size += len(data)
    json.loads(data)
print(size)
"""
LISTS = ["/api/v1/pods", "/api/v1/nodes", "/apis/policy/v1/poddisruptionbudgets"]
LISTS += [f"/apis/resource.k8s.io/v1/{name}" for name in ("resourceclaims", "resourceslices")]


def main() -> None:
    kubeconfig = str(kube_fleet.start("large", 1000, 4000))
    ours, peer = [], []
    for dummy in range(ROUNDS):
        peer.append(kube_fleet.process([sys.executable, "-c", FLOOR, kubeconfig, *LISTS]))
        options = {"kubeconfig": kubeconfig}
        ours.append(kube_fleet.module("fleet_snapshot_info", scheduler="kubernetes", scheduler_options=options))
    result = {
        "bench": "k8s_snapshot_vs_floor",
        "ratio": round(min(each.cpu for each in ours) / min(each.cpu for each in peer), 2),
        "ours": round(min(each.cpu for each in ours), 3),
        "peer": round(min(each.cpu for each in peer), 3),
        "unit": "s CPU",
        "aim": AIM,
        "peer_is": "fetching and json.loads of the same lists, in a process of its own",
        "wall": round(min(each.wall for each in ours), 2),
        "peer_wall": round(min(each.wall for each in peer), 2),
        "megabytes": round(int(peer[0].said) / 1e6, 1),
        "workloads": len(json.loads(ours[0].said)["snapshot"]["workloads"]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
