#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_settings
version_added: 1.0.0
short_description: Remember the settings of a node's GPUs and put them back
description:
  - A reload of the driver loses persistence mode, compute mode, power limits, application clocks and all MIG instances.
    This module writes them to the node's journal before, and restores them afterwards, GPU by GPU (by UUID).
  - A power limit or clock that was at its default is set to the default of the new driver.
  - GPU and compute instances of MIG are created again with the same profiles at the same placement. Instances that
    were not there before are never destroyed. Their devices may get new UUIDs, which is a warning.
  - The ECC mode, and files in C(/etc/modprobe.d) that name nvidia, are only compared. Clocks locked with
    C(nvidia-smi -lgc) cannot be read from a driver and so are not restored.
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
    support: full
options:
  state:
    description:
      - V(saved) remembers the settings and the GPUs. What this run has remembered already is kept. If NVML cannot be
        used, the node's GPUs are remembered without settings and RV(findings) has a warning.
      - V(restored) puts back what was remembered and checks it. It fails with RV(reboot_required) if a MIG mode only
        becomes current at a reset.
    type: str
    choices: [saved, restored]
    required: true
  timeout:
    description: Seconds that each visit to the driver may take.
    type: int
    default: 60
seealso:
  - module: gpufleet.driver.kernel_modules
  - module: gpufleet.driver.driver_validate
"""

EXAMPLES = r"""
- name: Remember the settings before the driver is unloaded
  gpufleet.driver.gpu_settings:
    state: saved

- name: Put them back on the new driver
  gpufleet.driver.gpu_settings:
    state: restored
"""

RETURN = r"""
changes:
  description: What was put back (or would be, in check mode), each with the command that does the same by hand.
  type: list
  elements: dict
  returned: always
  contains:
    uuid:
      description: The GPU.
      type: str
    setting:
      description: V(persistence), V(mig), V(mig_layout), V(compute_mode), V(power_limit) or V(application_clocks).
      type: str
    before:
      description: The value found.
      type: raw
    after:
      description: The value remembered.
      type: raw
    command:
      description: What a person would type.
      type: str
settings:
  description: What is remembered - C(gpus) by UUID, C(modules), C(modprobe). Null if nothing is.
  type: dict
  returned: always
findings:
  description: What could not be remembered or put back, and what else is different.
  type: list
  elements: dict
  returned: always
reboot_required:
  description: Whether the rest can only be put back after a reboot.
  type: bool
  returned: always
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils.host import settings
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["saved", "restored"], "required": True},
            "timeout": {"type": "int", "default": 60},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        journal = Journal.open(p["state_dir"], read_only=module.check_mode)
        if p["state"] == "saved":
            done = settings.save(journal, p["timeout"], time.time())
        else:
            done = settings.restore(journal, p["timeout"], time.time(), check=module.check_mode)
    except (settings.SettingsError, JournalError) as exc:
        module.fail_json(msg=str(exc))
    if done.error:
        module.fail_json(msg=done.error, **done.as_dict())
    module.exit_json(**done.as_dict())


if __name__ == "__main__":
    main()
