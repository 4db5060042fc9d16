#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_lock
version_added: 1.0.0
short_description: Let one upgrade at a time have the fleet
description:
  - Takes, renews or gives back a lease in the file C(lock.json) on a node. Run it on every node of an upgrade, and on
    the few that all controllers of the fleet ask (the playbooks use the first three); M(gpufleet.driver.upgrade_gate)
    says whether their answers give a run the fleet, also if one of them is lost.
  - A lease runs out after O(ttl), so a controller that died does not lock the fleet for ever. Renew it with the same
    O(run_id) at the head of each batch. It is timed by how long the node has been up, so setting its clock changes
    nothing.
  - A run that gives the lock back is remembered as ended, and so is one that was taken over. Its lease on a node that
    could not be reached then no longer counts.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: partial
    details: With O(state=held) and O(state=renewed), each run renews the lease, and says so.
options:
  state:
    description:
      - V(held) takes the lock, or renews it if O(run_id) holds it. It fails if another run does.
      - V(renewed) only renews. It fails if O(run_id) does not hold the lock, because another run has taken over.
      - V(released) gives it back if O(run_id) holds it, and otherwise leaves it alone with a warning.
    type: str
    choices: [held, renewed, released]
    default: held
  run_id:
    description: Identifies the run.
    type: str
    required: true
  holder:
    description:
      - Who runs it, for whoever finds the fleet locked. For example a name and a controller. A renewal keeps it.
    type: str
  ttl:
    description:
      - Seconds until the lease runs out unless it is renewed. Longer than a batch can take.
    type: int
    default: 7200
  takeover:
    description:
      - Id of the run to take the lock from, as the error message names it. Takes it only from that run, which stops at
        its next batch if it is alive after all.
    type: str
  ended:
    description:
      - Ids of runs that other nodes know to have ended. A lease that such a run has left here does not count.
    type: list
    elements: str
    default: []
  state_dir:
    description:
      - Directory on the host that holds the lock. It is created with mode V(0700) if it is missing.
    type: path
    default: /var/lib/gpufleet
seealso:
  - module: gpufleet.driver.upgrade_gate
"""

EXAMPLES = r"""
- name: Have the fleet for this run
  gpufleet.driver.fleet_lock:
    run_id: "{{ gpu_run_id }}"
    holder: "{{ lookup('ansible.builtin.env', 'USER') }} on the deploy host"
    takeover: "{{ gpu_lock_takeover | default(omit) }}"
  register: answer
  ignore_errors: true

- name: See that most of the first three nodes have given it
  gpufleet.driver.upgrade_gate:
    outcomes: {}
    run_id: "{{ gpu_run_id }}"
    lock_keepers: "{{ keepers }}"
    lock_answers: "{{ dict(keepers | zip(keepers | map('extract', hostvars, 'answer'))) }}"
  delegate_to: localhost
  run_once: true
  vars:
    keepers: "{{ groups['gpu_nodes'][:3] }}"

- name: Give it back
  gpufleet.driver.fleet_lock:
    state: released
    run_id: "{{ gpu_run_id }}"
"""

RETURN = r"""
lock:
  description: The lease after this task, empty if the lock is free. Also if the task failed because another run has it.
  type: dict
  returned: if the file could be read
  contains:
    run_id:
      description: The run that has the lock.
      type: str
    holder:
      description: Who runs it.
      type: str
    since:
      description: When it was taken. Times are Unix seconds of the node's clock.
      type: float
    renewed:
      description: When it was last renewed.
      type: float
    expires:
      description: When it runs out if the node is booted meanwhile.
      type: float
    boot_id:
      description: The boot of the node that RV(lock.uptime) counts from.
      type: str
    uptime:
      description: How long the node will have been up when the lease runs out, in seconds.
      type: float
previous:
  description: The lease before this task, empty if the lock was free.
  type: dict
  returned: success
ended:
  description: Ids of runs that are known to have ended, the latest last.
  type: list
  elements: str
  returned: if the file could be read
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.host import lock
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "renewed", "released"], "default": "held"},
            "run_id": {"type": "str", "required": True},
            "holder": {"type": "str"},
            "ttl": {"type": "int", "default": 7200},
            "takeover": {"type": "str"},
            "ended": {"type": "list", "elements": "str", "default": []},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    if p["ttl"] <= 0:
        module.fail_json(msg=f"ttl is {p['ttl']}; expected a number of seconds above 0")
    try:
        if p["state"] == "held":
            change = lock.acquire(
                p["state_dir"],
                p["run_id"],
                p["holder"],
                p["ttl"],
                lock.Clock.read(),
                takeover=p["takeover"],
                elsewhere=p["ended"],
                check=module.check_mode,
            )
        elif p["state"] == "renewed":
            change = lock.renew(p["state_dir"], p["run_id"], p["ttl"], lock.Clock.read(), check=module.check_mode)
        else:
            change = lock.release(p["state_dir"], p["run_id"], check=module.check_mode)
    except lock.LockError as exc:
        module.fail_json(msg=str(exc), lock=_lease(exc.knows), ended=list(exc.knows.ended))
    except StateFileError as exc:
        module.fail_json(msg=str(exc))
    for warning in change.warnings:
        module.warn(warning)
    before, after = _lease(change.before), _lease(change.after)
    module.exit_json(
        changed=change.changed,
        lock=after,
        previous=before,
        ended=list(change.after.ended),
        diff={"before": before, "after": after},
    )


def _lease(knows: lock.Lock) -> dict[str, Any]:
    return asdict(knows.lease) if knows.lease else {}


if __name__ == "__main__":
    main()
