#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_lease
version_added: 1.0.0
short_description: Let one upgrade at a time have a Kubernetes cluster
description:
  - Takes, renews or gives back a C(Lease) in the cluster. It takes the place of M(gpufleet.driver.fleet_lock) where
    nobody logs in to a node, because the GPU Operator owns the driver.
  - A lease runs out after O(ttl), so a controller that died does not lock the cluster for ever. Renew it with the same
    O(run_id) at the head of each batch. It is timed by the clock of the API server.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.kubernetes
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
      - V(held) takes the lease, or renews it if O(run_id) holds it. It fails if another run does.
      - V(renewed) only renews. It fails if O(run_id) does not hold the lease, because another run has taken over.
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
      - Who runs it, for whoever finds the cluster locked. For example a name and a controller. A renewal keeps it.
    type: str
  ttl:
    description:
      - Seconds until the lease runs out unless it is renewed. Longer than a batch can take.
    type: int
    default: 7200
  takeover:
    description:
      - Id of the run to take the lease from, as the error message names it. Takes it only from that run, which stops at
        its next batch if it is alive after all.
    type: str
  namespace:
    description: Where the C(Lease), C(gpufleet-upgrade), is. The same for everybody who upgrades this cluster.
    type: str
    default: default
seealso:
  - module: gpufleet.driver.fleet_lock
  - module: gpufleet.driver.upgrade_gate
"""

EXAMPLES = r"""
- name: Have the cluster for this run
  gpufleet.driver.fleet_lease:
    run_id: "{{ gpu_run_id }}"
    holder: "{{ lookup('ansible.builtin.env', 'USER') }} on the deploy host"
  delegate_to: localhost
  run_once: true

- name: Give it back
  gpufleet.driver.fleet_lease:
    state: released
    run_id: "{{ gpu_run_id }}"
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
lock:
  description: The lease after this task, empty if the cluster is free. Also if it failed because another run has it.
  type: dict
  returned: if the cluster could be asked
  contains:
    run_id:
      description: The run that has the cluster.
      type: str
    holder:
      description: Who runs it.
      type: str
    since:
      description: When it was taken. Times are Unix seconds of the API server's clock.
      type: float
    renewed:
      description: When it was last renewed.
      type: float
    expires:
      description: When it runs out.
      type: float
previous:
  description: The lease before this task, empty if the cluster was free.
  type: dict
  returned: success
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import ARGUMENTS, Api, ClusterError
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_lease import (
    ClusterLease,
    Held,
    LeaseError,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **ARGUMENTS,
            "state": {"type": "str", "choices": ["held", "renewed", "released"], "default": "held"},
            "run_id": {"type": "str", "required": True},
            "holder": {"type": "str"},
            "ttl": {"type": "int", "default": 7200},
            "takeover": {"type": "str"},
            "namespace": {"type": "str", "default": "default"},
        },
        supports_check_mode=True,
    )
    p = module.params
    if not p["run_id"]:
        module.fail_json(msg="run_id is empty; expected the name of a run, that no other has")
    if p["ttl"] <= 0:
        module.fail_json(msg=f"ttl is {p['ttl']}; expected a number of seconds above 0")
    try:
        lease = ClusterLease(Api(p["kubeconfig"], p["context"], p["timeout"]), p["namespace"])
        if p["state"] == "held":
            change = lease.hold(p["run_id"], p["holder"], p["ttl"], p["takeover"], module.check_mode)
        elif p["state"] == "renewed":
            change = lease.renew(p["run_id"], p["ttl"], module.check_mode)
        else:
            change = lease.release(p["run_id"], module.check_mode)
    except LeaseError as exc:
        module.fail_json(msg=str(exc), lock=_told(exc.held))
    except ClusterError as exc:
        module.fail_json(msg=str(exc))
    if change.warning:
        module.warn(change.warning)
    before, after = _told(change.before), _told(change.after)
    module.exit_json(changed=change.changed, lock=after, previous=before, diff={"before": before, "after": after})


def _told(held: Held | None) -> dict[str, Any]:
    return asdict(held) if held else {}


if __name__ == "__main__":
    main()
