#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: node_evacuate
version_added: 1.0.0
short_description: Empty nodes of the work their scheduler placed there, as a plan says
description:
  - Saves, requeues or evicts what runs on nodes that M(gpufleet.driver.node_cordon) took out of service, or waits for
    it to end, as the plan says for each workload. Work that is not in the plan is waited for.
  - One call does many nodes, concurrently, and comes back after O(patience) seconds with what is still waited for.
    Repeat it until RV(waiting_nodes) is empty, so that a person sees what an upgrade waits for.
  - A node that cannot be emptied fails in its own result, RV(nodes), and does not fail the module.
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
  nodes:
    description: Names of the nodes, as the scheduler knows them.
    type: list
    elements: str
    required: true
  run_id:
    description: Identifies the run that took the nodes out of service.
    type: str
    required: true
  fates:
    description:
      - What becomes of each workload, as C(plan.batches[].workloads) of M(gpufleet.driver.upgrade_plan), of which
        C(workload), C(fate) and C(to) are read.
    type: list
    elements: dict
    default: []
  deadline:
    description:
      - Unix seconds, by the clock of the machine where this runs, until which work that may not be taken away is
        waited for. After that its node fails.
    type: float
    required: true
  patience:
    description: Seconds after which the module comes back, whether or not the nodes are empty.
    type: float
    default: 30
seealso:
  - module: gpufleet.driver.node_cordon
  - module: gpufleet.driver.host_workloads
"""

EXAMPLES = r"""
- name: Empty the nodes of this batch
  gpufleet.driver.node_evacuate:
    scheduler: hosts
    nodes: "{{ ansible_play_batch }}"
    run_id: "{{ gpu_run_id }}"
    fates: "{{ gpu_plan.batches | map(attribute='workloads') | flatten }}"
    deadline: "{{ evacuate_deadline }}"
  delegate_to: localhost
  run_once: true
  register: evacuated
  until: evacuated.waiting_nodes | default([]) | length == 0
  retries: 240
  delay: 0
"""

RETURN = r"""
nodes:
  description: How far each node is emptied, by name.
  type: dict
  returned: always
  sample:
    gpu-node-01:
      empty: false
      workloads: [{workload: job 4711, how: requeued, reason: saved at step 1200}]
      waiting: ["job 4712 (alice) ends by 14:05"]
      changed: true
      failed: false
      msg: ""
  contains:
    empty:
      description: Whether the scheduler has no work left there.
      type: bool
    workloads:
      description:
        - What became of each workload, with C(workload), C(how) (V(ended), V(requeued), V(evicted), V(stopped) or
          V(left)) and C(reason).
      type: list
      elements: dict
    waiting:
      description: What is still there and what is waited for.
      type: list
      elements: str
    changed:
      description: Whether anything was done about the node.
      type: bool
    failed:
      description: Whether the node cannot be emptied.
      type: bool
    msg:
      description: Why not, and what to do next.
      type: str
waiting_nodes:
  description: Names of the nodes that are not empty yet and have not failed.
  type: list
  elements: str
  returned: always
failed_nodes:
  description: Names of the nodes that cannot be emptied.
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
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Fate, Mark, SchedulerError
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError

SPEC: dict[str, Any] = {
    "argument_spec": {
        **registry.ARGUMENTS,
        "nodes": {"type": "list", "elements": "str", "required": True},
        "run_id": {"type": "str", "required": True},
        "fates": {"type": "list", "elements": "dict", "default": []},
        "deadline": {"type": "float", "required": True},
        "patience": {"type": "float", "default": 30},
    },
}


def answer(p: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    try:
        fates = [Fate.of(item) for item in p["fates"]]
    except ValueError as exc:
        raise answers.Failed(f"fates: {exc}") from exc
    try:
        results = registry.get(p, execution.run).evacuate(
            p["nodes"], Mark(p["run_id"], time.time()), fates, p["deadline"], p["patience"], check=check_mode
        )
    except (SchedulerError, StateFileError) as exc:
        raise answers.Failed(str(exc)) from exc
    return {
        "changed": any(result.changed for result in results.values()),
        "nodes": {node: result.as_dict() for node, result in results.items()},
        "waiting_nodes": [node for node, result in results.items() if result.waiting and not result.failed],
        "failed_nodes": [node for node, result in results.items() if result.failed],
        "diff": {
            "before": "",
            "after": "".join(
                f"{node}: {end.workload}: {end.how}\n" for node, result in results.items() for end in result.ends
            ),
        },
    }


def main() -> None:
    answers.give(AnsibleModule(**SPEC, supports_check_mode=True), answer)


if __name__ == "__main__":
    main()
