# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A made machine with the stand-in libcuda, and real processes that compute on it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend

SOURCES = Path(__file__).parents[2] / "lab/standin/userland"
VERSION = "535.183.01"
SCRIPT = str(Path(suspend.__file__))
WORK = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context, memory, value = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64(7)
assert not cuda.cuInit(0) and not cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
assert not cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20))
while True:
    assert not cuda.cuMemcpyHtoD_v2(memory, ctypes.byref(value), ctypes.c_size_t(8))
    got = ctypes.c_uint64()
    time.sleep(0.02)
    assert not cuda.cuMemcpyDtoH_v2(ctypes.byref(got), memory, ctypes.c_size_t(8))
    if got.value != value.value:
        sys.exit("GPU memory is wrong")
    value.value += 1
    print(value.value, flush=True)
"""


def uuid(gpu: int, serial: int = 0) -> str:
    return f"GPU-5ca1ab1e-{serial:04x}-4000-8000-{gpu:012d}"


@dataclass
class Gpus:
    """A made machine with two GPUs, and processes on it."""

    root: Path
    environment: dict[str, str]
    processes: list[subprocess.Popen[str]]

    def machine(self, serial: int = 0, version: str = VERSION) -> None:
        """The machine as it is from now on: another serial number is another machine's GPUs."""
        proc = self.root / "proc/driver/nvidia"
        for gpu in range(2):
            place = proc / f"gpus/0000:0{gpu + 1}:00.0"
            place.mkdir(parents=True, exist_ok=True)
            (place / "information").write_text(f"Model: A\nGPU UUID: {uuid(gpu, serial)}\nDevice Minor: {gpu}\n")
        (proc / "version").write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  R\n")

    def knobs(self, *lines: str) -> None:
        (self.root / "run/nvidia-standin/state").write_text("".join(f"{line}\n" for line in lines))

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORK],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self.environment,
        )
        self.processes.append(process)
        assert process.stdout
        process.stdout.readline()
        return process

    def ask(self, action: str, *pids: int, timeout: float = 30, **options: Any) -> dict[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, SCRIPT, action, json.dumps(options), *map(str, pids)],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
            timeout=timeout,
            check=True,
        )
        return {said["pid"]: said for said in map(json.loads, done.stdout.splitlines())}

    def devices(self, pid: int) -> list[str]:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: PTH115
        return sorted(Path(link).name for link in links if "/dev/nvidia" in link)


def goes_on(process: subprocess.Popen[str]) -> bool:
    """Whether a process computes, and computes right: it ends itself when its GPU memory is not what it wrote."""
    assert process.stdout
    while process.stdout.readline():
        if not select_ready(process):
            break
    first = int(process.stdout.readline() or 0)
    return int(process.stdout.readline() or 0) == first + 1


def select_ready(process: subprocess.Popen[str]) -> bool:
    return bool(select.select([process.stdout], [], [], 0)[0])
