#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: upgrade_gate
version_added: 1.0.0
short_description: Decide whether the next batch of an upgrade may start
description:
  - Compares what became of every node so far with the failure budget, looks at the clock, the maintenance windows and
    a stop file, at whether the plan still holds, and at what the nodes that keep the lock of the fleet say.
  - Run it once at the head of each batch, on the controller. Ansible's C(max_fail_percentage) and
    C(any_errors_fatal) do not stop later batches for a node that was lost or rescued; this does.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: N/A
    details: This module changes nothing.
  idempotent:
    support: full
options:
  outcomes:
    description: What became of each node whose turn has come, as a dictionary of node name to outcome.
    type: dict
    required: true
  lost:
    description: Names of the nodes Ansible has dropped from the play.
    type: list
    elements: str
    default: []
  max_failed:
    description: How many nodes may fail before the upgrade stops.
    type: int
    default: 0
  not_after:
    description: End of the maintenance window in Unix seconds. V(0) is no window.
    type: float
    default: 0
  windows:
    description: Maintenance windows, as in O(gpufleet.driver.upgrade_plan#module:windows). Without any, always.
    type: list
    elements: dict
    default: []
  batch_seconds:
    description:
      - How long the batch is expected to take, in seconds. A batch that cannot finish before O(not_after) and within
        one of O(windows) is not started.
    type: float
    default: 0
  stop_file:
    description: Path on the controller; if a file is there, no further batch starts.
    type: path
  review:
    description:
      - RV(gpufleet.driver.upgrade_plan#module:review), so whether the plan still holds for the fleet as it is now. Read
        are C(safe) and C(reasons). The gate is closed unless C(safe) is V(true).
    type: dict
  run_id:
    description: Identifies the run, for O(lock_keepers).
    type: str
    default: ""
  lock_keepers:
    description:
      - Names of the nodes that keep the lock of the fleet, the same for every controller. If there are any, the gate is
        closed unless most of those that answered give the lock to O(run_id), and these are at least half of all.
    type: list
    elements: str
    default: []
  lock_answers:
    description:
      - Node name to result of M(gpufleet.driver.fleet_lock) there, failed or not. Nodes that are not among
        O(lock_keepers) may be there as well; the gate is closed if another run has one of them.
    type: dict
    default: {}
seealso:
  - module: gpufleet.driver.upgrade_plan
  - module: gpufleet.driver.fleet_lock
"""

EXAMPLES = r"""
- name: May this batch start?
  gpufleet.driver.upgrade_gate:
    outcomes: {gpu-node-01: upgraded, gpu-node-02: rolled_back}
    lost: "{{ ansible_play_hosts_all | difference(ansible_play_hosts) }}"
    stop_file: /run/gpufleet-stop
    windows:
      - {start: "22:00", end: "04:00", tz: Europe/Berlin, days: [fri, sat]}
    batch_seconds: 660
    review: "{{ again.review }}"
  delegate_to: localhost
  run_once: true
  register: gate

- name: Stop here, and go on to the report
  ansible.builtin.meta: end_play
  when: not gate.open
"""

RETURN = r"""
open:
  description: Whether the next batch may start.
  type: bool
  returned: always
failed_nodes:
  description: The nodes that count against the budget.
  type: list
  elements: str
  returned: always
reasons:
  description: Why the gate is closed; empty if it is open.
  type: list
  elements: str
  returned: always
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import answers
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.gate import (
    check,
    decide,
    doubts_of,
    lock_objections,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy, Window

SPEC: dict[str, Any] = {
    "argument_spec": {
        "outcomes": {"type": "dict", "required": True},
        "lost": {"type": "list", "elements": "str", "default": []},
        "max_failed": {"type": "int", "default": 0},
        "not_after": {"type": "float", "default": 0},
        "windows": {"type": "list", "elements": "dict", "default": []},
        "batch_seconds": {"type": "float", "default": 0},
        "stop_file": {"type": "path"},
        "review": {"type": "dict"},
        "run_id": {"type": "str", "default": ""},
        "lock_keepers": {"type": "list", "elements": "str", "default": []},
        "lock_answers": {"type": "dict", "default": {}},
    },
}


def answer(options: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    stop_file = options["stop_file"]
    try:
        check(options)
        windows = [Window.of(window) for window in options["windows"]]
    except BadPolicy as exc:
        raise answers.Failed(f"No batch may start, since nothing can be decided: {exc}") from exc
    gate = decide(
        options["outcomes"],
        options["lost"],
        max_failed=options["max_failed"],
        now=time.time(),
        not_after=options["not_after"] or None,
        windows=windows,
        batch_seconds=options["batch_seconds"],
        stop_requested=stop_file if stop_file and Path(stop_file).exists() else None,
        doubts=doubts_of(options["review"]),
        objections=lock_objections(options["run_id"], options["lock_keepers"], options["lock_answers"]),
    )
    return {"changed": False, "open": gate.open, "failed_nodes": list(gate.failed), "reasons": list(gate.reasons)}


def main() -> None:
    answers.give(AnsibleModule(**SPEC, supports_check_mode=True), answer)


if __name__ == "__main__":
    main()
