# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fleets made from a seed, small enough for an exact solution or as large as wanted."""

from __future__ import annotations

import random
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Demand, Member, Node, Snapshot, Workload
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import plan

OLD, NEW = "570.133.20", "580.95.05"

FACTS = tuple(
    sorted(
        {
            "gpu_memory": 85899345920,
            "mig": "off",
            "mps": "off",
            "architecture": "x86_64",
            "cpu_features": ("avx512f", "avx512vl"),
            "kernel": "6.8.0-51-generic",
            "runtime": "containerd 2.1.4",
            "cgroup": "v2",
            "security_module": "apparmor",
            "driver_flavour": "open",
            "gpu_sku": "2330-16c1",
            "ecc": "on",
            "topology": "nvswitch-8",
            "criu": "4.1",
        }.items()
    )
)


def node(name: str, **values: Any) -> Node:
    """An H100 machine on the old driver, empty unless told otherwise."""
    defaults = {
        "gpu_model": "H100",
        "gpus": 8,
        "loaded": OLD,
        "installed": OLD,
        "free": {"gpu": values.get("gpus", 8)},
        "facts": FACTS,
    }
    return Node(name, **{**defaults, **values})


def workload(name: str, *where: str, gpus: int = 1, **values: Any) -> Workload:
    """A workload that may do anything, with a member of ``gpus`` GPUs on each node of ``where``."""
    defaults: dict[str, Any] = {"may": frozenset(("move", "wait", "restart")), "backends": ("cuda_criu",)}
    members = tuple(Member(each, {"gpu": gpus}) for each in where)
    return Workload(name, members, **{**defaults, **values})


def fleet_of(count: int, *works: Workload, **values: Any) -> Snapshot:
    """Nodes n0, n1 … of one kind."""
    return Snapshot(tuple(node(f"n{number}", **values) for number in range(count)), works)


def fate_of(made: plan.Plan, name: str) -> plan.WorkloadFate:
    return next(each for batch in made.batches for each in batch.fates if each.workload == name)


def small_fleet(seed: int) -> Snapshot:
    """Two to eight nodes, work of one node each, every workload restartable; half of the seeds have a queue."""
    dice = random.Random(seed)
    models = ["H100"] if dice.random() < 0.7 else ["H100", "A100"]
    names = [f"n{number}" for number in range(dice.randint(2, 8))]
    model = {name: dice.choice(models) for name in names}
    free = dict.fromkeys(names, 8)
    works = []
    for number in range(dice.randint(2, 14)):
        gpus = dice.choice((1, 1, 2, 4, 4, 8))
        places = [name for name in names if free[name] >= gpus]
        if not places:
            continue
        place = dice.choice(places)
        free[place] -= gpus
        may = dice.choice((("move", "wait", "restart"), ("move", "wait", "restart"), ("wait", "restart"), ("restart",)))
        works.append(
            workload(
                f"w{number}",
                place,
                gpus=gpus,
                may=frozenset(may),
                remaining=dice.choice((None, dice.randint(60, 6000), dice.randint(60, 6000))),
                at_risk=dice.randint(0, 3600),
                start_cost=dice.randint(30, 600),
                capture=dice.randint(20, 120),
                restore=dice.randint(20, 60),
            )
        )
    nodes = tuple(node(name, gpu_model=model[name], free={"gpu": free[name]}) for name in names)
    queue = {name: Demand(16.0) for name in models} if dice.random() < 0.5 else {}
    return Snapshot(nodes, tuple(works), queue=queue)
