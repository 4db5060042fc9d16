# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A gang on two nodes is saved whole, or goes on whole. Each node is a real process with its own record and store; only
the connections, CRIU and systemd are stood in for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_work import Gpus, goes_on
from test_source import Place

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import gang, options, suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import CheckpointError
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.moving import NodeLost


class Two:
    """Two nodes, and what ``workload_checkpoint`` does on each."""

    def __init__(self, gpus: Gpus, tmp_path: Path) -> None:
        self.places = {}
        for node in ("node1", "node2"):
            (tmp_path / node).mkdir()
            place = self.places[node] = Place(gpus, tmp_path / node)
            place.work = replace(place.work, name=f"work-{node}")
        self.said: list[str] = []
        self.lost: Callable[[str, str, bool], bool] = lambda node, state, only_look: False

    def call(self, node: str, given: Mapping[str, Any], only_look: bool) -> Mapping[str, Any]:
        if self.lost(node, given["state"], only_look):
            raise NodeLost("Connection timed out")
        place = self.places[node]

        def act(dummy: Mapping[str, Any]) -> Mapping[str, Any]:
            backend = place.backend()
            if given["state"] == "aborted":
                return {"changed": True, "source": backend.abort(place.work)}
            if not only_look:
                return backend.capture(place.work).as_dict()
            refused = backend.check(place.work)
            if refused:
                raise CheckpointError(refused[0])
            return {"changed": True, "source": "running"}

        return {"workloads": options.each(given["workloads"], act, 1)}

    def capture(self, only_look: bool = False) -> list[dict[str, Any]]:
        members = [gang.Member(node, {"name": place.work.name}) for node, place in self.places.items()]
        return gang.capture(members, self.call, {"freeze_limit": 60}, self.said.append, only_look)

    @property
    def still(self) -> list[bool]:
        return [suspend.stands_still(place.pid) for place in self.places.values()]

    def all_go_on(self) -> bool:
        return all(goes_on(place.process) and not place.left_behind for place in self.places.values())


@pytest.fixture
def two(gpus: Gpus, tmp_path: Path) -> Two:
    return Two(gpus, tmp_path)


def test_all_are_saved(two: Two) -> None:
    done = two.capture()
    assert [(one["node"], one["ok"], one["source"]) for one in done] == [
        ("node1", True, "frozen"),
        ("node2", True, "frozen"),
    ]
    assert two.still == [True, True]
    again = two.capture()
    assert [one["changed"] for one in again] == [False, False]


@pytest.mark.parametrize("culprit", ["node1", "node2"])
def test_one_that_cannot_be_dumped_lets_all_go_on(two: Two, culprit: str) -> None:
    two.places[culprit].how.write_text("fail")
    done = {one["node"]: one for one in two.capture()}
    assert [one["ok"] for one in done.values()] == [False, False]
    assert done[culprit]["reason"]["reason"] == "dump_failed"
    other = "node2" if culprit == "node1" else "node1"
    assert f"work-{culprit} on {culprit} was not saved" in done[other]["msg"]
    assert two.all_go_on()


def test_one_that_is_refused_stops_none(two: Two) -> None:
    two.places["node2"].unit.properties = {"RootImage": "/x.raw"}
    done = two.capture()
    assert [one["ok"] for one in done] == [False, False]
    assert [place.record() for place in two.places.values()] == [{}, {}]
    assert two.all_go_on()


def test_a_look_stops_none(two: Two) -> None:
    assert [one["ok"] for one in two.capture(only_look=True)] == [True, True]
    assert two.all_go_on()


def test_a_node_that_stops_answering_lets_the_others_go_on(two: Two) -> None:
    two.lost = lambda node, state, only_look: node == "node2" and not only_look
    done = {one["node"]: one for one in two.capture()}
    assert [one["ok"] for one in done.values()] == [False, False]
    assert done["node2"]["source"] == "unknown"
    assert "does not answer" in done["node2"]["msg"]
    assert done["node1"]["source"] == "running"
    assert two.all_go_on()


def test_a_node_that_is_lost_while_they_are_let_go_on_is_named(two: Two) -> None:
    two.places["node2"].how.write_text("fail")
    two.lost = lambda node, state, only_look: node == "node1" and state == "aborted"
    done = {one["node"]: one for one in two.capture()}
    assert (done["node1"]["ok"], done["node1"]["source"]) == (False, "unknown")
    assert "a timer on it lets its work go on" in done["node1"]["msg"]
    armed = two.places["node1"].unit.armed
    assert armed and armed[-2] == "thaw"


def test_a_gang_that_is_ended_again_is_ended_to_the_last_member() -> None:
    """One that cannot be is told of, and does not keep the others running alone."""
    results: list[dict[str, Any]] = [
        {"workload": name, "ok": name != "failed", "reason": None} for name in ("failed", "busy", "well")
    ]
    asked: list[str] = []

    def end(given: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(given["name"])
        if given["name"] == "busy":
            raise TimeoutError("another process has held it")
        return {"changed": True}

    options.end_gang(results, [{"name": one["workload"]} for one in results], end, 1)
    assert asked == ["busy", "well"]
    assert [one["ok"] for one in results] == [False, False, False]
    assert results[1]["msg"].startswith("not ended (") and "another process" in results[1]["msg"]
    assert results[2]["msg"].startswith("ended again")
