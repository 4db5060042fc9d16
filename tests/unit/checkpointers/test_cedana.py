# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cedana by contract: an API and a command with the documented shapes, stood in for. An accepted request is no save."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import EngineServer

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import CheckpointError, Work
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cedana import Cedana
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.host import nvml

KEY = {"gpu_model": "NVIDIA A100", "driver": "550.90.07"}
URL = "https://cedana.example"


class Api:
    """What https://docs.cedana.ai/references/api documents: actions, their status, checkpoints."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.statuses = ["initialized", "processing", "checkpoint_created", "ready"]
        self.details: Any = None
        self.checkpoint = {
            "id": str(uuid.uuid4()),
            "status": "ready",
            "checksum": "c0ffee",
            "gpu": "A",
            "platform": "k8s",
        }
        self.action = ""
        self.poll = 0
        self.http = 200

    def __call__(self, method: str, url: str, body: Mapping[str, Any] | None, **options: Any) -> tuple[int, str]:
        path = url[len(URL) :]
        self.asked.append((method, path, body))
        assert options["token_file"] == "/token"
        if self.http != 200:
            return self.http, json.dumps({"message": "no such cluster", "code": str(self.http)})
        if method == "POST":
            self.action, self.poll = str(uuid.uuid4()), 0
            return 200, self.action
        if path.startswith("/v2/checkpoint/status/"):
            status = self.statuses[min(self.poll, len(self.statuses) - 1)]
            self.poll += 1
            return 200, json.dumps({"status": status, "details": self.details})
        if path == "/v2/actions":
            row = {
                "action_id": self.action,
                "checkpoint_id": self.checkpoint["id"],
                "status": "ready",
                "type": "checkpoint",
            }
            return 200, json.dumps([{"action_id": str(uuid.uuid4()), "checkpoint_id": str(uuid.uuid4())}, row])
        if path.startswith("/v2/checkpoints?ids="):
            return 200, json.dumps([self.checkpoint])
        if method == "PATCH":
            return 200, path.rpartition("/")[2]
        return 404, "{}"


class Timer:
    armed: Sequence[str] | None = None

    def arm(self, argv: Sequence[str], seconds: float) -> None:
        self.armed = argv

    def disarm(self) -> None:
        self.armed = None


class Place:
    """A node, the API, and the command."""

    def __init__(self, tmp_path: Path) -> None:
        self.api = Api()
        self.timer = Timer()
        self.folder = tmp_path
        self.seconds = 0.0
        self.commands: list[list[str]] = []
        self.rc = 0
        self.makes = {"dump-1/pages-1.img": b"memory"}
        self.differences: list[Any] = []

    def run(self, argv: Sequence[str], **dummy: Any) -> Completed:
        self.commands.append(list(argv))
        if "--dir" in argv:
            for name, content in self.makes.items():
                path = Path(argv[argv.index("--dir") + 1], name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return Completed(tuple(argv), self.rc, "", "daemon is not running" if self.rc else "", 0.1)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def backend(self) -> Cedana:
        made = Cedana(
            self.run,
            str(self.folder / "state"),
            str(self.folder / "store"),
            node="node1",
            limits=Limits(settle=0),
            differences=lambda key, node: self.differences,
            observe=lambda: nvml.Report("ok", "", None, None, None, None, []),
            service=lambda dummy: self.timer,  # type: ignore[arg-type,return-value]
            sleep=self.sleep,
        )
        made.answer = self.api  # type: ignore[method-assign,assignment]
        made.monotonic = lambda: self.seconds  # type: ignore[method-assign,assignment]
        return made


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def work(may_repeat: bool = True, **options: Any) -> Work:
    return Work("llama", save={"cedana": options, "may_repeat": may_repeat, "deadline": 60, "key": KEY})


API = {"url": URL, "token_file": "/token", "cluster": "c1"}
POD = work(**API, namespace="ml", pod="llama-0")
JOB = work(**API, slurm_job="4711", kind="rootfs")
OWN = work(job="j1")


def test_a_pod_is_saved_and_comes_back(place: Place) -> None:
    captured = place.backend().capture(POD)
    assert captured.source == "running"
    assert place.api.asked[0] == (
        "POST",
        "/v2/checkpoint/pod",
        {"cluster_id": "c1", "namespace": "ml", "pod_name": "llama-0", "runc_root": "/run/containerd/runc/k8s.io"},
    )
    manifest = artefact.read(place.folder / "store", captured.artefact)
    assert manifest["saved"]["checkpoint"] == place.api.checkpoint["id"]
    assert manifest["key"]["backend"] == "cedana/1"
    assert "driver" in manifest["key"]
    saved = place.api.action
    place.backend().commit(POD, "node2")
    place.backend().restore(POD, captured.artefact)
    restored = [body for method, path, body in place.api.asked if path == "/v2/restore/pod"]
    assert restored == [{"action_id": saved, "cluster_id": "c1"}]
    place.backend().restore(POD, captured.artefact)
    assert len([path for dummy, path, body in place.api.asked if path == "/v2/restore/pod"]) == 1  # never twice
    assert place.backend().discard(POD, captured.artefact)
    assert place.api.asked[-1][:2] == ("PATCH", f"/v2/checkpoints/deprecate/{place.api.checkpoint['id']}")
    assert list((place.folder / "store").iterdir()) == []


def test_a_job_of_slurm_is_saved_and_comes_back(place: Place) -> None:
    captured = place.backend().capture(JOB)
    assert place.api.asked[0][1:] == (
        "/v2/slurm/checkpoint/job",
        {"job_id": "4711", "kind": "rootfs", "reason": "manual"},
    )
    saved = place.api.action
    place.backend().restore(JOB, captured.artefact)
    restored = [body for dummy, path, body in place.api.asked if path == "/v2/slurm/restore/job"]
    assert restored == [{"action_id": saved, "cluster_id": "c1", "reason": "manual"}]


def test_a_job_of_the_daemon_is_saved_and_comes_back(place: Place) -> None:
    captured = place.backend().capture(OWN)
    kept = place.folder / "store" / captured.artefact
    assert (kept / "dump-1/pages-1.img").read_bytes() == b"memory"
    dump = next(argv for argv in place.commands if argv[1:3] == ["dump", "job"])
    assert dump[3] == "j1" and "--leave-running" in dump
    place.backend().restore(OWN, captured.artefact)
    assert place.commands[-1] == ["cedana", "restore", "job", "j1", "--path", str(kept / "dump-1")]


def broken(place: Place, what: str) -> None:
    api = place.api
    if what == "error":
        api.statuses, api.details = ["processing", "error"], "CRIU said no"
    elif what == "never":
        api.statuses = ["processing"]
    elif what == "new-word":
        api.statuses = ["melted"]
    elif what == "http":
        api.http = 404
    elif what == "not-uploaded":
        api.checkpoint["status"] = "possibly_uploaded"
    elif what == "no-action":
        api.checkpoint["id"] = "latest"


TROUBLE = {
    "error": "CRIU said no",
    "never": "still processing after 60 s",
    "new-word": "melted",
    "http": "HTTP 404",
    "not-uploaded": "possibly_uploaded",
    "no-action": "names no checkpoint",
}


@pytest.mark.parametrize(("what", "said"), TROUBLE.items(), ids=TROUBLE)
def test_what_is_no_save_is_not_taken_for_one(place: Place, what: str, said: str) -> None:
    broken(place, what)
    with pytest.raises(CheckpointError, match=said) as caught:
        place.backend().capture(POD)
    assert (caught.value.reason.reason, caught.value.reason.source) == ("dump_failed", "running")
    assert list((place.folder / "store").iterdir()) == []
    assert suspend.read_record(place.backend().record_path("llama")) == {}


@pytest.mark.parametrize("makes", [{}, {"dump-1/pages-1.img": b""}, {"a": b"1", "b": b"2"}])
def test_a_command_that_says_success_is_not_believed(place: Place, makes: dict[str, bytes]) -> None:
    place.makes = makes
    with pytest.raises(CheckpointError, match="dump_failed"):
        place.backend().capture(OWN)


def test_a_checkpoint_that_is_another_by_now_is_not_restored(place: Place) -> None:
    captured = place.backend().capture(POD)
    place.api.checkpoint["checksum"] = "bad"
    with pytest.raises(CheckpointError, match="hash_mismatch"):
        place.backend().restore(POD, captured.artefact)
    place.api.checkpoint.update(checksum="c0ffee", status="deprecated")
    with pytest.raises(CheckpointError, match="deprecated"):
        place.backend().restore(POD, captured.artefact)
    assert not [path for dummy, path, body in place.api.asked if path == "/v2/restore/pod"]


def test_another_key_is_not_restored(place: Place) -> None:
    class Difference:
        field = "driver"

    captured = place.backend().capture(POD)
    place.differences = [Difference()]
    with pytest.raises(CheckpointError, match="key_mismatch:driver"):
        place.backend().restore(POD, captured.artefact)


@pytest.mark.parametrize("name", ["manifest.json", "cedana.json"])
def test_a_damaged_save_is_not_restored(place: Place, name: str) -> None:
    captured = place.backend().capture(POD)
    (place.folder / "store" / captured.artefact / name).write_text("{")
    with pytest.raises(CheckpointError, match="hash_mismatch"):
        place.backend().restore(POD, captured.artefact)


WRONG = {
    "nothing": work(),
    "two": work(**API, pod="a", slurm_job="1"),
    "plain-http": work(url="http://cedana.example", pod="a", cluster="c"),
    "no-cluster": work(url=URL, pod="a"),
    "a-path": work(**API, pod="../../x"),
    "daemon-and-api": work(url=URL, job="j1"),
}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_a_declaration_that_cannot_work_is_refused_first(place: Place, given: Work) -> None:
    with pytest.raises(CheckpointError, match="policy"):
        place.backend().capture(given)
    assert place.api.asked == []


def test_a_node_without_the_daemon_is_refused_first(place: Place) -> None:
    place.rc = 1
    (found,) = place.backend().check(OWN)
    assert (found.reason, "daemon is not running" in found.observed) == ("unsupported_backend", True)


def test_work_that_would_run_on_is_refused_unless_its_owner_says_it_may(place: Place) -> None:
    (found,) = place.backend().check(work(may_repeat=False, **API, pod="llama-0"))
    assert found.reason == "unsupported_feature:left_running"


def test_what_another_backend_has_begun_is_left_alone(place: Place) -> None:
    path = place.backend().record_path("llama")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"state": "frozen", "workload": "llama", "unit": "llama.service", "members": []}))
    before = path.read_text()
    for act in (place.backend().capture, place.backend().abort):
        with pytest.raises(CheckpointError, match="cuda_criu's"):
            act(POD)
    assert path.read_text() == before


def test_a_save_that_would_not_be_encrypted_is_refused(place: Place) -> None:
    given = replace(POD, save={**POD.save, "encrypt": {"tool": "age", "recipient": "age1x"}})
    (found,) = place.backend().check(given)
    assert found.reason == "unsupported_feature:encryption"


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    server = EngineServer("vllm")
    yield server
    server.close()


def with_engine(engine: EngineServer) -> Work:
    return replace(POD, save={**POD.save, "may_repeat": False, "engine": {"kind": "vllm", "url": engine.url}})


def test_an_engine_stands_by_until_it_comes_back(place: Place, engine: EngineServer) -> None:
    given = with_engine(engine)
    captured = place.backend().capture(given)
    assert (captured.source, engine.paused, place.timer.armed is not None) == ("frozen", True, True)
    assert place.backend().capture(given).changed is False
    assert place.backend().commit(given, "node2") == "frozen"
    assert place.timer.armed is None
    with pytest.raises(CheckpointError, match="for node2"):
        place.backend().commit(given, "node3")
    place.backend().restore(given, captured.artefact)
    assert not engine.paused


def test_an_engine_goes_on_if_it_is_not_saved(place: Place, engine: EngineServer) -> None:
    broken(place, "error")
    with pytest.raises(CheckpointError) as caught:
        place.backend().capture(with_engine(engine))
    assert (caught.value.reason.source, engine.paused, place.timer.armed) == ("running", False, None)


def test_an_engine_that_was_let_go_on_is_not_ended(place: Place, engine: EngineServer) -> None:
    given = with_engine(engine)
    place.backend().capture(given)
    assert "go on" in suspend.thaw(place.backend().record_path("llama"))
    assert not engine.paused
    with pytest.raises(CheckpointError, match="let go on meanwhile"):
        place.backend().commit(given, "node2")
    assert place.backend().abort(given) == "running"


def test_a_save_that_is_not_the_one_that_was_told_of_is_not_restored(place: Place) -> None:
    captured = place.backend().capture(OWN)
    with pytest.raises(CheckpointError, match="hash_mismatch"):
        place.backend().restore(OWN, captured.artefact, "0" * 64)
    place.backend().restore(OWN, captured.artefact, captured.digest)


def test_an_engine_that_does_not_go_on_is_asked_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend, "PATIENCE", 1.0)
    server = EngineServer("sglang")
    try:
        engine = replace(OWN, save={**OWN.save, "engine": {"kind": "sglang", "url": server.url, "drain": 1}})
        captured = place.backend().capture(engine)
        server.refuses = {"/continue_generation"}
        assert (place.backend().abort(engine), server.paused) == ("lost", True)
        assert place.timer.armed, "it asks, too"
        server.refuses = set()
        assert (place.backend().abort(engine), server.paused) == ("running", False)
        assert place.timer.armed is None and not (place.folder / "store" / captured.artefact).exists()
    finally:
        server.close()
