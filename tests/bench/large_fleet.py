# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A large made fleet, and the time to plan it. Used by plan_vs_parse and plan_growth."""

from __future__ import annotations

import gc
import json
import random
import time
import tracemalloc
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import plan
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import Policy

OLD, NEW = "570.133.20", "580.95.05"
MODELS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H200")
POLICY = Policy(NEW, batch_size=(1, 10, "5%"), max_per_domain=(("rack", 8),))


def snapshot_text(nodes: int, workloads: int, seed: int = 1) -> str:
    """The JSON of a fleet of ``nodes`` machines with 8 GPUs each, about 85 % of them used."""
    dice = random.Random(seed)
    keys = {
        f"kernel{number}": {
            "gpu_memory": 80 << 30,
            "mig": "off",
            "mps": "off",
            "architecture": "x86_64",
            "cpu_features": ["avx2", "avx512f"],
            "kernel": f"6.8.0-{number}",
            "runtime": "containerd 2.1",
            "cgroup": "v2",
            "security_module": "apparmor",
            "driver_flavour": "open",
            "gpu_sku": "2330-16c1",
            "ecc": "on",
            "topology": "nvswitch",
            "criu": "4.1",
        }
        for number in range(3)
    }
    listed: list[dict[str, Any]] = []
    for number in range(nodes):
        listed.append(
            {
                "name": f"gpu-{number:05}.cluster.example",
                "gpu_model": MODELS[number * 3 // nodes],
                "gpus": 8,
                "loaded": OLD,
                "installed": OLD,
                "free": {"gpu": 8, "cpu": 192000, "memory": 2048 << 30},
                "schedulable": True,
                "domains": {"rack": f"rack-{number // 16}", "zone": f"zone-{number % 3}"},
                "labels": {"pool": "gpu", "team": f"t{number % 7}"},
                "key": f"kernel{dice.randrange(3)}",
            }
        )
    works = []
    sizes = dice.choices((1, 1, 1, 1, 2), k=workloads)
    place = 0
    for number, gpus in enumerate(sizes):
        free = listed[place % nodes]["free"]
        if free["gpu"] < gpus:
            place += 1
            free = listed[place % nodes]["free"]
        need = {"gpu": gpus, "cpu": 16000 * gpus, "memory": 160 * gpus << 30}
        if free["gpu"] < gpus:
            continue
        for resource, amount in need.items():
            free[resource] -= amount
        works.append(
            {
                "name": f"namespace-{number % 90}/workload-{number:06}",
                "kind": "pod",
                "owner": f"job/job-{number:06}",
                "members": [{"node": listed[place % nodes]["name"], "resources": need}],
                "may": dice.choice((["move", "wait", "restart"], ["wait", "restart"], ["move", "restart"])),
                "backends": ["cuda_criu"],
                "key": {"engine": "vllm", "model": f"m{number % 20}"},
                "remaining": dice.choice((None, dice.randint(60, 40000))),
                "at_risk": dice.randint(0, 3600),
                "start_cost": dice.randint(30, 600),
                "capture": dice.randint(20, 90),
                "restore": dice.randint(20, 60),
                "priority": 0,
                "budgets": [],
            }
        )
        if number % 6 == 5:
            place += 1
    return json.dumps(
        {
            "format": fleet.FORMAT,
            "version": fleet.VERSION,
            "keys": keys,
            "nodes": listed,
            "workloads": works,
            "queue": {MODELS[0]: {"gpus": 400}},
        }
    )


def seconds(work: Any, rounds: int = 3) -> float:
    """Least CPU time of ``work()`` in a few rounds."""
    best = float("inf")
    for dummy in range(rounds):
        gc.collect()
        before = time.process_time()
        work()
        best = min(best, time.process_time() - before)
    return best


def peak_memory(text: str) -> int:
    """The most memory that reading and planning took, in bytes."""
    tracemalloc.start()
    plan.make(fleet.parse(json.loads(text)), POLICY)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
