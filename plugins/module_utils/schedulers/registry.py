# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every scheduler there is, by the name users write. Only the one that is asked for is imported.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Scheduler, SchedulerError

NAMES = ("hosts", "kubernetes", "slurm")

PAUSE_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/scale-down-disabled": "true",
    "karpenter.sh/do-not-disrupt": "true",
}
"""What keeps autoscalers from removing a Kubernetes node while it is empty for us."""

VALIDATION_IMAGE = "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubuntu22.04"

ARGUMENTS: dict[str, Any] = {
    "scheduler": {"type": "str", "choices": list(NAMES), "default": "hosts"},
    "scheduler_options": {
        "type": "dict",
        "apply_defaults": True,
        "options": {
            "timeout": {"type": "int", "default": 60},
            "state_dir": {"type": "path", "default": "~/.local/state/gpufleet"},
            "cordon_command": {"type": "list", "elements": "str"},
            "uncordon_command": {"type": "list", "elements": "str"},
            "state_command": {"type": "list", "elements": "str"},
            "kubeconfig": {"type": "path"},
            "context": {"type": "str"},
            "evict_unmanaged": {"type": "bool", "default": False},
            "evict_local_data": {"type": "bool", "default": False},
            "taint_daemonsets": {"type": "bool", "default": False},
            "ignore": {"type": "list", "elements": "str", "default": []},
            "fact_expressions": {"type": "dict", "default": {}},
            "domain_labels": {"type": "dict", "default": {}},
            "holders": {"type": "list", "elements": "str", "default": []},
            "pause_annotations": {"type": "dict", "default": dict(PAUSE_ANNOTATIONS)},
            "validation_image": {"type": "str", "default": VALIDATION_IMAGE},
            "validation_command": {"type": "list", "elements": "str", "default": []},
            "validation_namespace": {"type": "str", "default": "default"},
            "validation_runtime_class": {"type": "str"},
            "slurm_conf": {"type": "path"},
            "slurm_bin": {"type": "path"},
            "versions": {"type": "dict", "default": {}},
            "interactive_jobs": {"type": "str", "choices": ["wait", "cancel"], "default": "wait"},
            "no_requeue_jobs": {"type": "str", "choices": ["wait", "cancel", "requeue"], "default": "wait"},
            "save_timeout": {"type": "int", "default": 300},
            "notify_command": {"type": "list", "elements": "str", "default": []},
            "validation_partition": {"type": "str", "default": ""},
            "srun_options": {"type": "list", "elements": "str", "default": []},
        },
    },
}
"""The argument spec of the doc fragment ``gpufleet.driver.fleet``."""


def get(parameters: Mapping[str, Any], run: Runner) -> Scheduler:
    """The scheduler that a module's ``parameters`` ask for; it takes from the options what is its own.

    :raises SchedulerError: if its options do not fit.
    """
    name, options = parameters["scheduler"], parameters["scheduler_options"]
    if name == "hosts":
        from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.hosts import Hosts

        own = ("state_dir", "cordon_command", "uncordon_command", "state_command", "timeout")
        return Hosts(run, **{key: options[key] for key in own}, ours=parameters.get("ours") or ())
    if name == "kubernetes":
        from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes

        return kubernetes.connect(options)
    if name == "slurm":
        from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import slurm

        return slurm.with_options(run, options)
    raise SchedulerError(f"no scheduler is called {name!r}; expected one of {', '.join(NAMES)}")
