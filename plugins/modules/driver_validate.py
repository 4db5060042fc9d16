#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: driver_validate
version_added: 1.0.0
short_description: Prove that a node's GPUs work on their driver
description:
  - Checks that the wanted driver is the loaded one and that of the libraries, that every GPU of before is there with
    its device nodes and settings, that the NVLink fabric is set up, that nothing new is wrong in the kernel log or with
    the memory, and then computes on every GPU and MIG device and checks each element of the result.
  - Fails unless all of it is right, and says in RV(verdict.act) whether another driver could cure it.
  - It changes nothing on the node but the journal, and that only with O(baseline=recorded).
author: gpufleet.driver contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.node
  - gpufleet.driver.node
attributes:
  check_mode:
    support: partial
    details: O(command) and O(benchmark_command), which may change something, are not run.
  diff_mode:
    support: none
  idempotent:
    support: partial
    details: With O(baseline=recorded) and no run under way in the journal, each run keeps its own measurements.
options:
  version:
    description: Driver version that must be loaded. By default, the libraries only have to be as the loaded driver.
    type: str
  gpus:
    description:
      - UUIDs of the GPUs that must be there.
      - By default, those that M(gpufleet.driver.gpu_settings) has remembered in the journal.
    type: list
    elements: str
  since:
    description:
      - Only what the kernel has said from this time on counts, in Unix seconds.
      - By default, from the beginning of the run in the journal, or from the last boot if there is none. What an
        earlier driver said about itself before M(gpufleet.driver.kernel_modules) loaded this one is then a warning.
    type: float
  checks:
    description: Which checks to make. V(compute) and V(performance) are always made with a O(baseline).
    type: list
    elements: str
    choices:
      - versions
      - gpus
      - devices
      - health
      - memory
      - fabric
      - companions
      - services
      - settings
      - modules
      - compute
      - dcgm
      - command
      - performance
    default:
      - versions
      - gpus
      - devices
      - health
      - memory
      - fabric
      - companions
      - services
      - settings
      - modules
      - compute
      - dcgm
      - command
      - performance
  services:
    description: Systemd units that must be active.
    type: list
    elements: str
    default: []
  dcgm_level:
    description: Run C(dcgmi diag) at this level, V(1) to V(4). V(0) does not.
    type: int
    choices: [0, 1, 2, 3, 4]
    default: 0
  command:
    description:
      - A command of yours, as a list of arguments, that must succeed within O(timeout), for example one that starts a
        container with a GPU.
    type: list
    elements: str
    default: []
  benchmark_command:
    description: A command, as a list of arguments, that prints a number last. More is better.
    type: list
    elements: str
    default: []
  baseline:
    description:
      - V(recorded) keeps the measurements in the journal, if the node is well. Use it on the old driver.
      - V(compared) compares with what was recorded and fails if the node has become slower by more than O(tolerance).
    type: str
    choices: [none, recorded, compared]
    default: none
  tolerance:
    description: How much worse a measurement may be than the baseline, as a fraction.
    type: float
    default: 0.1
  timeout:
    description: Seconds that each probe, command, wait for the fabric, and computation on one device may take.
    type: int
    default: 120
  pci_devices:
    description: Directory with the PCI devices in the form of sysfs.
    type: path
    default: /sys/bus/pci/devices
seealso:
  - module: gpufleet.driver.driver_info
  - module: gpufleet.driver.gpu_settings
"""

EXAMPLES = r"""
- name: Measure a canary on its old driver
  gpufleet.driver.driver_validate:
    baseline: recorded

- name: Validate it on the new one
  gpufleet.driver.driver_validate:
    version: 580.95.05
    services: [nvidia-persistenced, nvidia-fabricmanager]
    command: [podman, run, --rm, --device, nvidia.com/gpu=all, registry.example.com/probe, nvidia-smi, -L]
    baseline: compared
    tolerance: 0.05
"""

RETURN = r"""
verdict:
  description: The result.
  type: dict
  returned: always
  contains:
    ok:
      description: Whether no check found an error.
      type: bool
    act:
      description:
        - V(return) the node to service, V(rollback) to the driver it had, or V(quarantine) it, since what is wrong is
          the hardware or can only be cured by a reboot.
      type: str
    checks:
      description: One judgement a check - C(check), C(level) (ok, warning, error), C(message), C(evidence), C(next).
      type: list
      elements: dict
    measurements:
      description:
        - C(devices) by GPU UUID, or GPU and place for MIG devices, with C(copy_gib_s) (GiB/s, host to device) and
          C(compute_us) (µs); and C(benchmark).
      type: dict
baseline:
  description: The measurements in the journal; null if there are none.
  type: dict
  returned: always
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution, findings
from ansible_collections.gpufleet.driver.plugins.module_utils.host import facts, module_state, settings, validation
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalError
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

BASELINE = "baseline"


def main() -> None:
    checks = list(validation.CHECKS)
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str"},
            "gpus": {"type": "list", "elements": "str"},
            "since": {"type": "float"},
            "checks": {"type": "list", "elements": "str", "choices": checks, "default": checks},
            "services": {"type": "list", "elements": "str", "default": []},
            "dcgm_level": {"type": "int", "choices": [0, 1, 2, 3, 4], "default": 0},
            "command": {"type": "list", "elements": "str", "default": []},
            "benchmark_command": {"type": "list", "elements": "str", "default": []},
            "baseline": {"type": "str", "choices": ["none", "recorded", "compared"], "default": "none"},
            "tolerance": {"type": "float", "default": 0.1},
            "timeout": {"type": "int", "default": 120},
            "pci_devices": {"type": "path", "default": "/sys/bus/pci/devices"},
            "state_dir": {"type": "path", "default": "/var/lib/gpufleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    recording = p["baseline"] == "recorded"
    try:
        if p["version"]:
            DriverVersion.parse(p["version"])
        journal = Journal.open(p["state_dir"], read_only=module.check_mode or not recording)
    except (JournalError, ValueError) as exc:
        module.fail_json(msg=str(exc))
    since = p["since"]
    if since is None and journal.unfinished and journal.run:
        since = journal.run["begun"]
    load = journal.last(module_state.LOAD) if journal.unfinished else None
    remembered = journal.before(settings.GPUS) or []
    verdict = validation.validate(
        execution.run,
        validation.Wanted(
            version=p["version"],
            gpus=remembered if p["gpus"] is None else [{"uuid": uuid} for uuid in p["gpus"]],
            settings=journal.before(settings.SETTINGS),
            since=since,
            loaded_at=load["at"] if load else None,
            services=p["services"],
            dcgm_level=p["dcgm_level"],
            command=[] if module.check_mode else p["command"],
            benchmark_command=[] if module.check_mode else p["benchmark_command"],
            baseline=journal.before(BASELINE),
            compare=p["baseline"] == "compared",
            tolerance=p["tolerance"],
            timeout=p["timeout"],
            checks=[*p["checks"], *(["compute", "performance"] if p["baseline"] != "none" else [])],
        ),
        facts.Roots(pci=p["pci_devices"]),
    )
    changed = False
    try:
        if recording and verdict.ok:
            if not journal.unfinished:
                journal.forget(BASELINE)
            changed = journal.remember(BASELINE, {**verdict.measurements, "at": time.time()})
    except JournalError as exc:
        module.fail_json(msg=str(exc), verdict=verdict.as_dict())
    result = {"changed": changed, "verdict": verdict.as_dict(), "baseline": journal.before(BASELINE)}
    if not verdict.ok:
        module.fail_json(msg=findings.summary(verdict.checks), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
