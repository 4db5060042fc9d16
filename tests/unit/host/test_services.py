# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import version
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.host import services as subject
from ansible_collections.gpufleet.driver.plugins.module_utils.host.services import Services, ServicesError
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal
from ansible_collections.gpufleet.driver.tests.unit.host.machine import Crash, FakeUnit, Machine

PERSISTENCED, FABRIC, DCGM = "nvidia-persistenced.service", "nvidia-fabricmanager.service", "nvidia-dcgm.service"


def open_services(tmp_path: Path, machine: Machine, **options: Any) -> Services:
    proc = tmp_path / "proc"
    proc.mkdir(exist_ok=True)
    return Services(
        Journal.open(str(tmp_path / "state"), read_only=options.pop("check", False)),
        machine.run,
        now=lambda: 1.0,
        hold_directory=str(machine.hold_directory),
        proc=str(proc),
        sleep=machine.sleep,
        monotonic=machine.monotonic,
        **options,
    )


def stop(tmp_path: Path, machine: Machine, *extra: str, keep: tuple[str, ...] = (), check: bool = False) -> Any:
    return open_services(tmp_path, machine, check=check).stop(extra, keep, timeout=60, check=check)


def restore(tmp_path: Path, machine: Machine, check: bool = False) -> Any:
    return open_services(tmp_path, machine, check=check).restore(timeout=60, check=check)


def fleet_node() -> dict[str, FakeUnit]:
    """A node with a bit of everything."""
    return {
        PERSISTENCED: FakeUnit("active"),
        FABRIC: FakeUnit("active"),
        DCGM: FakeUnit("active", names=("dcgm.service",)),
        "dcgm-exporter.service": FakeUnit("active", requires=(DCGM,)),
        "dcgm-exporter.socket": FakeUnit("active", triggers=("dcgm-exporter.service",)),
        "nvidia-powerd.service": FakeUnit("inactive", file_state="disabled"),
        "nvidia-cdi-refresh.service": FakeUnit("active", type="oneshot"),
        "nvidia-cdi-refresh.path": FakeUnit("active", triggers=("nvidia-cdi-refresh.service",)),
        "job-agent.service": FakeUnit("active", requires=(PERSISTENCED,)),
        "sshd.service": FakeUnit("active"),
    }


def test_what_was_up_is_stopped_and_comes_back_in_the_reverse_order(tmp_path: Path) -> None:
    machine = Machine(tmp_path, fleet_node())
    before = machine.states()
    stopped = stop(tmp_path, machine)
    assert stopped["changed"] and stopped["stopped"] == machine.done("systemctl", "stop")
    assert machine.states() == {**dict.fromkeys(before, "inactive"), "sshd.service": "active"}
    assert stopped["stopped"].index("dcgm-exporter.service") < stopped["stopped"].index(DCGM)
    assert stopped["stopped"].index("dcgm-exporter.socket") < stopped["stopped"].index("dcgm-exporter.service")
    assert stopped["stopped"][-1] == PERSISTENCED
    machine.start_by_others()
    assert set(machine.states().values()) == {"inactive", "active"} and machine.states()[PERSISTENCED] == "inactive"
    restored = restore(tmp_path, machine)
    services = [name for name in stopped["stopped"] if name.endswith(".service")]
    assert restored["started"] == ["dcgm-exporter.socket", *reversed(services), "nvidia-cdi-refresh.path"]
    assert machine.states() == before
    assert restored["left_stopped"] == ["nvidia-powerd.service"]
    assert not list(machine.hold_directory.rglob("*.conf"))


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, fleet_node())
    stop(tmp_path, machine)
    count = len(machine.done("systemctl", "stop")) + len(machine.done("systemctl", "daemon-reload"))
    assert not stop(tmp_path, machine)["changed"]
    assert len(machine.done("systemctl", "stop")) + len(machine.done("systemctl", "daemon-reload")) == count
    restore(tmp_path, machine)
    assert not restore(tmp_path, machine)["changed"]


