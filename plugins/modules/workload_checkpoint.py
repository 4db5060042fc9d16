#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: workload_checkpoint
version_added: 1.0.0
short_description: Save running work on a node, and end it there or let it go on
description:
  - Saves workloads so that they can go on elsewhere, and proves each save. Only work whose save is whole is ever ended.
  - With V(cuda_criu), the work stands still from the save on, until it is ended with O(state=committed) or let go on
    with O(state=aborted). If neither comes within O(freeze_limit), a timer on the node lets it go on by itself.
  - A workload that cannot be saved runs on, and RV(workloads[].reason) says why. The module does not fail for it,
    unless O(gang=true).
  - Can be repeated after any interruption. It goes on from what it finds on the node.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.checkpoint
  - gpufleet.driver.checkpoint.store
  - gpufleet.driver.checkpoint.limits
  - gpufleet.driver.node
attributes:
  check_mode:
    support: full
    details: Says which workloads could be saved and what it would cost. Nothing is stopped.
  diff_mode:
    support: none
  idempotent:
    support: full
    details: Except that V(hook) asks for a new save each time.
options:
  state:
    description:
      - V(captured) saves the work. See above for how it is afterwards.
      - V(committed) ends saved work on this node for good, in favour of O(target). Its unit cannot be started here
        until it comes back.
      - V(reassigned) gives work that was ended in favour of one target to another. Only for whoever has proven that it
        does not run at the first.
      - V(aborted) lets saved work go on here, and forgets the save.
      - V(left) ends work that was taken in here as its owner wants it to end, and saves its O(workloads[].save.paths),
        for the node it came from.
      - V(returned) starts work that was ended here again from its own state, because no save of it could be restored.
        Only for whoever has proven that it does not run at O(target).
      - V(discarded) removes a save and what is remembered of it.
    type: str
    choices: [captured, committed, reassigned, aborted, left, returned, discarded]
    required: true
  target:
    description:
      - Name of the node on which the work goes on. Required with O(state=committed) and O(state=reassigned).
      - With O(state=returned), the node on which it was to go on, and does not.
    type: str
  node:
    description: Name of this node, for messages and the manifest. The host name if it is not given.
    type: str
seealso:
  - module: gpufleet.driver.workload_restore
  - module: gpufleet.driver.checkpoint_info
  - module: gpufleet.driver.checkpoint_fetch
"""

EXAMPLES = r"""
- name: Save the trainer
  gpufleet.driver.workload_checkpoint:
    state: captured
    workloads:
      - name: trainer
        unit: trainer.service
        save:
          paths: [/var/lib/trainer]
  register: saved

- name: End it here, for it goes on at node2
  gpufleet.driver.workload_checkpoint:
    state: committed
    target: node2
    workloads:
      - name: trainer
        unit: trainer.service
        artefact: "{{ saved.workloads[0].artefact }}"

- name: Have an application save itself
  gpufleet.driver.workload_checkpoint:
    state: captured
    workloads:
      - name: trainer
        unit: trainer.service
        save:
          backend: hook
          signal: SIGUSR1
          proof: /scratch/trainer/checkpoints
