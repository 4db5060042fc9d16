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
  - Takes, renews or gives back a lease in the file C(lock.json) on one host. Delegate it to a host that every
    controller of the fleet uses, so that two of them cannot upgrade the same fleet at once.
  - A lease runs out after O(ttl), so a controller that died does not lock the fleet for ever. Renew it with the same
    O(run_id) at the head of each batch.
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
    details: With O(state=held), each run renews the lease, and says so.
options:
  state:
    description:
      - V(held) takes the lock, or renews it if O(run_id) holds it. It fails if another run does.
      - V(released) gives it back if O(run_id) holds it, and otherwise leaves it alone with a warning.
    type: str
    choices: [held, released]
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
      - Id of the run to take the lock from, as the error message names it. Takes it only from that run.
    type: str
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
  delegate_to: "{{ groups['gpu_nodes'] | first }}"
  run_once: true

- name: Give it back
  gpufleet.driver.fleet_lock:
    state: released
    run_id: "{{ gpu_run_id }}"
  delegate_to: "{{ groups['gpu_nodes'] | first }}"
  run_once: true
"""

RETURN = r"""
lock:
  description: The lease after this task, empty if the lock is free. Times are Unix seconds.
  type: dict
  returned: always
  sample:
    run_id: 20261129-1530
    holder: ops on deploy-1
    since: 1796052600.0
    renewed: 1796054400.0
    expires: 1796061600.0
previous:
  description: The lease before this task, empty if the lock was free.
  type: dict
  returned: always
"""

import time
from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.host import lock
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "released"], "default": "held"},
            "run_id": {"type": "str", "required": True},
            "holder": {"type": "str"},
            "ttl": {"type": "int", "default": 7200},
            "takeover": {"type": "str"},
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
                time.time(),
                takeover=p["takeover"],
                check=module.check_mode,
            )
        else:
            change = lock.release(p["state_dir"], p["run_id"], check=module.check_mode)
    except (lock.LockError, StateFileError) as exc:
        module.fail_json(msg=str(exc))
    for warning in change.warnings:
        module.warn(warning)
    before, after = ({} if lease is None else asdict(lease) for lease in (change.before, change.after))
    module.exit_json(changed=change.changed, lock=after, previous=before, diff={"before": before, "after": after})


if __name__ == "__main__":
    main()
