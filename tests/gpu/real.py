# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only a real GPU can tell: whether the driver's checkpoint calls do what we think, and how long they take.

A process with known contents in GPU memory is locked, checkpointed, restored and unlocked; its contents are compared.
Only the standard library and the driver are needed. Everything seen goes into one JSON file and, in short, to the
terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.host import cuda, gpus, holders, nvml

SIZES_GIB = (1, 8, 32)
END = time.monotonic() + 330
WORK = """
import ctypes, hashlib, os, signal, sys
size = int(sys.argv[1]) << 30
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name}: CUDA error {code}")
context, memory, device = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
block = 64 << 20
seed = os.urandom(1 << 20)
def piece(offset):
    return ((offset // block).to_bytes(8, "little") + seed)[: 1 << 20] * (block >> 20)
for offset in range(0, size, block):
    call("cuMemcpyHtoD_v2", ctypes.c_uint64(memory.value + offset), piece(offset), ctypes.c_size_t(block))
call("cuCtxSynchronize")
print("ready", flush=True)
got = ctypes.create_string_buffer(block)
for line in sys.stdin:
    wrong = 0
    for offset in range(0, size, block):
        call("cuMemcpyDtoH_v2", got, ctypes.c_uint64(memory.value + offset), ctypes.c_size_t(block))
        wrong += got.raw != piece(offset)
    print("wrong", wrong, flush=True)
"""

result: dict[str, Any] = {"kernel": platform.release(), "python": platform.python_version()}


def say(text: str) -> None:
    print(f"[{END - time.monotonic():4.0f} s left] {text}", flush=True)


class Work:
    """A process with ``gib`` GiB of known contents on GPU 0."""

    def __init__(self, gib: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORK, str(gib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        if self.line(120) != "ready":
            raise RuntimeError("the process did not get its GPU memory")

    def line(self, seconds: float) -> str:
        signal.alarm(int(seconds))
        try:
            return str(self.process.stdout.readline()).strip() if self.process.stdout else ""
        finally:
            signal.alarm(0)

    def wrong(self) -> str:
        """Pieces of its memory that are not what it wrote."""
        if self.process.stdin:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return self.line(60)

    def end(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def ask(action: str, pid: int, timeout: float = 60) -> dict[str, Any]:
    began = time.monotonic()
    script = str(Path(suspend.__file__))
    done = execution.run([sys.executable, script, action, json.dumps({"timeout": 10}), str(pid)], timeout=timeout)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[0]) if done.stdout.strip() else {"code": None}
    return {**said, "seconds": round(time.monotonic() - began, 3), "stderr": done.stderr[-300:]}


def devices(pid: int) -> list[str]:
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(path))  # noqa: PTH115
    return sorted({link for link in links if "/dev/nvidia" in link})


def resident(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS")) * 1024


def look_at_the_machine() -> None:
    loaded = gpus.read_loaded()
    report = nvml.observe(20)
    result["driver"] = loaded.as_dict() if loaded else None
    result["nvml"] = {"status": report.status, "gpus": report.gpus}
    say(f"driver {loaded.version if loaded else '?'}, {len(report.gpus)} GPUs, NVML {report.status}")
    uuids = [str(gpu["uuid"]) for gpu in report.gpus if gpu.get("uuid")]
    result["compute"] = [one.as_dict() for one in cuda.compute_on(uuids[:1], 60)]
    say(f"compute: {result['compute']}")
    census = holders.take(run=execution.run)
    result["census"] = {
        "order": list(census.order), "complete": census.complete, "processes": [one.title for one in census.processes],
        "unexplained": dict(census.unexplained), "modules": [one.as_dict() for one in census.modules.values()],
    }  # fmt: skip
    say(f"holders: {result['census']['processes']}; unexplained {result['census']['unexplained']}")


def there_and_back(gib: int) -> dict[str, Any]:
    found: dict[str, Any] = {"gib": gib}
    work = Work(gib)
    try:
        found["look"] = ask("look", work.pid)
        found["rss_before"], found["devices_before"] = resident(work.pid), devices(work.pid)
        for action in ("lock", "checkpoint"):
            found[action] = ask(action, work.pid, 120)
            say(f"{gib} GiB {action}: {found[action]}")
            if found[action]["code"] != 0:
                return found
        found["rss_suspended"], found["devices_suspended"] = resident(work.pid), devices(work.pid)
        found["nvml_suspended"] = work.pid in nvml.usage(20)
        census = holders.take(run=execution.run)
        found["census_suspended"] = [{"pid": one.process.pid, "state": one.state} for one in census.suspended]
        found["references_suspended"] = {name: one.references for name, one in census.modules.items()}
        if gib == SIZES_GIB[0]:
            work.process.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            found["state_while_stopped"] = ask("look", work.pid, 10)
            work.process.send_signal(signal.SIGCONT)
        for action in ("restore", "unlock"):
            found[action] = ask(action, work.pid, 120)
            say(f"{gib} GiB {action}: {found[action]}")
        found["contents"] = work.wrong()
        found["nvml_after"] = work.pid in nvml.usage(20)
        say(f"{gib} GiB contents: {found['contents']}")
    finally:
        work.end()
    return found


def late(*dummy: object) -> None:
    raise TimeoutError("no answer of the process in time")


def main() -> int:
    signal.signal(signal.SIGALRM, late)
    target = Path(sys.argv[1])
    ok = True
    try:
        look_at_the_machine()
        result["criu"] = execution.run(["criu", "check"], timeout=60).describe()
        result["cuda_checkpoint"] = execution.run(["cuda-checkpoint", "--help"], timeout=30).describe()
        result["moves"] = []
        for gib in SIZES_GIB:
            memory = [gpu["memory"] for gpu in result["nvml"]["gpus"] if gpu.get("memory")]
            free = memory[0]["total"] - memory[0]["used"] if memory else 0
            if END - time.monotonic() < 20 + 5 * gib or free < (gib + 2) << 30:
                say(f"{gib} GiB left out: no time or no memory for it")
                continue
            found = there_and_back(gib)
            result["moves"].append(found)
            ok = ok and found.get("contents") == "wrong 0" and not found.get("devices_suspended")
    except Exception as exc:
        result["error"] = f"{type(exc).__name__}: {exc}"
        say(result["error"])
        ok = False
    target.write_text(json.dumps(result, indent=1, default=str) + "\n")
    say(f"{'as expected' if ok else 'NOT as expected'}; details: {target}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
