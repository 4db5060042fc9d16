#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: node_cordon
version_added: 1.0.0
short_description: Take nodes out of service, and put back only those we took out
description:
  - Takes nodes out of service for new work and leaves a mark that says which run did it. Puts back only marked nodes,
    so a node that was out of service before the upgrade stays so after it.
  - One call does many nodes, concurrently. A node that cannot be dealt with fails in its own result, RV(nodes), and
    does not fail the module. Check RV(failed_nodes) or each node's C(failed).
  - With O(scheduler=hosts), the marks are kept in the file C(cordons.json) on the machine where the module runs. The
    roles of this collection keep the same in the journal of each node and give it as O(ours), so that any controller
    can go on.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.fleet
  - gpufleet.driver.fleet
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  state:
    description: Whether the nodes are to be out of service or in service.
    type: str
    choices: [cordoned, uncordoned]
    required: true
  nodes:
    description: Names of the nodes, as the scheduler knows them.
    type: list
    elements: str
    required: true
  run_id:
    description: Identifies the run in the marks.
    type: str
    required: true
  ours:
    description:
      - For O(scheduler=hosts). Names of the nodes whose journal says that this collection took them out of service.
        They count as marked, so that a run goes on from a controller that has no marks of its own.
    type: list
    elements: str
    default: []
seealso:
  - module: gpufleet.driver.node_evacuate
  - module: gpufleet.driver.fleet_lock
"""

EXAMPLES = r"""
- name: Take this batch out of the load balancer
  gpufleet.driver.node_cordon:
    state: cordoned
    nodes: "{{ ansible_play_batch }}"
    run_id: "{{ gpu_run_id }}"
    scheduler_options:
      cordon_command: [/usr/local/bin/lb, drain, "{node}"]
      uncordon_command: [/usr/local/bin/lb, enable, "{node}"]
      state_command: [/usr/local/bin/lb, enabled, "{node}"]
  delegate_to: lb-1
  run_once: true
  register: cordon

- name: Go on only with nodes that are out of service
  ansible.builtin.fail:
    msg: "{{ cordon.nodes[inventory_hostname].msg }}"
  when: cordon.nodes[inventory_hostname].failed
"""

RETURN = r"""
nodes:
  description: What became of each node, by name.
  type: dict
  returned: always
  sample:
    gpu-node-01:
      cordoned: true
      ours: true
      before: {cordoned: false, ours: false, run_id: null}
      changed: true
      failed: false
      msg: ""
  contains:
    cordoned:
      description: Whether the node is out of service now. Null if that is unknown.
      type: bool
      returned: always
    ours:
      description: Whether this collection took it out of service.
      type: bool
      returned: always
    before:
      description: How it was before this task. Null if that is unknown.
      type: dict
      returned: always
    changed:
      description: Whether it was changed.
      type: bool
      returned: always
    failed:
      description: Whether it is not as it should be.
      type: bool
      returned: always
    msg:
      description: What was found and what to do next, if there is something to say.
      type: str
      returned: always
failed_nodes:
  description: Names of the nodes that failed.
  type: list
  elements: str
  returned: always
foreign_nodes:
  description: Names of the nodes that somebody else had taken out of service and that are left so.
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
        "state": {"type": "str", "choices": ["cordoned", "uncordoned"], "required": True},
        "nodes": {"type": "list", "elements": "str", "required": True},
        "run_id": {"type": "str", "required": True},
        "ours": {"type": "list", "elements": "str", "default": []},
    },
}


def answer(p: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    try:
        scheduler = registry.get(p, execution.run)
        act = scheduler.cordon if p["state"] == "cordoned" else scheduler.uncordon
        results = act(p["nodes"], Mark(p["run_id"], time.time()), check=check_mode)
    except (SchedulerError, StateFileError) as exc:
        raise answers.Failed(str(exc)) from exc
    return {
        "changed": any(result.changed for result in results.values()),
        "nodes": {node: result.as_dict() for node, result in results.items()},
        "failed_nodes": [node for node, result in results.items() if result.failed],
        "foreign_nodes": [node for node, r in results.items() if r.after and r.after.cordoned and not r.after.ours],
        "diff": {
            when: "".join(
                f"{node}: {getattr(result, when).describe() if getattr(result, when) else 'unknown'}\n"
                for node, result in results.items()
            )
            for when in ("before", "after")
        },
    }


def main() -> None:
    answers.give(AnsibleModule(**SPEC, supports_check_mode=True), answer)


if __name__ == "__main__":
    main()
