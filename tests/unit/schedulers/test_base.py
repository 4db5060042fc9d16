# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import (
    Demand,
    Durations,
    Node,
    Snapshot,
    check,
    dump,
    parse,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import (
    End,
    Evacuated,
    Fate,
    with_host_facts,
)

H100 = "NVIDIA H100 80GB HBM3"


def merged(*hosts: dict, **node: object) -> dict[str, Node]:
    snapshot = Snapshot(nodes=(Node("n1", **{"gpus": 8, "loaded": "535.1", **node}), Node("n2")))
    return {each.name: each for each in with_host_facts(snapshot, hosts, "slurm").nodes}


def test_the_kernel_is_believed_before_the_label() -> None:
    fact = {"name": "n1", "loaded": "550.2", "installed": "550.2", "gpus": [H100] * 7, "domain": "nv-3"}
    node = merged(fact, domains={"rack": "r1"})["n1"]
    assert (node.loaded, node.installed, node.gpu_model, node.gpus) == ("550.2", "550.2", H100, 7)
    assert node.domains == {"nvlink": "nv-3", "rack": "r1"} and node.skip is None and not node.unfinished


def test_a_host_that_says_nothing_keeps_what_the_scheduler_said() -> None:
    node = merged({"name": "n1", "loaded": "", "installed": "", "gpus": [], "unfinished": True})["n1"]
    assert (node.loaded, node.gpus, node.unfinished) == ("535.1", 8, True)


def test_nodes_of_only_one_side_are_skipped_with_the_reason() -> None:
    nodes = merged({"name": "n1"}, {"name": "N9", "gpus": [H100]})
    assert nodes["n2"].skip == "not among the hosts of this run"
    assert nodes["N9"].skip == "slurm knows no node of that name" and nodes["N9"].gpus == 1
    assert nodes["n1"].skip is None


def test_a_reason_of_the_host_to_skip_it_is_kept() -> None:
    assert merged({"name": "n1", "skip": "unfit: no headers"})["n1"].skip == "unfit: no headers"


def test_without_hosts_the_scheduler_is_believed() -> None:
    assert set(merged()) == {"n1", "n2"} and merged()["n2"].skip is None


def test_models_go_by_the_hosts_names_also_in_the_queue_and_on_other_nodes() -> None:
    """Slurm calls them by a type of somebody's choice or not at all, Kubernetes by a label."""
    types = {"n1": "h100", "n2": "h100", "n3": "a100", "n4": "a100", "n5": "a100", "n6": None, "n7": None}
    nodes = tuple(Node(name, gpu_model=kind, gpus=8) for name, kind in types.items())
    queue = {"h100": Demand(4, 0, 100, 50), "": Demand(2, 1, 400), "a100": Demand(1), "l40": Demand(3)}
    models = {"n1": H100, "n3": "A100 40GB", "n4": "A100 80GB", "n6": H100}
    hosts = [{"name": name, "gpus": [model] * 8} for name, model in models.items()]
    seen = with_host_facts(Snapshot(nodes=nodes, queue=queue), hosts, "slurm")
    assert [node.gpu_model for node in seen.nodes] == [H100, H100, "A100 40GB", "A100 80GB", "a100", H100, H100]
    assert seen.queue == {H100: Demand(6, 1, 200, 50), "A100 40GB": Demand(1), "l40": Demand(3)}
    unknown = with_host_facts(Snapshot(nodes=(Node("n1"),), queue={"": Demand(2)}), [{"name": "n1"}], "slurm")
    assert unknown.queue == {}


def test_times_are_those_of_earlier_upgrades_where_there_were_any() -> None:
    def took(*seconds: float) -> dict:
        return dict(zip(("evacuate", "install", "validate", "reboot"), seconds, strict=True))

    fleet = Snapshot(nodes=(Node("n1"), Node("n2"), Node("n3"), Node("n4")))
    hosts = [{"name": "n1", "durations": took(5, 50, 7, 0)}, {"name": "n2", "durations": took(1, 70, 9, 0)}]
    hosts += [{"name": "n3", "durations": {}}, {"name": "n4", "durations": took(3, 60, 8, 100)}]
    assert with_host_facts(fleet, hosts, "hosts").durations == Durations(3, 60, 8, 0)
    assert with_host_facts(fleet, hosts[2:3], "hosts").durations == Durations()


def work(name: str, **values: Any) -> dict[str, Any]:
    """As the module host_workloads lists it."""
    entry = {"name": name, "kind": "unit", "state": "running", "gpus": [0], "may": ["restart"], "wait": 0}
    return {**entry, "elsewhere": None, **values}


def test_work_of_plain_hosts_is_planned_with() -> None:
    listed = [
        work("serving", gpus=[0, 1], elsewhere="n2"),
        work("training", gpus=[1, 2], may=["move", "restart"]),
        work("off", state="stopped"),
        work("python3 of eve\x1b[31m", kind="process", gpus=[3], may=["wait"], wait=300),
        work("busy", gpus=[3], may=["wait", "restart"], wait=300),
    ]
    hosts = [{"name": "n1", "gpus": [H100] * 8, "work": listed}, {"name": "n2", "gpus": [H100] * 8}]
    seen = with_host_facts(Snapshot(nodes=(Node("n1"), Node("n2"))), hosts, "hosts")
    assert [node.free for node in seen.nodes] == [{"gpu": 4}, {"gpu": 8}]
    told = {w.name: (w.gpus, sorted(w.may), w.backends, w.remaining, w.stand_in) for w in seen.workloads}
    assert told == {
        "n1/serving": (2, ["restart"], (), None, "n2"),
        "n1/training": (1, ["move", "restart"], ("host",), None, None),
        "n1/python3 of eve?[31m": (1, ["wait"], (), 300, None),
        "n1/busy": (0, ["restart", "wait"], (), None, None),
    }
    assert all(w.stays_home for w in seen.workloads)
    check(seen)
    assert parse(dump(seen)) == seen


def test_fate_of_a_plan() -> None:
    item = {"workload": "job-7", "fate": "move", "nodes": ["n1"], "to": ["n5"], "lost_gpu_hours": 0.1, "reason": ""}
    assert Fate.of(item) == Fate("job-7", "move", ("n5",))
    for senseless in ({"fate": "move"}, {"workload": "job-7"}, {**item, "fate": "moved"}, {**item, "to": 5}):
        with pytest.raises(ValueError, match="is no fate; expected workload, fate"):
            Fate.of(senseless)


def test_evacuated_is_empty_when_nothing_is_waited_for() -> None:
    done = Evacuated((End("job-7", "requeued", "saved step 10"),), changed=True)
    assert done.as_dict()["empty"]
    assert done.as_dict()["workloads"] == [{"workload": "job-7", "how": "requeued", "reason": "saved step 10"}]
    assert not Evacuated(waiting=("job-8 until 12:00",)).as_dict()["empty"]
    assert not Evacuated(failed=True, msg="gone").as_dict()["empty"]
