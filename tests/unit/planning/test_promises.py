# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans of fleets made at random keep what docs/snapshot.md promises."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.planning import options, plan
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy

from .fleets import FACTS, NEW, OLD
from .promises import broken

MAY = (["move", "wait", "restart"], ["wait", "restart"], ["move", "restart"], ["restart"], ["move"], ["wait"])
BACKENDS = (["cuda_criu"], ["cuda_criu"], ["hook"], ["slurm"], ["host"], [])


def odd_fleet(dice: random.Random) -> dict[str, Any]:
    """A snapshot as JSON with everything in it that a snapshot can have."""
    old = {name: list(value) if isinstance(value, tuple) else value for name, value in FACTS}
    keys = {"k": old, "other": old | {"kernel": "5.15"}, "mig": old | {"mig": "on"}, "bare": {}}
    rare = dice.choice((0.0, 0.1, 0.25))
    nodes = []
    for number in range(dice.randint(2, 12)):
        mig = dice.random() < rare
        node: dict[str, Any] = {
            "name": f"n{number}",
            "gpu_model": dice.choice(("H100", "H100", "H100", "A100", "B200")),
            "gpus": 0 if dice.random() < 0.02 else 8,
            "loaded": NEW if dice.random() < rare else OLD,
            "free": {"gpu": 4 if mig else 8, "cpu": 64, "memory": 512, **({"mig-2g.20gb": 12} if mig else {})},
            "key": "mig" if mig else dice.choice(("k", "k", "k", "k", "k", "k", "other", "bare")),
            "domains": {"rack": f"r{number // 3}"},
        }
        if not node["gpus"]:
            node["free"] = {}
        if dice.random() < 0.3:
            node["domains"] |= {dice.choice(("nvlink", "imex")): f"d{number // 2}"}
        for field, value in (
            ("skip", "opted out"),
            ("cordoned_by", "ops"),
            ("unfinished", True),
            ("schedulable", False),
            ("taints", ["dedicated=a:NoSchedule"]),
            ("labels", {"pool": "x"}),
        ):
            if dice.random() < rare:
                node[field] = value
        nodes.append(node)
    works = [work for number in range(dice.randint(0, 24)) if (work := _work(dice, nodes, number))]
    snapshot = {"version": 1, "keys": keys, "nodes": nodes, "workloads": works, "budgets": {"a": 1, "b": 2, "c": 0}}
    if dice.random() < 0.4:
        snapshot["queue"] = {
            "H100": {"gpus": dice.choice((4, 40)), "duration": 3600, "shortest": dice.choice((0, 600))}
        }
    if dice.random() < 0.2:
        snapshot["durations"] = {"evacuate": 60, "install": 900, "reboot": 300}
    return snapshot


def _work(dice: random.Random, nodes: list[dict[str, Any]], number: int) -> dict[str, Any] | None:
    need = {
        dice.choice(("gpu", "gpu", "gpu", "gpu", "mig-2g.20gb")): dice.choice((1, 2, 4, 8)),
        "cpu": dice.choice((0, 8)),
    }
    size = dice.choice((1, 1, 1, 2, 3))
    places = [node for node in nodes if all(node["free"].get(what, 0) >= amount for what, amount in need.items())]
    if len(places) < size:
        return None
    chosen = dice.sample(places, size)
    for node in chosen:
        for what, amount in need.items():
            node["free"][what] -= amount
    work = {
        "name": f"w{number}",
        "members": [{"node": node["name"], "resources": need} for node in chosen],
        "gang": dice.random() < 0.7,
        "may": ["protect"] if dice.random() < 0.03 else dice.choice(MAY[: dice.choice((2, 4, 6))]),
        "backends": dice.choice(BACKENDS),
        "remaining": dice.choice((None, dice.randint(1, 30000), dice.randint(1, 3000))),
        "at_risk": dice.choice((0, 600, 20000)),
        "start_cost": dice.randint(0, 600),
        "capture": dice.choice((20, 60, 900)),
        "restore": dice.randint(0, 100),
        "priority": dice.choice((0, 0, 5)),
        "budgets": dice.choice(([], [], [], ["a"], ["b"], ["a", "b"])) if dice.random() < 0.95 else ["c"],
        "tolerates": dice.choice(([], ["dedicated=a:NoSchedule"])),
        "together": "rack" if size > 1 and dice.random() < 0.3 else None,
    }
    if dice.random() < 0.1:
        work["requires"] = {"pool": ["x"]}
    if size == 1 and dice.random() < 0.1:
        work |= {"stays_home": True, "stand_in": dice.choice(nodes)["name"]}
    return work


