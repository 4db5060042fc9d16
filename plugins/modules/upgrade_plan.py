#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: upgrade_plan
version_added: 1.0.0
short_description: Plan in which order and in which batches GPU nodes get a new driver
description:
  - Decides which nodes are upgraded, in which batches and in which order, which are left out and why, and what happens
    to every workload on them. It moves to a node upgraded later whose driver and everything else match, or if it saves
    itself also to an upgraded one (V(move)), is waited for (V(wait)), starts again (V(cold_start)), or ends before
    (V(stay)).
  - Runs on the controller, reads nothing but its options and writes nothing but O(dest). The same options give the same
    plan.
  - Fails if no node that wants the upgrade can have it, with the reason for each.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.planning
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: RV(table) and RV(review) say what there is to see.
  idempotent:
    support: full
options:
  previous:
    description:
      - A plan this module returned earlier, as a dictionary or the path of a file that holds one.
      - What is left of it is played on the fresh O(snapshot), in its order, and RV(review) says whether its next batch
        is still safe. O(canary), O(reserve) and the sizes are not looked at then.
    type: raw
  outcomes:
    description:
      - With O(previous), what became of each node whose turn has come, as in
        O(gpufleet.driver.upgrade_gate#module:outcomes).
      - Any other node of the next batch that is not fit for its turn any more is left out of it, see RV(review).
    type: dict
    default: {}
  dest:
    description: Write RV(plan) as JSON to this path on the controller, unless in check mode.
    type: path
seealso:
  - module: gpufleet.driver.upgrade_forecast
  - module: gpufleet.driver.upgrade_gate
  - module: gpufleet.driver.workload_placement
"""

EXAMPLES = r"""
- name: Plan for the hosts of this play
  gpufleet.driver.upgrade_plan:
    version: 580.95.05
    canary: 1
    batch_size: [1, 10%, 30%]
    nodes:
      - {name: gpu-node-01, loaded_version: 570.133.20, installed_version: 570.133.20, gpus: [NVIDIA H100 80GB HBM3]}
      - {name: gpu-node-02, loaded_version: 570.133.20, installed_version: 570.133.20, gpus: [NVIDIA H100 80GB HBM3]}
  delegate_to: localhost
  run_once: true
  register: planned

- name: Show it
  ansible.builtin.debug:
    var: planned.table

- name: Before each batch, look whether the plan still holds
  gpufleet.driver.upgrade_plan:
    version: 580.95.05
    snapshot: "{{ fresh_snapshot }}"
    previous: gpu-upgrade-plan.json
  delegate_to: localhost
  run_once: true
  register: again
  failed_when: again is failed or not again.review.safe
"""

RETURN = r"""
plan:
  description: The plan.
  type: dict
  returned: success
  contains:
    id:
      description:
        - Twelve digits that stand for the version, the canary, the batches, and what is moved or started cold, and
          where. Two plans with one id do the same to nodes and work.
      type: str
    version:
      description: The driver version.
      type: str
    batches:
      description:
        - The batches in order, each with C(name), C(nodes), C(starts_seconds) from the start of the plan,
          C(wait_seconds), C(ends_seconds), C(undisturbed) (the names of workloads that end before) and C(workloads).
        - Each workload has C(workload), C(fate), C(nodes), C(to), C(lost_gpu_hours) and C(reason).
      type: list
      elements: dict
    serial:
      description: The sizes of the batches, for C(serial).
      type: list
      elements: int
    order:
      description: The names of the nodes in the order of their upgrade.
      type: list
      elements: str
    skipped:
      description: The nodes left out, each with C(node) and C(reason).
      type: list
      elements: dict
    blocked:
      description: Those of the nodes left out that want the upgrade but whose work cannot be taken off them.
      type: list
      elements: dict
    canary:
      description: The nodes of the first batch if it is a canary, else nothing.
      type: list
      elements: str
    lost_gpu_hours:
      description: What the plan loses, by cause (C(moves), C(cold_starts), C(idle)).
      type: dict
    finish_seconds:
      description: When the last batch is done, from the start of the plan.
      type: int
    notes:
      description: What a person should know before approving.
      type: list
      elements: str
table:
  description: The plan as lines of text.
  type: list
  elements: str
  returned: success
review:
  description: What became of the earlier plan.
  type: dict
  returned: when O(previous) is given
  contains:
    safe:
      description: Whether its next batch may start.
      type: bool
    next_batch:
      description: The name of its next batch; null if it is done.
      type: str
    reasons:
      description: Why its next batch is not safe.
      type: list
      elements: str
    changes:
      description: What differs from when the plan was made.
      type: list
      elements: str
    left_out:
      description:
        - The nodes of the next batch that are not to be upgraded any more, each with C(node) and C(reason), for example
          because somebody took them out of service. The rest may go on without them if C(safe).
        - Not safe is a canary of which nothing is left, and a domain that is kept together without one of its nodes.
          Nor is a batch of which work would start cold that the plan moves, waits for or lets end, or that goes beyond
          O(max_unavailable) or O(max_pending).
      type: list
      elements: dict
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import answers
from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import BadSnapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import options, table
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.plan import make
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.review import review

SPEC: dict[str, Any] = {
    "argument_spec": {
        **options.ARGUMENTS,
        "previous": {"type": "raw"},
        "outcomes": {"type": "dict", "default": {}},
        "dest": {"type": "path"},
    },
    "mutually_exclusive": [("nodes", "snapshot")],
    "required_one_of": [("nodes", "snapshot")],
}


def answer(given: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    try:
        snapshot, policy, start = options.snapshot_of(given), options.policy_of(given), options.start_of(given)
        earlier = options.earlier_of(given["previous"])
        if earlier is None:
            plan = make(snapshot, policy)
        else:
            plan, found = review(earlier, snapshot, policy, given["outcomes"])
            result["review"] = found.as_dict()
    except (BadSnapshot, BadPolicy, OSError) as exc:
        raise answers.Failed(f"No plan for {given['version']}: {exc}") from exc
    result.update(plan=plan.as_dict(), table=table.lines(plan, start))
    if plan.impossible:
        raise answers.Failed("\n".join(table.impossible(plan)), **result)
    changed = False
    if given["dest"]:
        text = (json.dumps(result["plan"], indent=1) + "\n").encode()
        path = Path(given["dest"])
        try:
            changed = not path.exists() or path.read_bytes() != text
            if changed and not check_mode:
                path.write_bytes(text)
        except OSError as exc:
            raise answers.Failed(f"The plan cannot be written: {exc}", **result) from exc
    return {"changed": changed, **result}


def main() -> None:
    answers.give(AnsibleModule(**SPEC, supports_check_mode=True), answer)


if __name__ == "__main__":
    main()
