# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders, identity
from ansible_collections.gpufleet.driver.plugins.module_utils.host.identity import Owner, parse_cgroup

ID = "0123456789abcdef" * 4
POD = "0a1b2c3d-0000-4000-8000-0123456789ab"
POD_ = POD.replace("-", "_")
STATIC = "0123456789abcdef0123456789abcdef"

PLACES: list[Any] = [
    ("system unit", "0::/system.slice/nvidia-dcgm.service", {"unit": "nvidia-dcgm.service"}),
    ("delegated below a unit", "0::/system.slice/nomad.service/child", {"unit": "nomad.service"}),
    ("instance in its slice", "0::/system.slice/system-foo.slice/foo@1.service", {"unit": "foo@1.service"}),
    ("session", "0::/user.slice/user-1000.slice/session-c3.scope", {"session": "c3"}),
    (
        "user unit",
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service",
        {"unit": "jupyter.service", "user_unit_of": 1000},
    ),
    ("init", "0::/init.scope", {}),
    ("root group", "0::/", {}),
    ("docker, systemd driver", f"0::/system.slice/docker-{ID}.scope", {"container": ID, "runtime": "docker"}),
    (
        "docker, cgroupfs, v1",
        f"5:devices:/docker/{ID}\n1:name=systemd:/docker/{ID}",
        {"container": ID, "runtime": "docker"},
    ),
    ("podman, rootful", f"0::/machine.slice/libpod-{ID}.scope/container", {"container": ID, "runtime": "podman"}),
    (
        "podman, rootless",
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
        {"container": ID, "runtime": "podman", "user_unit_of": 1000},
    ),
    (
        "a user's group named as the system's",
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/system.slice/postgresql.service",
        {"unit": "postgresql.service", "user_unit_of": 1000},
    ),
    (
        "a user's group named as a container",
        f"0::/user.slice/user-1000.slice/user@1000.service/app.slice/docker-{ID}.scope",
        {"container": ID, "runtime": "docker", "user_unit_of": 1000},
    ),
    (
        "a user's group named as a pod",
        f"0::/user.slice/user-1000.slice/user@1000.service/kubepods.slice/kubepods-pod{POD_}.slice/x",
        {},
    ),
    (
        "a user's group named as a job",
        "0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_7/step_0",
        {"unit": "slurmstepd.scope", "user_unit_of": 1000},
    ),
    (
        "a user's manager in a container",
        f"0::/system.slice/docker-{ID}.scope/user.slice/user-1000.slice/user@1000.service/app.slice/a.service",
        {"container": ID, "runtime": "docker"},
    ),
    (
        "containerd, systemd driver, burstable",
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope",
        {"container": ID, "runtime": "containerd", "pod": POD, "qos": "burstable"},
    ),
    (
        "containerd, systemd driver, guaranteed",
        f"0::/kubepods.slice/kubepods-pod{POD_}.slice/cri-containerd-{ID}.scope",
        {"container": ID, "runtime": "containerd", "pod": POD, "qos": "guaranteed"},
    ),
    (
        "containerd without the systemd driver on a systemd host",
        f"0::/system.slice/containerd.service/kubepods-besteffort-pod{POD_}.slice:cri-containerd:{ID}",
        {"container": ID, "runtime": "containerd", "pod": POD, "qos": "besteffort"},
    ),
    (
        "kubelet, cgroupfs, v1",
        f"8:devices:/kubepods/besteffort/pod{POD}/{ID}",
        {"container": ID, "pod": POD, "qos": "besteffort"},
    ),
    (
        "static pod, cri-o",
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/crio-{ID}.scope",
        {"container": ID, "runtime": "cri-o", "pod": STATIC, "qos": "burstable"},
    ),
    (
        "kubelet with a cgroup root",
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
        f"kubelet-kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope",
        {"container": ID, "runtime": "containerd", "pod": POD, "qos": "burstable"},
    ),
    ("Slurm, v1", "4:devices:/slurm/uid_1000/job_123/step_0/task_0", {"job": "123", "step": "0"}),
    ("Slurm, v1, several daemons", "4:devices:/slurm_gpu-01/uid_1000/job_9/step_batch", {"job": "9", "step": "batch"}),
    ("Slurm, v2", "0::/system.slice/slurmstepd.scope/job_77/step_extern/user/task_0", {"job": "77", "step": "extern"}),
    ("Slurm, v2, named", "0::/system.slice/gpu-01_slurmstepd.scope/job_77/step_0/user", {"job": "77", "step": "0"}),
    (
        "version 1 and 2 together",
        "4:devices:/slurm/uid_1000/job_123/step_0\n1:name=systemd:/system.slice/slurmd.service\n0::/",
        {"job": "123", "step": "0", "unit": "slurmd.service"},
    ),
]


