# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where work is to come back: whatever differs is refused by name before anything is started, and a place is promised
once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import (
    artefact,
    carried,
    facts,
    suspend,
    tree,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import CheckpointError, Work
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import FORMAT, Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cuda_criu import CudaCriu
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import ServiceError
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.host import nvml
from ansible_collections.gpufleet.driver.plugins.module_utils.host.lock import Clock
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import compatibility

GIB = 1 << 30
FACTS: dict[str, Any] = {
    "gpu_model": "NVIDIA H100",
    "gpu_sku": "2330",
    "gpu_memory": 80 * GIB,
    "ecc": "on",
    "mig": "off",
    "mps": "off",
    "topology": "2 GPUs",
    "driver": "580.95.05",
    "driver_flavour": "open",
    "architecture": "x86_64",
    "kernel": "6.1.0-57",
    "cpu_features": ("avx", "avx2"),
    "runtime": "systemd",
    "cgroup": "2",
    "security_module": "none",
    "criu": "4.2",
}
FREE_PID = 4_100_000  # beyond the largest pid_max that is usual


class Service:
    unit = "work.service"
    status_command, log_command = "systemctl status work", "journalctl -u work"

    def __init__(self, active: str = "inactive") -> None:
        self.active = active
        self.limit = "infinity"
        self.fails: set[str] = set()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.cgroup: Path | None = None

    def show(self) -> dict[str, str]:
        if "show" in self.fails:
            raise ServiceError("podman does not answer")
        return {"ActiveState": self.active, "ControlGroup": "/work", "MemoryMax": self.limit}

    def run(self, sys_root: Path) -> None:
        """A process of its unit."""
        self.processes.append(subprocess.Popen(["sleep", "600"]))
        self.cgroup = sys_root / "fs/cgroup/work"
        self.cgroup.mkdir(parents=True)
        (self.cgroup / "cgroup.procs").write_text(f"{self.processes[0].pid}\n")

    def guard(self) -> None:
        if "guard" in self.fails:
            raise ServiceError("systemd did not read its units again")

    def end(self, alive: Callable[[], Sequence[int]], timeout: float) -> None:
        if "end" in self.fails:
            raise ServiceError(f"PIDs {list(alive())} are still there after SIGKILL")
        for process in self.processes:
            process.kill()
            process.wait()
        if self.cgroup:
            (self.cgroup / "cgroup.procs").unlink(missing_ok=True)

    def stop(self, timeout: float) -> Completed:
        self.active = "inactive"
        return Completed(("systemctl", "stop"), 0, "", "", 0.1)

    def start(self, timeout: float) -> bool:
        self.active = "active"
        return True

    def reset(self) -> None: ...

    def unguard(self) -> None: ...

    def forget(self) -> None: ...

    def settle(self) -> None: ...


class Node:
    """A node that could take work in."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.store = tmp_path / "store"
        self.facts = dict(FACTS)
        self.uuids = ["GPU-a", "GPU-b"]
        self.usage: dict[int, nvml.Usage] = {}
        self.service = Service()
        self.used = 0
        self.library = tmp_path / "libwork.so"
        self.library.write_bytes(b"x" * 100)
        self.data = tmp_path / "data"
        self.data.write_bytes(b"x" * 10)
        self.log = tmp_path / "log"
        self.log.write_bytes(b"x" * 500)
        self.waived: tuple[str, ...] = ()

    def save(self, name: str = "work", **changes: Any) -> Work:
        staged = artefact.stage(self.store, name)
        (staged / "core.img").write_text("core")
        member = {
            "pid": FREE_PID, "start": 1, "comm": "work", "cuda": True, "ids": [FREE_PID], "gpus": ["GPU-a"],
            "gpu_bytes": 8 * GIB, "rss": 1000,
        }  # fmt: skip
        gpus = [
            {"uuid": uuid, "minor": minor, "total": 80 * GIB, "used": 0}
            for minor, uuid in enumerate(("GPU-a", "GPU-b"))
        ]
        manifest = {
            "created": 1.0,
            "workload": {"name": name, "unit": "work.service", "fragment": "", "declared": {}},
            "backend": {"name": "cuda_criu", "format": FORMAT},
            "key": FACTS,
            "node": "node1",
            "members": [member],
            "gpus": gpus,
            "journal_sockets": [],
            "paths": [],
            "open_files": [
                {"path": str(self.data), "size": 10, "log": False},
                {"path": str(self.log), "size": 100, "log": True},
            ],
            "libraries": [{"path": str(self.library), "size": 100}],
        }
        artefact.publish(staged, name, {**manifest, **changes})
        return Work(name, "work.service")

    def backend(self) -> CudaCriu:
        devices = [
            {
                "uuid": uuid,
                "minor": minor,
                "pci": f"0000:0{minor + 1}:00.0",
                "memory": {"total": 80 * GIB, "used": self.used},
            }
            for minor, uuid in enumerate(self.uuids)
        ]

        def run(argv: Sequence[str], **dummy: Any) -> Completed:
            return Completed(tuple(argv), 0, "", "", 0.1)

        return CudaCriu(
            run,
            str(self.tmp_path / "state"),
            str(self.store),
            node="node2",
            limits=Limits(settle=0),
            differences=lambda key, offer: compatibility.explain(
                {k: tuple(v) if isinstance(v, list) else v for k, v in key.items()},
                offer,
                waived=self.waived,
                scope=compatibility.NODE,
            ),
            observe=lambda: nvml.Report("ok", "", None, None, None, None, devices),
            usage=lambda: self.usage,
            service=lambda dummy: self.service,  # type: ignore[arg-type,return-value]
            sys_root=str(self.tmp_path / "sys"),
        )


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(tmp_path)
    monkeypatch.setattr(facts, "node_facts", lambda *args: made.facts)
    monkeypatch.setattr(CudaCriu, "probe", lambda self: [])
    monkeypatch.setattr(tree, "memory_available", lambda proc: 64 * GIB)
    yield made
    for process in made.service.processes:
        process.kill()
        process.wait()


def refused(node: Node, work: Work) -> str:
    with pytest.raises(CheckpointError) as caught:
        node.backend().prepare(work, work.name)
    assert caught.value.reason.source == "frozen", "the source must not have been ended by then"
    assert caught.value.reason.next
    return caught.value.reason.reason


def test_an_equal_node_takes_it(node: Node) -> None:
    record = node.backend().prepare(node.save(), "work")
    assert (record["state"], record["map"], record["home"]) == ("prepared", {}, "node1")


OTHER = {
    "gpu_memory": 40 * GIB,
    "mig": "on",
    "mps": "on",
    "cpu_features": ("avx",),
    "driver": "580.95.04",
}


@pytest.mark.parametrize("unknown", [False, True], ids=["other", "unknown"])
@pytest.mark.parametrize("name", FACTS)
def test_every_field_of_the_key_counts(node: Node, name: str, unknown: bool) -> None:
    work = node.save()
    node.facts[name] = None if unknown else OTHER.get(name, "other")
    assert refused(node, work) == f"key_mismatch:{name}"
    node.waived = (name,)
    assert node.backend().prepare(work, "work")["state"] == "prepared"


def occupy(node: Node) -> None:
    node.usage = {1: nvml.Usage((0,), GIB), 2: nvml.Usage((1,), GIB)}


def fill(node: Node) -> None:
    node.used = 75 * GIB


CHANGES: dict[str, tuple[Callable[[Node], Any], str]] = {
    "a-library-of-another-size": (lambda node: node.library.write_bytes(b"x"), "key_mismatch:libraries"),
    "a-library-that-is-not-there": (lambda node: node.library.unlink(), "key_mismatch:libraries"),
    "an-open-file-that-changed": (lambda node: node.data.write_bytes(b"y"), "key_mismatch:open_files"),
    "a-log-that-is-not-there": (lambda node: node.log.unlink(), "key_mismatch:open_files"),
    "its-unit-runs-here-already": (lambda node: setattr(node.service, "active", "active"), "policy"),
    "its-gpus-are-taken": (occupy, "insufficient_gpu_memory"),
    "too-little-gpu-memory": (fill, "insufficient_gpu_memory"),
    "fewer-gpus": (lambda node: node.uuids.pop(), "key_mismatch:topology"),
    "a-flipped-byte": (lambda node: (node.store / "work/core.img").write_text("cor3"), "hash_mismatch"),
    "a-truncated-file": (lambda node: (node.store / "work/core.img").write_text("co"), "hash_mismatch"),
    "no-manifest": (lambda node: (node.store / "work/manifest.json").unlink(), "hash_mismatch"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_what_does_not_fit_is_refused(node: Node, change: Callable[[Node], Any], reason: str) -> None:
    work = node.save()
    change(node)
    assert refused(node, work) == reason
    assert suspend.read_record(node.backend().record_path("work", "restores")) == {}


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_manifest_that_is_not_the_one_that_was_written(node: Node, when: str) -> None:
    """It vouches for all but itself, so whoever knows its hash has it compared: first, and again at the restore."""
    work = node.save()
    digest = artefact.digest(node.store, "work")
    manifest = node.store / "work" / artefact.MANIFEST
    changed = manifest.read_text().replace('"rss": 1000', '"rss": 1001')
    if when == "between":
        assert node.backend().prepare(work, "work", digest)["digest"] == digest
    manifest.write_text(changed)
    with pytest.raises(CheckpointError, match="instead of") as caught:
        if when == "before":
            node.backend().prepare(work, "work", digest)
        else:
            node.backend().restore(work, "work")
    assert caught.value.reason.observed.startswith(str(manifest))


def test_a_file_that_went_between_the_comparison_and_the_restore(node: Node) -> None:
    work = node.save()
    node.backend().prepare(work, "work")
    (node.store / "work/core.img").unlink()
    with pytest.raises(CheckpointError, match=r"hash_mismatch at fetch: core\.img, piece 0: No such file"):
        node.backend().restore(work, "work")


def test_where_its_files_cannot_come_the_source_is_not_ended(node: Node) -> None:
    assert refused(node, node.save(paths=["/proc"])) == "insufficient_space"


def test_progress_that_fell_is_no_proof(node: Node) -> None:
    """Files that were not declared stay behind, and other ones of their names may be here."""
    work = Work("work", "work.service", {"progress": ["printed"]})
    record = {"members": [], "unit": "work.service", "progress": [100.0]}
    backend = node.backend()
    for printed, said in (("7", "it was 100 before"), ("nan", "printed no number"), ("100", "")):
        backend._run = lambda argv, printed=printed, **dummy: Completed(tuple(argv), 0, printed, "", 0.1)
        if said:
            with pytest.raises(CheckpointError, match=said):
                backend._verify(work, record, 0.0)
        else:
            assert backend._verify(work, record, 0.0)["progress"] == [100.0]


def test_a_taken_pid_is_refused(node: Node) -> None:
    member = {
        "pid": 1,
        "start": 1,
        "comm": "w",
        "cuda": True,
        "ids": [os.getpid()],
        "gpus": [],
        "gpu_bytes": 0,
        "rss": 0,
    }
    assert refused(node, node.save(members=[member])) == "key_mismatch:pids"


def test_too_little_memory_on_the_host(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "memory_available", lambda proc: GIB)
    assert refused(node, node.save()) == "insufficient_host_ram"


def test_the_limit_of_its_unit_holds_what_is_on_the_gpu(node: Node) -> None:
    node.service.limit = str(GIB)
    assert refused(node, node.save()) == "insufficient_host_ram"
    node.service.limit = str(9 * GIB)
    assert node.backend().prepare(node.save("work2"), "work2")["state"] == "prepared"


def test_gpu_memory_is_back_before_it_is_let_go_on(node: Node) -> None:
    """Then it may go on elsewhere, as it did nothing here."""
    member = {"pid": FREE_PID, "comm": "work", "gpu_bytes": 8 * GIB}
    for has, whole in ((8 * GIB, True), (7 * GIB, False), (9 * GIB, False), (None, True)):
        node.usage = {FREE_PID: nvml.Usage((0,), has)}
        if whole:
            node.backend()._memory_back(Work("work"), {"members": [member]}, [FREE_PID])
            continue
        with pytest.raises(CheckpointError, match="as when it was saved") as caught:
            node.backend()._memory_back(Work("work"), {"members": [member]}, [FREE_PID])
        assert caught.value.reason.reason == "cuda_restore_failed"


XIDS: dict[str, tuple[str, bool]] = {
    "its-gpu": ("NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=other, MMU Fault", True),
    "its-process": (f"NVRM: Xid (PCI:0000:09:00): 31, pid={FREE_PID}, name=work, MMU Fault", True),
    "another": ("NVRM: Xid (PCI:0000:09:00): 31, pid=7, name=other, MMU Fault", False),
    "nothing": ("nvidia: all is well", False),
}


@pytest.mark.parametrize(("said", "ours"), XIDS.values(), ids=XIDS)
def test_what_the_kernel_says_of_its_gpus_counts(node: Node, said: str, ours: bool) -> None:
    backend = node.backend()
    backend._run = lambda argv, **dummy: Completed(tuple(argv), 0, f"1700000000.500000 host kernel: {said}\n", "", 0.1)
    record = {"began": 1.7e9, "map": {"GPU-old": "GPU-a"}, "members": [{"pid": FREE_PID, "gpus": ["GPU-old"]}]}
    assert backend._xids(record) == ([said] if ours else [])
    assert backend._xids({**record, "began": 1.7e9 + 1}) == [], "it was said before"


def test_what_nvml_does_not_list_is_not_proven(node: Node) -> None:
    """C-33-criu#2993, C-22-cuda-checkpoint#48: a restore that says success, and a driver that knows nothing of it."""
    start = suspend.start_of(os.getpid())
    member = {"pid": os.getpid(), "start": start, "comm": "work", "cuda": False, "gpus": ["GPU-a"]}
    record = {"members": [member], "unit": "work.service", "map": {}}
    with pytest.raises(CheckpointError, match="NVML does not list"):
        node.backend()._verify(Work("work"), record, 0.0)
    node.usage = {os.getpid(): nvml.Usage((0,), GIB)}
    assert node.backend()._verify(Work("work"), record, 0.0)["nvml"] == [os.getpid()]


def test_what_is_declared_of_the_work_counts(node: Node) -> None:
    """C-57-dynamo#14724: field by field. A model of another revision is not the work that was saved."""
    node.save(key={**FACTS, "model_revision": "a"})
    work = Work("work", "work.service", {"key": {"model_revision": "b"}})
    assert refused(node, work) == "key_mismatch:model_revision"
    assert node.backend().prepare(replace(work, save={"key": {"model_revision": "a"}}), "work")["state"] == "prepared"


def test_another_format_is_refused(node: Node) -> None:
    work = node.save(backend={"name": "cuda_criu", "format": "cuda_criu/9"})
    assert refused(node, work) == "key_mismatch:backend"


def test_other_gpus_are_mapped_one_to_one(node: Node) -> None:
    node.uuids = ["GPU-x", "GPU-y"]
    node.usage = {1: nvml.Usage((0,), GIB)}  # so the one that computes goes to the second
    assert node.backend().prepare(node.save(), "work")["map"] == {"GPU-a": "GPU-y", "GPU-b": "GPU-x"}


def test_a_map_needs_a_driver_that_takes_one(node: Node) -> None:
    node.uuids = ["GPU-x", "GPU-y"]
    node.facts["driver"] = "570.86.10"
    work = node.save(key={**FACTS, "driver": "570.86.10"})
    assert refused(node, work) == "key_mismatch:gpu_uuid"


def test_two_saves_are_not_promised_one_gpu(node: Node) -> None:
    first, second, third = node.save(), node.save("work2"), node.save("work3")
    assert node.backend().prepare(first, "work")["map"] == {}
    assert node.backend().prepare(second, "work2")["map"] == {"GPU-a": "GPU-b", "GPU-b": "GPU-a"}
    assert refused(node, third) == "insufficient_gpu_memory"
    node.backend().absent(first)
    assert node.backend().prepare(third, "work3")["map"] == {}


def test_what_was_not_prepared_is_not_restored(node: Node) -> None:
    with pytest.raises(CheckpointError, match="prepared here"):
        node.backend().restore(node.save(), "work")


def test_work_that_never_came_is_proven_absent(node: Node) -> None:
    work = node.save()
    assert node.backend().absent(work) == {"changed": False, "runs": False, "ran": False}
    node.backend().prepare(work, "work")
    assert node.backend().absent(work) == {"changed": True, "runs": False, "ran": False}


@pytest.mark.parametrize("state", ["starting", "unlocking", "running", "failed"])
@pytest.mark.parametrize("fails", ["guard", "end", "show"])
def test_work_that_may_still_run_is_not_proven_absent(node: Node, fails: str, state: str) -> None:
    """Not by the restore that failed over it either: the files it uses stay, and the next look tries again."""
    work = node.save()
    data = node.tmp_path / "data.before"
    data.write_text("what was here")
    aside = [{"path": str(node.data), "kept": str(data), "existed": True}]
    path = node.backend().record_path("work", "restores")
    record = {**node.backend().prepare(work, "work"), "state": state, "aside": aside}
    suspend.write_record(path, record)
    node.service.run(node.tmp_path / "sys")
    node.service.fails = {fails}
    if state == "failed" and fails != "show":
        assert node.backend().absent(work)["runs"]
        return
    with pytest.raises(CheckpointError, match=r"restore_failed at absent|podman does not answer"):
        node.backend().absent(work, also_running=True)
    assert node.data.read_bytes() == b"x" * 10
    with pytest.raises(CheckpointError, match="prepared here" if state != "failed" else "prepared here|says failed"):
        node.backend().restore(work, "work")
    if state == "failed":
        return
    assert suspend.read_record(path)["state"] == "ending"
    node.service.fails = set()
    told = node.backend().absent(work)
    assert (told["runs"], told["ran"]) == (False, state in ("unlocking", "running"))
    assert node.data.read_text() == "what was here"


def test_a_restore_that_fails_tells_that_it_may_still_run(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it fails over, also what nobody thought of."""
    work = node.save()
    node.backend().prepare(work, "work")

    def started(self: CudaCriu, work: Work, service: Service, path: Path, record: dict[str, Any], *rest: Any) -> None:
        record.update(state="starting")
        node.service.run(node.tmp_path / "sys")
        raise ValueError("invalid continuation byte")

    monkeypatch.setattr(CudaCriu, "_restart", started)
    node.service.fails = {"guard"}
    with pytest.raises(CheckpointError, match=r"ValueError: invalid .* not proven to have ended") as caught:
        node.backend().restore(work, "work")
    assert caught.value.reason.reason == "restore_failed"
    assert suspend.read_record(node.backend().record_path("work", "restores"))["state"] == "ending"
    node.service.fails = set()
    assert node.backend().absent(work)["runs"] is False


def test_files_that_could_not_be_put_back_are_not_forgotten(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing starts from half of another's, and what was set aside is not thrown away with the save."""
    work = node.save()
    kept = node.tmp_path / "data.before"
    kept.write_text("what was here")
    path = node.backend().record_path("work", "restores")
    aside = [{"path": str(node.data), "kept": str(kept), "existed": True}]
    suspend.write_record(path, {**node.backend().prepare(work, "work"), "state": "starting", "aside": aside})

    def busy(path: str) -> None:
        raise OSError(16, "Device or resource busy", path)

    with monkeypatch.context() as broken:
        broken.setattr(carried, "remove", busy)
        node.backend().absent(work)
        for act in (
            lambda: node.backend().prepare(work, "work"),
            lambda: node.backend().discard(work, "work"),
            lambda: node.backend().return_cold(work, "node2"),
        ):
            with pytest.raises(CheckpointError, match=r"data\.before in its place"):
                act()
    assert node.backend().discard(work, "work")
    assert node.data.read_text() == "what was here"


@pytest.mark.parametrize(("seconds", "boot", "promised"), [(0, None, True), (901, None, False), (0, "another", False)])
def test_a_place_is_kept_by_a_clock_that_nobody_sets(
    node: Node, monkeypatch: pytest.MonkeyPatch, seconds: float, boot: str | None, promised: bool
) -> None:
    node.backend().prepare(node.save(), "work")
    clock = Clock.read()
    later = Clock(clock.now + 10_000, clock.uptime + seconds, boot or clock.boot_id)
    monkeypatch.setattr(Clock, "read", lambda *dummy: later)
    claimed = node.backend()._claimed(node.tmp_path / "state/restores/other.json")
    assert claimed == ({"GPU-a"} if promised else set())


@pytest.mark.parametrize("paths", [["/etc"], ["{}/data", "/etc"]])
def test_only_declared_paths_come_home(node: Node, paths: list[str]) -> None:
    """Whoever can write to the store may have named others."""
    work = Work("work", "work.service", {"paths": [f"{node.tmp_path}/data"]})
    node.save(backend={"name": "cuda_criu", "format": "files/1"}, paths=[one.format(node.tmp_path) for one in paths])
    with pytest.raises(CheckpointError, match=r"holds /etc, which save\.paths does not name"):
        node.backend().come_home(work, "work")
    assert suspend.read_record(node.backend().record_path("work", "restores")) == {}


def test_a_guest_that_cannot_be_said_to_have_left_runs_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is full by then, nobody would know that it stopped."""
    work = node.save()
    path = node.backend().record_path("work", "restores")
    suspend.write_record(path, {**node.backend().prepare(work, "work"), "state": "running"})
    node.service.active = "active"
    real = suspend.write_record

    def full(path: Path, record: dict[str, Any]) -> None:
        if record["state"] == "left":
            raise OSError(28, "No space left on device", str(path))
        real(path, record)

    monkeypatch.setattr(suspend, "write_record", full)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        node.backend().leave(work)
    assert (caught.value.reason.source, node.service.active) == ("running", "active")
    assert suspend.read_record(path)["state"] == "running"
