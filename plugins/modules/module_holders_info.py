#!/usr/bin/python
# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: module_holders_info
short_description: Tell what keeps the NVIDIA kernel modules loaded
version_added: 1.0.0
author: gpufleet.driver contributors (@gpufleet)
description:
  - Takes a census of everything that keeps the modules of the NVIDIA driver loaded. These are processes that have a
    device of the driver open or mapped, in whatever mount or PID namespace and under whatever path; other kernel
    modules; and references that neither explains.
  - Each process is named by its systemd unit, container, pod, Slurm job, session and user, and comes with what would
    make it let go.
  - Also finds processes that a CUDA checkpoint has suspended. They hold no device, but must not lose the driver.
  - Reads C(/proc) and C(/sys) only. It never runs C(nvidia-smi), which shows compute contexts only.
extends_documentation_fragment:
  - gpufleet.driver.attributes
  - gpufleet.driver.attributes.info
options:
  timeout:
    description:
      - Seconds that the walk over all processes may take. If it takes longer, a process stuck in the kernel has made it
        hang, and it is done once more without reading memory maps.
    type: float
    default: 60
seealso:
  - module: gpufleet.driver.kernel_modules
  - module: gpufleet.driver.gpu_services
"""

EXAMPLES = r"""
- name: See what holds the driver
  gpufleet.driver.module_holders_info:
  become: true
  register: census

- name: Name the work that is still running
  ansible.builtin.debug:
    msg: "{{ census.holders | selectattr('kind', 'equalto', 'workload') | map(attribute='title') }}"
"""

RETURN = r"""
modules:
  description: The modules of the driver that are loaded, C(nvidia) and all that use it.
  returned: success
  type: list
  elements: dict
  sample:
    - name: nvidia_uvm
      references: 2
      used_by: []
      permanent: false
      state: live
      version: 550.90.07
      parameters: {}
order:
  description: Their names in the order in which they can be unloaded, dependants first.
  returned: success
  type: list
  elements: str
  sample: [nvidia_uvm, nvidia_drm, nvidia_modeset, nvidia]
holders:
  description:
    - What holds the modules. RV(holders[].kind) is V(workload), V(management), V(system), V(kernel) (another module) or
      V(unknown).
  returned: success
  type: list
  elements: dict
  contains:
    kind:
      description: What kind of holder it is.
      type: str
    name:
      description: Name of the process, at most 15 characters, or of the module.
      type: str
    title:
      description: One phrase for a message.
      type: str
    devices:
      description: The devices it has open or mapped, by their usual paths on the host.
      type: list
      elements: str
    modules:
      description: The modules it holds by them.
      type: list
      elements: str
    open_files:
      description: How many descriptors it has on them.
      type: int
    mappings:
      description: How many of the devices it has mapped.
      type: int
    pid:
      description: The process, as the host sees it; none for a module.
      type: int
    pids:
      description: Its ids in every PID namespace from the host's to its own.
      type: list
      elements: int
    ppid:
      description: Its parent.
      type: int
    state:
      description: Its state as in C(/proc/PID/stat), for example V(S) or V(D).
      type: str
    command:
      description: Its command line.
      type: str
    user:
      description: The user it runs as.
      type: str
    login:
      description: The user who logged in and started it; none for daemons.
      type: str
    unit:
      description: Its systemd unit.
      type: str
    user_unit_of:
      description: The numeric id of the user whose service manager runs that unit; none for a unit of the system.
      type: int
    container:
      description: The id of its container.
      type: str
    container_name:
      description: The name of the container, where docker or podman could be asked.
      type: str
    runtime:
      description: V(docker), V(podman), V(containerd) or V(cri-o).
      type: str
    pod:
      description: The uid of its Kubernetes pod.
      type: str
    qos:
      description: The quality of service class of the pod.
      type: str
    job:
      description: Its Slurm job.
      type: str
    step:
      description: Its Slurm job step.
      type: str
    session:
      description: Its login session.
      type: str
    blocked_in:
      description: Where in the kernel it is stuck, if it is.
      type: str
    zombie_parent:
      description: A dead but unreaped process that it descends from.
      type: int
    release:
      description: What makes it let go. C(argv) of C(release) is empty where no single command does.
      type: dict
suspended:
  description:
    - Processes that map libcuda and have no device open, with C(state) V(checkpointed), V(locked),
      V(stopped), V(running), V(failed) or V(unknown).
  returned: success
  type: list
  elements: dict
unexplained:
  description: References by module that neither another module nor a process explains.
  returned: success
  type: dict
  sample: {"nvidia": 1}
findings:
  description: What is wrong, each with what to do next.
  returned: success
  type: list
  elements: dict
releasable:
  description: Whether the driver can be unloaded once the holders have let go. If not, only a reboot will do, or a
    suspended process would be lost.
  returned: success
  type: bool
reboot_required:
  description: Whether only a reboot will make the driver let go.
  returned: success
  type: bool
complete:
  description: Whether the whole host could be seen. Not so without root, or inside a container.
  returned: success
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders


def main() -> None:
    module = AnsibleModule(argument_spec={"timeout": {"type": "float", "default": 60}}, supports_check_mode=True)
    census = holders.take(run=execution.run, scan_seconds=module.params["timeout"])
    module.exit_json(changed=False, **census.as_dict())


if __name__ == "__main__":
    main()
