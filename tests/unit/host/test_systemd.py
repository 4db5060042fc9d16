# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.host.systemd import (
    Hold,
    Systemd,
    SystemdError,
    in_order,
    parse_list,
    parse_show,
    to_stop,
    unit_name,
    with_followers,
)
from ansible_collections.gpufleet.driver.tests.unit.host.machine import FakeUnit, Machine

SHOW = """Type=simple
Result=success
Id=nvidia-dcgm.service
Names=nvidia-dcgm.service dcgm.service
RequiredBy=dcgm-exporter.service
BoundBy=
ConsistsOf=dcgm-exporter.service
TriggeredBy=
LoadState=loaded
ActiveState=active
SubState=running
DropInPaths=/run/systemd/system/nvidia-dcgm.service.d/zz-gpufleet-hold.conf
UnitFileState=enabled

Type=
Result=success
Id=nope.service
Names=nope.service
LoadState=not-found
ActiveState=inactive
SubState=dead
UnitFileState=

Type=oneshot
Result=success
Id=nvidia-mig-manager.service
Names=nvidia-mig-manager.service
LoadState=loaded
ActiveState=inactive
SubState=dead
UnitFileState=enabled
"""


def test_show() -> None:
    dcgm, nope, mig = parse_show(SHOW)
    assert dcgm.names == ("nvidia-dcgm.service", "dcgm.service") and dcgm.up and dcgm.back and dcgm.kind == "service"
    assert dcgm.dependents == ("dcgm-exporter.service",)
    assert not nope.present and not nope.up
    assert mig.present and not mig.up and mig.back, "a oneshot that succeeded is where it belongs"


@pytest.mark.parametrize(
    ("active", "sub", "up", "back"),
    [
        ("active", "running", True, True),
        ("active", "exited", True, True),
        ("activating", "auto-restart", True, False),
        ("reloading", "reload", True, False),
        ("deactivating", "stop-sigterm", False, False),
        ("failed", "failed", False, False),
        ("inactive", "dead", False, False),
    ],
)
def test_states(active: str, sub: str, up: bool, back: bool) -> None:
    text = f"Id=a.service\nType=simple\nLoadState=loaded\nActiveState={active}\nSubState={sub}\nResult=success"
    (unit,) = parse_show(text)
    assert (unit.up, unit.back) == (up, back)


def test_a_failed_oneshot_is_not_back() -> None:
    text = "Id=a.service\nType=oneshot\nLoadState=loaded\nActiveState=inactive\nSubState=dead\nResult=exit-code"
    assert not parse_show(text)[0].back


@pytest.mark.parametrize("text", ["", "\n\n", "garbage", "LoadState=loaded\n"])
def test_show_of_nothing(text: str) -> None:
    assert parse_show(text) == []


def test_list() -> None:
    text = (
        "nvsm-core.service       loaded    active   running NVSM core\n"
        "● nvsm-mqtt.service     not-found inactive dead    nvsm-mqtt.service\n"
        "nvsm_api_gateway-plugin-memory.service loaded active running a.service\n"
        "\n0 loaded units listed.\n"
    )
    assert parse_list(text) == ["nvsm-core.service", "nvsm-mqtt.service", "nvsm_api_gateway-plugin-memory.service"]


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("trainer", "trainer.service"),
        ("trainer.service", "trainer.service"),
        ("refresh.path", "refresh.path"),
        ("mps@0", "mps@0.service"),
        ("a\\x2db.service", "a\\x2db.service"),
    ],
)
def test_unit_name(given: str, full: str) -> None:
    assert unit_name(given) == full


@pytest.mark.parametrize("given", ["", "../../etc/cron.d/x", "a b", "--now", "a;b", "a/b.service", "%i.service"])
def test_what_is_no_unit_name_is_refused(given: str) -> None:
    with pytest.raises(SystemdError, match="is not the name of a systemd unit"):
        unit_name(given)


@pytest.mark.parametrize(
    ("rc", "message"), [(127, "systemctl is not installed"), (1, "systemd does not answer"), (124, "does not answer")]
)
def test_without_systemd(rc: int, message: str) -> None:
    def run(argv: list[str], timeout: float) -> Completed:
        return Completed(tuple(argv), rc, "", "System has not been booted with systemd as init system", 1.0, rc == 124)

    with pytest.raises(SystemdError, match=message):
        Systemd(run).show(["a.service"])


