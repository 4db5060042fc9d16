#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: driver_preflight
version_added: 1.0.0
short_description: Tell whether a node can go to a driver version, and come back
description:
  - Works out the one package transaction that would bring the node's whole driver to O(version), simulates it, and
    judges everything that could stop it - packages, holds, repositories, the way back, kernels and their headers,
    space, Secure Boot, and whether the branch drives the GPUs.
  - Changes nothing but, with O(update_cache), the package lists. Never fails because of what it finds; see RV(ready)
    and RV(findings). It fails where the question makes no sense, for example where another method installed the driver.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.info
  - gpufleet.driver.attributes.node
  - gpufleet.driver.node
  - gpufleet.driver.driver_source
options:
  version:
    required: true
  update_cache:
    description:
      - Refresh the package lists first, though not in check mode.
      - Without it, a version published since the last refresh is not seen.
    type: bool
    default: false
seealso:
  - module: gpufleet.driver.driver_info
  - module: gpufleet.driver.driver_stage
  - module: gpufleet.driver.driver_install
"""

EXAMPLES = r"""
- name: Judge every node, any time
  gpufleet.driver.driver_preflight:
    version: 580.95.05
  register: preflight

- name: Leave out the nodes that are not ready
  ansible.builtin.debug:
    msg: "{{ preflight.findings | selectattr('level', 'eq', 'error') | map(attribute='message') | join('; ') }}"
  when: not preflight.ready
"""

RETURN = r"""
ready:
  description: Whether nothing stands in the way. Warnings do not.
  returned: success
  type: bool
already:
  description: Whether packages, module on disk and loaded module are all at O(version), so there is nothing to do.
  returned: success
  type: bool
findings:
  description: What was found, each with RV(findings[].check), RV(findings[].level) and what to do next.
  returned: success
  type: list
  elements: dict
  contains:
    check:
      description: Stable name of the check.
      type: str
      sample: drivers.held
    level:
      description: V(ok), V(warning) or V(error).
      type: str
    message:
      description: What was seen, and what was expected.
      type: str
    evidence:
      description: The facts behind it.
      type: dict
    next:
      description: What a person would do now.
      type: str
plan:
  description: The transaction.
  returned: success
  type: dict
  contains:
    source:
      description: Who carries it out.
      type: str
    target:
      description: The driver version.
      type: str
    flavour:
      description: V(open) or V(proprietary).
      type: str
    install:
      description: Package names and exact versions of the whole target set; empty if nothing has to change.
      type: dict
    remove:
      description: Packages that go in the same transaction.
      type: list
      elements: str
    hold:
      description: Packages that are held afterwards.
      type: list
      elements: str
    unhold:
      description: Held packages that move.
      type: list
      elements: str
    stream:
      description: The module stream to switch to, if it changes.
      type: str
    download_bytes:
      description: Size of the packages of the target set in bytes.
      type: int
download_bytes:
  description: Same as RV(plan.download_bytes).
  returned: success
  type: int
installed:
  description: The installed driver - source, packages, versions, flavour, holds, pins, streams and problems.
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import options
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import PackagePlan, SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.preflight import preflight
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.host import boot, facts, gpus, settings
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalError

# What the machine says about now that also decides whether a plan can go through.
DECIDING = ("boot.", "dkms.", "kernel.compiler", "kernel.fallback", "secure_boot.")


def host_findings(plan: PackagePlan, state_dir: str, run: execution.Runner = execution.run) -> list[Finding]:
    """Kernels, headers, space, Secure Boot and GPUs, as far as they matter to ``plan``."""
    seen = facts.observe(run, sections=("kernel", "boot"))
    found = [Finding(**entry) for entry in seen["findings"] if entry["check"].startswith(DECIDING)]
    if plan.builds_module:
        judged = boot.kernel_findings(seen["kernel"]["kernels"], headers_needed=True)
        found += [finding for finding in judged if finding.check == "kernel.headers"]
    found += boot.space_findings([boot.state_space(state_dir)])
    found += boot.read_only_findings([*boot.WRITTEN_PATHS, state_dir])
    found += settings.locked_clocks()
    branch = plan.target.split(".")[0]
    models = {device.device_id for device in gpus.scan_pci() if device.kind == "gpu"}
    return found + [gpus.supports(model, branch, plan.flavour) for model in sorted(models)]


def main() -> None:
    arguments = {
        **options.ARGUMENTS,
        "version": {"type": "str", "required": True},
        "update_cache": {"type": "bool", "default": False},
    }
    module = AnsibleModule(argument_spec=arguments, supports_check_mode=True)

    try:
        source = options.source_for(module.params, execution.run)
        stale = source.update() if module.params["update_cache"] and not module.check_mode else None
        found = preflight(
            source,
            Journal.open(module.params["state_dir"], read_only=True),
            options.node_for(module.params, execution.run),
            options.target_of(module.params),
            module.params["flavour"],
            module.params["rollback_required"],
            lambda plan: host_findings(plan, module.params["state_dir"]),
        )
    except (SourceError, JournalError) as exc:
        module.fail_json(msg=str(exc))
    if stale:
        module.warn(stale.message)
    module.exit_json(changed=False, **found.as_dict())


if __name__ == "__main__":
    main()
