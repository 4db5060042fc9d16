# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet

from .fleets import small_fleet

GOOD: dict[str, Any] = {
    "format": "gpufleet.snapshot",
    "version": 1,
    "keys": {"h100": {"kernel": "6.8", "cpu_features": ["b", "a"]}},
    "nodes": [{"name": "a", "gpu_model": "H100", "gpus": 8, "free": {"gpu": 4}, "key": "h100"}],
    "workloads": [{"name": "w", "members": [{"node": "a", "resources": {"gpu": 4}}], "key": {"engine": "vllm"}}],
    "budgets": {"pdb": 1},
    "queue": {"H100": {"gpus": 2}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good snapshot with the value at ``path`` (a dotted path, numbers are list places) replaced or added."""
    data = json.loads(json.dumps(GOOD))
    *parents, last = path.split(".")
    target = data
    for part in parents:
        target = target[int(part)] if part.isdigit() else target[part]
    target[last] = value
    return data


def test_good_snapshot_is_read() -> None:
    found = fleet.parse(GOOD)
    assert found.nodes[0].facts == (("cpu_features", ("a", "b")), ("kernel", "6.8"))
    assert found.workloads[0].members == (fleet.Member("a", {"gpu": 4}),)
    assert found.workloads[0].gpus == 4


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        pytest.param([], "snapshot", "expected an object", id="no object"),
        pytest.param(changed("version", 2), "version", "expected 1", id="version of the future"),
        pytest.param(changed("format", "x"), "format", "gpufleet.snapshot", id="other format"),
        pytest.param(changed("nods", []), "nods", "unknown field", id="unknown field at the top"),
        pytest.param(changed("nodes.0.gpus", -1), "nodes[0].gpus", "0 or more, below 2^60, not -1", id="negative GPUs"),
        pytest.param(changed("nodes.0.gpus", True), "nodes[0].gpus", "not true", id="true is no number"),
        pytest.param(changed("nodes.0.name", ""), "nodes[0].name", "non-empty", id="empty name"),
        pytest.param(changed("nodes.0.colour", "red"), "nodes[0].colour", "unknown field", id="unknown node field"),
        pytest.param(changed("nodes.0.free", {"gpu": "4"}), "nodes[0].free.gpu", 'not "4"', id="text amount"),
        pytest.param(changed("nodes.0.free", {"mig-big": 1}), "nodes[0].free.mig-big", "MIG profile", id="MIG profile"),
        pytest.param(changed("nodes.0.key", "h200"), "nodes[0].key", "no entry of keys", id="unknown key"),
        pytest.param(changed("nodes.0.key", {"kernel": {}}), "nodes[0].key.kernel", "text, a number", id="nested fact"),
        pytest.param(changed("nodes.0.taints", ["a", 1]), "nodes[0].taints[1]", "not 1", id="taint of no text"),
        pytest.param(changed("nodes.0.domains", {"rack": None}), "nodes[0].domains.rack", "not null", id="null domain"),
        pytest.param(changed("workloads.0.members", {}), "workloads[0].members", "a list", id="members no list"),
        pytest.param(
            changed("workloads.0.members.0.node", "b"), "workloads[0].members[0].node", "'b'", id="no such node"
        ),
        pytest.param(
            changed("workloads.0.members.0.resources", {"gpu": 1.5}),
            "workloads[0].members[0].resources.gpu",
            "not 1.5",
            id="half a GPU",
        ),
        pytest.param(changed("workloads.0.may", ["move", "fly"]), "workloads[0].may", "'fly'", id="unknown permission"),
        pytest.param(
            changed("workloads.0.may", ["protect", "move"]), "workloads[0].may", "excludes", id="protect and move"
        ),
        pytest.param(changed("workloads.0.budgets", ["x"]), "workloads[0].budgets[0]", "'x'", id="unknown budget"),
        pytest.param(
            changed("workloads.0.remaining", float("nan")), "workloads[0].remaining", "NaN", id="not a number"
        ),
        pytest.param(changed("workloads.0.remaining", float("inf")), "workloads[0].remaining", "Inf", id="infinite"),
        pytest.param(changed("workloads.0.at_risk", 1e300), "workloads[0].at_risk", "below 2^60", id="huge seconds"),
        pytest.param(
            changed("nodes.0.free", {"memory": 10**30}), "nodes[0].free.memory", "below 2^60", id="huge amount"
        ),
        pytest.param(changed("nodes.0.gpus", 1.0), "nodes[0].gpus", "whole number", id="fractional GPUs"),
        pytest.param(
            changed("workloads.0.members.0.resources", {"mig-²g.20gb": 1}),
            "workloads[0].members[0].resources.mig-²g.20gb",
            "MIG",
            id="odd digit",
        ),
        pytest.param(
            changed("workloads.0.priority", 1.5), "workloads[0].priority", "whole number", id="half a priority"
        ),
        pytest.param(
            changed("durations", {"evacuate": 0, "install": 0, "validate": 0}), "durations", "no time", id="no time"
        ),
        pytest.param(changed("durations", {"install": None}), "durations.install", "not null", id="null duration"),
        pytest.param(
            changed("queue", {"H100": {"gpu": 1}}), "queue.H100.gpu", "unknown field", id="unknown queue field"
        ),
        pytest.param(changed("nodes", [{"name": "a"}, {"name": "a"}]), "nodes[1].name", "already nodes[0]", id="twice"),
        pytest.param({"version": 1}, "nodes", "is missing", id="no nodes"),
        pytest.param(changed("workloads", [{"name": "w"}]), "workloads[0].members", "is missing", id="no members"),
    ],
)
def test_bad_snapshot_is_refused_with_the_path(data: Any, path: str, message: str) -> None:
    with pytest.raises(fleet.BadSnapshot) as caught:
        fleet.parse(data)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


SAMPLES: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus": -1,
    "zero": 0,
    "half": 0.5,
    "nan": float("nan"),
    "huge": 1 << 60,
    "empty": "",
    "text": "x",
    "no list": [],
    "numbers": [1],
    "texts": ["x"],
    "empty texts": [""],
    "no object": {},
    "amounts": {"a": 1},
    "fractions": {"a": 0.5},
    "labels": {"a": "x"},
    "empty labels": {"a": ""},
    "lists": {"a": ["x"]},
    "nulls": {"a": None},
    "objects": {"a": {}},
}
MAYBE_TEXT, FLAG, AMOUNT, TEXTS = {"null", "text"}, {"true"}, {"zero", "half"}, {"no list", "texts"}
AMOUNTS, LABELS = {"no object", "amounts"}, {"no object", "labels", "empty labels"}
KEY = {"no object", "amounts", "fractions", "labels", "empty labels", "lists", "nulls"}
TAKES: dict[str, dict[str, set[str]]] = {
    "nodes.0": {
        "name": {"text"},
        "gpu_model": MAYBE_TEXT,
        "gpus": {"zero"},
        "loaded": MAYBE_TEXT,
        "installed": MAYBE_TEXT,
        "free": AMOUNTS,
        "schedulable": FLAG,
        "cordoned_by": MAYBE_TEXT,
        "domains": {"no object", "labels"},
        "labels": LABELS,
        "taints": TEXTS,
        "key": KEY,
        "skip": MAYBE_TEXT,
        "unfinished": FLAG,
    },
    "workloads.0": {
        "name": {"text"},
        "members": {"no list"},
        "kind": {"text"},
        "owner": MAYBE_TEXT,
        "gang": FLAG,
        "may": {"no list"},
        "backends": TEXTS,
        "key": KEY,
        "remaining": {"null", *AMOUNT},
        "at_risk": AMOUNT,
        "start_cost": AMOUNT,
        "capture": AMOUNT,
        "restore": AMOUNT,
        "priority": {"minus", "zero", "huge"},
        "budgets": {"no list"},
        "requires": {"no object", "lists"},
        "tolerates": TEXTS,
        "together": MAYBE_TEXT,
        "spread": MAYBE_TEXT,
        "stays_home": FLAG,
        "stand_in": MAYBE_TEXT,
    },
    "workloads.0.members.0": {"node": set(), "resources": AMOUNTS},
    "durations": dict.fromkeys(("evacuate", "install", "validate", "reboot"), AMOUNT),
    "queue.H100": dict.fromkeys(("gpus", "arrivals_per_hour", "duration", "shortest"), AMOUNT),
    "": {
        "format": set(),
        "version": set(),
        "taken_at": MAYBE_TEXT,
        "keys": {"no object", "objects"},
        "nodes": {"no list"},
        "workloads": {"no list"},
        "budgets": AMOUNTS,
        "durations": {"no object"},
        "queue": {"no object", "objects"},
    },
}


def test_every_field_is_told_of_here() -> None:
    assert set(TAKES["nodes.0"]) == set(fleet.NODE_FIELDS)
    assert set(TAKES["workloads.0"]) == set(fleet.WORKLOAD_FIELDS)
    assert set(TAKES[""]) == set(fleet.SNAPSHOT_FIELDS)
    assert set(TAKES["durations"]) == {each.name for each in fields(fleet.Durations)}
    assert set(TAKES["queue.H100"]) == {each.name for each in fields(fleet.Demand)}


@pytest.mark.parametrize(("where", "name"), [(where, name) for where, names in TAKES.items() for name in names])
def test_each_field_takes_what_it_should_and_refuses_all_else_with_its_path(where: str, name: str) -> None:
    path = f"{where}.{name}".lstrip(".")
    shown = re.sub(r"\.(\d+)", r"[\1]", path)
    for kind, value in SAMPLES.items():
        data = changed("durations", {}) if where == "durations" else changed("version", 1)
        target = data
        for part in where.split(".") if where else ():
            target = target[int(part) if part.isdigit() else part]
        target[name] = value
        if path.startswith("nodes") or path == "keys":  # what refers to them would be refused instead
            data["workloads"] = []
        if path == "keys":
            data["nodes"] = []
        if kind in TAKES[where][name]:
            fleet.parse(data)
            continue
        with pytest.raises(fleet.BadSnapshot) as caught:
            fleet.parse(data)
            pytest.fail(f"{path} takes {value!r}")
        assert caught.value.path.startswith(shown), f"{path} = {value!r}: {caught.value}"


@pytest.mark.parametrize("seed", range(5))
def test_json_form_round_trips(seed: int) -> None:
    snapshot = small_fleet(seed)
    assert fleet.parse(json.loads(json.dumps(fleet.dump(snapshot)))) == snapshot


def test_equal_facts_are_one_object() -> None:
    data = changed("nodes", [{"name": name, "key": {"kernel": "6.8"}} for name in "ab"])
    first, second = fleet.parse({**data, "workloads": []}).nodes
    assert first.facts is second.facts


@pytest.mark.parametrize("text", ["{", "", "[" * 200_000, '{"a":' * 50_000])
def test_file_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(text)
    with pytest.raises(fleet.BadSnapshot, match="is not JSON"):
        fleet.read(str(path))


def test_what_may_have_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fleet.json")
    for path in (str(tmp_path / "fleet.json"), "/dev/zero", str(tmp_path)):
        with pytest.raises(fleet.BadSnapshot, match=f"{path}: is no plain file"):
            fleet.read(path)


def test_a_long_name_is_not_told_in_full() -> None:
    with pytest.raises(fleet.BadSnapshot) as caught:
        fleet.parse(changed("nodes", [{"name": "a" * 10_000}, {"name": "a" * 10_000}]))
    assert len(str(caught.value)) < 200


def test_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps({"version": 1, "nodes": []}), encoding="utf-8-sig")
    assert fleet.read(str(path)).nodes == ()


def test_mig_instances_count_by_their_slices() -> None:
    assert fleet.gpus_of({"mig-2g.20gb": 2, "gpu": 1, "cpu": 9}) == 1 + 4 / 7
