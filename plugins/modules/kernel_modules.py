#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_modules
short_description: Unload or load the kernel modules of the NVIDIA driver
version_added: 1.0.0
author: gpufleet.driver contributors (@gpufleet)
description:
  - Unloads C(nvidia) and every module that uses it, in an order derived from what the kernel says uses what, or loads
    them.
  - Modules that do not depend on C(nvidia) are never touched, and nothing is ever forced.
  - Before it unloads, it takes the census of M(gpufleet.driver.module_holders_info). If anything holds the driver,
    nothing is touched and the module fails, naming each holder and the command that makes it let go.
    RV(reboot_required) tells whether stopping holders will do, or only a reboot.
  - If the kernel refuses on the way, what was already removed is loaded again with the parameters it had.
  - What was loaded is kept in the node's journal, so that O(state=loaded) brings the same set back.
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
      - V(unloaded) removes all modules of the driver.
      - V(loaded) loads O(modules) and makes the device nodes.
    type: str
    choices: [unloaded, loaded]
    required: true
  modules:
    description:
      - The modules to load, used with O(state=loaded) only.
      - Without it, those that were loaded when O(state=unloaded) ran, or C(nvidia) and C(nvidia_uvm) if none were.
      - If a module other than C(nvidia) and C(nvidia_uvm) does not load, that is a warning among RV(findings).
    type: list
    elements: str
  timeout:
    description: Seconds that each C(rmmod), C(modprobe) or C(nvidia-modprobe) may take.
    type: float
    default: 60
  wait:
    description: Seconds that processes which are just ending have to let go before they count as holders.
    type: float
    default: 5
seealso:
  - module: gpufleet.driver.module_holders_info
  - module: gpufleet.driver.gpu_services
"""

EXAMPLES = r"""
- name: Take the driver out, if nothing uses it
  gpufleet.driver.kernel_modules:
    state: unloaded
  become: true

- name: Put the new driver in
  gpufleet.driver.kernel_modules:
    state: loaded
  become: true
"""

RETURN = r"""
before:
  description: The modules of the driver that were loaded, each as in M(gpufleet.driver.module_holders_info).
  returned: always
  type: list
  elements: dict
after:
  description: The modules of the driver that are loaded now, or would be.
  returned: always
  type: list
  elements: dict
actions:
  description: The commands that were run, or would be in check mode.
  returned: always
  type: list
  elements: dict
  contains:
    what:
      description: V(unload), V(load), V(reload) (put back after a refusal) or V(nodes).
      type: str
    module:
      description: The module it is about.
      type: str
    argv:
      description: The command.
      type: list
      elements: str
    ok:
      description: Whether it reported success.
      type: bool
    said:
      description: The last line it printed.
      type: str
blocked_by:
  description: The processes that hold the driver, as RV(gpufleet.driver.module_holders_info#module:holders).
  returned: always
  type: list
  elements: dict
reboot_required:
  description: Whether only a reboot will bring this state about.
  returned: always
  type: bool
findings:
  description: What was found to be wrong, each with what to do next. A module that did not come back is a warning.
  returned: always
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import WARNING
from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders, kernel_modules, module_state
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import STATE_DIR, Journal, JournalError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["unloaded", "loaded"], "required": True},
            "modules": {"type": "list", "elements": "str"},
            "timeout": {"type": "float", "default": 60},
            "wait": {"type": "float", "default": 5},
            "state_dir": {"type": "path", "default": STATE_DIR},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    kernel = kernel_modules.KernelModules(execution.run, timeout=wanted["timeout"])
    try:
        journal = Journal.open(wanted["state_dir"], read_only=module.check_mode)
        if wanted["state"] == "unloaded":
            result = module_state.unloaded(
                kernel,
                journal,
                lambda: holders.take(run=execution.run),
                wait=wanted["wait"],
                check=module.check_mode,
            )
        else:
            result = module_state.loaded(kernel, journal, names=wanted["modules"] or (), check=module.check_mode)
    except JournalError as exc:
        module.fail_json(msg=str(exc))
    if result.error:
        module.fail_json(msg=result.error, **result.as_dict())
    for finding in result.findings:
        if finding.level == WARNING and finding.check.startswith("modules."):
            module.warn(finding.message)
    module.exit_json(**result.as_dict())


if __name__ == "__main__":
    main()
