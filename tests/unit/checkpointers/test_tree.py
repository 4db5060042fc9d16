# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is seen in a process that a checkpoint would not survive, each by its name. Ids are rows of
docs/public-failures.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import tree

STAT = "{pid} (work) S 1 40 40 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0\n"
STATUS = "Name:\twork\nTracerPid:\t{tracer}\nVmRSS:\t   2048 kB\nNSpid:\t40\n"
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup")


class Proc:
    """A /proc with one process, PID 40, and whoever looks at it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.own = root / "40"
        for folder in ("ns", "fd", "fdinfo", "task/40"):
            (self.own / folder).mkdir(parents=True)
        (root / "self/ns").mkdir(parents=True)
        for name in NAMESPACES:
            for one in (self.own, root / "self"):
                (one / "ns" / name).symlink_to(f"{name}:[1]")
        (self.own / "stat").write_text(STAT.format(pid=40))
        self.traced_by(0)
        self.environ()
        self.maps()

    def traced_by(self, pid: int) -> None:
        (self.own / "status").write_text(STATUS.format(tracer=pid))

    def environ(self, *words: str) -> None:
        (self.own / "environ").write_text("".join(f"{word}\0" for word in ("PATH=/usr/bin", *words)))

    def maps(self, *paths: str) -> None:
        rows = [f"7f0000000000-7f0000001000 r--p 00000000 08:01 {n} {path}" for n, path in enumerate(paths, 1)]
        (self.own / "maps").write_text("\n".join(["55-56 rw-p 00000000 00:00 0 [heap]", *rows, ""]))

    def has_open(self, target: str) -> None:
        (self.own / "fd/3").symlink_to(target)
        (self.own / "fdinfo/3").write_text("pos:\t0\nflags:\t0100001\n")

    def in_another(self, namespace: str) -> None:
        (self.own / "ns" / namespace).unlink()
        (self.own / "ns" / namespace).symlink_to(f"{namespace}:[2]")

    def has_probes(self) -> None:
        (self.own / "maps").write_text("7fffffffe000-7fffffffffff --xp 00000000 00:00 0 [uprobes]\n")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


FEATURES: dict[str, tuple[Callable[[Proc], Any], list[str]]] = {
    "nothing": (lambda proc: None, []),
    "C-05-cuda-checkpoint#14-verbs": (lambda proc: proc.has_open("/dev/infiniband/uverbs0"), ["rdma"]),
    "C-15-cuda-checkpoint#42-mig-by-name": (lambda proc: proc.environ("CUDA_VISIBLE_DEVICES=MIG-1"), ["mig"]),
    "C-15-cuda-checkpoint#42-mig-by-device": (lambda proc: proc.has_open("/dev/nvidia-caps/nvidia-cap66"), ["mig"]),
    "C-16-cuda-checkpoint#43-launch-job": (
        lambda proc: proc.environ("CUDA_CHECKPOINT_JOB_FILE=/proc/self/fd/5"),
        ["launch_job"],
    ),
    "C-27-criu#2601-nested-container": (lambda proc: proc.in_another("pid"), ["namespace_pid"]),
    "C-46-gvisor#9363-sandbox": (lambda proc: proc.in_another("mnt"), ["namespace_mnt"]),
    "C-44-snapshot-pull-168-probes": (Proc.has_probes, ["uprobes"]),
    "C-44-snapshot-pull-168-preload": (lambda proc: proc.environ("LD_PRELOAD=/opt/monitor.so"), ["preload"]),
    "mps-by-pipe": (lambda proc: proc.environ("CUDA_MPS_PIPE_DIRECTORY=/run/mps"), ["mps"]),
    "mps-by-share": (lambda proc: proc.environ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"), ["mps"]),
    "imex": (lambda proc: proc.has_open("/dev/nvidia-caps-imex-channels/channel0"), ["imex"]),
    "io-uring": (lambda proc: proc.has_open("anon_inode:[io_uring]"), ["io_uring"]),
    "debugger": (lambda proc: proc.traced_by(39), ["ptrace"]),
    "uvm-open-is-normal": (lambda proc: proc.has_open("/dev/nvidia-uvm"), []),
}


@pytest.mark.parametrize(("make", "features"), FEATURES.values(), ids=FEATURES)
def test_what_breaks_a_checkpoint_is_named(proc: Proc, make: Callable[[Proc], Any], features: list[str]) -> None:
    make(proc)
    assert [feature for feature, dummy in tree.look(40, str(proc.root)).problems] == features


def test_what_a_process_maps_is_told_apart(proc: Proc) -> None:
    proc.maps(
        "/usr/lib/libcuda.so.580.95.05", "/usr/lib/libnccl.so.2", "/dev/shm/arrays", "/dev/shm/gone (deleted)",
        "/dev/nvidia0", "/memfd:x (deleted)",
    )  # fmt: skip
    seen = tree.look(40, str(proc.root))
    assert (seen.cuda, seen.nccl) == ("580.95.05", True)
    assert seen.shared == ("/dev/shm/arrays",), "C-32: CRIU saves its name alone"
    assert [path for path, dummy in seen.libraries] == ["/usr/lib/libcuda.so.580.95.05", "/usr/lib/libnccl.so.2"]


def test_libcuda_of_unknown_version_is_cuda_all_the_same(proc: Proc) -> None:
    proc.maps("/opt/libcuda.so.1")
    assert tree.look(40, str(proc.root)).cuda == "of unknown version"


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_headroom_of_all_groups_above_counts(tmp_path: Path, version: int) -> None:
    top = tmp_path / "fs/cgroup" / ("memory" if version == 1 else "")
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    )
    for folder, most, now in (("a", "1000", 400), ("a/b", "9223372036854771712" if version == 1 else "max", 300)):
        (top / folder).mkdir(parents=True)
        (top / folder / limit).write_text(f"{most}\n")
        (top / folder / used).write_text(f"{now}\n")
    assert tree.cgroup_headroom("/a/b", str(tmp_path)) == 600
    assert tree.cgroup_headroom("/other", str(tmp_path)) is None


def test_an_id_of_the_work_that_somebody_has_is_named() -> None:
    assert list(tree.taken([os.getpid(), 4_100_000])) == [os.getpid()], "C-56-dynamo#4189"