def test_check_mode_touches_nothing_and_foretells(tmp_path: Path) -> None:
    machine = Machine(tmp_path, fleet_node())
    before = machine.states()
    foretold = stop(tmp_path, machine, check=True)
    assert machine.states() == before and not (tmp_path / "state").exists() and not machine.hold_directory.exists()
    done = stop(tmp_path, machine)
    assert {**done, "services": {}} == {**foretold, "services": {}}
    assert foretold["diff"] == done["diff"]
    foretold = restore(tmp_path, machine, check=True)
    assert machine.states()[PERSISTENCED] == "inactive"
    assert restore(tmp_path, machine)["diff"] == foretold["diff"]


@pytest.mark.parametrize("crash_after", range(14))
def test_after_a_crash_at_any_command_a_new_run_finishes(tmp_path: Path, crash_after: int) -> None:
    machine = Machine(tmp_path, fleet_node())
    before = machine.states()
    for act in (stop, restore):
        machine.crash_after = crash_after
        try:
            act(tmp_path, machine)
        except Crash:
            machine.crash_after = None
            act(tmp_path, machine)
        machine.crash_after = None
        if act is stop:
            machine.start_by_others()
            assert machine.states() == {**dict.fromkeys(before, "inactive"), "sshd.service": "active"}
    assert machine.states() == before


def test_a_crash_between_the_holds_and_the_reload_is_made_good(tmp_path: Path) -> None:
    machine = Machine(tmp_path, fleet_node())
    machine.crash_after = 0  # the first command that changes something is the reload
    with pytest.raises(Crash):
        stop(tmp_path, machine)
    assert machine.calls[-1] == ("systemctl", "daemon-reload")
    machine.crash_after = None
    stop(tmp_path, machine)
    machine.start_by_others()
    assert machine.states()[PERSISTENCED] == "inactive"


def test_after_a_reboot_what_boot_started_is_not_started_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path, fleet_node())
    before = machine.states()
    stop(tmp_path, machine)
    for path in machine.hold_directory.rglob("*.conf"):
        path.unlink()
    for unit in machine.units.values():
        unit.active, unit.drop_ins = ("active" if unit.file_state == "enabled" else "inactive"), ()
    restored = restore(tmp_path, machine)
    assert restored["started"] == [] and machine.states() == before


def test_what_a_new_package_brought_up_is_stopped_but_not_remembered_as_running(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {PERSISTENCED: FakeUnit("active")})
    stop(tmp_path, machine)
    machine.units["nvidia-powerd.service"] = FakeUnit("active")
    assert stop(tmp_path, machine)["stopped"] == ["nvidia-powerd.service"]
    assert restore(tmp_path, machine)["started"] == [PERSISTENCED]
    assert machine.states()["nvidia-powerd.service"] == "inactive"


def test_more_units_in_a_second_call_are_remembered_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {PERSISTENCED: FakeUnit("active"), "nomad.service": FakeUnit("active")})
    stop(tmp_path, machine)
    assert stop(tmp_path, machine, "nomad")["stopped"] == ["nomad.service"]
    restore(tmp_path, machine)
    assert machine.states() == {PERSISTENCED: "active", "nomad.service": "active"}


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [
        ("enabled", "disabled", "enabled"),
        ("disabled", "enabled", "disabled"),
        ("static", "static", "static"),
        ("enabled", "masked", "masked"),
    ],
)
def test_enabled_is_put_back_as_it_was(tmp_path: Path, now: str, then: str, expected: str) -> None:
    machine = Machine(tmp_path, {PERSISTENCED: FakeUnit("active", file_state=now)})
    stop(tmp_path, machine)
    machine.units[PERSISTENCED].file_state = then  # its package was removed and installed again
    restore(tmp_path, machine)
    assert machine.units[PERSISTENCED].file_state == expected


