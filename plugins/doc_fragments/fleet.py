# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that ask whoever places work on the nodes."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
requirements:
  - kubernetes (the Python package), with O(scheduler=kubernetes), on the machine where the module runs
options:
  scheduler:
    description:
      - Who places work on the nodes. V(hosts) is nobody, so plain machines. V(slurm) is Slurm 22.05 or later, by its
        commands on the machine where the module runs, as root or as SlurmUser.
    type: str
    choices: [hosts, kubernetes, slurm]
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
      kubeconfig:
        description:
          - For O(scheduler=kubernetes). File that says how to reach the cluster. Without it, the environment variable
            E(KUBECONFIG), the service account of the pod where the module runs, or C(~/.kube/config).
        type: path
      context:
        description: For O(scheduler=kubernetes). Context of that file to use instead of its current one.
        type: str
      evict_unmanaged:
        description:
          - For O(scheduler=kubernetes). Whether pods that belong to no controller may be evicted, though nobody makes
            new ones. Otherwise they are waited for.
        type: bool
        default: false
      evict_local_data:
        description:
          - For O(scheduler=kubernetes). Whether pods that keep files in an C(emptyDir) on disk may be evicted, which
            loses these files. Otherwise they are waited for. An C(emptyDir) in memory hinders nothing.
        type: bool
        default: false
      taint_daemonsets:
        description:
          - For O(scheduler=kubernetes). Whether DaemonSets that use a GPU, but have no node label of their own by which
            they could be taken off one node, are taken off by a taint, as NVIDIA's plain device plugin needs it. It
            takes everything off the node that does not tolerate it, also what uses no GPU. Pods of no DaemonSet are
            evicted before, within their budgets. All of it comes back for the validation.
          - Without it, such a DaemonSet fails the node, and is named.
        type: bool
        default: false
      ignore:
        description:
          - For O(scheduler=kubernetes). Patterns of C(namespace/Kind/name) of owners whose pods are never taken for
            users of a GPU, such as V(monitoring/DaemonSet/*).
        type: list
        elements: str
        default: []
      fact_expressions:
        description:
          - For O(scheduler=kubernetes). JMESPath expressions over a pod, by the compatibility fact they give, such as
            V(model), V(model_revision), V(engine) or V(engine_version). What vLLM, SGLang, Triton, TGI, NIM and
            PyTorch say of themselves is known without.
        type: dict
        default: {}
      domain_labels:
        description:
          - For O(scheduler=kubernetes). Node labels that name a domain, by its kind, such as V(rack). Zone, rack,
            NVLink domain and node pool are known by the usual labels without.
        type: dict
        default: {}
      holders:
        description:
          - For O(scheduler=kubernetes). Ids of pods that use a GPU whatever their specification says, because their
            node found a device open in one of their processes. The roles fill it in where nodes are reached over SSH.
        type: list
        elements: str
        default: []
      pause_annotations:
        description:
          - For O(scheduler=kubernetes). Annotations that a node carries while it is out of service, for autoscalers and
            health automation to leave it alone. What was there before is put back.
        type: dict
        default: {cluster-autoscaler.kubernetes.io/scale-down-disabled: 'true', karpenter.sh/do-not-disrupt: 'true'}
      validation_image:
        description:
          - For O(scheduler=kubernetes). Image of the pod that gets all GPUs of a node, while it is closed to others,
            and must succeed. Empty for no such pod.
        type: str
        default: nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubuntu22.04
      validation_command:
        description:
          - For O(scheduler=kubernetes), command of that pod, if not the one of its image.
          - For O(scheduler=slurm), command of the job that gets all GPUs of a node, while it is closed to others, and
            must succeed. By default C(nvidia-smi) must name one driver version for each GPU.
        type: list
        elements: str
        default: []
      validation_namespace:
        description: For O(scheduler=kubernetes). Namespace of that pod.
        type: str
        default: default
      validation_runtime_class:
        description: For O(scheduler=kubernetes). Runtime class of that pod.
        type: str
      slurm_conf:
        description: For O(scheduler=slurm). Path of C(slurm.conf), if it is not where Slurm's commands look for it.
        type: path
      slurm_bin:
        description: For O(scheduler=slurm). Directory of Slurm's commands, if they are not in E(PATH).
        type: path
      versions:
        description:
          - For O(scheduler=slurm). Driver version that is loaded on each node, by the node's name. Nodes are given the
            feature C(driver-VERSION) when others are drained, again whenever slurmctld has forgotten it, so that work
            which is moved can ask for the driver it ran on.
        type: dict
        default: {}
      interactive_jobs:
        description:
          - For O(scheduler=slurm). What becomes of jobs of C(srun) and C(salloc), which Slurm cannot requeue, when
            their time is over. V(wait) leaves them, and their node fails.
        type: str
        choices: [wait, cancel]
        default: wait
      no_requeue_jobs:
        description:
          - For O(scheduler=slurm). The same for batch jobs submitted with C(--no-requeue). V(requeue) requeues them
            against their owner's word.
        type: str
        choices: [wait, cancel, requeue]
        default: wait
      save_timeout:
        description:
          - For O(scheduler=slurm). Seconds a job may take to save itself after its signal. One that does not is left
            running, until the time for all work is over.
        type: int
        default: 300
      notify_command:
        description:
          - For O(scheduler=slurm). Command run once for each job that is signalled, requeued or cancelled, to tell its
            owner. V({job}), V({user}), V({nodes}) and V({message}) in an argument are replaced. No shell is involved.
        type: list
        elements: str
        default: []
      validation_partition:
        description: For O(scheduler=slurm). Partition of the job that proves a node, if not the first one of each node.
        type: str
        default: ""
      srun_options:
        description: For O(scheduler=slurm). Further options of that job's C(srun), such as C(--account=admin).
        type: list
        elements: str
        default: []
"""
