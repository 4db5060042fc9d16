#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_settle
version_added: 1.0.0
short_description: Take away what a run left with the scheduler
description:
  - At the end of a run, takes away what it left besides the marks of nodes that are still out of service - constraints
    that kept moved work on nodes with the old driver, reservations, taints.
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
  run_id:
    description: Identifies the run.
    type: str
    required: true
seealso:
  - module: gpufleet.driver.node_cordon
"""

EXAMPLES = r"""
- name: Leave nothing behind
  gpufleet.driver.fleet_settle:
    scheduler: hosts
    run_id: "{{ gpu_run_id }}"
  delegate_to: localhost
"""

RETURN = r"""
removed:
  description: What was taken away, one line for each.
  type: list
  elements: str
  returned: always
doubtful:
  description:
    - What may be left of a run that died, or may be somebody else's doing, such as a held job that nobody says to have
      held, or what cannot be taken away yet, such as the constraint of a moved job that runs. One line for each, with
      the command that takes it away; nothing is done about it.
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

SPEC: dict[str, Any] = {
    "argument_spec": {
        **registry.ARGUMENTS,
        "run_id": {"type": "str", "required": True},
    },
}


def answer(p: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    try:
        scheduler = registry.get(p, execution.run)
        removed = scheduler.settle(Mark(p["run_id"], time.time()), check=check_mode)
        doubtful = scheduler.doubtful()
    except SchedulerError as exc:
        raise answers.Failed(str(exc)) from exc
    return {
        "changed": bool(removed),
        "removed": removed,
        "doubtful": doubtful,
        "diff": {"before": "".join(f"{line}\n" for line in removed), "after": ""},
    }


def main() -> None:
    answers.give(AnsibleModule(**SPEC, supports_check_mode=True), answer)


if __name__ == "__main__":
    main()
