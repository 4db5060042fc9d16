# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that ask whoever places work on the nodes."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  scheduler:
    description: Who places work on the nodes. V(hosts) is nobody, so plain machines.
    type: str
    choices: [hosts]
    default: hosts
  scheduler_options:
    description: How to reach the scheduler, and what is particular to it.
    type: dict
    suboptions:
      timeout:
        description: Seconds that one command or request for one node may take.
        type: int
        default: 60
      state_dir:
        description:
          - For O(scheduler=hosts). Directory for the marks, on the machine where the module runs. It is created with
            mode V(0700) if it is missing.
        type: path
        default: ~/.local/state/gpufleet
      cordon_command:
        description:
          - For O(scheduler=hosts). Command that takes a node out of service, for example at a load balancer, as a list
            of arguments. V({node}) in an argument is replaced by the node's name. No shell is involved.
        type: list
        elements: str
      uncordon_command:
        description:
          - For O(scheduler=hosts). Command that puts a node back. Goes together with
            O(scheduler_options.cordon_command).
        type: list
        elements: str
      state_command:
        description:
          - For O(scheduler=hosts). Command that exits with 0 if the node is in service and with 1 if it is out of
            service.
          - Without it, a node is taken to be in service unless it is marked.
        type: list
        elements: str
"""