def test_what_does_not_come_back_is_told_and_stays_remembered(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {PERSISTENCED: FakeUnit("active"), FABRIC: FakeUnit("active")})
    machine.answers["journalctl --unit=nvidia-fabricmanager.service"] = Completed((), 0, "starting\nno switch\n", "", 0)
    stop(tmp_path, machine)
    machine.units[FABRIC].broken = True
    with pytest.raises(ServicesError) as caught:
        restore(tmp_path, machine)
    assert str(caught.value) == (
        "not back as before the upgrade: nvidia-fabricmanager.service is failed (failed, result exit-code), "
        'last said "no switch" (next: systemctl status nvidia-fabricmanager.service)'
    )
    assert caught.value.result["failed_units"] == [FABRIC] and machine.states()[PERSISTENCED] == "active"
    machine.units[FABRIC].broken = False
    assert restore(tmp_path, machine)["started"] == [FABRIC]
    assert not restore(tmp_path, machine)["changed"]


def test_a_unit_that_is_no_longer_installed_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {PERSISTENCED: FakeUnit("active")})
    stop(tmp_path, machine)
    del machine.units[PERSISTENCED]
    with pytest.raises(ServicesError, match=r"nvidia-persistenced\.service was running before and is no longer"):
        restore(tmp_path, machine)


def test_a_unit_that_was_failing_before_is_started_but_not_waited_for(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {FABRIC: FakeUnit("activating", broken=True)})
    assert stop(tmp_path, machine)["stopped"] == [FABRIC]
    assert restore(tmp_path, machine)["started"] == [FABRIC]
    assert machine.states()[FABRIC] == "failed"


def test_a_service_that_does_not_stop_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {PERSISTENCED: FakeUnit("active", stuck=True), DCGM: FakeUnit("active")})
    with pytest.raises(ServicesError, match=r"still not stopped after 60 s: nvidia-persistenced\.service is deactiv"):
        stop(tmp_path, machine)
    with pytest.raises(ServicesError, match=r"has not ended, so .*next: systemctl kill --signal=KILL nvidia-persist"):
        restore(tmp_path, machine)
    assert 59 <= machine.clock <= 62, "a start that waits behind a stop has the time that was given, and no more"
    machine.units[PERSISTENCED].stuck = False
    machine.units[PERSISTENCED].active = "inactive"
    restore(tmp_path, machine)
    assert machine.states() == {PERSISTENCED: "active", DCGM: "active"}


@pytest.mark.parametrize("keep", [DCGM, "dcgm.service", "dcgm"], ids=["name", "alias", "alias without suffix"])
def test_kept_units_are_left_alone(tmp_path: Path, keep: str) -> None:
    machine = Machine(tmp_path, {PERSISTENCED: FakeUnit("active"), DCGM: FakeUnit("active", names=("dcgm.service",))})
    assert stop(tmp_path, machine, keep=(keep,))["kept"] == [DCGM]
    assert machine.states() == {PERSISTENCED: "inactive", DCGM: "active"}


def test_what_is_kept_cannot_hang_on_what_is_stopped(tmp_path: Path) -> None:
    machine = Machine(tmp_path, fleet_node())
    with pytest.raises(ServicesError, match=rf"job-agent.service is to be kept, but .* together with {PERSISTENCED}"):
        stop(tmp_path, machine, keep=("job-agent",))
    assert machine.states() == Machine(tmp_path, fleet_node()).states()


def test_a_target_that_goes_down_is_only_marked_as_reached_again(tmp_path: Path) -> None:
    machine = Machine(
        tmp_path, {PERSISTENCED: FakeUnit("active"), "x.target": FakeUnit("active", requires=(PERSISTENCED,))}
    )
    stop(tmp_path, machine)
    assert machine.done("systemctl", "stop") == [PERSISTENCED] and machine.states()["x.target"] == "inactive"
    restore(tmp_path, machine)
    assert ("systemctl", "start", "--job-mode=ignore-dependencies", "--", "x.target") in machine.calls
    assert machine.states()["x.target"] == "active"


