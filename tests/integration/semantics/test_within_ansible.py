# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Modules that are called within Ansible on the controller say the same there as when they run as a program."""

from __future__ import annotations

from collections.abc import Callable

import pytest

GPUS = "gpus: [NVIDIA L40S]"
NODES = f"[{{name: a, loaded_version: 535.183.01, {GPUS}}}, {{name: b, loaded_version: 535.183.01, {GPUS}}}]"
STATE = "{state_dir: '{{ touched | dirname }}/cordons'}"
ASKED = {
    "a gate that stays shut": ("upgrade_gate", "{outcomes: {a: quarantined}, lost: '{{ [1, 2] }}'}"),
    "a gate that cannot decide": ("upgrade_gate", "{outcomes: {}, windows: [{days: [someday]}]}"),
    "an option of the wrong type": ("upgrade_gate", "{outcomes: {}, max_failed: several}"),
    "an option that is missing": ("node_cordon", "{nodes: [a], run_id: r1}"),
    "a plan": ("upgrade_plan", f"{{version: 550.90.07, nodes: {NODES}, now: '2026-01-01T00:00:00Z'}}"),
    "two options that exclude each other": ("upgrade_plan", "{version: 550.90.07, snapshot: {}, nodes: [{name: a}]}"),
    "a snapshot": ("fleet_snapshot_info", f"{{hosts: [{{name: a}}, {{name: b}}], scheduler_options: {STATE}}}"),
    "a host without a name": ("fleet_snapshot_info", "{hosts: [{}]}"),
    "a cordon": ("node_cordon", f"{{state: cordoned, nodes: [a], run_id: r1, scheduler_options: {STATE}}}"),
    "nothing to evacuate": ("node_evacuate", "{nodes: [a], run_id: r1, deadline: 0}"),
    "a node in service": ("node_validate", f"{{nodes: [a], run_id: r1, scheduler_options: {STATE}}}"),
    "nothing to settle": ("fleet_settle", "{run_id: r1}"),
}
ASK = """
    - name: {name}
      gpufleet.driver.{module}: {options}
      check_mode: true
      ignore_errors: true
      register: within
    - name: {name}, as a program
      gpufleet.driver.{module}: {options}
      check_mode: true
      ignore_errors: true
      environment: {{ASKED: elsewhere}}
      register: program
    - name: Compare {name}
      ansible.builtin.assert:
        that:
          - within.invocation is not defined
          - program.invocation is defined
          - not differs
        fail_msg: "{name}: {{{{ within }}}} and {{{{ program }}}}"
      vars:
        aside: [invocation, warnings, exception]
        differs: >-
          {{{{ within | dict2items | rejectattr('key', 'in', aside) | items2dict
             != program | dict2items | rejectattr('key', 'in', aside) | items2dict }}}}
"""


def test_modules_say_the_same_within_ansible_and_as_a_program(play: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSIBLE_INJECT_INVOCATION", "1")  # tells which of the two it was
    asked = "".join(ASK.format(name=name, module=module, options=options) for name, (module, options) in ASKED.items())
    played = play("- hosts: localhost\n  gather_facts: false\n  tasks:\n" + asked)
    assert played.rc == 0, played.output
    assert played.output.count("...ignoring") == 10  # those that fail, both ways
