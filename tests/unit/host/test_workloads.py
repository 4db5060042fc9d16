# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders, nvml
from ansible_collections.gpufleet.driver.plugins.module_utils.host.identity import Owner, identify
from ansible_collections.gpufleet.driver.plugins.module_utils.host.workloads import (
    REFUSE,
    STOP,
    WAIT,
    Holder,
    Workload,
    Workloads,
    WorkloadsError,
    from_census,
    parse_inspect,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal
from ansible_collections.gpufleet.driver.tests.unit.host.machine import Crash, FakeContainer, FakeUnit, Machine

TRAINER = Workload("trainer", unit="trainer.service")
BOX = Workload("box", container="box", engine="docker")
SERVER = Workload("server", unit="server", ready=("check", "server"), ready_timeout=30)


def container_id(name: str) -> str:
    return name.ljust(64, "0")


def holder(pid: int = 41, name: str = "python", **more: Any) -> Holder:
    return Holder(pid, name, f"PID {pid} {name} (user alice)", "ask alice to end it", since=0.0, **more)


class Node:
    """A node with a fake machine, whose GPUs are held by what the test says."""

    def __init__(self, tmp_path: Path, units: dict[str, FakeUnit], containers: dict[str, FakeContainer] | None = None):
        self.path = tmp_path
        self.machine = Machine(tmp_path, units, containers)
        self.held: list[Holder] = []
        self.until: dict[int, float] = {}
        self.said: list[str] = []

    def census(self) -> list[Holder]:
        """Processes of stopped units and containers are gone; others end at their time."""
        found = []
        for one in self.held:
            its_unit = self.machine.units.get(one.unit or "")
            its_container = self.machine.containers.get((one.container or "").rstrip("0"))
            gone = (its_unit and its_unit.active != "active") or (its_container and not its_container.running)
            if not gone and self.machine.clock < self.until.get(one.pid, float("inf")):
                found.append(one)
        return found

    def open(self, check: bool = False, extra: Sequence[str] = ()) -> Workloads:
        return Workloads(
            Journal.open(str(self.path / "state"), read_only=check),
            self.machine.run,
            self.census,
            self.said.append,
            extra_units=extra,
            hold_directory=str(self.machine.hold_directory),
            now=lambda: 1.0,
            monotonic=self.machine.monotonic,
            sleep=self.machine.sleep,
        )

    def stop(
        self, *work: Workload, wait: float = 60, undeclared: str = WAIT, check: bool = False, extra: Any = ()
    ) -> Any:
        return self.open(check, extra).stop(work, wait, undeclared, check=check)

    def start(self, *work: Workload, check: bool = False) -> Any:
        return self.open(check).start(work, check=check)

    def states(self) -> dict[str, Any]:
        return {**self.machine.states(), **{n: (c.running, c.policy) for n, c in self.machine.containers.items()}}


def busy_node(tmp_path: Path) -> Node:
    node = Node(
        tmp_path,
        {
            "trainer.service": FakeUnit("active"),
            "server.service": FakeUnit("active"),
            "server.socket": FakeUnit("active", triggers=("server.service",)),
            "idle.service": FakeUnit("inactive"),
            "nvidia-persistenced.service": FakeUnit("active"),
        },
        {"box": FakeContainer(policy="always"), "off": FakeContainer(running=False, policy="unless-stopped")},
    )
    node.machine.answers["check server"] = Completed((), 0, "", "", 0)
    node.held = [
        holder(1, unit="trainer.service"),
        holder(2, container=container_id("box")),
        holder(3, "nvidia-persiste", unit="nvidia-persistenced.service", management=True),
    ]
    return node


ALL = (
    TRAINER,
    BOX,
    SERVER,
    Workload("idle", unit="idle"),
    Workload("off", container="off", engine="docker"),
    Workload("else", unit="elsewhere"),
)


def test_from_running_to_running(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    before = node.states()
    result = node.stop(*ALL)
    assert result["changed"] and result["stopped"] == ["trainer", "box", "server"] and result["missing"] == ["else"]
    assert result["workloads"] == {
        "trainer": "stopped",
        "box": "stopped",
        "server": "stopped",
        "idle": "stopped",
        "off": "stopped",
        "else": "missing",
    }
    assert node.states() == {
        **before,
        "trainer.service": "inactive",
        "server.service": "inactive",
        "server.socket": "inactive",
        "box": (False, "no"),
        "off": (False, "no"),
    }
    node.machine.start_by_others()
    assert node.states()["trainer.service"] == "inactive" and node.states()["server.socket"] == "inactive"
    assert not node.stop(*ALL)["changed"]
    result = node.start()
    assert result["started"] == ["server", "trainer", "box"] and result["left_stopped"] == ["else", "idle", "off"]
    assert node.states() == before
    assert not node.start()["changed"]


def test_containers_go_before_the_daemon_reload__A_CTR_02(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.stop(*ALL)
    node.start()
    order = [call[:2] for call in node.machine.calls]
    reloads = [index for index, call in enumerate(order) if call == ("systemctl", "daemon-reload")]
    assert order.index(("docker", "stop")) < reloads[0] < reloads[1] < order.index(("docker", "start"))


def test_restart_policy_is_suspended_before_the_stop_and_put_back__A_CTR_03(tmp_path: Path) -> None:
    node = Node(tmp_path, {}, {"box": FakeContainer(policy="on-failure:5")})
    node.stop(BOX)
    node.start()
    changes = [
        call for call in node.machine.calls if call[0] in ("docker", "nvidia-modprobe") and call[1] != "container"
    ]
    assert changes == [
        ("docker", "update", "--restart=no", "box"),
        ("docker", "stop", "-t", "60", "box"),
        ("nvidia-modprobe", "-u", "-c=0"),
        ("docker", "start", "box"),
        ("docker", "update", "--restart=on-failure:5", "box"),
    ]


def test_an_engine_that_cannot_change_the_policy_is_a_warning(tmp_path: Path) -> None:
    node = Node(tmp_path, {}, {"box": FakeContainer(policy="always")})
    node.machine.policies_can_change = False
    (warning,) = node.stop(BOX)["warnings"]
    assert "restart policy always could not be suspended" in warning and "unknown flag" in warning
    node.start()
    assert node.states() == {"box": (True, "always")}


@pytest.mark.parametrize("crash_after", range(12))
def test_after_a_crash_at_any_command_a_new_run_finishes(tmp_path: Path, crash_after: int) -> None:
    node = busy_node(tmp_path)
    before = node.states()
    for act in (lambda: node.stop(*ALL), node.start):
        node.machine.crash_after = crash_after
        try:
            act()
        except Crash:
            node.machine.crash_after = None
            act()
        node.machine.crash_after = None
    assert node.states() == before


def test_check_mode_touches_nothing(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.held.append(holder(9))
    before = node.states()
    foretold = node.stop(*ALL, check=True)
    assert foretold["stopped"] == ["trainer", "box", "server"] and [one["pid"] for one in foretold["undeclared"]] == [9]
    assert node.states() == before and node.machine.clock == 0 and not (tmp_path / "state").exists()
    node.held.pop()
    node.stop(*ALL)
    stopped = node.states()
    assert node.start(check=True)["started"] == ["server", "trainer", "box"] and node.states() == stopped


def test_a_new_run_without_declarations_still_starts_what_was_stopped(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.stop(*ALL)
    Journal.open(str(tmp_path / "state")).begin("r2", "550.90.07", None, now=5.0)
    assert node.start()["started"] == ["server", "trainer", "box"]


# -- what there is


def test_survey_names_all_work_and_says_what_will_be_done(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.held += [
        holder(7, kind="session", part_of="login session 3 of alice", gpus=(1,), memory=100),
        holder(8, kind="session", part_of="login session 3 of alice", gpus=(0, 1), memory=50),
        holder(9, unit="rogue.service", kind="unit", part_of="rogue.service", gpus=(2,)),
    ]
    work = node.open(check=True).survey(ALL, 60)
    assert [(one["name"], one["kind"], one["declared"], one["state"]) for one in work] == [
        ("trainer", "unit", True, "running"),
        ("box", "container", True, "running"),
        ("server", "unit", True, "running"),
        ("idle", "unit", True, "stopped"),
        ("off", "container", True, "stopped"),
        ("else", "unit", True, "missing"),
        ("login session 3 of alice", "session", False, "running"),
        ("rogue.service", "unit", False, "running"),
    ]
    session = work[-2]
    assert (session["gpus"], session["memory"], session["pids"], session["since"]) == ([0, 1], 150, [7, 8], 0.0)
    assert work[0]["then"] == "is stopped, and started again afterwards" and "left so" in work[3]["then"]
    assert work[5]["then"].startswith("is not there, the node has no ")
    assert [one["may"] for one in work[:2]] == [["restart"], ["restart"]]
    assert [(one["may"], one["wait"]) for one in work[-2:]] == [(["wait"], 60)] * 2
    movable = node.open().survey([replace(ALL[0], movable=True, elsewhere="spare")], 60)[0]
    assert (movable["may"], movable["elsewhere"]) == (["move", "restart"], "spare")
    assert movable["then"].startswith("is saved and moved if a node can take it; if not, it is stopped")
    patience = "is not declared in gpu_workloads: it is waited for, at most 60 s, then"
    given_up = f"{patience} the node is given up, with its declared work untouched; declare it, raise gpu_workload_wait"
    left_to_its_user, can_be_stopped = (
        f"{given_up}, or end it before",
        f"{given_up}, set gpu_undeclared=stop, or end it before",
    )
    stopped = f"{patience} it is stopped, and started again afterwards"
    assert [one["then"] for one in work[-2:]] == [left_to_its_user, can_be_stopped]
    assert [one["then"] for one in node.open().survey(ALL, 60, STOP)[-2:]] == [left_to_its_user, stopped]
    assert {one["then"] for one in node.open().survey(ALL, 60, REFUSE)[-2:]} == {
        "is not declared in gpu_workloads, so the node is refused"
    }
    assert node.machine.clock == 0 and not any(call[1] in ("stop", "start") for call in node.machine.calls)


def test_survey_tells_what_an_interrupted_run_has_stopped(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.open().stop(ALL, 60)
    work = node.open().survey(ALL, 60)
    assert "is started again afterwards" in work[0]["then"] and "left so" in work[3]["then"]


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        (Owner(pod="1234-5", container="abc"), None, ("pod", "pod 1234-5")),
        (Owner(job="12", step="0"), None, ("job", "Slurm job 12")),
        (Owner(container="0123456789abcdef"), None, ("container", "container 0123456789ab")),
        (Owner(container="0123456789abcdef", unit="docker.service"), "web", ("container", "container web")),
        (Owner(unit="triton.service"), None, ("unit", "triton.service")),
        (Owner(unit="nb.service", user_unit_of=1000), None, ("unit", "nb.service of user {user}")),
        (Owner(session="3"), None, ("session", "login session 3 of {user}")),
        (Owner(unit="run-1.scope"), None, ("process", "{comm} of {user} (PID {pid})")),
    ],
)
def test_work_is_named_as_its_owner_knows_it(owner: Owner, name: str | None, expected: tuple[str, str]) -> None:
    me = replace(identify(os.getpid()), owner=owner)
    held = holders.Holder(
        holders.WORKLOAD,
        me.comm,
        ("/dev/nvidia2", "/dev/nvidiactl"),
        (),
        holders.Release(""),
        process=me,
        container_name=name,
    )
    census = holders.Census({}, (), (held,))
    (one,) = from_census(census)
    about = {"user": me.login or me.user, "comm": me.comm, "pid": me.pid}
    assert (one.kind, one.part_of) == (expected[0], expected[1].format(**about))
    assert (one.gpus, one.memory) == ((2,), None), "without NVML, the open device nodes tell"
    (told,) = from_census(census, usage={me.pid: nvml.Usage((5,), 7)})
    assert (told.gpus, told.memory) == ((5,), 7)


# -- what nobody declared


def test_undeclared_work_is_waited_for_before_anything_is_stopped(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.held.append(holder(9))
    node.until[9] = 40
    result = node.stop(TRAINER, BOX, wait=60)
    assert 40 <= result["waited"] <= 46 and result["undeclared"] == []
    assert node.said == [
        "waiting for undeclared GPU work to end: PID 9 python (user alice) since 1970-01-01 00:00:00Z. "
        "In 60 s this node is given up"
    ]


def test_a_look_says_what_is_waited_for_and_the_next_one_goes_on(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    before = node.states()
    node.held.append(holder(9))
    node.until[9] = 40
    for waited, left in ((0.0, 57), (20.0, 37)):
        with pytest.raises(
            WorkloadsError, match=f"waiting for undeclared .*PID 9 .* In {left} s this node is"
        ) as caught:
            node.open().stop([TRAINER, BOX], 60, waited=waited, look=3)
        assert caught.value.result["waiting"] and caught.value.result["waited"] == waited + 3
    assert node.states() == before
    node.until[9] = node.machine.clock + 5
    assert node.open().stop([TRAINER, BOX], 60, waited=40, look=20)["stopped"] == ["trainer", "box"]


def test_the_last_look_ends_as_the_policy_says(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    with pytest.raises(WorkloadsError, match="after 60 s there is GPU work that nobody declared"):
        node.open().stop([BOX], 60, waited=50, look=20)
    result = node.open().stop([BOX], 60, STOP, waited=50, look=20)
    assert result["stopped"] == ["box", "trainer.service"] and result["waited"] == 60


def test_when_it_does_not_end_nothing_was_stopped(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    before = node.states()
    node.held.append(holder(9))
    with pytest.raises(WorkloadsError) as caught:
        node.stop(TRAINER, BOX, wait=60)
    assert str(caught.value) == (
        "after 60 s there is GPU work that nobody declared: PID 9 python (user alice) since 1970-01-01 00:00:00Z. "
        "Nothing was stopped. Declare it in gpu_workloads, wait longer, or end it: ask alice to end it"
    )
    assert caught.value.result["undeclared"][0]["pid"] == 9
    assert node.states() == before and Journal.open(str(tmp_path / "state"), read_only=True).before("workloads") is None


@pytest.mark.parametrize(("until", "refused"), [(2.0, False), (30.0, True)], ids=["a passing look", "work"])
def test_refused_at_once_but_not_for_a_passing_look(tmp_path: Path, until: float, refused: bool) -> None:
    node = busy_node(tmp_path)
    node.held.append(holder(9, "nvidia-smi", management=True))
    node.until[9] = until
    if not refused:
        assert node.stop(TRAINER, BOX, wait=600, undeclared=REFUSE)["changed"]
        return
    with pytest.raises(WorkloadsError, match=r"after 3 s there is GPU work"):
        node.stop(TRAINER, BOX, wait=600, undeclared=REFUSE)


def test_undeclared_services_and_containers_are_stopped_and_come_back(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    before = node.states()
    result = node.stop(undeclared=STOP, wait=10)
    assert result["stopped"] == ["trainer.service", "box000000000"] and result["waited"] == 10
    assert node.states()["trainer.service"] == "inactive" and node.states()["box"] == (False, "no")
    assert node.said[0].endswith("In 10 s its service or container is stopped")
    node.start()
    assert node.states() == before


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(holder(9), id="login session"),
        pytest.param(holder(9, unit="sshd.service"), id="daemonised below sshd"),
        pytest.param(holder(9, unit="session-3.scope"), id="scope"),
        pytest.param(holder(9, container=container_id("pod")), id="container of no engine here"),
    ],
)
def test_what_has_no_service_of_its_own_is_not_stopped(tmp_path: Path, one: Holder) -> None:
    node = Node(tmp_path, {"sshd.service": FakeUnit("active"), "session-3.scope": FakeUnit("active")})
    node.held = [one]
    with pytest.raises(WorkloadsError, match="GPU work that nobody declared"):
        node.stop(undeclared=STOP, wait=0)
    assert set(node.states().values()) == {"active"}


@pytest.mark.parametrize(
    ("one", "extra", "work"),
    [
        pytest.param(holder(9, unit="nvidia-dcgm.service"), (), False, id="A-MOD-03 known service"),
        pytest.param(holder(9, "nomad", unit="nomad.service", management=True), (), False, id="A-MOD-05 watcher"),
        pytest.param(holder(9, "agent", unit="agent.service"), ("agent",), False, id="given"),
        pytest.param(holder(9, "nvidia-cuda-mps"), (), False, id="A-MOD-12 MPS"),
        pytest.param(holder(9, "agent", unit="agent.service"), (), True, id="a service that computes"),
        pytest.param(holder(9, "nvtop", management=True), (), True, id="a watcher in a session"),
        pytest.param(
            holder(9, "dcgm-exporter", container=container_id("exporter"), management=True),
            (),
            True,
            id="A-MOD-09 a watcher in a container",
        ),
        pytest.param(holder(9, "x", unit="sshd.service", management=True), (), True, id="a watcher below sshd"),
    ],
)
def test_what_is_work(tmp_path: Path, one: Holder, extra: tuple[str, ...], work: bool) -> None:
    node = Node(tmp_path, {})
    node.held = [one]
    if work:
        with pytest.raises(WorkloadsError, match="nobody declared"):
            node.stop(wait=0, extra=extra)
    else:
        assert not node.stop(wait=0, extra=extra)["changed"]


def test_a_process_that_outlives_its_unit_is_told(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.held = [holder(7, unit="trainer.service")]
    node.machine.units["gone.service"] = FakeUnit("active")
    census = node.open()
    census.census = lambda: node.held  # it stays whatever becomes of its unit
    with pytest.raises(WorkloadsError, match="work is stopped, but GPUs are still open: PID 7 python"):
        census.stop([TRAINER], wait=0)
    node.held = []
    assert not node.stop(TRAINER)["changed"]
    assert node.start()["started"] == ["trainer"]


def test_a_unit_that_calls_docker_run_owns_its_container(tmp_path: Path) -> None:
    node = Node(tmp_path, {"runner.service": FakeUnit("active")}, {"run": FakeContainer(auto_remove=True)})
    node.held = [holder(5, container=container_id("run"))]
    work = Workload("runner", unit="runner", container="run", engine="docker")
    stop = node.machine._stop

    def stop_both(name: str) -> None:
        stop(name)
        node.machine.containers["run"].running = False

    node.machine._stop = stop_both  # type: ignore[method-assign]
    assert node.stop(work, wait=0)["stopped"] == ["runner"]
    assert not [call for call in node.machine.calls if call[:2] == ("docker", "stop")]
    assert node.start()["started"] == ["runner"]


def test_a_container_that_systemd_runs_is_stopped_by_its_unit(tmp_path: Path) -> None:
    container = FakeContainer(labels={"PODMAN_SYSTEMD_UNIT": "web.service"}, auto_remove=True)
    node = Node(tmp_path, {"web.service": FakeUnit("active")}, {"web": container})
    assert node.stop(Workload("web", container="web", engine="docker"))["stopped"] == ["web"]
    assert node.states()["web.service"] == "inactive" and container.running, "podman's unit takes it down, not we"
    assert node.start()["started"] == ["web"] and node.states()["web.service"] == "active"


# -- what goes wrong


@pytest.mark.parametrize(
    ("work", "message"),
    [
        pytest.param([TRAINER, TRAINER], "workloads declared more than once: trainer", id="twice"),
        pytest.param([Workload("rm", container="rm", engine="docker")], "was started with --rm", id="would vanish"),
        pytest.param([Workload("x", container="-it")], "'-it' is not the name of a container", id="an option"),
        pytest.param([Workload("x", container="down", engine="podman")], "podman does not answer", id="engine down"),
        pytest.param([Workload("x", container="none", engine="podman")], "podman is not installed", id="no engine"),
    ],
)
def test_refused_before_anything_is_stopped(tmp_path: Path, work: list[Workload], message: str) -> None:
    node = Node(tmp_path, {"trainer.service": FakeUnit("active")}, {"rm": FakeContainer(auto_remove=True)})

    def run(argv: Any, **options: Any) -> Completed:
        if argv[-1] == "down":
            return Completed(tuple(argv), 125, "", "Cannot connect to Podman", 0.0)
        if argv[-1] == "none":
            return Completed(tuple(argv), 127, "", "podman: not found", 0.0)
        return node.machine.run(argv, **options)

    workloads = node.open()
    workloads.run = run
    before = node.states()
    with pytest.raises(WorkloadsError, match=message):
        workloads.stop([TRAINER, *work] if work[0] is not TRAINER else work, wait=0)
    assert node.states() == before


def test_a_unit_that_does_not_stop_is_told(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.machine.units["trainer.service"].stuck = True
    with pytest.raises(WorkloadsError, match=r"workload trainer: trainer\.service is deactivating .* after 90 s"):
        node.stop(TRAINER, BOX)
    with pytest.raises(
        WorkloadsError, match=r"trainer\.service .* has not ended, .*next: systemctl kill --signal=KILL"
    ):
        node.start()
    assert 119 <= node.machine.clock <= 122, "a start that waits behind a stop has its ready_timeout, and no more"


def test_work_that_does_not_come_back_is_told_and_stays_remembered(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.stop(*ALL)
    node.machine.units["trainer.service"].broken = True
    node.machine.containers["box"].broken = True
    node.machine.answers["check server"] = Completed(("check", "server"), 7, "", "connection refused", 0)
    with pytest.raises(WorkloadsError) as caught:
        node.start()
    text = str(caught.value)
    assert "trainer: trainer.service is failed (failed, result exit-code)" in text
    assert "box: container box is exited with 0 (next: docker logs --tail 20 box)" in text
    assert "server: is running, but not ready after 30 s (check server: rc 7: connection refused)" in text
    assert caught.value.result["failed_workloads"] == ["box", "server", "trainer"]
    assert node.machine.containers["box"].policy == "always", "its policy is put back all the same"
    node.machine.units["trainer.service"].broken = node.machine.containers["box"].broken = False
    later = Workload("server", unit="server", ready=("true",), ready_timeout=30)
    node.machine.answers["true"] = Completed((), 0, "", "", 0)
    assert node.start(later)["failed_workloads"] == [] and not node.start()["changed"]


def test_a_container_that_is_gone_is_told(tmp_path: Path) -> None:
    node = busy_node(tmp_path)
    node.stop(BOX, TRAINER)
    del node.machine.containers["box"]
    with pytest.raises(WorkloadsError, match="box: container box is no longer there"):
        node.start()


# -- parsers


PODMAN = {
    "Id": "e5b0c7",
    "State": {"Status": "exited", "Running": False, "ExitCode": 128, "Error": "lstat /dev/nvidia-uvm-tools: no such"},
    "HostConfig": {"RestartPolicy": {"Name": "", "MaximumRetryCount": 0}, "AutoRemove": False},
    "Config": {"Labels": None},
}


def test_inspect__A_CTR_03() -> None:
    container = parse_inspect(json.dumps([PODMAN]))
    assert (container.exit_code, container.error) == (128, "lstat /dev/nvidia-uvm-tools: no such")
    assert container.policy == "no" and container.unit is None and not container.running


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"Name": "always", "MaximumRetryCount": 0}, "always"),
        ({"Name": "on-failure", "MaximumRetryCount": 5}, "on-failure:5"),
        ({"Name": "on-failure", "MaximumRetryCount": 0}, "on-failure"),
        ({"Name": "unless-stopped"}, "unless-stopped"),
        ({}, "no"),
        (None, "no"),
    ],
)
def test_restart_policies(policy: Any, expected: str) -> None:
    assert parse_inspect(json.dumps([{**PODMAN, "HostConfig": {"RestartPolicy": policy}}])).policy == expected


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", "[{}, {}]", "[{}]"])
def test_inspect_of_something_else(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_inspect(text)


def test_holders_from_a_census_of_this_process() -> None:
    me = identify(os.getpid())
    release = holders.Release("ask nicely")
    kinds = (holders.WORKLOAD, holders.MANAGEMENT, holders.SYSTEM)
    taken = [holders.Holder(kind, me.comm, (), (), release, process=me) for kind in kinds]
    module = holders.Holder(holders.KERNEL, "gdrdrv", (), ("nvidia",), release)
    one, other = from_census(holders.Census({}, (), (*taken, module)))
    assert (one.pid, one.management, other.management) == (os.getpid(), False, True)
    assert one.next == "ask nicely" and str(os.getpid()) in one.title
    assert one.since is not None and 0 <= time.time() - one.since < 3600