def units(**states: str) -> dict[str, FakeUnit]:
    return {f"{name.replace('_', '-')}.service": FakeUnit(state) for name, state in states.items()}


@pytest.mark.parametrize(
    ("found", "stopped"),
    [
        pytest.param(
            {
                "nvsm.service": FakeUnit("inactive"),
                "nvsm-core.service": FakeUnit("active"),
                DCGM: FakeUnit("active", names=("dcgm.service",)),
            },
            ["nvsm-core.service", DCGM],
            id="A-MOD-11 nvsm is not running, its child is; an alias is one unit",
        ),
        pytest.param({}, [], id="A-MOD-11 no such units"),
        pytest.param(
            {"nvsm_api_gateway-mqtt.service": FakeUnit("active")}, ["nvsm_api_gateway-mqtt.service"], id="older NVSM"
        ),
        pytest.param(units(nvidia_powerd="active"), ["nvidia-powerd.service"], id="A-MOD-15 powerd"),
        pytest.param(
            units(nvidia_gridd="active", nvidia_topologyd="active", nvidia_imex="active", nvlsm="active"),
            ["nvidia-topologyd.service", "nvidia-gridd.service", "nvidia-imex.service", "nvlsm.service"],
            id="A-MOD-15 the rest of the table",
        ),
        pytest.param(units(nvidia_dcgm="inactive", dcgm_exporter="active"), ["dcgm-exporter.service"], id="A-MOD-09"),
    ],
)
def test_field_cases(tmp_path: Path, found: dict[str, FakeUnit], stopped: list[str]) -> None:
    machine = Machine(tmp_path, found)
    before = machine.states()
    assert stop(tmp_path, machine)["stopped"] == stopped
    assert restore(tmp_path, machine)["started"] == stopped[::-1]
    assert machine.states() == before


def test_an_agent_nobody_named_is_stopped_and_comes_back__A_MOD_05(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"nomad.service": FakeUnit("active")})
    services = open_services(tmp_path, machine, find_watchers=lambda: ["nomad.service"])
    assert services.stop([], [], timeout=60)["stopped"] == ["nomad.service"]
    services = open_services(tmp_path, machine, find_watchers=list)
    assert services.restore(timeout=60)["started"] == ["nomad.service"]


DETACH = [
    pytest.param("4.5.2", "590.48.01", True, id="A-DCGM-02 both new enough"),
    pytest.param("4.4.1", "590.48.01", False, id="A-DCGM-02 old DCGM"),
    pytest.param("4.5.2", "580.95.05", False, id="A-DCGM-02 old driver"),
    pytest.param("10.0.0", "1000.10.01", True, id="numbers, not text"),
    pytest.param(None, "590.48.01", False, id="no DCGM"),
    pytest.param("4.5.2", None, False, id="no driver"),
]


@pytest.mark.parametrize(("dcgm", "driver", "expected"), DETACH)
def test_can_detach(dcgm: str | None, driver: str | None, expected: bool) -> None:
    parsed = subject.parse_dcgm_version(f"\ndcgmi  version: {dcgm}\n" if dcgm else "dcgmi: no host engine")
    assert subject.can_detach(parsed, version.find(driver) if driver else None) is expected


def dcgm_node(tmp_path: Path, driver: str = "590.48.01", dcgm: str = "4.5.2") -> Machine:
    machine = Machine(tmp_path, {PERSISTENCED: FakeUnit("active"), DCGM: FakeUnit("active", names=("dcgm.service",))})
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\n")
    machine.answers["dcgmi --version"] = Completed((), 0, f"dcgmi  version: {dcgm}", "", 0)
    machine.answers["dcgmi set"] = Completed((), 0, "", "", 0)
    return machine


