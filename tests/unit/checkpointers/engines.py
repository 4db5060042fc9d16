# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for the control endpoints of vLLM and SGLang, with requests that take as long as a test lets them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class EngineServer:
    """Answers as the engines do: a pause that waits takes no more at once, and returns when no request runs."""

    def __init__(self, kind: str, running: int = 0) -> None:
        self.kind = kind
        self.running = running
        self.paused = self.asleep = False
        self.asked: list[str] = []
        self.refuses: set[str] = set()
        """Paths that answer 500."""
        self.lies = False
        """Whether what it accepts has no effect."""
        self.token = ""
        self.done = threading.Condition()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def finish(self) -> None:
        with self.done:
            self.running = 0
            self.done.notify_all()

    def close(self) -> None:
        self.finish()
        self.server.shutdown()
        self.server.server_close()

    def _answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if path in self.refuses:
            return 500, {"error": "refused"}
        if self.kind == "vllm":
            return self._vllm(f"{method} {path}", query)
        return self._sglang(f"{method} {path}", body)

    def _vllm(self, asked: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        if asked == "POST /pause":
            self.paused = not self.lies
            with self.done:
                self.done.wait_for(lambda: not self.running or query.get("mode") != ["wait"], 30)
        elif asked == "POST /sleep":
            if self.running:
                return 500, {"error": "requests are running"}
            self.asleep = query == {"level": ["1"]} and not self.lies
        elif asked == "POST /wake_up":
            self.asleep = False
        elif asked == "POST /resume":
            self.paused = False
        elif asked == "GET /is_paused":
            return 200, {"is_paused": self.paused}
        elif asked == "GET /is_sleeping":
            return 200, {"is_sleeping": self.asleep}
        else:
            return 404, {"detail": "Not Found"}
        return 200, {}

    def _sglang(self, asked: str, body: Any) -> tuple[int, Any]:
        if asked == "GET /metrics":
            rows = [("sglang:num_running_reqs", self.running), ("sglang:num_queue_reqs", 0)]
            return 200, "".join(f'# TYPE {name} gauge\n{name}{{model_name="m"}} {float(n)}\n' for name, n in rows)
        if not isinstance(body, dict):
            return 422, {"detail": "a body is required"}
        if asked == "POST /pause_generation":
            self.paused = body == {"mode": "retract"}
        elif asked == "POST /continue_generation":
            self.paused = False
        elif asked == "POST /release_memory_occupation":
            if self.running or self.asleep:
                return 500, {"error": "not idle"}
            self.asleep = True
        elif asked == "POST /resume_memory_occupation":
            if not self.asleep:
                return 500, {"error": "nothing was released"}
            self.asleep = False
        else:
            return 404, {"detail": "Not Found"}
        return 200, {}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = urlsplit(self.path)
                engine.asked.append(f"{self.command} {self.path}")
                status: int
                answer: Any
                if engine.token and self.headers.get("Authorization") != f"Bearer {engine.token}":
                    status, answer = 401, {"error": "Unauthorized"}
                else:
                    body = json.loads(given) if given else None
                    status, answer = engine._answer(self.command, parts.path, parse_qs(parts.query), body)
                data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # who asked has given up
                    pass

            do_GET = do_POST = _serve

            def log_message(self, *dummy: Any) -> None: ...

        return Handler
