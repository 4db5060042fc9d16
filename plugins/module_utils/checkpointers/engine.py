# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Have an inference engine finish its requests and stand by before its processes are saved, and go on afterwards.

A request under way is answered, not cut off; a cache that can be built again is not saved. What is asked of whom:

===========  ============================================  ====================================================
             vLLM (``VLLM_SERVER_DEV_MODE=1``)              SGLang (``--enable-memory-saver`` for ``sleep``)
===========  ============================================  ====================================================
drain        POST /pause?mode=wait, GET /is_paused         GET /metrics until nothing runs or waits,
                                                           POST /pause_generation {"mode": "retract"}
sleep        POST /sleep?level=1, GET /is_sleeping         POST /release_memory_occupation {}
wake         POST /wake_up, POST /resume                   POST /resume_memory_occupation {},
                                                           POST /continue_generation {}
===========  ============================================  ====================================================

Sources: vllm/entrypoints/serve/{rlhf,sleep}/api_router.py of vLLM, managers/io_struct.py and the metrics of SGLang.
Engines are spoken to on the loopback only: their control endpoints know no login worth the name.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import ipaddress
import json
import re
import time
from collections.abc import Mapping
from typing import Any, Callable
from urllib.parse import urlsplit

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend

KINDS = ("vllm", "sglang")
_ANSWER = 30.0
_MOVE = 300.0
"""Seconds in which weights go to the host's memory."""
_BUSY = re.compile(rb"^sglang:num_(?:running|queue)_reqs(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

Request = Callable[..., bytes]


class EngineError(Exception):
    """An engine that did not do what it was asked; ``late`` if its requests did not end in time."""

    def __init__(self, text: str, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class Engine:
    """One engine, as ``save.engine`` declares it: ``kind``, ``url``, ``drain`` seconds, ``sleep``, ``token_file``."""

    def __init__(
        self,
        options: Mapping[str, Any],
        request: Request = suspend.request,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.kind = str(options.get("kind"))
        self.url = str(options.get("url") or "").rstrip("/")
        self._drain = float(options.get("drain", 60))
        self._sleeps = bool(options.get("sleep"))
        self._token = options.get("token_file")
        self._request = request
        self._monotonic, self._pause = monotonic, sleep

    def trouble(self) -> str:
        """What is wrong with the declaration, or with the engine as far as a look can tell; empty if nothing is."""
        parts = urlsplit(self.url)
        if self.kind not in KINDS or parts.scheme not in ("http", "https") or not _is_loopback(parts.hostname or ""):
            return f"engine {self.kind!r} at {self.url!r}; expected one of {', '.join(KINDS)} at a loopback address"
        try:
            if self.kind == "vllm":
                self._flag("/is_paused", "is_paused")
                if self._sleeps:
                    self._flag("/is_sleeping", "is_sleeping")
            else:
                self._requests()
        except EngineError as exc:
            return str(exc)
        return ""

    def wake_calls(self, asleep: bool) -> list[dict[str, Any]]:
        """What makes it go on, for a record that others can act on (:func:`suspend.wake`)."""
        vllm = self.kind == "vllm"
        paths = ("/wake_up", "/resume") if vllm else ("/resume_memory_occupation", "/continue_generation")
        body: dict[str, Any] | None = None if vllm else {}
        return [
            {"url": self.url + path, "body": body, "token_file": self._token, "timeout": _MOVE}
            for path in (paths if asleep else paths[1:])
        ]

    def quiesce(self, remember: Callable[[list[dict[str, Any]]], None]) -> None:
        """Finish the requests, take no more, and with ``sleep`` give the GPU's memory back, weights kept on the host.

        ``remember`` is told, before each act, what undoes all acts so far.

        :raises EngineError: if it does not; what was remembered is then still to be undone.
        """
        remember(self.wake_calls(asleep=False))
        if self.kind == "vllm":
            try:
                self._post("/pause?mode=wait&wait_for_inflight_requests=true", self._drain)
            except EngineError as exc:
                raise EngineError(f"requests did not end within {self._drain:.0f} s ({exc})", late=True) from exc
            if not self._flag("/is_paused", "is_paused"):
                raise EngineError(f"{self.url}/is_paused says no after a pause that was accepted")
        else:
            self._drain_by_count()
            self._post("/pause_generation", _ANSWER, {"mode": "retract"})
            left = self._requests()
            if left:
                raise EngineError(f"{left:.0f} requests came in before the pause", late=True)
        if not self._sleeps:
            return
        remember(self.wake_calls(asleep=True))
        if self.kind == "sglang":
            self._post("/release_memory_occupation", _MOVE, {})
            return
        self._post("/sleep?level=1", _MOVE)
        if not self._flag("/is_sleeping", "is_sleeping"):
            raise EngineError(f"{self.url}/is_sleeping says no after a sleep that was accepted")

    def _drain_by_count(self) -> None:
        deadline = self._monotonic() + self._drain
        left = self._requests()
        while left and self._monotonic() < deadline:
            self._pause(0.5)
            left = self._requests()
        if left:
            raise EngineError(f"{left:.0f} requests did not end within {self._drain:.0f} s", late=True)

    def _requests(self) -> float:
        """Requests that run or wait; :raises EngineError: if its metrics do not say."""
        found = _BUSY.findall(self._call("GET", "/metrics", _ANSWER))
        try:
            if found:
                return sum(float(one) for one in found)
        except ValueError:
            pass
        raise EngineError(f"{self.url}/metrics has no count of requests; start the engine with --enable-metrics")

    def _flag(self, path: str, name: str) -> bool:
        answer = self._call("GET", path, _ANSWER)
        try:
            value = json.loads(answer)[name]
        except (ValueError, KeyError, TypeError):
            value = None
        if not isinstance(value, bool):
            raise EngineError(f"{self.url}{path} answers {answer[:80]!r}, expected {name} as true or false")
        return value

    def _post(self, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> None:
        self._call("POST", path, timeout, body)

    def _call(self, method: str, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> bytes:
        try:
            return self._request(method, self.url + path, body, self._token, timeout)
        except OSError as exc:
            raise EngineError(f"{method} {self.url}{path}: {exc}") from exc


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
