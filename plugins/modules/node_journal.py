#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: node_journal
version_added: 1.0.0
short_description: Keep the journal of a node's upgrade on the node
description:
  - Begins and closes the journal in which the modules of this collection keep what was there before the upgrade and
    which steps are done. It lies on the node, so another controller can go on or go back after this one has died.
  - Only one process at a time may change the journal. If a module of an interrupted run is still at work on the node,
    this fails and names it.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.node
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: partial
    details: Each run with O(state=noted) adds a step or closes one.
options:
  state:
    description:
      - V(begun) begins a run. A run that is unfinished or ended in quarantine is gone on with under the new O(run_id),
        and what it remembers is kept.
      - V(reopened) goes on with a run that has ended, to bring the node back to what that run remembers.
      - V(noted) adds a step that no module of this collection does, for example a reboot.
      - V(finished) closes the run with an O(outcome).
      - V(read) changes nothing.
    type: str
    choices: [begun, reopened, noted, finished, read]
    default: read
  run_id:
    description:
      - Identifies the run. Required with O(state=begun) and O(state=reopened).
      - If it is given with O(state=noted) or O(state=finished), and the journal is another run's, the module fails.
    type: str
  target:
    description: The driver version to go to. Required with O(state=begun).
    type: str
  previous:
    description: The driver version the node came with, so the one to go back to.
    type: str
  cordon:
    description:
      - For O(state=begun) and O(state=reopened). How the node was found before it was taken out of service. The first
        write wins, until the run ends and the node is given back.
    type: dict
    suboptions:
      foreign:
        description: Whether somebody else had taken the node out of service, so that it stays so afterwards.
        type: bool
        required: true
  step:
    description: Name of the step. Required with O(state=noted).
    type: str
  step_state:
    description:
      - V(started) before the act, V(done) or V(failed) after it.
      - V(done) or V(failed) closes the latest step of that name, or adds a closed one.
    type: str
    choices: [started, done, failed]
    default: done
  outcome:
    description:
      - For O(state=finished). How the run ended on this node.
      - If it is not given, V(upgraded) if the run has done anything about the driver, and else V(unchanged). The module
        fails if packages were being changed and that has not ended well.
    type: str
    choices: [upgraded, rolled_back, quarantined, unchanged]
  reason:
    description: Why, in one sentence.
    type: str
    default: ""
  next:
    description: The next command for a person to type, if there is one.
    type: str
    default: ""
seealso:
  - module: gpufleet.driver.driver_info
"""

EXAMPLES = r"""
- name: Begin
  gpufleet.driver.node_journal:
    state: begun
    run_id: "{{ gpu_run_id }}"
    target: 580.95.05
    previous: 535.183.01

- name: Note that a reboot comes
  gpufleet.driver.node_journal:
    state: noted
    step: reboot
    step_state: started

- name: Close
  gpufleet.driver.node_journal:
    state: finished
    run_id: "{{ gpu_run_id }}"
    outcome: upgraded
"""

RETURN = r"""
journal:
  description: The journal after this task.
  type: dict
  returned: always
  contains:
    run:
      description:
        - The run, or null. Its id, target and previous version, when it began, earlier ids it went under, and earlier
          targets that were given up.
      type: dict
      returned: always
    steps:
      description: The steps in order, each with its name, state and times.
      type: list
      elements: dict
      returned: always
    before:
      description: What was there before, by kind.
      type: dict
      returned: always
    outcome:
      description: The outcome with its reason, next command and time, or null while the run is unfinished.
      type: dict
      returned: always
    unfinished:
      description: Whether a run was begun and not closed.
      type: bool
      returned: always
    goes_on:
      description: Whether the next run goes on with this one, since it was not closed or ended in quarantine.
      type: bool
      returned: always
adopted_from:
  description: The id under which an unfinished run was found, if O(state=begun) went on with it.
  type: str
  returned: when a run of another id was gone on with
busy:
  description: Whether another module of this collection is still at work on the node, so that waiting helps.
  type: bool
  returned: on failure
"""

import copy
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.journal import (
    CORDON,
    OUTCOMES,
    QUARANTINED,
    Journal,
    JournalBusy,
    JournalError,
)


def keep(journal: Journal, params: dict[str, Any], now: float) -> dict[str, Any]:
    """Do what ``state`` says to the journal; the module's further results."""
    owner = journal.run["id"] if journal.run else None
    if params["state"] in ("begun", "reopened"):
        if params["state"] == "begun":
            new = journal.begin(params["run_id"], params["target"], params["previous"], now)
        else:
            new = False
            journal.reopen(params["run_id"])
        if params["cordon"] is not None:
            journal.remember(CORDON, params["cordon"])
        return {} if new or owner == params["run_id"] else {"adopted_from": owner}
    if params["run_id"] and owner and owner != params["run_id"]:
        raise JournalError(
            f"{journal.path} belongs to run {owner}, not to {params['run_id']}; "
            f"begin with the new id to go on with that run, or leave it to its owner"
        )
    if params["state"] == "noted":
        last = journal.last(params["step"])
        if params["step_state"] == "started" or not last or last["state"] != "started":
            journal.start(params["step"], now)
        if params["step_state"] != "started":
            detail = {"reason": params["reason"]} if params["reason"] else {}
            journal.end(params["step"], now, state=params["step_state"], **detail)
    elif params["state"] == "finished":
        outcome = params["outcome"] or journal.ending
        same = journal.outcome and [journal.outcome[key] for key in ("name", "reason", "next")]
        given = [outcome, params["reason"], params["next"] or None]
        if same != given and (journal.run or outcome == QUARANTINED):
            journal.finish(outcome, params["reason"], params["next"] or None, now)
    return {}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["begun", "reopened", "noted", "finished", "read"], "default": "read"},
            "run_id": {"type": "str"},
            "target": {"type": "str"},
            "previous": {"type": "str"},
            "cordon": {"type": "dict", "options": {"foreign": {"type": "bool", "required": True}}},
            "step": {"type": "str"},
            "step_state": {"type": "str", "choices": ["started", "done", "failed"], "default": "done"},
            "outcome": {"type": "str", "choices": list(OUTCOMES)},
            "reason": {"type": "str", "default": ""},
            "next": {"type": "str", "default": ""},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        required_if=[
            ("state", "begun", ("run_id", "target")),
            ("state", "reopened", ("run_id",)),
            ("state", "noted", ("step",)),
        ],
        supports_check_mode=True,
    )
    read_only = module.check_mode or module.params["state"] == "read"
    try:
        journal = Journal.open(module.params["state_dir"], read_only=read_only)
        before = copy.deepcopy(journal.as_dict())
        result = keep(journal, module.params, time.time())
    except JournalError as exc:
        module.fail_json(msg=str(exc), busy=isinstance(exc, JournalBusy))
    after = journal.as_dict()
    module.exit_json(changed=before != after, journal=after, diff={"before": before, "after": after}, **result)


if __name__ == "__main__":
    main()
