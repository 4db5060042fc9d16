# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An engine is left without requests, or as it was: over real HTTP, with an engine that is stood in for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import EngineServer

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.engine import Engine, EngineError

BOTH = pytest.mark.parametrize("kind", ["vllm", "sglang"])
Start = Callable[..., EngineServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[EngineServer] = []

    def one(kind: str, **options: Any) -> EngineServer:
        servers.append(EngineServer(kind, **options))
        return servers[-1]

    yield one
    for server in servers:
        server.close()


def quiesce(server: EngineServer, **options: Any) -> dict[str, Any]:
    """What a record remembers of it."""
    record: dict[str, Any] = {}
    given = {"kind": server.kind, "url": server.url, **options}
    try:
        Engine(given, sleep=lambda dummy: time.sleep(0.01)).quiesce(lambda calls: record.update(wake=calls))
    except EngineError as exc:
        record["failed"] = exc
    return record


@BOTH
@pytest.mark.parametrize("sleep", [False, True])
def test_it_stands_by_and_goes_on(start: Start, kind: str, sleep: bool) -> None:
    server = start(kind)
    record = quiesce(server, sleep=sleep)
    assert (server.paused, server.asleep) == (True, sleep)
    assert suspend.wake(record) == ""
    assert (server.paused, server.asleep) == (False, False)


@BOTH
def test_requests_under_way_are_waited_for(start: Start, kind: str) -> None:
    server = start(kind, running=2)
    record: dict[str, Any] = {}
    waiting = threading.Thread(target=lambda: record.update(quiesce(server)))
    waiting.start()
    while not server.asked:
        time.sleep(0.01)
    assert waiting.is_alive()
    server.finish()
    waiting.join(10)
    assert "failed" not in record
    assert server.paused


@BOTH
def test_requests_that_do_not_end_leave_it_as_it_was(start: Start, kind: str) -> None:
    server = start(kind, running=1)
    record = quiesce(server, drain=0.3)
    assert record["failed"].late
    assert suspend.wake(record) == ""
    server.finish()
    assert (server.paused, server.asleep) == (False, False)


@BOTH
def test_a_sleep_that_is_refused_is_undone_as_far_as_it_came(start: Start, kind: str) -> None:
    server = start(kind)
    server.refuses = {"/sleep", "/release_memory_occupation"}
    record = quiesce(server, sleep=True)
    assert "500" in str(record["failed"])
    suspend.wake(record)
    assert not server.paused


def test_a_pause_without_effect_is_not_believed(start: Start) -> None:
    server = start("vllm")
    server.lies = True
    assert "says no" in str(quiesce(server)["failed"])


def test_an_engine_that_does_not_wake_is_told(start: Start) -> None:
    server = start("sglang")
    record = quiesce(server, sleep=True)
    server.refuses = {"/resume_memory_occupation"}
    assert "/resume_memory_occupation" in suspend.wake(record)


def test_a_token_comes_from_a_file_and_is_kept_nowhere_else(start: Start, tmp_path: Path) -> None:
    server = start("sglang")
    server.token = "s3cret"
    (tmp_path / "token").write_text("s3cret\n")
    record = quiesce(server, token_file=str(tmp_path / "token"))
    assert server.paused
    assert "s3cret" not in str(record)


WRONG = {
    "another-machine": ({"url": "http://192.0.2.1:8000"}, "loopback"),
    "a-name": ({"url": "http://engine.example"}, "loopback"),
    "a-file": ({"url": "file:///etc/shadow"}, "loopback"),
    "nothing": ({"url": ""}, "loopback"),
    "another-engine": ({"kind": "ollama"}, "expected one of vllm, sglang"),
    "nobody-there": ({"url": "http://127.0.0.1:9"}, "refused"),
    "no-token": ({"token_file": "/nonexistent/token"}, "No such file"),
}


@pytest.mark.parametrize(("options", "said"), WRONG.values(), ids=WRONG)
def test_a_declaration_that_cannot_work_is_refused_first(start: Start, options: dict[str, Any], said: str) -> None:
    server = start("vllm")
    assert said in Engine({"kind": "vllm", "url": server.url, **options}).trouble()


@BOTH
def test_an_engine_started_without_its_control_endpoints_is_refused_first(start: Start, kind: str) -> None:
    other = start("sglang" if kind == "vllm" else "vllm")
    assert other.url in Engine({"kind": kind, "url": other.url}).trouble()


@BOTH
def test_a_look_changes_nothing(start: Start, kind: str) -> None:
    server = start(kind)
    assert Engine({"kind": kind, "url": server.url, "sleep": True}).trouble() == ""
    assert not [asked for asked in server.asked if asked.startswith("POST")]
