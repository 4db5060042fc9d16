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
  scheduler:
    description: Who places work on the nodes. V(hosts) is nobody, so plain machines.
    type: str
    choices: [hosts]
    default: hosts
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
  cordon_command:
    description:
      - For O(scheduler=hosts). Command that takes a node out of service, for example at a load balancer, as a list of
        arguments. V({node}) in an argument is replaced by the node's name. No shell is involved.
    type: list
    elements: str
  uncordon_command:
    description: For O(scheduler=hosts). Command that puts a node back. Goes together with O(cordon_command).
    type: list
    elements: str
  state_command:
    description:
      - For O(scheduler=hosts). Command that exits with 0 if the node is in service and with 1 if it is out of service.
      - Without it, a node is taken to be in service unless it is marked.
    type: list
    elements: str
  timeout:
    description: Seconds that one command for one node may take.
    type: int
    default: 60
  state_dir:
    description:
      - For O(scheduler=hosts). Directory for the marks. It is created with mode V(0700) if it is missing.
    type: path
    default: /var/lib/gpufleet
seealso:
  - module: gpufleet.driver.fleet_lock
  - module: gpufleet.driver.host_workloads
"""

EXAMPLES = r"""
- name: Take this batch out of the load balancer
  gpufleet.driver.node_cordon:
    state: cordoned
    nodes: "{{ ansible_play_batch }}"
    run_id: "{{ gpu_run_id }}"
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

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import registry
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark, SchedulerError
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["cordoned", "uncordoned"], "required": True},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "scheduler": {"type": "str", "choices": list(registry.NAMES), "default": "hosts"},
            "run_id": {"type": "str", "required": True},
            "ours": {"type": "list", "elements": "str", "default": []},
            "cordon_command": {"type": "list", "elements": "str"},
            "uncordon_command": {"type": "list", "elements": "str"},
            "state_command": {"type": "list", "elements": "str"},
            "timeout": {"type": "int", "default": 60},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        scheduler = registry.get(p["scheduler"], execution.run, p)
        act = scheduler.cordon if p["state"] == "cordoned" else scheduler.uncordon
        results = act(p["nodes"], Mark(p["run_id"], time.time()), check=module.check_mode)
    except (SchedulerError, StateFileError) as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(
        changed=any(result.changed for result in results.values()),
        nodes={node: result.as_dict() for node, result in results.items()},
        failed_nodes=[node for node, result in results.items() if result.failed],
        foreign_nodes=[node for node, r in results.items() if r.after and r.after.cordoned and not r.after.ours],
        diff={
            when: "".join(
                f"{node}: {getattr(result, when).describe() if getattr(result, when) else 'unknown'}\n"
                for node, result in results.items()
            )
            for when in ("before", "after")
        },
    )


if __name__ == "__main__":
    main()
