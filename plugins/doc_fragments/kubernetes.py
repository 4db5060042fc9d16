# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that ask a Kubernetes API server themselves."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  kubeconfig:
    description:
      - File that says how to reach the cluster. Without it, the environment variable E(KUBECONFIG), the service account
        of the pod where the module runs, or C(~/.kube/config).
    type: path
  context:
    description: Context of that file to use instead of its current one.
    type: str
  timeout:
    description: Seconds that one request may take.
    type: int
    default: 60
requirements:
  - kubernetes, on the machine where the module runs
"""