def test_dcgm_stays_up_detached(tmp_path: Path) -> None:
    machine = dcgm_node(tmp_path)
    result = stop(tmp_path, machine)
    assert result["detached"] == [DCGM] and result["stopped"] == [PERSISTENCED] and machine.states()[DCGM] == "active"
    (tmp_path / "proc/driver/nvidia/version").unlink()  # the driver is out
    again = stop(tmp_path, machine)
    assert not again["changed"] and machine.done("dcgmi", "set") == ["--detach-driver"]
    assert restore(tmp_path, machine)["attached"] == [DCGM]
    assert machine.done("dcgmi", "set") == ["--detach-driver", "--attach-driver"]
    assert not restore(tmp_path, machine)["changed"]


def test_dcgm_that_will_not_detach_is_stopped(tmp_path: Path) -> None:
    machine = dcgm_node(tmp_path)
    machine.answers["dcgmi set --detach-driver"] = machine.answers["dcgmi set"]
    machine.answers["dcgmi set"] = Completed((), 1, "", "Error", 0)
    machine.answers = {"dcgmi --version": machine.answers["dcgmi --version"], "dcgmi set": machine.answers["dcgmi set"]}
    result = stop(tmp_path, machine)
    assert result["detached"] == [] and result["stopped"] == [DCGM, PERSISTENCED]
    machine.start_by_others()
    assert set(machine.states().values()) == {"inactive"}
    assert restore(tmp_path, machine)["started"] == [PERSISTENCED, DCGM]
    assert "--attach-driver" not in machine.done("dcgmi", "set")


def test_dcgm_that_cannot_attach_to_an_older_driver_is_restarted(tmp_path: Path) -> None:
    machine = dcgm_node(tmp_path)
    stop(tmp_path, machine)
    machine.answers["dcgmi set"] = Completed((), 1, "", "Error", 0)
    restore(tmp_path, machine)
    assert machine.done("systemctl", "stop")[-1] == DCGM and machine.done("systemctl", "start")[-1] == DCGM
    assert machine.states()[DCGM] == "active"


PROGRAM = "/usr/bin/nvidia-cuda-mps-control"
CMD = b"/usr/bin/nvidia-cuda-mps-control\0-d\0"
ENV = b"PATH=/bin\0CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-7\0CUDA_VISIBLE_DEVICES=0\0LANG=C\0"


@pytest.mark.parametrize(
    ("cmdline", "environ", "cgroup", "expected"),
    [
        pytest.param(CMD, ENV, "0::/user.slice/user-0.slice/session-1.scope\n", (None, "/tmp/mps-7"), id="by hand"),
        pytest.param(CMD, b"", "0::/\n", (None, "/tmp/nvidia-mps"), id="default directory"),
        pytest.param(CMD, ENV, "0::/system.slice/mps.service\n", ("mps.service", "/tmp/mps-7"), id="in a unit"),
        pytest.param(
            CMD,
            ENV,
            "4:memory:/system.slice/mps.service\n1:name=systemd:/system.slice/mps.service\n0::/\n",
            ("mps.service", "/tmp/mps-7"),
            id="cgroup v1",
        ),
        pytest.param(
            CMD,
            ENV,
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/mps.service\n",
            (None, "/tmp/mps-7"),
            id="a user's own unit",
        ),
        pytest.param(CMD, ENV, "0::/system.slice/ssh.service\n", (None, "/tmp/mps-7"), id="by hand, without sessions"),
        pytest.param(CMD, ENV, f"0::/system.slice/docker-{'a' * 64}.scope\n", None, id="in a container"),
        pytest.param(b"nvidia-cuda-mps-control\0", ENV, "0::/\n", None, id="its command line"),
        pytest.param(b"\0", b"", "0::/\n", None, id="kernel thread"),
    ],
)
def test_mps_daemons(cmdline: bytes, environ: bytes, cgroup: str, expected: tuple[str | None, str] | None) -> None:
    found = subject.parse_mps(7, cmdline, {"Uid": "0 0 0 0"}, environ, cgroup, PROGRAM)
    assert (found and (found.unit, found.directory)) == expected
    assert (
        not found
        or not environ
        or dict(found.env)
        == {
            "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps-7",
            "CUDA_VISIBLE_DEVICES": "0",
        }
    )