"""

RETURN = r"""
workloads:
  description: What became of each workload, in the order given.
  type: list
  elements: dict
  returned: always
  contains:
    workload:
      description: Its name.
      type: str
      returned: always
    ok:
      description: Whether it is as it was asked to be.
      type: bool
      returned: always
    source:
      description:
        - How the work is on this node now. C(running), C(frozen), C(gone), C(lost), which is neither running nor saved,
          or C(unknown), if it could not be looked at.
      type: str
      returned: always
    artefact:
      description: Id of the save, or the path of the application's own.
      type: str
      returned: when there is one
    digest:
      description: SHA-256 of its manifest, for O(gpufleet.driver.workload_restore#module:workloads[].digest).
      type: str
      returned: with O(state=captured) and O(state=left)
    bytes:
      description: Its size.
      type: int
      returned: with O(state=captured)
    seconds:
      description: How long it took.
      type: float
      returned: with O(state=captured)
    still:
      description: Seconds for which it stands still by now, also while others were being saved.
      type: float
      returned: with O(state=captured), when it stands still
    evidence:
      description: What proves it, with the time of each step.
      type: dict
      returned: with O(state=captured)
    reason:
      description:
        - Why not, as C(reason) (one of a fixed set), C(step), C(observed), C(expected), C(next), C(pid) and C(source).
      type: dict
      returned: always
    msg:
      description: The same in one sentence.
      type: str
      returned: when it is not
saved:
  description: Names of the workloads that are as asked.
  type: list
  elements: str
  returned: always
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import options
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_GONE,
    SOURCE_RUNNING,
    CheckpointError,
    Reason,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cuda_criu import CudaCriu


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **options.ARGUMENTS,
            "state": {
                "type": "str",
                "choices": ["captured", "committed", "reassigned", "aborted", "left", "returned", "discarded"],
                "required": True,
            },
            "target": {"type": "str"},
            "node": {"type": "str"},
            "lock_timeout": {"type": "int", "default": 10},
            "freeze_limit": {"type": "int", "default": 900},
        },
        required_if=[("state", given, ("target",)) for given in ("committed", "reassigned", "returned")],
        supports_check_mode=True,
    )
    p = module.params
    state = p["state"]
    limits = Limits(lock=p["lock_timeout"], freeze=p["freeze_limit"])

    def act(given: Any) -> dict[str, Any]:
        work = options.work_of(given)
        chosen = options.backend(work.save["backend"], p, limits, module.log)
        if state == "captured":
            if module.check_mode:
                refused = chosen.check(work)
                if refused:
                    raise CheckpointError(refused[0])
                return {"changed": True, "source": SOURCE_RUNNING, "bytes": chosen.estimate(work).bytes}
            return chosen.capture(work).as_dict()
        if module.check_mode:
            return {"changed": True, "source": "unknown"}
        if state == "discarded":
            return {"changed": chosen.discard(work, given["artefact"]), "source": "unknown"}
        if state == "aborted":
            return {"changed": True, "source": chosen.abort(work)}
        if state == "committed":
            return {"changed": True, "source": chosen.commit(work, p["target"]), "artefact": given["artefact"]}
        if not isinstance(chosen, CudaCriu):
            raise CheckpointError(
                Reason("policy", state, f"backend {chosen.name}", "cuda_criu", "see docs/checkpoint.md",
                       "unknown", work.name)
            )  # fmt: skip
        if state == "left":
            return chosen.leave(work).as_dict()
        if state == "returned":
            return {"changed": True, "source": chosen.return_cold(work, p["target"])}
        chosen.reassign(work, p["target"])
        return {"changed": True, "source": SOURCE_GONE}

    if state in ("committed", "reassigned", "discarded") and options.missing_artefact(p["workloads"]):
        module.fail_json(msg=options.missing_artefact(p["workloads"]))
    results = options.each(p["workloads"], act, p["concurrency"])
    for one in results:
        if one.get("frozen_since"):  # since when others were waited for, too
            one["still"] = round(time.time() - one["frozen_since"], 3)
    failed = [one for one in results if not one["ok"]]
    if failed and p["gang"] and state == "captured" and not module.check_mode:
        p["state"] = state = "aborted"
        undone = {one["workload"]: one for one in options.each(p["workloads"], act, p["concurrency"])}
        for one in results:
            if one["ok"]:
                one.update(
                    ok=False, source=undone[one["workload"]]["source"], msg="let go on, for its gang was not saved"
                )
    result = {
        "changed": any(one.get("changed") for one in results),
        "workloads": results,
        "saved": [one["workload"] for one in results if one["ok"]],
    }
    if failed and (p["gang"] or state != "captured"):
        module.fail_json(msg="; ".join(one["msg"] for one in failed), **result)
    for one in failed:
        module.warn(one["msg"])
    module.exit_json(**result)


if __name__ == "__main__":
    main()
