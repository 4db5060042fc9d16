#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: workload_restore
version_added: 1.0.0
short_description: Bring saved work to life on a node, and prove that it goes on
description:
  - Restores saves that M(gpufleet.driver.workload_checkpoint) made with V(cuda_criu). The work runs under the same unit
    as before.
  - Nothing is restored before every byte was compared with the manifest, and every fact of the compatibility key with
    this node. A fact that is unknown counts as different.
  - Exit codes prove nothing here. The work counts as restored once its processes are alive, the driver says that each
    computes, NVML lists them, its own probes succeed, and all of that still holds a while later.
  - What fails is ended without a trace, and RV(workloads[].reason) says why. The module then fails.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.checkpoint
  - gpufleet.driver.checkpoint.store
  - gpufleet.driver.node
attributes:
  check_mode:
    support: full
    details: With O(state=prepared), everything is compared. Nothing is kept or started.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  state:
    description:
      - V(prepared) compares everything and keeps the place, while the source still stands.
      - V(restored) starts the work from its save, and proves it.
      - V(home) puts the files of work that V(left) another node where they were, starts its unit, and proves it.
      - V(absent) makes sure that work which was to be restored here does not run here.
      - V(verified) proves that work which was restored here goes on. With V(kubelet), a restore only makes an image
        ready, so this is for when its pod is there.
      - V(discarded) removes the save here, once the work is healthy.
    type: str
    choices: [prepared, restored, verified, home, absent, discarded]
    required: true
  waived:
    description: Fields of the compatibility key that are not compared, by name. Only for what you know to be harmless.
    type: list
    elements: str
    default: []
  settle:
    description: Seconds after which the work must still be well.
    type: int
    default: 10
  freeze_limit:
    description: Seconds for which a place is kept.
    type: int
    default: 900
seealso:
  - module: gpufleet.driver.workload_checkpoint
  - module: gpufleet.driver.checkpoint_info
  - module: gpufleet.driver.checkpoint_fetch
"""

EXAMPLES = r"""
- name: See whether the save fits this node
  gpufleet.driver.workload_restore:
    state: prepared
    workloads:
      - name: trainer
        unit: trainer.service
        artefact: "{{ saved.workloads[0].artefact }}"

- name: Go on here, now that it has ended there
  gpufleet.driver.workload_restore:
    state: restored
    workloads:
      - name: trainer
        unit: trainer.service
        artefact: "{{ saved.workloads[0].artefact }}"
        ready: [curl, --fail, --silent, "http://127.0.0.1:8000/health"]
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
    evidence:
      description: What proves it, with the time of each step.
      type: dict
      returned: with O(state=restored)
    runs:
      description: Whether the work runs on this node, having been restored before.
      type: bool
      returned: with O(state=absent)
    ran:
      description: Whether the work had been let go on here, so that a restore elsewhere would repeat what it did.
      type: bool
      returned: with O(state=absent)
    reason:
      description: Why not, as C(reason) (one of a fixed set), C(step), C(observed), C(expected), C(next) and C(pid).
      type: dict
      returned: always
    msg:
      description: The same in one sentence.
      type: str
      returned: when it is not
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import options
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_GONE,
    CheckpointError,
    Reason,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cuda_criu import CudaCriu
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.hook import Hook
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.left_running import LeftRunning
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import compatibility


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **options.ARGUMENTS,
            "state": {
                "type": "str",
                "choices": ["prepared", "restored", "verified", "home", "absent", "discarded"],
                "required": True,
            },
            "waived": {"type": "list", "elements": "str", "default": []},
            "settle": {"type": "int", "default": 10},
            "freeze_limit": {"type": "int", "default": 900},
        },
        supports_check_mode=True,
    )
    p = module.params
    unknown = sorted(set(p["waived"]) - compatibility.NAMES)
    if unknown:
        known = ", ".join(sorted(compatibility.NAMES))
        module.fail_json(msg=f"no field of the key is called {unknown[0]}; there are {known}")
    limits = Limits(settle=p["settle"], freeze=p["freeze_limit"])

    def tupled(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    def differences(key: Mapping[str, Any], node: Mapping[str, Any]) -> Any:
        return compatibility.explain(tupled(key), tupled(node), waived=p["waived"], scope=compatibility.NODE)

    def act(given: Any) -> dict[str, Any]:
        work = options.work_of(given)
        chosen = options.backend(work.save["backend"], p, limits, module.log, differences)
        if module.check_mode:
            if p["state"] == "prepared" and not isinstance(chosen, Hook):
                chosen.compare(work, given["artefact"], given["digest"] or "")
            return {"changed": p["state"] != "verified"}
        if p["state"] == "verified":
            return {"changed": False, "evidence": chosen.verify(work)}
        if p["state"] == "discarded":
            return {"changed": chosen.discard(work, given["artefact"])}
        if p["state"] == "restored":
            known = {"digest": given["digest"] or ""} if isinstance(chosen, LeftRunning) else {}
            evidence = dict(chosen.restore(work, given["artefact"], **known))
            return {"changed": evidence.pop("changed", True), "evidence": evidence}
        if isinstance(chosen, LeftRunning) and p["state"] == "prepared":
            chosen.compare(work, given["artefact"], given["digest"] or "")
            return {"changed": False}
        if not isinstance(chosen, CudaCriu):
            raise CheckpointError(
                Reason("policy", p["state"], f"backend {chosen.name}", "cuda_criu", "see docs/checkpoint.md",
                       SOURCE_GONE, work.name)
            )  # fmt: skip
        if p["state"] == "prepared":
            return {"changed": chosen.prepare(work, given["artefact"], given["digest"] or "")["state"] == "prepared"}
        if p["state"] == "home":
            evidence = chosen.come_home(work, given["artefact"], given["digest"] or "")
            return {"changed": evidence.pop("changed", True), "evidence": evidence}
        return chosen.absent(work)

    if p["state"] not in ("absent", "verified") and options.missing_artefact(p["workloads"]):
        module.fail_json(msg=options.missing_artefact(p["workloads"]))
    results = options.each(p["workloads"], act, p["concurrency"])
    failed = [one for one in results if not one["ok"]]
    if failed and p["gang"] and p["state"] == "restored" and not module.check_mode:

        def end(given: Mapping[str, Any]) -> dict[str, Any]:
            chosen = options.backend(given["save"]["backend"], p, limits, module.log, differences)
            if not isinstance(chosen, CudaCriu):
                raise CheckpointError(
                    Reason("policy", "absent", f"backend {chosen.name}", "cuda_criu", "see docs/checkpoint.md",
                           SOURCE_GONE, given["name"])
                )  # fmt: skip
            return chosen.absent(options.work_of(given), also_running=True)

        options.end_gang(results, p["workloads"], end, p["concurrency"])
    result = {"changed": any(one.get("changed") for one in results), "workloads": results}
    if failed:
        module.fail_json(msg="; ".join(one["msg"] for one in failed), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