@pytest.mark.parametrize(
    ("program", "uids"),
    [
        pytest.param("/usr/bin/nvidia-cuda-mps-server", "0 0 0 0", id="its server"),
        pytest.param("/usr/bin/vi", "0 0 0 0", id="something else"),
        pytest.param("/usr/bin/su", "1000 0 0 0", id="a program with more rights, called so by its user"),
        pytest.param("/tmp/nvidia-cuda-mps-control", "1000 0 0 0", id="one with more rights, by a link of that name"),
        pytest.param(PROGRAM, "", id="nobody knows whose"),
    ],
)
def test_what_is_only_called_an_mps_daemon(program: str, uids: str) -> None:
    assert subject.parse_mps(7, CMD, {"Uid": uids}, ENV, "0::/\n", program) is None


def test_an_mps_daemon_whose_program_was_replaced() -> None:
    found = subject.parse_mps(7, CMD, {"Uid": "65534\t65534\t0\t0"}, ENV, "0::/\n", f"{PROGRAM} (deleted)")
    assert found and found.user == "nobody"


def mps_process(tmp_path: Path, pid: int = 7) -> Path:
    process = tmp_path / f"proc/{pid}"
    process.mkdir(parents=True)
    (process / "cmdline").write_bytes(CMD)
    (process / "environ").write_bytes(ENV)
    (process / "cgroup").write_text("0::/user.slice/user-0.slice/session-1.scope\n")
    (process / "status").write_text("Name:\tnvidia-cuda-mps\nUid:\t0\t0\t0\t0\n")
    (process / "exe").symlink_to(PROGRAM)
    return process


def test_mps_is_told_to_quit_by_its_pipe_and_started_as_it_was__A_MOD_12(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {})
    process = mps_process(tmp_path)
    told: list[Any] = []

    def run(argv: Any, *, timeout: float, env: Any = None, stdin: Any = None) -> Completed:
        if argv[0] != "env":
            return machine.run(argv, timeout=timeout)
        told.append((list(argv[3:]), stdin and stdin.split()[0]))
        if stdin:
            for path in process.iterdir():
                path.unlink()
            process.rmdir()
        else:
            mps_process(tmp_path, pid=8)
        return Completed(tuple(argv), 0, "", "", 0)

    services = open_services(tmp_path, machine)
    services.run = run
    assert services.stop([], [], timeout=60)["mps"] == ["/tmp/mps-7"]
    assert not services.stop([], [], timeout=60)["changed"]
    assert services.restore(timeout=60)["mps"] == ["/tmp/mps-7"]
    env = ["CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-7", "CUDA_VISIBLE_DEVICES=0"]
    assert told == [([*env, "nvidia-cuda-mps-control"], "quit"), ([*env, "nvidia-cuda-mps-control", "-d"], None)]


def test_an_mps_daemon_that_does_not_quit_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    machine = Machine(tmp_path, {PERSISTENCED: FakeUnit("active")})
    mps_process(tmp_path)
    monkeypatch.setattr(subject.time, "monotonic", machine.monotonic)
    with pytest.raises(
        ServicesError, match=r"MPS control daemon \(pid 7, user root, pipe in /tmp/mps-7\) did not quit"
    ):
        stop(tmp_path, machine)


@pytest.mark.parametrize(
    ("unit", "needed"),
    [
        ("sshd.service", True),
        ("ssh.service", True),
        ("sshd@1.service", True),
        ("docker.service", True),
        ("slurmd.service", True),
        ("user@1000.service", True),
        ("nomad.service", False),
        ("telegraf.service", False),
    ],
)
def test_services_that_others_live_in(unit: str, needed: bool) -> None:
    assert subject.is_needed(unit) is needed
