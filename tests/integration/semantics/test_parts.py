# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Single tasks of playbooks and roles, played by themselves with what is known at that point."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

TOP = Path(__file__).resolve().parents[3]


def tasks(path: str) -> Iterator[dict[str, Any]]:
    """Every task and block of a file, with the plays if it is a playbook."""
    left = list(yaml.safe_load((TOP / path).read_text()))
    while left:
        task = left.pop(0)
        yield task
        left += [*task.get("tasks", ()), *task.get("block", ()), *task.get("rescue", ())]


def task(path: str, name: str) -> dict[str, Any]:
    return next(one for one in tasks(path) if one.get("name") == name)


def play_of(hosts: str, variables: dict[str, Any], *played: Any) -> str:
    return json.dumps([{"hosts": hosts, "gather_facts": False, "vars": variables, "tasks": played}])


def check(*that: str, **variables: Any) -> dict[str, Any]:
    return {"ansible.builtin.assert": {"that": [*that]}, "vars": variables}


def test_hosts_that_are_gone_may_be_named_by_a_text(play: Callable) -> None:
    """``-e gpu_elsewhere_gone=c,d`` is one: what is started there is not waited for, nor stopped."""
    before = {"x": "b", "y": "c", "z": "d"}
    work = {name: {"running": True, "elsewhere": host} for name, host in before.items()}
    known = {
        "gpu_elsewhere_gone": "c, d",
        "__uncordon_before": {"journal": {"before": {"workloads": work}}},
        **yaml.safe_load((TOP / "roles/uncordon/vars/main.yml").read_text()),
    }
    played = play(play_of("a", known, check("__uncordon_places == ['b']", "__uncordon_gone == ['c', 'd']")))
    assert played.rc == 0, played.output


GONE_BACK = {"changed": True, "done": True}


@pytest.mark.parametrize(
    ("known", "outcome"),
    [
        ({"__rollback_driver": {"nodes": {"a": GONE_BACK}}}, "rolled_back"),
        ({"__rollback_driver": {"nodes": {"a": {**GONE_BACK, "changed": False}}, "attempts": 2}}, "rolled_back"),
        ({"__rollback_driver": {"nodes": {"a": {**GONE_BACK, "changed": False}}, "attempts": 1}}, "refused"),
        ({"__rollback_driver": {"nodes": {"a": GONE_BACK}}, "__rollback_to_quarantine": True}, "quarantined"),
        (
            {"__rollback_driver": {"nodes": {"a": GONE_BACK}}, "__cordon_result": {"nodes": {"a": {"failed": True}}}},
            "refused",
        ),
        (
            {
                "__rollback_driver": {"nodes": {"a": {**GONE_BACK, "changed": False}}},
                "__cordon_result": {"nodes": {"a": {"failed": False}}},
            },
            "rolled_back",
        ),
    ],
    ids=["alone", "alone, after a wait", "alone, nothing to do", "quarantine", "never cordoned", "cordoned"],
)
def test_outcome_of_a_node_of_the_gpu_operator_that_went_back(
    play: Callable, known: dict[str, Any], outcome: str
) -> None:
    conclude = task("roles/rollback/tasks/gpu_operator.yml", "Conclude")
    known = {"__rollback_failure": "asked for", "__rollback_to_quarantine": False, **known}
    played = play(play_of("a", known, conclude, check(f"gpu_outcome.name == '{outcome}'")))
    assert played.rc == 0, played.output


def test_only_nodes_back_in_service_are_given_back_and_a_failure_is_told(play: Callable) -> None:
    give = task("roles/uncordon/tasks/main.yml", "Give the nodes back to the maintenance operator")
    report = task("roles/uncordon/tasks/main.yml", "Report a node that could not be given back")
    known = {
        "gpu_maintenance_namespace": "nvidia",
        "__uncordon_result": {"nodes": {"a": {"failed": False}, "b": {"failed": True}, "c": {"failed": False}}},
        "__uncordon_maintenance": {"failed_nodes": ["c"], "nodes": {"c": {"msg": "c was not given back"}}},
    }
    asked = check("asked == ['a', 'c']", asked=give["gpufleet.driver.node_maintenance"]["nodes"])
    played = play(play_of("a,c", known, asked, report))
    assert "a                          : ok=1" in played.output and played.rc != 0, played.output
    assert "c is back in service, but still in maintenance: c was not given back" in played.output


def test_no_limit_cuts_off_what_was_to_be_waited_for(play: Callable) -> None:
    limit = task("playbooks/upgrade.yml", "Upgrade the node")["timeout"]
    waits = [
        check(f"limit | int == {seconds}", limit=limit, **known)
        for seconds, known in (
            (7200, {}),
            (7200, {"gpu_workload_wait": "600"}),
            (16200, {"gpu_workload_wait": "14400"}),
            (9000, {"gpu_reboot_timeout": 7200}),
            (60, {"gpu_workload_wait": 14400, "gpu_step_timeout": 60}),
        )
    ]
    lasts = {"ansible.builtin.include_tasks": f"{TOP}/playbooks/tasks/lock_keepers.yml"}
    wait = {"ansible.builtin.set_fact": {"gpu_workload_wait": 14400}, "delegate_to": "b", "delegate_facts": True}
    told = check("gpu_lock_lasts == 7200 + 60 + 14400", "'@' in gpu_lock_holder")
    played = play(play_of("localhost", {"gpu_canary_soak": 60}, *waits, wait, lasts, told))
    assert played.rc == 0, played.output


def test_canaries_soak_together(play: Callable) -> None:
    soak = next(one for one in tasks("playbooks/tasks/soak.yml") if "ansible.builtin.wait_for" in one)
    played = play(play_of("a,b", {"gpu_canary_soak": 1}, soak))
    assert played.rc == 0 and played.output.count("-> localhost]") == 1, played.output


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("roles/install/tasks/reboot.yml", "Reboot the node"),
        ("roles/rollback/tasks/restore.yml", "Reboot into the old driver"),
    ],
)
def test_a_node_lost_just_before_its_reboot_is_rescued(play: Callable, path: str, name: str) -> None:
    """Ansible's reboot asks a node for its distribution first, outside of what it forgives a node that goes down."""
    steps = {"block": [task(path, name), task(path, "Refuse to go on without the node")]}
    steps["rescue"] = [{"ansible.builtin.debug": {"msg": "rescued it: {{ ansible_failed_result.msg }}"}}]
    known = {"gpu_reboot_timeout": 5, "gpu_driver_version": "550.90.07", "__rollback_swap": {"reboot_required": True}}
    lost = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    played = play(play_of("a", known, steps), "-e", json.dumps(lost))
    assert "rescued it: a was not rebooted: " in played.output and played.rc == 0, played.output


def test_a_host_that_takes_work_in_keeps_its_own_journal(play: Callable) -> None:
    for path, known in (
        ("roles/evacuate/tasks/elsewhere.yml", {"__evacuate_place": {"key": "x", "value": "b"}}),
        ("roles/uncordon/tasks/elsewhere.yml", {"__uncordon_place": "b"}),
    ):
        asked = next(
            one["gpufleet.driver.host_workloads"] for one in tasks(path) if "gpufleet.driver.host_workloads" in one
        )
        told = {"ansible.builtin.set_fact": {"gpu_state_dir": "/var/lib/{{ inventory_hostname }}"}}
        on_a = {
            **check("there == '/var/lib/b'", there=asked["state_dir"], **known),
            "when": "inventory_hostname == 'a'",
        }
        played = play(play_of("a,b", {}, told, on_a))
        assert played.rc == 0, played.output
