#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: driver_info
version_added: 1.0.0
short_description: Tell the truth about the NVIDIA driver and the GPUs of a node
description:
  - Reports the loaded driver (kernel), the installed one (packages) and the library (user space) as three facts, the
    GPUs as the PCI bus, the driver and its library see them, and what surrounds them - kernels, DKMS, Secure Boot,
    companions such as Fabric Manager and DCGM, the kernel log and the node's journal.
  - Judges each of them and returns the judgements as findings. It never fails because of what it finds.
  - Whatever enters the driver runs in a process of its own with a deadline. If processes are already stuck in the
    driver, or a call does not come back, RV(driver_info.wedged) is V(true) and the driver is not entered again.
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.info
  - gpufleet.driver.attributes.node
  - gpufleet.driver.node
options:
  gather:
    description:
      - What to gather besides the loaded driver, the libraries and the loaded modules.
      - V(initramfs) lists the initial RAM disk of the next boot, which takes seconds.
    type: list
    elements: str
    choices: [gpus, health, companions, kernel, boot, initramfs, packages]
    default: [gpus, health, companions, kernel, boot, initramfs, packages]
  since:
    description: Only look at kernel messages from this time on, in Unix seconds. By default, since the last boot.
    type: float
  timeout:
    description: Seconds that each single probe may take.
    type: int
    default: 30
  pci_devices:
    description: Directory with the PCI devices in the form of sysfs.
    type: path
    default: /sys/bus/pci/devices
seealso:
  - module: gpufleet.driver.driver_preflight
  - module: gpufleet.driver.driver_validate
"""

EXAMPLES = r"""
- name: See what each node really runs
  gpufleet.driver.driver_info:
  register: node

- name: Stop on a node whose driver is wedged
  ansible.builtin.assert:
    that: not node.driver_info.wedged

- name: Only the versions, quickly
  gpufleet.driver.driver_info:
    gather: [packages]
"""

RETURN = r"""
driver_info:
  description: What was found. Sections that were not asked for are left out.
  type: dict
  returned: always
  contains:
    loaded:
      description: The driver in the kernel; null if none is loaded.
      type: dict
      returned: always
      sample:
        version: 550.90.07
        flavour: open
        arch: x86_64
    installed:
      description: The driver's packages, and which source they come from. See M(gpufleet.driver.driver_install).
      type: dict
      returned: with V(packages) in O(gather)
    library:
      description:
        - The user space libraries, by the files that the loader takes. RV(driver_info.library.status) is NVML's answer.
      type: dict
      returned: always
      contains:
        version:
          description: Version of libnvidia-ml.
          type: str
        versions:
          description: Version of each library looked at, null if it is missing.
          type: dict
        paths:
          description: File of each library looked at, null if it is missing.
          type: dict
        status:
          description:
            - V(ok), V(driver_not_loaded), V(library_not_found), V(mismatch), V(gpu_lost), V(reset_required),
              V(no_device), V(error), V(hung) or V(crashed). Null if NVML was not asked.
          type: str
        message:
          description: The same in words.
          type: str
        cuda_version:
          description: The newest CUDA that the driver speaks.
          type: str
    modules:
      description: Loaded kernel modules of the driver and those that build on it.
      type: list
      elements: str
      returned: always
    wedged:
      description: Whether calls into the driver hang. Only a reboot helps then.
      type: bool
      returned: always
    pci_gpus:
      description: Number of NVIDIA GPUs on the PCI bus.
      type: int
      returned: always
    nvswitches:
      description: Number of NVSwitches on the PCI bus.
      type: int
      returned: always
    gpus:
      description:
        - The GPUs by PCI address. C(seen_by) says whether the bus, the driver and NVML know each.
        - Powers in watts, clocks in MHz, memory in bytes. A value that cannot be had is null; C(unknown) says why.
      type: list
      elements: dict
      returned: with V(gpus) in O(gather)
    domain:
      description: The NVLink domain of the node (cluster and clique); null if it has none. Its nodes go together.
      type: str
      returned: with V(gpus) in O(gather)
    health:
      description: Events in the kernel log, and whether they forbid a live reload (C(reboot_needed)).
      type: dict
      returned: with V(health) in O(gather)
    companions:
      description: Fabric Manager, NVLSM, IMEX, NSCQ, DCGM, container toolkit and persistence daemon, and CDI files.
      type: dict
      returned: with V(companions) in O(gather)
    kernel:
      description: The running kernel and the one of the next boot, with their headers and modules, and DKMS.
      type: dict
      returned: with V(kernel) in O(gather)
    secure_boot:
      description: Whether Secure Boot is on, and the keys.
      type: dict
      returned: with V(kernel) in O(gather)
    boot:
      description: Boot id and time, pending reboot, free space, nouveau.
      type: dict
      returned: with V(boot) in O(gather)
    initramfs:
      description: NVIDIA modules inside the initial RAM disk of the next boot.
      type: dict
      returned: with V(initramfs) in O(gather)
    journal:
      description:
        - The journal of the node's upgrade. See M(gpufleet.driver.node_journal).
        - C(at_work) says whether a module that changes the node is at work right now.
        - If it cannot be read there is only C(error), what is wrong with it and what to do.
      type: dict
      returned: always
    lock:
      description:
        - What the node knows of the lock of the fleet. See M(gpufleet.driver.fleet_lock).
        - C(lease) is null unless a run has the fleet; C(ended) has the ids of runs that are known to have ended.
        - If it cannot be read there is only C(error), what is wrong with it and what to do.
      type: dict
      returned: always
    findings:
      description: One judgement a check - C(check), C(level) (ok, warning, error), C(message), C(evidence), C(next).
      type: list
      elements: dict
      returned: always
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import detect
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.host import facts, lock
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalError, at_work
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError


def main() -> None:
    sections = [*facts.SECTIONS, "packages"]
    module = AnsibleModule(
        argument_spec={
            "gather": {"type": "list", "elements": "str", "choices": sections, "default": sections},
            "since": {"type": "float"},
            "timeout": {"type": "int", "default": 30},
            "pci_devices": {"type": "path", "default": "/sys/bus/pci/devices"},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        journal = {**Journal.open(p["state_dir"], read_only=True).as_dict(), "at_work": at_work(p["state_dir"])}
    except JournalError as exc:
        # what the driver is like is not to be hidden by it
        journal = {"error": str(exc)}
    try:
        held = asdict(lock.look(p["state_dir"], lock.Clock.read()))
    except StateFileError as exc:
        held = {"error": str(exc)}
    try:
        installed = detect.detect(run=execution.run).as_dict() if "packages" in p["gather"] else None
    except SourceError as exc:
        module.fail_json(msg=str(exc))
    result = facts.observe(
        execution.run,
        sections=p["gather"],
        timeout=p["timeout"],
        since=p["since"],
        installed=installed["version"] if installed else None,
        roots=facts.Roots(pci=p["pci_devices"]),
    )
    if installed is not None:
        result["installed"] = installed
        result["findings"] += installed["problems"]
    module.exit_json(changed=False, driver_info={**result, "journal": journal, "lock": held})


if __name__ == "__main__":
    main()
