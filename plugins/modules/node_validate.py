#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: node_validate
version_added: 1.0.0
short_description: Prove through their scheduler that nodes can work, before anybody else gets in
description:
  - Compares the GPUs that the scheduler counts on each node with those it must have, and runs a small job there by the
    scheduler's own way, while the node stays closed to everybody else's work.
  - A Kubernetes node that is in service all the same, as somebody has uncordoned it, or deleted it so that it came back
    as a new one, is taken out of service again; M(gpufleet.driver.node_cordon) puts it back once it is proven.
  - This is the scheduler's half of the proof. The driver itself is proven by M(gpufleet.driver.driver_validate).
  - One call does many nodes, concurrently. A node that fails does so in its own result, RV(nodes), and does not fail
    the module.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.fleet
  - gpufleet.driver.fleet
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: What it starts on a node ends with it; a node that it takes out of service again is told in RV(nodes).
  idempotent:
    support: full
options:
  nodes:
    description: Names of the nodes, as the scheduler knows them.
    type: list
    elements: str
    required: true
  run_id:
    description: Identifies the run that took the nodes out of service.
    type: str
    required: true
  gpus:
    description: How many GPUs each node must have, by name. A node that is not named is not counted.
    type: dict
    default: {}
  wait:
    description: Seconds until every node must be proven.
    type: float
    default: 300
seealso:
  - module: gpufleet.driver.driver_validate
  - module: gpufleet.driver.node_cordon
"""

EXAMPLES = r"""
- name: Let a job prove the nodes of this batch
  gpufleet.driver.node_validate:
    scheduler: hosts
    nodes: "{{ ansible_play_batch }}"
    run_id: "{{ gpu_run_id }}"
    gpus: {gpu-node-01: 8, gpu-node-02: 8}
  delegate_to: localhost
  run_once: true
  register: proof

- name: Refuse a node that is not proven
  ansible.builtin.assert:
    that: not proof.nodes[inventory_hostname].failed
    fail_msg: "{{ proof.nodes[inventory_hostname].msg }}"
"""

RETURN = r"""
nodes:
  description: What was found of each node, by name, as in M(gpufleet.driver.node_cordon).
  type: dict
  returned: always
failed_nodes:
  description: Names of the nodes that are not proven.
  type: list
  elements: str
  returned: always
"""

import time
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import answers, execution
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import registry
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark, SchedulerError
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError

SPEC: dict[str, Any] = {
    "argument_spec": {
        **registry.ARGUMENTS,
        "nodes": {"type": "list", "elements": "str", "required": True},
        "run_id": {"type": "str", "required": True},
        "gpus": {"type": "dict", "default": {}},
        "wait": {"type": "float", "default": 300},
    },
}


def answer(p: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    try:
        gpus = {node: int(count) for node, count in p["gpus"].items()}
    except (TypeError, ValueError) as exc:
        raise answers.Failed(f"gpus is {p['gpus']}; expected a whole number for each node") from exc
    try:
        results = registry.get(p, execution.run).validate(
            p["nodes"], Mark(p["run_id"], time.time()), gpus, p["wait"], check=check_mode
        )
    except (SchedulerError, StateFileError) as exc:
        raise answers.Failed(str(exc)) from exc
    return {
        "changed": any(result.changed for result in results.values()),
        "nodes": {node: result.as_dict() for node, result in results.items()},
        "failed_nodes": [node for node, result in results.items() if result.failed],
    }


def main() -> None:
    answers.give(AnsibleModule(**SPEC, supports_check_mode=True), answer)


if __name__ == "__main__":
    main()