@pytest.mark.parametrize(("text", "expected"), [pytest.param(text, owner, id=name) for name, text, owner in PLACES])
def test_control_groups(text: str, expected: dict[str, Any]) -> None:
    assert parse_cgroup(text) == Owner(**expected)


def test_this_process() -> None:
    me = identity.identify(os.getpid())
    assert me.pid == os.getpid() and me.ppid == os.getppid() and me.pids[0] == os.getpid()
    words = Path("/proc/self/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    assert me.state in "RS" and me.command.startswith(words[0])


def test_a_process_that_has_gone(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        identity.identify(4242, str(tmp_path))


def person(comm: str, **owner: Any) -> identity.Identity:
    return identity.Identity(500, (500,), 1, 500, 500, comm[:15], comm, "S", "alice", None, Owner(**owner))


@pytest.mark.parametrize(
    "name",
    [
        "nvidia-persistenced",
        "nv-hostengine",
        "dcgm-exporter",
        "nv-fabricmanager",
        "nvlsm",
        "nvidia-imex",
        "nvidia-gridd",
        "nvidia-topologyd",
        "nvidia-mig-manager",
        "nvidia-cuda-mps-control",
        "nvsm-core",
        "nvidia-powerd",
        "telegraf",
        "node_exporter",
        "nomad",
        "nvidia-device-plugin",
    ],
)
def test_known_managers(name: str) -> None:
    assert holders.classify(person(name), {"control", "gpu", "compute"}) == "management"


@pytest.mark.parametrize(
    ("who", "roles", "kind"),
    [
        pytest.param(person("python"), {"control", "gpu", "compute"}, "workload", id="a CUDA context"),
        pytest.param(person("agent"), {"control", "gpu"}, "management", id="NVML only"),
        pytest.param(person("Xorg"), {"display", "control"}, "system", id="display server"),
        pytest.param(person("gnome-shell", unit="gdm.service"), {"display"}, "system", id="desktop"),
        pytest.param(person("cat"), {"gpu"}, "unknown", id="a bare GPU node"),
        pytest.param(person("Xorg", container=ID), {"gpu", "compute"}, "workload", id="a container's own display"),
    ],
)
def test_kinds(who: identity.Identity, roles: set[str], kind: str) -> None:
    assert holders.classify(who, roles) == kind


@pytest.mark.parametrize(
    ("who", "argv"),
    [
        pytest.param(person("a", unit="train.service"), ("systemctl", "stop", "train.service"), id="unit"),
        pytest.param(
            person("a", unit="nb.service", user_unit_of=1000),
            ("systemctl", "--user", "--machine=1000@.host", "stop", "nb.service"),
            id="user unit",
        ),
        pytest.param(person("a", job="77", step="0"), ("scontrol", "requeue", "77"), id="Slurm job"),
        pytest.param(person("a", pod=POD, container=ID, runtime="containerd"), (), id="pod"),
        pytest.param(person("a", container=ID, runtime="podman"), ("podman", "stop", ID[:12]), id="podman"),
        pytest.param(person("a", container=ID), (), id="unknown runtime"),
        pytest.param(person("a", session="3"), ("kill", "-TERM", "500"), id="session"),
        pytest.param(person("systemd-logind"), ("systemctl", "isolate", "multi-user.target"), id="logind"),
    ],
)
def test_what_makes_it_let_go(who: identity.Identity, argv: tuple[str, ...]) -> None:
    assert holders.release(who, "workload", None).argv == argv
