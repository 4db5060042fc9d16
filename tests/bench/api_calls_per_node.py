# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to the API server to take a Kubernetes node out of service, empty it, prove it and put it back."""

from __future__ import annotations

import collections
import json
import time
from typing import Any

import kube_fleet
from api import Api

from ansible_collections.gpufleet.driver.plugins.module_utils import execution, kubernetes_api
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import registry
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Fate, Mark

AIM = 16
NODES, PODS = 20, 80


def main() -> None:
    kubeconfig = kube_fleet.start("small", NODES, 0)
    pods = kube_fleet.refill(Api.of(kubeconfig), NODES, PODS)
    nodes = [f"gpu-{number}" for number in range(1, NODES + 1)]
    calls: collections.Counter[str] = collections.Counter()
    plain = kubernetes_api.Api.request
    doing = ""

    def counted(self: kubernetes_api.Api, *arguments: Any, **options: Any) -> kubernetes_api.Answer:
        calls[doing] += 1
        return plain(self, *arguments, **options)

    kubernetes_api.Api.request = counted
    known = registry.ARGUMENTS["scheduler_options"]["options"]
    defaults = {name: option.get("default") for name, option in known.items()}
    options = defaults | {"kubeconfig": str(kubeconfig), "validation_image": ""}
    cluster = registry.get({"scheduler": "kubernetes", "scheduler_options": options}, execution.run)
    mark = Mark("bench", time.time())
    fates = [Fate(f"{pod['metadata']['namespace']}/{pod['metadata']['name']}", "cold_start") for pod in pods]
    doing = "cordon"
    cluster.cordon(nodes, mark)
    doing = "evacuate"
    cluster.evacuate(nodes, mark, fates, time.time() + 600, 60)
    doing = "validate"
    proofs = cluster.validate(nodes, mark, {}, 60)
    doing = "uncordon"
    cluster.uncordon(nodes, mark)
    if any(proof.failed for proof in proofs.values()):
        raise SystemExit(f"a node was not proven: {proofs}")
    result = {
        "bench": "api_calls_per_node",
        "ratio": round(sum(calls.values()) / NODES, 1),
        "unit": "requests a node",
        "aim": AIM,
        "of_them": {name: round(count / NODES, 1) for name, count in calls.items()},
        "evictions": PODS // NODES,
        "without": "a validation pod, which takes four requests and one each half second it runs",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
