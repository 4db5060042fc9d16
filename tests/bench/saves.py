# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A process with 1 GiB of "GPU" memory, saved and restored by bare CRIU and by us, on this machine.

CRIU and the kernel are real. The stand-in libcuda has the driver's checkpoint calls. There is no systemd here, so
starting and ending the unit is done directly; what is measured is the same without the few daemon-reloads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import Work
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cuda_criu import CudaCriu
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import Service
from ansible_collections.gpufleet.driver.plugins.module_utils.host import nvml

SIZE = 1 << 30


def _criu() -> str:
    """The one named, or that of the labs."""
    built = Path(__file__).parents[1] / "lab/criu/build"
    done = subprocess.run([built], stdout=subprocess.PIPE, text=True, check=False)
    return f"{done.stdout.strip()}/layer/usr/local/sbin/criu" if done.returncode == 0 else "criu"


CRIU = os.environ.get("GPUFLEET_CRIU") or _criu()
SOURCES = Path(__file__).parents[1] / "lab/standin/userland"
VERSION = "535.183.01"
GROUP = "gpufleet-bench"
WORK = f"""
import ctypes, os, time
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
assert not cuda.cuInit(0) and not cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
assert not cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t({SIZE}))
block = os.urandom(1 << 20)
for offset in range(0, {SIZE}, 1 << 20):
    assert not cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(memory.value + offset), block, ctypes.c_size_t(1 << 20))
os.write(1, b"ready\\n")
devnull = os.open("/dev/null", os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(devnull, descriptor)
while True:
    time.sleep(0.05)
    assert not cuda.cuCtxSynchronize()
"""


class Unit(Service):
    """What stands for the systemd unit: a control group with the process in it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(execution.run, "bench.service", str(folder / "runtime"), str(folder / "lasting"))
        self.environment = environment
        self.pid = 0

    def launch(self) -> None:
        """Start the process, and wait until it has its memory."""
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", WORK],
            env=self.environment, stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        if os.read(reading, 16) != b"ready\n":
            raise SystemExit("the process to be saved did not start")
        os.close(reading)
        self.pid = process.pid
        self.join()

    def join(self) -> None:
        place = Path("/sys/fs/cgroup/unified" if Path("/sys/fs/cgroup/unified").is_dir() else "/sys/fs/cgroup", GROUP)
        place.mkdir(exist_ok=True)
        (place / "cgroup.procs").write_text(str(self.pid))

    def show(self) -> dict[str, str]:
        alive = self.pid and Path(f"/proc/{self.pid}").exists()
        return {"ActiveState": "active" if alive else "inactive", "MainPID": str(self.pid), "ControlGroup": f"/{GROUP}"}

    def start_from(self, argv: Sequence[str], pid_file: Path, identifier: str, timeout: float) -> execution.Completed:
        done = execution.run(argv, timeout=timeout)
        if done.ok:
            self.pid = int(pid_file.read_text())
            self.join()
        return done

    def end(self, alive: Any, timeout: float) -> None:
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        while Path(f"/proc/{self.pid}").exists():
            time.sleep(0.01)

    def fragment(self) -> str:
        return ""

    def arm(self, argv: Sequence[str], seconds: float) -> None: ...
    def disarm(self) -> None: ...
    def reset(self) -> None: ...
    def reload(self) -> None: ...


class Bench:
    """Both ways of saving and restoring, on the same kind of process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        root = folder / "root"
        for name in ("run/nvidia-standin", "dev", "proc/driver/nvidia/gpus/0000:01:00.0"):
            (root / name).mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  x\n"
        )
        (root / "proc/driver/nvidia/gpus/0000:01:00.0/information").write_text(
            "Model: A\nGPU UUID: GPU-5ca1ab1e-0000-4000-8000-000000000000\nDevice Minor: 0\n"
        )
        for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
            (root / "dev" / name).touch()
        subprocess.run(
            [
                *("gcc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"),
                f'-DSTANDIN_VERSION="{VERSION}"',
                *("-o", folder / "libcuda.so.1", SOURCES / "cuda.c", SOURCES / "standin.c"),
            ],
            check=True,
        )
        os.environ.update(NVIDIA_STANDIN_ROOT=str(root), LD_LIBRARY_PATH=str(folder))
        self.unit = Unit(folder, dict(os.environ))
        self.work = Work("bench", "bench.service")

    def ours(self, name: str) -> CudaCriu:
        empty = nvml.Report("ok", "", None, None, None, None, [])
        return CudaCriu(
            execution.run, str(self.folder / name), str(self.folder / name / "store"), criu=CRIU,
            limits=Limits(settle=0.0), observe=lambda: empty, usage=dict, service=lambda dummy: self.unit,
        )  # fmt: skip

    def suspend(self, *actions: str) -> float:
        """Seconds that the driver's checkpoint calls take for the process, without the start of a program for each."""

        def ask(action: str) -> float:
            began = time.monotonic()
            script = [sys.executable, suspend.__file__, action, "{}", str(self.unit.pid)]
            subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
            return time.monotonic() - began

        asked = [ask(action) for action in actions]
        return sum(asked) - len(actions) * ask("look")

    def fresh(self) -> None:
        """A new process, and nothing left to be written of what was saved before."""
        self.end()
        for made in ("bare", "ours"):
            shutil.rmtree(self.folder / made, ignore_errors=True)
        os.sync()
        self.unit.launch()

    def end(self) -> None:
        self.unit.end(lambda: [], 10)

    def criu_dump(self) -> float:
        """Seconds for what anybody must do: memory out of the GPU, and a dump into the page cache."""
        images = self.folder / "bare"
        images.mkdir()
        suspended = self.suspend("lock", "checkpoint")
        began = time.monotonic()
        argv = [CRIU, "dump", "-t", str(self.unit.pid), "-D", images, "-o", "dump.log", "--leave-stopped"]
        subprocess.run(argv, check=True)
        return suspended + time.monotonic() - began

    def durable(self) -> float:
        """Seconds that such a dump takes to be on disk and hashed, both at once: what keeps a save from being lost by a
        machine that fails, and tells a whole one from a damaged one."""
        began = time.monotonic()
        images = sorted((self.folder / "bare").iterdir())
        commands = [subprocess.Popen([tool, *images], stdout=subprocess.DEVNULL) for tool in ("sync", "sha256sum")]
        codes = [command.wait() for command in commands]
        if any(codes):
            raise SystemExit("the dump could not be written or hashed")
        return time.monotonic() - began

    def criu_restore(self) -> float:
        """Seconds for what anybody must do: the processes from the page cache, and memory back into the GPU."""
        began = time.monotonic()
        subprocess.run([CRIU, "restore", "-D", self.folder / "bare", "-d", "-o", "restore.log"], check=True)
        return time.monotonic() - began + self.suspend("restore", "unlock")


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """:raises SystemExit: with 0 where CRIU does not work, having said so."""
    checked = execution.run([CRIU, "check"], timeout=60)
    if not checked.ok:
        print(
            f"skipped: {checked.describe()}. CRIU does not work on this kernel; name one that does with "
            f"GPUFLEET_CRIU=/path/to/criu (4.2 works with Linux 6.18)",
            file=sys.stderr,
        )
        raise SystemExit(0)
    variables = {name: os.environ.get(name) for name in ("NVIDIA_STANDIN_ROOT", "LD_LIBRARY_PATH")}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        made = Bench(Path(name))
        try:
            yield made
        finally:
            made.end()
            for key, value in variables.items():
                os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)
