# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work that runs on another host while its own node is upgraded: two machines, each with a state directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.host.guests import Guests
from ansible_collections.gpufleet.driver.plugins.module_utils.host.workloads import Workload, Workloads, WorkloadsError
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal
from ansible_collections.gpufleet.driver.tests.unit.host.machine import Crash, FakeContainer, FakeUnit, Machine

SERVER = Workload("server", unit="server", ready=("check", "server"), ready_timeout=30, elsewhere="spare")
BOX = Workload("box", container="box", engine="docker", elsewhere="spare")
STAYING = Workload("server", unit="server", elsewhere="spare", come_back=False)


class Host:
    """A machine with a journal."""

    def __init__(self, path: Path, running: bool) -> None:
        self.state = str(path / "state")
        units = {"server.service": FakeUnit("active" if running else "inactive"), "other.service": FakeUnit("active")}
        self.machine = Machine(
            path, units, {"box": FakeContainer(running=running, policy="always" if running else "no")}
        )
        self.machine.answers["check server"] = Completed((), 0, "", "", 0)

    def open(self, check: bool = False, read_only: bool = False) -> Workloads:
        return Workloads(
            Journal.open(self.state, read_only=check or read_only),
            self.machine.run,
            list,
            lambda text: None,
            hold_directory=str(self.machine.hold_directory),
            now=lambda: 1.0,
            monotonic=self.machine.monotonic,
            sleep=self.machine.sleep,
        )

    def guests(self) -> Guests:
        return Guests(self.open(read_only=True), self.state, lambda: 5.0)

    @property
    def running(self) -> list[str]:
        found = [name for name, state in self.machine.states().items() if state == "active" and name != "other.service"]
        return found + [name for name, container in self.machine.containers.items() if container.running]


@pytest.fixture
def home(tmp_path: Path) -> Host:
    return Host(tmp_path / "home", running=True)


@pytest.fixture
def spare(tmp_path: Path) -> Host:
    return Host(tmp_path / "spare", running=False)


def test_there_and_back(home: Host, spare: Host) -> None:
    assert spare.guests().take_in([SERVER, BOX], "home", check=True)["started"] == ["server", "box"]
    assert spare.running == [] and not Path(spare.state).exists()
    assert home.open().stop([SERVER, BOX], 0)["elsewhere"] == {"server": "spare", "box": "spare"}
    assert home.running == []
    assert spare.guests().take_in([SERVER, BOX], "home")["changed"]
    assert spare.running == ["server.service", "box"]
    assert not spare.guests().take_in([SERVER, BOX], "home")["changed"], "a second run finds it done"
    assert home.open().stop([SERVER, BOX], 0)["elsewhere"] == {"server": "spare", "box": "spare"}, (
        "and knows where it is"
    )
    assert spare.guests().send_home("home") == {"changed": True, "stopped": ["box", "server"], "kept": []}
    assert spare.running == [] and not spare.guests().send_home("home")["changed"]
    with pytest.raises(
        WorkloadsError, match="may run elsewhere, so nothing was started here: box on spare; server on spare"
    ):
        home.open().start()
    assert home.open().start(back_from=["spare"])["started"] == ["server", "box"]
    assert home.running == ["server.service", "box"]


def test_what_is_to_stay_is_not_started_at_home(home: Host, spare: Host) -> None:
    home.open().stop([STAYING], 0)
    spare.guests().take_in([STAYING], "home")
    for dummy in range(2):  # the same after a crash between the two
        kept = spare.guests().send_home("home")
        assert kept == {"changed": False, "stopped": [], "kept": ["server"]}
    result = home.open().start(stay=kept["kept"], back_from=["spare"])
    assert result["left_stopped"] == ["server"] and "server.service" not in home.running
    assert spare.running == ["server.service"]
    spare.machine.units["server.service"].active = "inactive"
    assert spare.guests().send_home("home")["kept"] == [], "stopped there by a person: no guest any more"


def test_work_that_does_not_run_at_home_is_not_started_elsewhere(home: Host) -> None:
    home.machine.units["server.service"].active = "inactive"
    assert home.open().stop([SERVER], 0)["elsewhere"] == {}


def test_only_guests_are_sent_home(spare: Host) -> None:
    spare.guests().take_in([SERVER], "home")
    assert spare.guests().send_home("home-2")["stopped"] == []
    assert spare.running == ["server.service"]


@pytest.mark.parametrize("crash_after", range(8))
def test_after_a_crash_at_any_command_a_new_run_finishes(home: Host, spare: Host, crash_after: int) -> None:
    acts = (
        (home, lambda: home.open().stop([SERVER, BOX], 0)),
        (spare, lambda: spare.guests().take_in([SERVER, BOX], "home")),
        (spare, lambda: spare.guests().send_home("home")),
        (home, lambda: home.open().start(back_from=["spare"])),
    )
    for host, act in acts:
        host.machine.crash_after = crash_after
        try:
            act()
        except Crash:
            host.machine.crash_after = None
            act()
        host.machine.crash_after = None
        assert not set(home.running) & set(spare.running), "never on two nodes"
    assert home.running == ["server.service", "box"] and spare.running == []


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda spare: setattr(spare.machine.units["server.service"], "active", "active"), "it runs here already"),
        (lambda spare: spare.machine.units.pop("server.service"), "there is no unit server on this node"),
        (lambda spare: Journal.open(spare.state).begin("r", "5", None, 0.0), "in the middle of an upgrade of its own"),
    ],
    ids=["runs there for others", "not there", "being upgraded"],
)
@pytest.mark.parametrize("check", [True, False])
def test_a_host_that_cannot_take_it_in_says_so_and_starts_nothing(
    spare: Host, prepare: Any, message: str, check: bool
) -> None:
    prepare(spare)
    with pytest.raises(WorkloadsError, match=message):
        spare.guests().take_in([BOX, SERVER], "home", check=check)
    assert "box" not in spare.running


def test_quarantine_takes_nobody_in(spare: Host) -> None:
    journal = Journal.open(spare.state)
    journal.begin("r", "5", None, 0.0)
    journal.finish("quarantined", "", None, 1.0)
    journal.close()
    with pytest.raises(WorkloadsError, match="in quarantine"):
        spare.guests().take_in([BOX], "home")


def test_work_that_does_not_come_up_there_is_told_and_can_be_sent_home(spare: Host) -> None:
    spare.machine.answers["check server"] = Completed(("check",), 7, "", "connection refused", 0)
    with pytest.raises(
        WorkloadsError, match="server of home did not come up here: is running, but not ready after 30 s"
    ):
        spare.guests().take_in([SERVER], "home")
    assert spare.guests().send_home("home")["stopped"] == ["server"] and spare.running == []
