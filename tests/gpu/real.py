# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only a real GPU can tell: whether the driver's checkpoint calls do what we think, and how long they take.

A process with known contents in GPU memory, at work on it, is locked, checkpointed, restored and unlocked; its contents
are compared. Everything seen goes into one JSON file and, in short, to the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend, tree
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import detect
from ansible_collections.gpufleet.driver.plugins.module_utils.host import facts, gpus, holders, nvml, validation

END = time.monotonic() + 330
HEADROOM = 2 << 30

# Counts on the GPU until a line comes, and then says how many pieces of its memory, or counts, are wrong.
WORK = """
import ctypes, os, select, sys
ctypes.CDLL(None).prctl(1, 9)
kind, size = sys.argv[1], int(sys.argv[2]) << 20
seed = int.from_bytes(os.urandom(4), "little")
if kind == "driver":
    cuda = ctypes.CDLL("libcuda.so.1")
    def call(name, *arguments):
        code = getattr(cuda, name)(*arguments)
        if code:
            sys.exit(f"{name}: CUDA error {code}")
    context, memory, device, count = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    call("cuMemAlloc_v2", ctypes.byref(count), ctypes.c_size_t(8))
    step = 64 << 20
    got, number = ctypes.create_string_buffer(step), ctypes.c_uint64()
    call("cuMemcpyHtoD_v2", count, ctypes.byref(number), ctypes.c_size_t(8))
    block = os.urandom(1 << 20)
    def known(at):
        return (at.to_bytes(8, "little") + block)[: 1 << 20] * (step >> 20)
    def write(at):
        call("cuMemcpyHtoD_v2", ctypes.c_uint64(memory.value + at), known(at), ctypes.c_size_t(step))
    def right(at):
        call("cuMemcpyDtoH_v2", got, ctypes.c_uint64(memory.value + at), ctypes.c_size_t(step))
        return got.raw == known(at)
    def add():
        value = ctypes.c_uint64(counted() + 1)
        call("cuMemcpyHtoD_v2", count, ctypes.byref(value), ctypes.c_size_t(8))
    def counted():
        call("cuMemcpyDtoH_v2", ctypes.byref(number), count, ctypes.c_size_t(8))
        return number.value
else:
    step = 1 << 24
    size >>= 3
    if kind == "torch":
        import torch
        memory = torch.empty(size, dtype=torch.int64, device="cuda")
        count = torch.zeros(1, dtype=torch.int64, device="cuda")
        def known(at, where):
            return torch.arange(at, min(at + step, size), dtype=torch.int64, device=where) * 40503 + seed
        same, to_host, gpu, host = torch.equal, lambda piece: piece.cpu(), "cuda", "cpu"
    else:
        import cupy, numpy
        memory, count = cupy.empty(size, "int64"), cupy.zeros(1, "int64")
        def known(at, where):
            return where.arange(at, min(at + step, size), dtype="int64") * 40503 + seed
        same, to_host, gpu, host = (lambda one, other: bool((one == other).all())), cupy.asnumpy, cupy, numpy
    def write(at):
        memory[at:at + step] = known(at, gpu)
    def right(at):
        piece = memory[at:at + step]
        return same(piece, known(at, gpu)) and same(to_host(piece), known(at, host))
    def add():
        count.__iadd__(1)
        counted()
    def counted():
        return int(count[0])
for at in range(0, size, step):
    write(at)
steps = 0
print("ready", flush=True)
while True:
    if select.select([0], [], [], 0)[0]:
        if not os.read(0, 100):
            break
        wrong = sum(not right(at) for at in range(0, size, step)) + (counted() != steps)
        print("wrong", wrong, "steps", steps, flush=True)
    add()
    steps += 1
"""

result: dict[str, Any] = {"kernel": platform.release(), "python": platform.python_version(), "moves": []}
wrong: list[str] = []


def left() -> float:
    return END - time.monotonic()


def say(text: str) -> None:
    print(f"[{left():4.0f} s left] {text}", flush=True)


def expect(right: bool, text: str) -> None:
    if not right:
        wrong.append(text)
        say(f"NOT as expected: {text}")


