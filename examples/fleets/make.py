#!/usr/bin/env python3
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the example fleets again: python3 examples/fleets/make.py. The same files come out every time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

OLD = "570.133.20"
GB = 1 << 30
ANY = ["move", "wait", "restart"]


def facts(**values: Any) -> dict[str, Any]:
    """What a node must share with a checkpoint, besides GPU model and driver."""
    return {
        "gpu_memory": 80 * GB,
        "mig": "off",
        "mps": "off",
        "architecture": "x86_64",
        "cpu_features": ["avx2", "avx512f", "avx512vl"],
        "kernel": "6.8.0-51-generic",
        "runtime": "containerd 2.1",
        "cgroup": "v2",
        "security_module": "apparmor",
        "driver_flavour": "open",
        "gpu_sku": "2330-16c1",
        "ecc": "on",
        "topology": "nvswitch",
        "criu": "4.1",
        **values,
    }


def node(name: str, model: str, gpus: int, key: str, **values: Any) -> dict[str, Any]:
    free = {"gpu": gpus, "cpu": gpus * 24000, "memory": gpus * 240 * GB}
    return {
        "name": name,
        "gpu_model": model,
        "gpus": gpus,
        "loaded": OLD,
        "installed": OLD,
        "free": free,
        "key": key,
        **values,
    }


def put(nodes: list[dict[str, Any]], places: list[int], gpus: int, name: str, **values: Any) -> dict[str, Any]:
    """A workload with ``gpus`` GPUs, and CPU and memory in proportion, on each of ``places``; their room shrinks."""
    members = []
    for place in places:
        need = {"gpu": gpus, "cpu": gpus * 16000, "memory": gpus * 160 * GB}
        for resource, amount in need.items():
            nodes[place]["free"][resource] -= amount
        members.append({"node": nodes[place]["name"], "resources": need})
    return {"name": name, "members": members, **values}


