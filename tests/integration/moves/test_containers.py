# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers: named as holders, stopped and started, moved and brought home. One during an upgrade is in
test_upgrade.py."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from boxes import IMAGE, Box, machines, share
from fleet import Fleet
from node import Node
from works import FIRST, HOME, SECOND

QUICK = {"settle": 1, "lock_timeout": 1, "patience": 30}


@pytest.fixture
def nodes(lab: Fleet) -> Iterator[dict[str, Node]]:
    with machines(lab) as nodes:
        yield nodes
    for node in nodes.values():
        node.sh("mount -o remount,bind,rw /proc/sys/kernel/hostname")


def test_a_container_is_named_as_holder_and_stopped_and_started(nodes: dict[str, Node]) -> None:
    node = nodes[HOME]
    box = Box("notebook", node, "--restart", "on-failure")
    holders = [one for one in node.run("module_holders_info")["holders"] if one["kind"] == "workload"]
    assert [(one["runtime"], one["container"], one["container_name"]) for one in holders] == [
        ("podman", box.id, "notebook")
    ], holders
    assert holders[0]["release"]["argv"] == ["podman", "stop", "notebook"], holders
    assert "/dev/nvidia0" in holders[0]["devices"] and "container notebook" in holders[0]["title"], holders

    undeclared = node.run("host_workloads", state="stopped", undeclared="refuse")
    assert undeclared["failed"] and "notebook" in undeclared["msg"], undeclared
    work = {"name": "notebook", "container": "notebook"}
    stopped = node.run("host_workloads", state="stopped", workloads=[work], wait=20)
    assert not stopped["failed"] and stopped["stopped"] == ["notebook"], stopped
    assert node.run("module_holders_info")["releasable"]
    taken = box.steps(node)
    assert not node.run("host_workloads", state="stopped", workloads=[work], wait=20)["changed"]
    began = node.run("host_workloads", state="started")
    assert not began["failed"] and began["started"] == ["notebook"], began
    box.wait_for(node, len(taken) + 1)
    box.assert_goes_on(node)


def test_a_container_moves_under_its_own_name_and_comes_home(nodes: dict[str, Node]) -> None:
    """The first candidate lacks its image, then its CRIU fails, so that the second gets it. The kernel is what fails
    there: it does not let the container have its host name."""
    home, first, second = (nodes[name] for name in (HOME, FIRST, SECOND))
    box = Box("notebook", home)

    def move(*to: str) -> dict[str, Any]:
        told = home.run("workload_move", workloads=[box.declared()], candidates=list(to), **QUICK)
        assert not told["failed"], told
        return dict(told["workloads"][0])

    first.sh(f"podman rmi {IMAGE}")
    stayed = move(FIRST)
    assert stayed["how"] == "stayed" and stayed["reasons"][0]["reason"] == "key_mismatch:image", stayed
    box.assert_goes_on(home)

    first.sh(f"podman load --quiet <{share(first.fleet)}/bare.tar; mount -o remount,bind,ro /proc/sys/kernel/hostname")
    moved = move(FIRST, SECOND)
    assert (moved["how"], moved["to"]) == ("moved", SECOND), moved
    failed = moved["reasons"][0]
    assert failed["reason"] == "restore_failed" and "kernel/hostname: Read-only file system" in failed["observed"], (
        failed
    )
    assert first.sh("podman ps --all --quiet; ls /var/lib/notebook* 2>/dev/null", check=False) == ""
    box.assert_goes_on(second)
    assert home.sh("podman ps --all --format '{{.Names}} {{.Exited}}'") == "notebook-moved-by-gpufleet true"
    assert "no such container" in home.sh("podman start notebook 2>&1", check=False)
    assert box.steps(home) == box.steps(second)[: len(box.steps(home))]

    told = second.run("workload_move", state="home", candidates=[HOME], **QUICK)
    assert told["workloads"][0]["how"] == "moved" and told["workloads"][0]["to"] == HOME, told
    box.assert_goes_on(home)
    assert second.sh("podman ps --all --quiet") == ""
    for node in (home, first, second):
        assert node.sh("ls -A /var/lib/gpufleet/store; systemctl list-timers --all --no-legend 'gpufleet*'") == ""


def test_an_end_and_a_restore_that_are_cut_off_are_taken_up_again(nodes: dict[str, Node]) -> None:
    """The module is killed when it has put the container aside, and again when podman has brought it back elsewhere."""
    home, first = nodes[HOME], nodes[FIRST]
    box = Box("notebook", home)
    folder = share(home.fleet)
    where = {"store": str(folder / "store")}

    def ask(node: Node, module: str, state: str, **options: Any) -> dict[str, Any]:
        told = node.run(module, state=state, workloads=[{**box.declared(), "artefact": artefact}], **where, **options)
        assert not told["failed"], told
        return dict(told["workloads"][0])

    def die(node: Node, act: str, owner: str, name: str) -> None:
        order = {"act": act, "work": box.declared(), "after": [owner, name, 1], "artefact": artefact, "target": FIRST}
        words = ["python3", f"{folder}/die.py", str(folder), json.dumps({**order, **where})]
        assert node.sh(f"{shlex.join(words)} >&2; echo $?") == "137"

    artefact = None
    artefact = ask(home, "workload_checkpoint", "captured")["artefact"]
    ask(first, "workload_restore", "prepared")
    die(home, "commit", "renamed", "place")
    ask(home, "workload_checkpoint", "committed", target=FIRST)
    die(first, "restore", "podman", "restore")
    told = home.run("workload_move", workloads=[box.declared()], candidates=[FIRST], shared=True, **where, **QUICK)
    assert (told["workloads"][0]["how"], told["workloads"][0]["to"]) == ("moved", FIRST), told
    box.assert_goes_on(first)