def test_followers_and_the_order_to_start_them(tmp_path: Path) -> None:
    units = {
        "a.service": FakeUnit("active"),
        "b.service": FakeUnit("active", requires=("a.service",)),
        "c.service": FakeUnit("active", requires=("b.service",)),
        "idle.service": FakeUnit("inactive", requires=("a.service",)),
        "graph.target": FakeUnit("active", requires=("c.service",)),
        "a.socket": FakeUnit("inactive", triggers=("a.service",)),
        "c.timer": FakeUnit("active", triggers=("c.service",)),
        "other.service": FakeUnit("active"),
    }
    found, distance = with_followers(Systemd(Machine(tmp_path, units).run), ["a.service"])
    assert set(found) == {"a.service", "b.service", "c.service", "graph.target", "a.socket", "c.timer"}
    order = ["a.socket", "a.service", "b.service", "c.service", "graph.target", "c.timer"]
    assert in_order(distance, ["a.service"]) == order
    assert to_stop(order) == ["c.timer", "a.socket", "graph.target", "c.service", "b.service", "a.service"]


def test_followers_of_what_is_down_are_only_its_triggers(tmp_path: Path) -> None:
    units = {
        "a.service": FakeUnit("inactive"),
        "b.service": FakeUnit("active", requires=("a.service",)),
        "a.path": FakeUnit("active", triggers=("a.service",)),
    }
    found, dummy = with_followers(Systemd(Machine(tmp_path, units).run), ["a.service"])
    assert set(found) == {"a.service", "a.path"}


def test_a_service_that_dies_after_its_start_is_not_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"a.service": FakeUnit("active"), "b.service": FakeUnit("active")})

    def sleep(seconds: float) -> None:
        machine.units["b.service"].active = "failed"

    late = Systemd(machine.run, sleep).wait_back(["a.service", "b.service"], timeout=60)
    assert [unit.id for unit in late] == ["b.service"]


def test_one_look_is_enough_where_something_else_proves_the_service(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"a.service": FakeUnit("active")})
    assert Systemd(machine.run, machine.sleep).wait_back(["a.service"], timeout=60, twice=False) == []
    assert machine.clock == 0
    machine.units["a.service"].active = "failed"
    late = Systemd(machine.run, machine.sleep).wait_back(["a.service"], timeout=60, twice=False)
    assert [unit.id for unit in late] == ["a.service"]


def test_hold(tmp_path: Path) -> None:
    hold = Hold(tmp_path, "Because.")
    (tmp_path / "a.service.d").mkdir()
    (tmp_path / "a.service.d/local.conf").write_text("[Service]\n")
    names = ["a.service", "a.socket", "graph.target", "session-1.scope"]
    assert hold.place(names) == ["a.service", "a.socket"], "others cannot be started or have no conditions"
    assert hold.place(names) == [] and hold.held() == ["a.service", "a.socket"]
    path = tmp_path / "a.service.d/zz-gpufleet-hold.conf"
    assert f"ConditionPathExists=!{path}\n" in path.read_text()
    assert hold.lift() == ["a.service", "a.socket"]
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a.service.d", tmp_path / "a.service.d/local.conf"]
    assert hold.lift() == []


@pytest.mark.parametrize("left", ["", "# Because.\n", "[Unit]\nConditionPathExists=!/elsewhere\n", None])
def test_a_hold_that_a_power_cut_or_a_full_disk_cut_off_is_placed_again(tmp_path: Path, left: str | None) -> None:
    path = tmp_path / "a.service.d/zz-gpufleet-hold.conf"
    if left is not None:
        path.parent.mkdir()
        path.write_text(left)
    hold = Hold(tmp_path, "Because.")
    assert hold.missing(["a.service"]) == ["a.service"]
    assert hold.place(["a.service"]) == ["a.service"] and hold.missing(["a.service"]) == []
    assert path.read_text().endswith(f"[Unit]\nConditionPathExists=!{path}\n")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o644, 0o755)


def test_a_hold_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, its name, and the name of the directory that was made for it."""
    synced: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    Hold(tmp_path, "Because.").place(["a.service"])
    content, *folders = synced
    assert content.startswith(f"{tmp_path}/a.service.d/") and folders == [f"{tmp_path}/a.service.d", str(tmp_path)]