class Work:
    """A process with ``mib`` MiB of known contents on a GPU."""

    def __init__(self, python: str, kind: str, mib: int, gpu: str) -> None:
        self.process = subprocess.Popen(
            [python, "-c", WORK, kind, str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
        )
        self.pid = self.process.pid
        try:
            if self.line(min(120, left())) != "ready":
                raise RuntimeError(f"the process did not get its GPU memory (exit status {self.process.poll()})")
        except BaseException:
            self.end()
            raise

    def line(self, seconds: float) -> str:
        """What it says next; empty if it says nothing in time."""
        stream = self.process.stdout
        if not stream or not select.select([stream], [], [], max(0.0, seconds))[0]:
            return ""
        return stream.readline().decode().strip()

    def count(self) -> tuple[str, int]:
        """How many pieces of its memory are not what it wrote, as it says, and how many steps it has done."""
        if self.process.stdin:
            self.process.stdin.write(b"?\n")
            self.process.stdin.flush()
        said = self.line(min(120, left())).split()
        return (said[1], int(said[3])) if len(said) == 4 else ("no answer", 0)

    def end(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def ask(action: str, pid: int, seconds: float) -> dict[str, Any]:
    """One act of the driver on a process, in a child as on a node."""
    began = time.monotonic()
    argv = [sys.executable, str(Path(suspend.__file__)), action, json.dumps({"timeout": 10}), str(pid)]
    done = execution.run(argv, timeout=max(1.0, min(seconds, left() - 10)))
    said: dict[str, Any] = {"code": None, "state": suspend.UNKNOWN}
    with contextlib.suppress(ValueError, IndexError):
        said = json.loads(done.stdout.splitlines()[0])
    told = {**said, "seconds": round(time.monotonic() - began, 3)}
    return told if done.ok and said["code"] is not None else {**told, "said": done.describe()}


def devices(pid: int) -> list[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))  # noqa: PTH115
    return sorted(name for name in found if "/dev/nvidia" in name)


def seen(pid: int, gpu: str) -> dict[str, Any]:
    """What the kernel, NVML and our census say of the process at this moment."""
    text = Path(f"/proc/{pid}/status").read_text()
    memory = next((one.get("memory") for one in nvml.observe(20).gpus if one.get("uuid") == gpu), None) or {}
    census = holders.take(run=execution.run)
    return {
        "rss": next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmRSS")),
        "devices": devices(pid),
        "nvml_lists_it": pid in nvml.usage(20),
        "gpu_memory_used": memory.get("used"),
        "module_references": {name: module.references for name, module in census.modules.items()},
        "holders": [one.title for one in census.processes],
        "unexplained": dict(census.unexplained),
        "suspended": {one.process.pid: one.state for one in census.suspended},
        "at_stake": pid in [one.process.pid for one in census.suspended_at_stake],
    }


def look_at_the_machine() -> tuple[str, int]:
    """UUID of the GPU with the most free memory, and those bytes."""
    result["driver_info"] = facts.observe(execution.run)
    result["installed"] = detect.detect(run=execution.run).as_dict()
    loaded = gpus.read_loaded()
    report = nvml.observe(20)
    say(f"driver {loaded.version if loaded else '?'}, {len(report.gpus)} GPUs, NVML {report.status}")
    expect(report.ok and bool(report.gpus), f"NVML lists GPUs, but it says {report.status}")
    census = holders.take(run=execution.run)
    result["module_holders_info"] = census.as_dict()
    say(f"held by {[one.title for one in census.processes]}; unexplained {dict(census.unexplained)}")
    if not census.complete:
        say("not the whole host can be seen from here: is this a container?")
    verdict = validation.validate(execution.run, validation.Wanted(version=loaded.version if loaded else None))
    result["driver_validate"] = verdict.as_dict()
    for finding in verdict.checks:
        say(f"validated: {finding.check} {finding.level}: {finding.message}")
    expect(verdict.ok, "driver_validate finds no error")
    result["criu"] = execution.run(["criu", "check"], timeout=60).describe()
    result["cuda_checkpoint"] = execution.run(["cuda-checkpoint", "--help"], timeout=30).describe()
    say(f"criu: {result['criu'][:150]}")
    cards = [gpu for gpu in report.gpus if gpu.get("memory")]
    room, uuid = max(
        ((gpu["memory"]["total"] - gpu["memory"]["used"], str(gpu["uuid"])) for gpu in cards), default=(0, "")
    )
    return uuid, room


def kind_of(python: str) -> str:
    """What the process is made of: a framework that PYTHON has, or else bare calls of the driver."""
    for kind in ("torch", "cupy"):
        if execution.run([python, "-c", f"import {kind}"], timeout=60).ok:
            return kind
    say(f"{python} has neither PyTorch nor CuPy, so bare calls of the driver are used; name one with --python that has")
    return "driver"


def there_and_back(python: str, kind: str, mib: int, gpu: str) -> None:
    found: dict[str, Any] = {"mib": mib, "kind": kind}
    result["moves"].append(found)
    began = time.monotonic()
    work = Work(python, kind, mib, gpu)

    def act(action: str, state: str, seconds: float) -> bool:
        found[action] = ask(action, work.pid, seconds)
        done = found[action]["code"] == 0 and found[action]["state"] == state
        expect(done, f"{mib} MiB: {action} ends in {state}, but: {found[action]}")
        return done

    try:
        found["filled"] = round(time.monotonic() - began, 1)
        found["look"] = ask("look", work.pid, 60)
        expect(found["look"]["state"] == suspend.RUNNING, f"{mib} MiB: it is running, but: {found['look']}")
        found["before"] = seen(work.pid, gpu)
        steps = work.count()[1]
        if not (act("lock", suspend.LOCKED, 30) and act("checkpoint", suspend.CHECKPOINTED, 120)):
            return
        found["while"] = now = seen(work.pid, gpu)
        expect(not now["devices"], f"suspended, it has no device open, but: {now['devices']}")
        expect(not now["nvml_lists_it"], "suspended, NVML does not list it")
        expect(now["at_stake"], f"module_holders_info tells of the suspended process, but: {now['suspended']}")
        was, held = found["before"], now["holders"] or now["unexplained"]
        say(f"{mib} MiB suspended: {now['rss'] >> 20} MiB of host memory")
        say(f"GPU memory used: {was['gpu_memory_used']} → {now['gpu_memory_used']}")
        say(f"references to modules: {was['module_references']} → {now['module_references']}")
        say(f"rmmod would {f'be refused, by {held}' if held else 'succeed, and this process be lost'}")
        work.process.send_signal(signal.SIGSTOP)
        found["while_stopped"] = ask("look", work.pid, 10)
        work.process.send_signal(signal.SIGCONT)
        if not (act("restore", suspend.LOCKED, 120) and act("unlock", suspend.RUNNING, 30)):
            return
        found["contents"], done = work.count()
        expect(found["contents"] == "0", f"{mib} MiB: no piece of its memory is wrong, but: {found['contents']}")
        expect(done > steps, f"{mib} MiB: it goes on computing, but: {steps} steps before, {done} after")
        found["after"] = seen(work.pid, gpu)
        expect(found["after"]["nvml_lists_it"], f"{mib} MiB: NVML lists it again")
    finally:
        work.end()


def table() -> None:
    print("    MiB  made of     lock  checkpoint (GiB/s)   restore (GiB/s)   unlock   memory")
    for found in result["moves"]:
        times = {act: found.get(act, {}).get("seconds") for act in ("lock", "checkpoint", "restore", "unlock")}
        if None in times.values():
            print(f"{found['mib']:7}  {found['kind']:8}  did not get that far: {times}")
            continue
        rows = [f"{found['mib']:7}  {found['kind']:8}", f"{times['lock']:6.2f} s"]
        for act in ("checkpoint", "restore"):
            rows.append(f"{times[act]:7.2f} s ({found['mib'] / 1024 / times[act]:5.2f})")
        print(*rows, f"{times['unlock']:6.2f} s  ", "whole" if found.get("contents") == "0" else "WRONG")
    print("Seconds are those of a child that enters the driver, as on a node: with its start, and CUDA's.")


def ended(*dummy: object) -> None:
    raise TimeoutError("told to end")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run")
    parser.add_argument("--result", type=Path, default=Path("gpu-result.json"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--mib", type=int, nargs="+", default=[1024, 8192, 32768])
    options = parser.parse_args()
    if any(mib <= 0 or mib % 64 for mib in options.mib):
        parser.error("--mib takes multiples of 64")
    signal.signal(signal.SIGTERM, ended)
    try:
        gpu, room = look_at_the_machine()
        calls = ask("look", os.getpid(), 60)
        if calls["code"] == suspend.NO_CALL:
            say(f"skipped: this driver has no checkpoint calls, as 570 and newer do ({calls.get('error')})")
        kind = kind_of(options.python)
        for mib in options.mib if calls["code"] != suspend.NO_CALL else ():
            on_host = tree.memory_available()
            if left() < 30 + mib / 200 or min(room, on_host) < (mib << 20) + HEADROOM:
                say(f"{mib} MiB left out: {left():.0f} s, {room >> 20} MiB on the GPU, {on_host >> 20} MiB on the host")
                continue
            there_and_back(options.python, kind, mib, gpu)
        table()
    except Exception as exc:
        expect(False, f"{type(exc).__name__}: {exc}")
    result["wrong"] = wrong
    options.result.write_text(json.dumps(result, indent=1, default=str) + "\n")
    say(f"{'as expected' if not wrong else f'{len(wrong)} NOT as expected'}; details: {options.result.resolve()}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
