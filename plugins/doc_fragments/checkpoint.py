# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that save work and bring it back."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  workloads:
    description: The workloads, as C(gpu_workloads) declares them.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the workload.
        type: str
        required: true
      unit:
        description: The systemd unit that runs it. C(.service) may be left out.
        type: str
      container:
        description: Name of the container it is, if no unit runs it.
        type: str
      engine:
        description: Whose container it is. With V(docker) it cannot be saved as it is, only save itself.
        type: str
        choices: [podman, docker]
        default: podman
      artefact:
        description: Id of the save, for everything that is done to one that exists.
        type: str
      digest:
        description:
          - SHA-256 of its manifest, as M(gpufleet.driver.workload_checkpoint) returned it. A save whose manifest is
            another is refused. Without it, the manifest is believed.
        type: str
      ready:
        description: Command, as a list of arguments, that exits with 0 once the work does what it is for.
        type: list
        elements: str
        default: []
      ready_timeout:
        description: Seconds until O(workloads[].ready) must have succeeded.
        type: int
        default: 120
      save:
        description: How it is saved.
        type: dict
        default: {}
        suboptions:
          backend:
            description:
              - V(cuda_criu) saves the processes with their GPU memory. They come back only under exactly the same
                driver.
              - V(hook) asks the application to save itself. That outlives a change of the driver.
              - V(cedana) has Cedana save a pod, a job of Slurm, or a job of its daemon on this node.
              - V(kubelet) has the kubelet of this node save a container of a pod.
            type: str
            choices: [cuda_criu, hook, cedana, kubelet]
            default: cuda_criu
          paths:
            description:
              - For V(cuda_criu). Files and directories that travel with the work, with their content at the moment it
                was stopped. Files that its processes write and that are not on storage which both nodes share belong
                here.
            type: list
            elements: path
            default: []
          progress:
            description:
              - For all but V(hook). Command, as a list of arguments, that prints a number which grows while the work
                goes on. After a restore it must have grown.
            type: list
            elements: str
            default: []
          key:
            description:
              - Further facts that must be the same for a restore to be right, for example C(model_revision). They are
                kept in the manifest, and compared with those that are declared when the work is restored.
            type: dict
            default: {}
          may_repeat:
            description:
              - For V(cedana) and V(kubelet), which leave work running after its save. Whether it does no harm if what
                it did since is done again after a restore. Needed without O(workloads[].save.engine).
            type: bool
            default: false
          cedana:
            description: For V(cedana). What to save. One of C(pod), C(slurm_job) and C(job).
            type: dict
            suboptions:
              url:
                description: Its API, for a pod or a job of Slurm.
                type: str
              token_file:
                description: File on the node with the API's token.
                type: path
              ca:
                description: File with the certificates that the API's is to be trusted by.
                type: path
              cluster:
                description: Its id of the cluster. For a restore, of the one to restore to.
                type: str
              namespace:
                description: Namespace of the pod.
                type: str
                default: default
              pod:
                description: Name of the pod.
                type: str
              runc_root:
                description: Where the runtime keeps the state of the pod's containers.
                type: path
                default: /run/containerd/runc/k8s.io
              slurm_job:
                description: Id of the job in Slurm.
                type: str
              kind:
                description: What of a job of Slurm is saved.
                type: str
                choices: [simple, rootfs, rootfsonly]
                default: simple
              job:
                description: Id of a job of the daemon on this node.
                type: str
          kubelet:
            description: For V(kubelet). What to save.
            type: dict
            suboptions:
              namespace:
                description: Namespace of the pod.
                type: str
                required: true
              pod:
                description: Name of the pod.
                type: str
                required: true
              container:
                description: Name of the container in it.
                type: str
                required: true
              url:
                description: The kubelet.
                type: str
                default: https://127.0.0.1:10250
              ca:
                description: File with the certificates that the kubelet's is to be trusted by.
                type: path
              token_file:
                description: File with a token that may create C(nodes/checkpoint).
                type: path
              cert:
                description: File with a client certificate that may, instead of a token.
                type: path
              key:
                description: File with its key.
                type: path
              folder:
                description: Where the kubelet keeps its archives.
                type: path
                default: /var/lib/kubelet/checkpoints
              runtime:
                description:
                  - For a restore. The runtime of this node as the node's C(status.nodeInfo.containerRuntimeVersion)
                    has it, for example V(containerd://2.1.9).
                type: str
              runtime_config:
                description: File with the runtime's settings.
                type: path
                default: /etc/containerd/config.toml
          encrypt:
            description:
              - For V(cuda_criu). Encrypts the files of the save for one recipient before they are in O(store). The
                manifest is not encrypted. It tells the names and sizes of files and the text of the unit.
            type: dict
            suboptions:
              tool:
                description: Program that encrypts, to be installed on the nodes.
                type: str
                choices: [age, gpg]
                default: age
              recipient:
                description:
                  - Public key for V(age), or a key's fingerprint or address for V(gpg), which root's keyring must have.
                type: str
                required: true
              identity:
                description:
                  - For V(age). File with the secret key, on nodes that take the work in and on the one it comes home
                    to. With V(gpg), the secret key is in root's keyring, without a passphrase.
                type: path
              scratch:
                description:
                  - Where the directory C(gpufleet) is made for the plain files while CRIU writes or reads them. In
                    memory, unless the node has another place that does not keep them.
                type: path
                default: /dev/shm
          engine:
            description:
              - For V(cuda_criu), V(cedana) and V(kubelet), if the work is an inference engine.
              - It finishes its requests before it is stopped, takes no more, and goes on where it comes back, or here
                if it is not saved.
            type: dict
            suboptions:
              kind:
                description:
                  - V(vllm) needs its environment to have C(VLLM_SERVER_DEV_MODE=1).
                  - V(sglang) needs C(--enable-metrics), and C(--enable-memory-saver) with
                    O(workloads[].save.engine.sleep=true).
                type: str
                choices: [vllm, sglang]
                required: true
              url:
                description: Where it listens. A loopback address.
                type: str
                default: http://127.0.0.1:8000
              drain:
                description: Seconds until its requests must have ended.
                type: int
                default: 60
              sleep:
                description:
                  - Whether it also gives up its cache and moves its weights to the host's memory, so that the save
                    is smaller.
                type: bool
                default: false
              token_file:
                description: File on the node with a bearer token for it.
                type: path
          keep:
            description: Seconds after which a forgotten save may be removed.
            type: int
            default: 604800
          command:
            description: For V(hook). Command, as a list of arguments, that makes the application save itself.
            type: list
            elements: str
          signal:
            description: For V(hook). Signal to the unit's main process that does, for example V(SIGUSR1).
            type: str
          http:
            description: For V(hook). URL to which an empty POST does.
            type: str
          proof:
            description:
              - For V(hook). Absolute path, or pattern of paths, where a new save appears. A directory stands for the
                newest file in it.
            type: str
          check:
            description: For V(hook). Command, as a list of arguments, that judges a save. Its path is appended.
            type: list
            elements: str
          deadline:
            description: For all but V(cuda_criu). Seconds until a new save must be there.
            type: int
            default: 300
  gang:
    description:
      - Whether the workloads belong together, so that if one of them fails, all of them go back to where they were.
    type: bool
    default: false
  concurrency:
    description: How many are dealt with at a time.
    type: int
    default: 4
"""

    STORE = r"""
options:
  store:
    description:
      - Directory on the node for saves, or one that all nodes share. Saves hold the memory of the work with all its
        secrets, and only root may read them.
    type: path
    default: /var/lib/gpufleet/store
  criu:
    description: CRIU's program.
    type: str
    default: criu
"""

    LIMITS = r"""
options:
  lock_timeout:
    description: Seconds that work submitted to a GPU may take to end.
    type: int
    default: 10
  freeze_limit:
    description: Seconds that saved work stands still at most before it is let go on.
    type: int
    default: 900
"""
