# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Snapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import compatibility, plan
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy, Policy

from .fleets import FACTS, NEW, OLD, fate_of, fleet_of, node, workload

KEY = {**dict(FACTS), "gpu_model": "H100", "driver": OLD, "image": "sha256:1", "backend": "cuda_criu"}


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("driver", "570.133.07", "hard"),
        ("gpu_model", "H200", "hard"),
        ("kernel", "6.8.0-60-generic", "hard"),
        ("gpu_memory", 80 * 10**9, "hard"),
        ("cpu_features", ("avx512f",), "hard"),
        ("mig", "1g.10gb", "hard"),
        ("ecc", "off", "policy"),
        ("driver_flavour", "proprietary", "policy"),
        ("image", "sha256:2", "hard"),
    ],
)
def test_each_difference_is_named_with_both_values(field: str, value: Any, kind: str) -> None:
    waived = {"engine", "engine_version", "model", "model_revision", "arguments"}
    found = compatibility.explain(KEY, {**KEY, field: value}, waived=waived)
    assert [(m.field, m.kind, m.source, m.target) for m in found] == [(field, kind, KEY[field], value)]
    assert str(found[0]).startswith(f"key_mismatch:{field} ")
    assert not compatibility.explain(KEY, {**KEY, field: value}, waived={*waived, field})


@pytest.mark.parametrize("field", compatibility.FIELDS, ids=lambda field: field.name)
def test_each_field_of_the_key_matters_unless_it_is_waived(field: compatibility.Field) -> None:
    key = {each.name: KEY.get(each.name, "x") for each in compatibility.FIELDS}
    assert not compatibility.explain(key, key)
    for source, target in ((key[field.name], "other"), (key[field.name], None), (None, key[field.name])):
        have, offered = {**key, field.name: source}, {**key, field.name: target}
        found = compatibility.explain(have, offered)
        assert [(m.field, m.kind, m.source, m.target) for m in found] == [(field.name, field.kind, source, target)]
        assert "unknown" in str(found[0]) or (source and target)
        assert not compatibility.explain(have, offered, waived={field.name})
        assert bool(compatibility.explain(have, offered, scope="node")) is (field.scope == "node")


@pytest.mark.parametrize(
    ("field", "value"), [("gpu_memory", 90 * 2**30), ("cpu_features", ("avx512f", "avx512vl", "amx"))]
)
def test_more_than_needed_is_no_difference(field: str, value: Any) -> None:
    assert not compatibility.explain(KEY, {**KEY, field: value}, scope="node")


def test_unknown_is_a_mismatch_even_on_both_sides() -> None:
    without = {name: value for name, value in KEY.items() if name != "criu"}
    assert [m.field for m in compatibility.explain(without, without, scope="node")] == ["criu"]
    assert not compatibility.explain(without, without, scope="node", waived={"criu"})


def test_mig_on_both_sides_is_still_a_mismatch() -> None:
    mig = {**KEY, "mig": "1g.10gb"}
    assert [m.field for m in compatibility.explain(mig, mig, scope="node")] == ["mig"]


def test_hard_fields_come_first() -> None:
    found = compatibility.explain(KEY, {**KEY, "ecc": "off", "driver": NEW}, scope="node")
    assert [m.kind for m in found] == ["hard", "policy"]


def test_key_id_depends_on_values_only() -> None:
    assert compatibility.key_id(tuple(KEY.items())) == compatibility.key_id(tuple(sorted(KEY.items(), reverse=True)))
    assert compatibility.key_id(tuple(KEY.items())) != compatibility.key_id(tuple({**KEY, "driver": NEW}.items()))


def placed(*nodes: Any, work: Any, restore: bool = True, **options: Any) -> plan.Placement:
    return plan.place(Snapshot(nodes, (work,)), Policy(NEW), [work.name], restore=restore, **options)[0]


OTHER_KERNEL = tuple((k, "5.15" if k == "kernel" else v) for k, v in FACTS)