def snapshot(nodes: list[dict[str, Any]], workloads: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    return {
        "format": "gpufleet.snapshot",
        "version": 1,
        "taken_at": "2026-03-02T08:00:00Z",
        "nodes": nodes,
        "workloads": workloads,
        **values,
    }


def inference_half() -> dict[str, Any]:
    dice = random.Random(11)
    model = "NVIDIA H100 80GB HBM3"
    nodes = [node(f"inf-{n:02}", model, 8, "h100", domains={"rack": f"r{n // 6}"}) for n in range(24)]
    works = []
    for number in range(46):
        gpus = dice.choice((1, 2, 2, 4))
        places = [n for n in range(24) if nodes[n]["free"]["gpu"] >= gpus + 2]
        service = f"chat-{number % 8}"
        works.append(
            put(
                nodes,
                [dice.choice(places)],
                gpus,
                f"{service}-{number}",
                kind="pod",
                owner=f"deployment/{service}",
                may=ANY,
                backends=["cuda_criu"],
                at_risk=dice.randint(0, 60),
                start_cost=dice.randint(90, 240),
                capture=20 + 12 * gpus,
                restore=10 + 8 * gpus,
                priority=10 if number % 8 == 0 else 0,
                budgets=[service],
                spread="rack",
            )
        )
    return snapshot(nodes, works, keys={"h100": facts()}, budgets={f"chat-{n}": 3 for n in range(8)})


def training_97() -> dict[str, Any]:
    dice = random.Random(97)
    model = "NVIDIA H100 80GB HBM3"
    nodes = [node(f"train-{n:02}", model, 8, "h100", domains={"rack": f"r{n // 8}"}) for n in range(32)]
    works = []
    number = 0

    def job(places: list[int], gpus: int) -> None:
        nonlocal number
        hours = dice.uniform(0.2, 4.5) if dice.random() < 0.96 else dice.uniform(8, 30)
        works.append(
            put(
                nodes,
                places,
                gpus,
                f"job-{4100 + number}",
                kind="job",
                owner=f"account/{dice.choice('abcdef')}",
                may=ANY,
                backends=["cuda_criu"],
                remaining=round(hours * 3600),
                at_risk=dice.randint(1200, 5400),
                start_cost=dice.randint(180, 600),
                capture=60 + 10 * gpus,
                restore=40 + 8 * gpus,
            )
        )
        number += 1

    for start in (0, 2, 4, 8):
        job([start, start + 1], 8)
    for place in (6, 7, *range(10, 32)):
        while nodes[place]["free"]["gpu"] > (8 if place == 31 else 0):
            job([place], min(dice.choice((1, 2, 2, 4, 4, 8)), nodes[place]["free"]["gpu"]))
    queue = {model: {"gpus": 96, "arrivals_per_hour": 40, "duration": 7200, "shortest": 600}}
    return snapshot(nodes, works, keys={"h100": facts()}, queue=queue)


def mixed_mig() -> dict[str, Any]:
    dice = random.Random(5)
    hopper, ampere = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    nodes = [node(f"h100-{n}", hopper, 8, "h100", labels={"pool": "train"}) for n in range(8)]
    nodes += [node(f"a100-{n}", ampere, 8, "a100", labels={"pool": "batch"}) for n in range(8)]
    nodes += [node(f"mig-{n}", ampere, 4, "a100-mig", labels={"pool": "notebooks"}) for n in range(4)]
    for each in nodes[16:]:
        each["free"] = {"mig-1g.10gb": 28, "cpu": 96000, "memory": 960 * GB}
    works = []
    for number in range(34):
        pool = range(8) if number % 2 else range(8, 16)
        gpus = dice.choice((1, 2, 4))
        places = [n for n in pool if nodes[n]["free"]["gpu"] >= gpus]
        if not places:
            continue
        works.append(
            put(
                nodes,
                [dice.choice(places)],
                gpus,
                f"run-{number}",
                kind="pod",
                may=ANY,
                backends=["cuda_criu"],
                remaining=dice.randint(600, 9000),
                at_risk=dice.randint(600, 3600),
                start_cost=120,
                capture=40,
                restore=30,
                requires={"pool": ["train" if number % 2 else "batch"]},
            )
        )
    for number in range(40):
        place = nodes[16 + number % 4]
        need = {"mig-1g.10gb": 1, "cpu": 2000, "memory": 16 * GB}
        for resource, amount in need.items():
            place["free"][resource] -= amount
        works.append(
            {
                "name": f"notebook-{number}",
                "kind": "pod",
                "members": [{"node": place["name"], "resources": need}],
                "may": ["wait", "restart"],
                "at_risk": 900,
                "start_cost": 30,
                "requires": {"pool": ["notebooks"]},
            }
        )
    keys = {
        "h100": facts(),
        "a100": facts(gpu_sku="20b2-147f", kernel="5.15.0-130-generic"),
        "a100-mig": facts(gpu_sku="20b2-147f", kernel="5.15.0-130-generic", mig="1g.10gb"),
    }
    queue = {
        hopper: {"gpus": 24, "duration": 5400, "shortest": 600},
        ampere: {"gpus": 8, "duration": 5400, "shortest": 600},
    }
    return snapshot(nodes, works, keys=keys, queue=queue)


def nvl72() -> dict[str, Any]:
    dice = random.Random(72)
    model = "NVIDIA GB200"
    nodes = [
        node(f"rack{r}-tray{t:02}", model, 4, "gb200", domains={"nvlink": f"rack{r}", "imex": f"rack{r}"})
        for r in range(5)
        for t in range(18)
    ]
    works = []
    for rack in range(4):
        trays = list(range(rack * 18, rack * 18 + 18))
        while len(trays) >= 2:
            size = min(dice.choice((2, 4, 8)), len(trays))
            works.append(
                put(
                    nodes,
                    trays[:size],
                    4,
                    f"pretrain-{rack}-{len(works)}",
                    kind="job",
                    may=ANY,
                    backends=["hook"],
                    remaining=dice.randint(1800, 4 * 3600),
                    at_risk=dice.randint(900, 2700),
                    start_cost=600,
                    capture=120,
                    restore=180,
                    together="nvlink",
                )
            )
            trays = trays[size:]
    keys = {"gb200": facts(gpu_memory=186 * GB, architecture="aarch64", cpu_features=["sve2"], topology="nvl72")}
    return snapshot(nodes, works, keys=keys, queue={model: {"gpus": 72, "duration": 7200, "shortest": 600}})


def protected() -> dict[str, Any]:
    model = "NVIDIA H100 80GB HBM3"
    nodes = [node(f"lab-{n}", model, 8, "h100") for n in range(4)]
    works = [put(nodes, [n], 8, f"experiment-{n}", kind="unit", may=["protect"]) for n in range(3)]
    works.append(put(nodes, [3], 6, "experiment-3", kind="unit", may=["move"], backends=["cuda_criu"]))
    return snapshot(nodes, works, keys={"h100": facts()})


FLEETS = {
    "inference-half": inference_half,
    "training-97": training_97,
    "mixed-mig": mixed_mig,
    "nvl72": nvl72,
    "protected": protected,
}

if __name__ == "__main__":
    for name, make in FLEETS.items():
        data = make()
        lists = {"nodes", "workloads"}
        head = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in data.items() if key not in lists)
        body = ",\n".join(
            f' "{key}": [\n' + ",\n".join("  " + json.dumps(each) for each in data[key]) + "\n ]"
            for key in ("nodes", "workloads")
        )
        Path(__file__).with_name(f"{name}.json").write_text("{\n" + head + ",\n" + body + "\n}\n", encoding="utf-8")
