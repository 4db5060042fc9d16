# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A visible GPU workload: counts steps on a GPU, and shows whether one was ever lost or done twice.

The count and a pattern live in GPU memory (GPU_MIB of it, default 4): each step reads the count, adds one, writes it
back, and appends "STEP HOST" to steps.log before the next. It shows itself at
http://HOST:8000/ as JSON: host (where it runs now), step, resumed_from, driver (the version it started under), starts,
pid, saves. It ends with an error as soon as the GPU's memory is not what it wrote.

It saves its count when told to end (SIGTERM), and whenever it is asked to: SIGUSR1, or POST /save. It goes on from a
count that it finds when it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import json
import os
import signal
import sys
import threading
from pathlib import Path

HOME = Path(os.environ.get("STATE_DIRECTORY", "/var/lib/gpu-counter"))
SAVED = HOME / "count.json"
PORT = int(os.environ.get("PORT", "8000"))
STEP_SECONDS = 0.2
SIZE = int(float(os.environ.get("GPU_MIB", "4")) * (1 << 20))
PATTERN_EVERY = 50  # steps between two checks of the whole pattern


class Gpu:
    """GPU 0 through libcuda, as a training job holds it: /dev/nvidia* stay open for as long as this process lives."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, context, self._memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
        self._call("cuMemAlloc_v2", ctypes.byref(self._memory), ctypes.c_size_t(SIZE))
        for offset, block in self._blocks():
            self._call("cuMemcpyHtoD_v2", self._at(offset), block, ctypes.c_size_t(len(block)))

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result:
            sys.exit(f"{name} failed with CUDA error {result}")

    def _at(self, offset: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(self._memory.value + offset)

    def _blocks(self) -> list[tuple[int, bytes]]:
        """Everything after the first 8 bytes, in pieces, each different from the others."""
        size = 1 << 20
        starts = range(8, SIZE, size)
        return [(start, (start.to_bytes(8, "little") * (size // 8))[: min(size, SIZE - start)]) for start in starts]

    @property
    def count(self) -> int:
        got = ctypes.c_uint64()
        self._call("cuMemcpyDtoH_v2", ctypes.byref(got), self._at(0), ctypes.c_size_t(8))
        return got.value

    @count.setter
    def count(self, value: int) -> None:
        given = ctypes.c_uint64(value)
        self._call("cuMemcpyHtoD_v2", self._at(0), ctypes.byref(given), ctypes.c_size_t(8))
        self._call("cuCtxSynchronize")

    def check(self) -> None:
        """End if the memory is not what was written."""
        for offset, block in self._blocks():
            got = ctypes.create_string_buffer(len(block))
            self._call("cuMemcpyDtoH_v2", got, self._at(offset), ctypes.c_size_t(len(block)))
            if got.raw != block:
                sys.exit(f"GPU memory is not what was written, from byte {offset} on")


def saved_state() -> dict:
    with contextlib.suppress(FileNotFoundError):
        return json.loads(SAVED.read_text())
    return {"step": 0, "starts": 0}


def save(state: dict) -> None:
    part = SAVED.with_suffix(".part")
    with part.open("w") as stream:
        json.dump({"step": state["step"], "starts": state["starts"]}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(SAVED)
    state["saves"] += 1


def main() -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    gpu = Gpu()
    driver = Path("/sys/module/nvidia/version").read_text().strip()
    state = saved_state()
    state.update(driver=driver, resumed_from=state["step"], starts=state["starts"] + 1, pid=os.getpid(), saves=0)
    gpu.count = state["step"]
    stop, save_now = threading.Event(), threading.Event()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({**state, "host": os.uname().nodename})

        def do_POST(self) -> None:
            save_now.set()
            self.answer({"asked": True})

        def answer(self, content: dict) -> None:
            body = json.dumps(content).encode() + b"\n"
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Quiet: the journal is for the counter's own words."""

    server = http.server.ThreadingHTTPServer(("", PORT), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *dummy: stop.set())
    signal.signal(signal.SIGUSR1, lambda *dummy: save_now.set())
    print(f"counting from step {state['step']} under driver {driver}", flush=True)
    log = os.open(HOME / "steps.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while not stop.wait(STEP_SECONDS):
        step = gpu.count + 1
        if step != state["step"] + 1:
            sys.exit(f"the GPU counted to {step - 1}, the host to {state['step']}")
        os.write(log, f"{step} {os.uname().nodename}\n".encode())
        gpu.count = state["step"] = step
        if step % PATTERN_EVERY == 0:
            gpu.check()
        if save_now.is_set():
            save_now.clear()
            save(state)
    save(state)
    print(f"saved at step {state['step']}", flush=True)


if __name__ == "__main__":
    main()