@pytest.mark.parametrize(
    ("target", "work", "reason"),
    [
        pytest.param({"free": {"gpu": 4}}, {"gpus": 8}, "no_room:gpu 4 of 8", id="no room"),
        pytest.param({"loaded": NEW, "installed": NEW}, {}, "key_mismatch:driver", id="other driver"),
        pytest.param({"facts": OTHER_KERNEL}, {}, "key_mismatch:kernel", id="other kernel"),
        pytest.param({"gpu_model": "A100"}, {}, "gpu_model:A100 is not H100", id="other GPU"),
        pytest.param({"taints": ("x",)}, {}, "taint:x", id="taint"),
        pytest.param({}, {"requires": {"pool": ("a", "b")}}, "label:pool is None, wants a or b", id="label"),
    ],
)
def test_every_refusal_is_explained(target: dict[str, Any], work: dict[str, Any], reason: str) -> None:
    found = placed(node("a"), node("b", **target), work=workload("w", "a", **work))
    assert found.to == ()
    assert found.refused[0].startswith(reason)


def test_a_start_needs_no_matching_key() -> None:
    on_new = node("b", loaded=NEW, installed=NEW)
    assert placed(node("a"), on_new, work=workload("w", "a"), restore=False).to == ("b",)


def test_waived_fields_do_not_stop_a_move() -> None:
    work = workload("w", "a")
    nodes = (node("a"), node("b", facts=OTHER_KERNEL))
    found = plan.place(Snapshot(nodes, (work,)), Policy(NEW, waive=("kernel",)), ["w"], restore=True)
    assert found[0].to == ("b",)


@pytest.mark.parametrize(
    ("values", "to"),
    [({}, ("b",)), ({"loaded": NEW}, ("b",)), ({"gpu_model": "A100"}, ())],
    ids=["like", "driver", "GPU"],
)
def test_what_a_slurm_job_saved_itself_needs_its_gpu_model_only(values: dict[str, Any], to: Any) -> None:
    """Slurm tells no more of a node, and unknown facts are a mismatch for all other work."""
    nodes = node("a", facts=()), node("b", facts=(), **values)
    assert placed(*nodes, work=workload("w", "a", backends=("slurm",))).to == to
    assert placed(*nodes, work=workload("w", "a")).to == ()


def test_jobs_of_both_kinds_on_one_node_are_told_apart() -> None:
    works = (workload("own", "n0", backends=("slurm",), remaining=600.0), workload("image", "n0", remaining=600.0))
    made = plan.make(fleet_of(3, *works, facts=()), Policy(NEW, canary=("n0",), max_wait=0.0))
    assert [fate_of(made, name).fate for name in ("own", "image")] == ["move", "cold_start"]


def test_a_gang_is_placed_as_a_whole_or_not_at_all() -> None:
    gang = workload("gang", "a", "b", gpus=8)
    assert placed(node("a"), node("b"), node("c"), work=gang).to == ()
    assert placed(node("a"), node("b"), node("c"), node("d"), work=gang).to == ("c", "d")


def test_together_and_spread() -> None:
    racks = [node(name, domains={"rack": rack}) for name, rack in zip("abcdef", "112233", strict=True)]
    free = [*racks[:3], node("d", domains={"rack": "2"}, free={"gpu": 0}), *racks[4:]]
    gang = {"gpus": 8, "name": "gang"}
    assert placed(*free, work=workload("g", "a", "b", gpus=8, together="rack")).to == ("e", "f"), gang
    assert placed(*racks, work=workload("g", "a", "b", gpus=4, spread="rack")).to == ("c", "e")


def test_nothing_is_restored_where_its_turn_comes_no_later() -> None:
    work = workload("w", "a")
    order = {"version": NEW, "order": ["b", "a", "c"]}
    assert placed(node("a"), node("b"), node("c"), work=work, plan=order).to == ("c",)
    assert placed(node("a"), node("b"), work=work, plan=order).to == ()
    assert placed(node("a"), node("b"), work=work, plan=order, restore=False).to == ("b",)
    assert placed(node("a"), node("b", unfinished=True), work=work).to == ()
    with pytest.raises(BadPolicy, match=f"is for '{OLD}', not for"):
        placed(node("a"), node("b"), work=work, plan={**order, "version": OLD})


def test_tightest_fit_first_and_later_upgraded_before_that() -> None:
    nodes = (node("a"), node("b"), node("c", free={"gpu": 2}), node("d", free={"gpu": 3}))
    work = workload("w", "a", gpus=2)
    assert placed(*nodes, work=work).to == ("c",)
    assert placed(*nodes, work=work, plan={"order": ["c", "d", "b"]}, avoid=["a"]).to == ("b",)
    assert placed(*nodes, work=work, avoid=["c"]).to == ("d",)
