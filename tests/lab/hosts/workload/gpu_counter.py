# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A visible GPU workload: counts steps, saves its count when told to stop, and goes on from it.

Holds a CUDA context on GPU 0 through libcuda as a training job does, and shows itself at http://HOST:8000/
as JSON: host, step, resumed_from, driver (the version it started under), starts.
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

SAVED = Path(os.environ.get("STATE_DIRECTORY", "/var/lib/gpu-counter"), "count.json")
PORT = 8000
STEP_SECONDS = 0.2


def cuda_context() -> ctypes.CDLL:
    """libcuda with a current context on GPU 0: it keeps /dev/nvidia* open for as long as this process lives."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuCtxCreate_v2", (ctypes.byref(context), 0, device)),
    ):
        result = getattr(cuda, name)(*arguments)
        if result:
            sys.exit(f"{name} failed with CUDA error {result}")
    return cuda


def saved_state() -> dict:
    with contextlib.suppress(FileNotFoundError):
        return json.loads(SAVED.read_text())
    return {"step": 0, "starts": 0}


def main() -> None:
    cuda = cuda_context()
    driver = Path("/sys/module/nvidia/version").read_text().strip()
    state = saved_state()
    state.update(
        host=os.uname().nodename, driver=driver, resumed_from=state["step"], starts=state["starts"] + 1, pid=os.getpid()
    )
    stop = threading.Event()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(state).encode() + b"\n"
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
    print(f"counting from step {state['step']} under driver {driver}", flush=True)
    while not stop.wait(STEP_SECONDS):
        state["step"] += 1
        if cuda.cuCtxSynchronize():
            sys.exit("the GPU context is lost")
    part = SAVED.with_suffix(".part")
    part.write_text(json.dumps({"step": state["step"], "starts": state["starts"]}))
    part.replace(SAVED)
    print(f"saved at step {state['step']}", flush=True)


if __name__ == "__main__":
    main()