def odd_options(dice: random.Random, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Options of upgrade_plan, of any kind."""
    names = [node["name"] for node in nodes]
    choices: dict[str, list[Any]] = {
        "canary": [0, 1, 2, dice.sample(names, 1)],
        "batch_size": [1, 2, "25%", "50%", [1, 3], "100%"],
        "growth": [1.5, 2],
        "max_unavailable": [1, 3, "50%"],
        "max_wait": [0, 900, 14400],
        "max_per_domain": [{"rack": 1}, {"rack": 2}],
        "max_pending": [{"H100": 16}, {"H100": 40}],
        "reserve": [dice.sample(names, 2)],
        "keep_together": [[], ["nvlink"]],
        "waive": [["kernel"], ["gpu_memory", "cpu_features"]],
        "gpu_models": [["H100"]],
        "windows": [
            [{"start": "22:00", "end": "23:00"}],
            [{"start": "22:00", "end": "02:00", "tz": "Asia/Kolkata", "days": ["fri", "sat"]}],
            [{"start": "00:30", "end": "01:30"}, {"start": "22:00", "end": "22:40", "tz": "Europe/Berlin"}],
        ],
    }
    found = {name: dice.choice(values) for name, values in choices.items() if dice.random() < 0.25}
    return {"version": NEW, "now": "2026-03-27T21:50:00+00:00", **found}


def tried(seed: int) -> tuple[dict[str, Any] | None, list[str]]:
    """The plan for the fleet of a seed, as JSON, and what it breaks; None if the policy does not fit the fleet."""
    dice = random.Random(seed)
    snapshot = odd_fleet(dice)
    given = odd_options(dice, snapshot["nodes"])
    asked = {name: spec.get("default") for name, spec in options.ARGUMENTS.items()} | given
    kept = json.loads(json.dumps(snapshot))
    try:
        made = plan.make(options.snapshot_of({"snapshot": snapshot}), options.policy_of(asked))
    except BadPolicy:
        return None, []
    found = json.loads(json.dumps(made.as_dict()))
    return found, broken(kept, given, found)


def _plain() -> tuple[dict[str, Any], dict[str, Any]]:
    """A snapshot of full and of free nodes, and its plan, which keeps every promise."""
    old = {name: list(value) if isinstance(value, tuple) else value for name, value in FACTS}

    def work(name: str, node: str, gpus: int, **values: Any) -> dict[str, Any]:
        members = [{"node": node, "resources": {"gpu": gpus}}]
        return {
            "name": name,
            "members": members,
            "may": ["move", "wait", "restart"],
            "backends": ["cuda_criu"],
            **values,
        }

    nodes = [
        {"name": f"n{n}", "gpu_model": "H100", "gpus": 8, "loaded": OLD, "free": {"gpu": free}, "key": "k"}
        for n, free in enumerate((0, 4, 8, 8, 4))
    ]
    works = [
        work("moves", "n0", 8, remaining=1500, at_risk=90000),
        work("cold", "n1", 4, may=["restart"], budgets=["b"]),
        work("ends", "n4", 4, may=["wait"], remaining=2600),
    ]
    nodes[0]["domains"] = {"rack": "a"}
    snapshot = {"version": 1, "keys": {"k": old}, "nodes": nodes, "workloads": works, "budgets": {"b": 1}}
    given = {"version": NEW, "canary": ["n0"], "batch_size": 1, "reserve": ["n3"], "max_wait": 1000}
    asked = {name: spec.get("default") for name, spec in options.ARGUMENTS.items()} | given
    made = plan.make(options.snapshot_of({"snapshot": snapshot}), options.policy_of(asked)).as_dict()
    assert broken(snapshot, given, made) == []
    return {"snapshot": snapshot, "options": given}, made


def _entry(made: dict[str, Any], name: str) -> dict[str, Any]:
    return next(e for batch in made["batches"] for e in batch["workloads"] if e["workload"] == name)


PLAIN = _plain()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s, o, p: p["batches"][1]["nodes"].append(p["batches"][2]["nodes"][0]), "in 2 batches"),
        (lambda s, o, p: p["order"].reverse(), "order is not that of the batches"),
        (lambda s, o, p: p["serial"].append(1), "serial is not the sizes"),
        (lambda s, o, p: s["nodes"][2].update(skip="opted out"), "n2 is not to be upgraded"),
        (lambda s, o, p: o.update(canary=["n1"]), "are not in the first batch"),
        (lambda s, o, p: o.update(reserve=["n0"]), "of the reserve"),
        (lambda s, o, p: s["nodes"][2].update(unfinished=True), "are due and not in the first batch"),
        (lambda s, o, p: [n.update(domains={"imex": "x"}) for n in s["nodes"][:2]], "is split"),
        (lambda s, o, p: o.update(windows=[{"start": "03:00", "end": "03:10"}], now="2026-03-02T00:00:00Z"), "window"),
        (lambda s, o, p: p["batches"][1].update(starts_seconds=1), "starts"),
        (lambda s, o, p: _entry(p, "moves").update(to=["n0"]), "n0 takes no work then"),
        (lambda s, o, p: _entry(p, "moves").update(to=["n1"]), "has {'gpu': -4} left"),
        (lambda s, o, p: s["nodes"][2].update(key={}), "kernel on n2 is None"),
        (lambda s, o, p: s["nodes"][2].update(loaded="570.1.2"), "driver on n2 is 570.1.2"),
        (lambda s, o, p: s["nodes"][2].update(taints=["x"]), "n2 has the taint x"),
        (lambda s, o, p: s["nodes"][2].update(gpu_model="A100"), "n2 has other GPUs"),
        (lambda s, o, p: s["workloads"][0].update(requires={"pool": ["x"]}), "n2 has no pool of ['x']"),
        (lambda s, o, p: s["workloads"][0].update(may=["restart"]), "it may not move"),
        (lambda s, o, p: s["workloads"][0].update(capture=600), "loses"),
        (lambda s, o, p: s["workloads"][2].update(remaining=None), "has ['ends'] on its nodes and tells of {}"),
        (lambda s, o, p: p["batches"][2]["workloads"].clear(), "has ['cold'] on its nodes and tells of {}"),
        (lambda s, o, p: s["workloads"][1].update(may=["wait"]), "it may not start again"),
        (lambda s, o, p: _entry(p, "cold").update(to=["n3"]), "n3 is not upgraded yet"),
        (lambda s, o, p: s["budgets"].update(b=0), "its budget allows none"),
        (lambda s, o, p: s["workloads"][0].update(remaining=90000), "after the wait"),
        (lambda s, o, p: s["workloads"][0].update(may=["move"]), "it may not be waited for"),
    ],
)
def test_a_broken_promise_is_noticed(change: Any, told: str) -> None:
    """Else the checks below could not fail."""
    (asked, made) = json.loads(json.dumps(PLAIN))
    change(asked["snapshot"], asked["options"], made)
    found = broken(asked["snapshot"], asked["options"], made)
    assert any(told in each for each in found), found


@pytest.mark.parametrize("begin", range(0, 60, 20))
def test_plans_keep_their_promises(begin: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(begin, begin + 20):
        made, found = tried(seed)
        assert not found, f"seed {seed}: {'; '.join(found)}"
        seen.update(entry["fate"] for batch in (made or {"batches": []})["batches"] for entry in batch["workloads"])
    assert min(seen[fate] for fate in ("move", "wait", "cold_start")) > 0, seen
