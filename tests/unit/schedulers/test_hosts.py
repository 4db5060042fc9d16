# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import registry
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark, SchedulerError, State
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.hosts import Hosts
from ansible_collections.gpufleet.driver.plugins.module_utils.statefile import StateFileError

COMMANDS = {
    "cordon_command": ["lb", "out", "{node}"],
    "uncordon_command": ["lb", "in", "{node}"],
    "state_command": ["lb", "state", "{node}"],
}
R1, R2 = Mark("r1", 1.0), Mark("r2", 2.0)


class Crash(BaseException):
    pass


class Balancer:
    """A load balancer's command line: ``lb out|in|state NODE``."""

    def __init__(self, *out: str) -> None:
        self.out = set(out)
        self.broken: set[str] = set()
        self.unknown: set[str] = set()
        self.calls: list[tuple[str, ...]] = []
        self.crash = False
        self._lock = threading.Lock()

    def run(self, argv: Sequence[str], *, timeout: float) -> Completed:
        dummy, verb, node = argv
        with self._lock:
            self.calls.append((verb, node))
        if verb == "state":
            return Completed(tuple(argv), 4 if node in self.unknown else int(node in self.out), "", "no such node", 0)
        if self.crash:
            raise Crash
        if node in self.broken:
            return Completed(tuple(argv), 1, "", "connection refused", 0)
        (self.out.add if verb == "out" else self.out.discard)(node)
        return Completed(tuple(argv), 0, "", "", 0)

    def changes(self) -> list[tuple[str, ...]]:
        return [call for call in self.calls if call[0] != "state"]


def hosts(tmp_path: Path, balancer: Balancer, **options: Any) -> Hosts:
    return Hosts(balancer.run, str(tmp_path / "state"), **{**COMMANDS, **options})


def test_only_what_we_took_out_is_put_back(tmp_path: Path) -> None:
    balancer = Balancer("n2")
    taken = hosts(tmp_path, balancer).cordon(["n1", "n2"], R1)
    assert taken["n1"].before == State(False) and taken["n1"].after == State(True, True, "r1") and taken["n1"].changed
    assert taken["n2"].after == State(True) and not taken["n2"].changed and "left so" in taken["n2"].msg
    back = hosts(tmp_path, balancer).uncordon(["n1", "n2"], R1)
    assert balancer.out == {"n2"}
    assert back["n1"].after == State(False) and back["n1"].changed
    assert back["n2"].after == State(True) and not back["n2"].changed and not back["n2"].failed


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    balancer = Balancer()
    for act in (Hosts.cordon, Hosts.uncordon):
        assert act(hosts(tmp_path, balancer), ["n1"], R1)["n1"].changed
        count = len(balancer.changes())
        assert not act(hosts(tmp_path, balancer), ["n1"], R1)["n1"].changed
        assert len(balancer.changes()) == count


def test_another_run_from_another_controller_knows_whose_it_is(tmp_path: Path) -> None:
    balancer = Balancer()
    hosts(tmp_path, balancer).cordon(["n1"], R1)
    taken = hosts(tmp_path, balancer).cordon(["n1"], R2)["n1"]
    assert taken.before == State(True, True, "r1") and taken.after == State(True, True, "r2") and taken.changed
    assert balancer.changes() == [("out", "n1")]
    assert hosts(tmp_path, balancer).uncordon(["n1"], Mark("r3", 3.0))["n1"].changed
    assert balancer.out == set()


def test_a_crash_between_mark_and_command_leaves_it_ours(tmp_path: Path) -> None:
    balancer = Balancer()
    balancer.crash = True
    with pytest.raises(Crash):
        hosts(tmp_path, balancer).cordon(["n1"], R1)
    balancer.crash = False
    balancer.out.add("n1")  # the command had done its work when the process died
    assert hosts(tmp_path, balancer).cordon(["n1"], R1)["n1"].after == State(True, True, "r1")
    assert hosts(tmp_path, balancer).uncordon(["n1"], R1)["n1"].changed and balancer.out == set()


def test_a_controller_without_marks_is_told_by_the_nodes_journals(tmp_path: Path) -> None:
    balancer = Balancer("n1", "n2")
    back = hosts(tmp_path, balancer, ours=["n1"]).uncordon(["n1", "n2"], R1)
    assert back["n1"].before == State(True, True, "of its journal") and back["n1"].after == State(False)
    assert not back["n2"].changed and balancer.out == {"n2"}


def test_put_back_by_somebody_meanwhile_it_is_taken_out_again(tmp_path: Path) -> None:
    balancer = Balancer()
    hosts(tmp_path, balancer).cordon(["n1"], R1)
    balancer.out.clear()
    assert hosts(tmp_path, balancer).cordon(["n1"], R1)["n1"].changed and balancer.out == {"n1"}
    balancer.out.clear()
    back = hosts(tmp_path, balancer).uncordon(["n1"], R1)["n1"]
    assert back.after == State(False) and balancer.changes()[-1] == ("out", "n1")


def test_one_nodes_trouble_is_its_own(tmp_path: Path) -> None:
    balancer = Balancer()
    balancer.broken, balancer.unknown = {"n2"}, {"n3"}
    results = hosts(tmp_path, balancer).cordon(["n1", "n2", "n3"], R1)
    assert not results["n1"].failed and results["n2"].failed and results["n3"].failed
    assert results["n2"].msg == (
        "n2: lb out n2: rc 1: connection refused, and it is still in service; run that command by hand"
    )
    assert "cannot tell whether it is in service (lb state n3: rc 4: no such node)" in results["n3"].msg
    balancer.broken, balancer.unknown = {"n1"}, set()
    back = hosts(tmp_path, balancer).uncordon(["n1", "n2"], R1)
    assert back["n1"].failed and "still out of service" in back["n1"].msg
    assert not back["n2"].failed and not back["n2"].changed
    balancer.broken.clear()
    assert hosts(tmp_path, balancer).uncordon(["n1"], R1)["n1"].changed, "its mark must have stayed"


def test_a_command_that_lies_is_found_out(tmp_path: Path) -> None:
    balancer = Balancer()
    result = hosts(tmp_path, balancer, cordon_command=["lb", "in", "{node}"]).cordon(["n1"], R1)["n1"]
    assert result.failed and "rc 0, and it is still in service" in result.msg


def test_without_commands_the_mark_is_all(tmp_path: Path) -> None:
    balancer = Balancer()
    bare = {"cordon_command": None, "uncordon_command": None, "state_command": None}
    assert hosts(tmp_path, balancer, **bare).cordon(["n1"], R1)["n1"].after == State(True, True, "r1")
    assert hosts(tmp_path, balancer, **bare).uncordon(["n1", "n2"], R1)["n1"].changed
    assert not hosts(tmp_path, balancer, **bare).uncordon(["n1"], R1)["n1"].changed and balancer.calls == []


def test_without_a_state_command_the_exit_status_counts(tmp_path: Path) -> None:
    balancer = Balancer()
    balancer.broken = {"n2"}
    results = hosts(tmp_path, balancer, state_command=None).cordon(["n1", "n2"], R1)
    assert not results["n1"].failed and results["n2"].failed
    balancer.broken = {"n1"}
    assert hosts(tmp_path, balancer, state_command=None).uncordon(["n1"], R1)["n1"].failed


def test_check_mode_changes_nothing(tmp_path: Path) -> None:
    balancer = Balancer("n2")
    results = hosts(tmp_path, balancer).cordon(["n1", "n2"], R1, check=True)
    assert results["n1"].changed and results["n1"].after == State(True, True, "r1") and not results["n2"].changed
    assert balancer.changes() == [] and not (tmp_path / "state").exists()
    hosts(tmp_path, balancer).cordon(["n1"], R1)
    assert hosts(tmp_path, balancer).uncordon(["n1"], R1, check=True)["n1"].after == State(False)
    assert balancer.out == {"n1", "n2"}


def test_many_nodes_at_once_lose_no_mark(tmp_path: Path) -> None:
    balancer = Balancer()
    nodes = [f"n{number:03}" for number in range(60)]
    results = hosts(tmp_path, balancer).cordon([*nodes, *nodes], R1)
    assert list(results) == nodes and all(result.changed for result in results.values())
    assert sorted(balancer.changes()) == [("out", node) for node in nodes]
    hosts(tmp_path, balancer).uncordon(nodes, R1)
    assert balancer.out == set()


@pytest.mark.parametrize("name", ["cordon_command", "uncordon_command", "state_command"])
def test_a_command_that_does_not_name_the_node_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SchedulerError, match=f"{name} does not say"):
        Hosts(execution.run, str(tmp_path), **{**COMMANDS, name: ["lb", "out", "{nod}"]})


def test_a_name_is_one_argument_and_no_shell(tmp_path: Path) -> None:
    marker = tmp_path / "pwned"
    node = f"n1; touch {marker} $(touch {marker})"
    out = tmp_path / "out"
    options = {
        "cordon_command": ["sh", "-c", 'printf %s "$1" > "$0"', str(out), "{node}"],
        "uncordon_command": ["rm", str(out), "{node}"],
    }
    result = Hosts(execution.run, str(tmp_path / "state"), **options).cordon([node], R1)[node]
    assert not result.failed and out.read_text() == node and not marker.exists()


def test_a_command_that_hangs_is_given_up(tmp_path: Path) -> None:
    options = {**COMMANDS, "state_command": ["sh", "-c", "sleep 600", "{node}"], "timeout": 0.2}
    result = Hosts(execution.run, str(tmp_path / "state"), **options).cordon(["n1"], R1)["n1"]
    assert result.failed and "no answer within" in result.msg


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"{", StateFileError),
        (b'{"schema": 9}', StateFileError),
        (b'{"schema": 1, "nodes": ["n1"]}', SchedulerError),
        (b'{"schema": 1, "nodes": {"n1": {}}}', SchedulerError),
    ],
)
def test_marks_that_cannot_be_read_are_everybodys_trouble(
    tmp_path: Path, content: bytes, error: type[Exception]
) -> None:
    (tmp_path / "state").mkdir()
    path = tmp_path / "state/cordons.json"
    path.write_bytes(content)
    balancer = Balancer()
    with pytest.raises(error, match=f"mv {path} {path}.bad"):
        hosts(tmp_path, balancer).cordon(["n1"], R1)
    assert balancer.calls == []


def test_half_a_pair_of_commands_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match="belong together"):
        hosts(tmp_path, Balancer(), uncordon_command=None)


def test_registry(tmp_path: Path) -> None:
    options = {**COMMANDS, "state_dir": str(tmp_path), "timeout": 5, "other": 1}
    assert isinstance(registry.get({"scheduler": "hosts", "scheduler_options": options}, execution.run), Hosts)
    with pytest.raises(SchedulerError, match="no scheduler is called 'lsf'; expected one of hosts, kubernetes"):
        registry.get({"scheduler": "lsf", "scheduler_options": {}}, execution.run)


def test_plain_machines_have_nothing_to_evacuate_or_settle(tmp_path: Path) -> None:
    balancer = Balancer("n2")
    these = hosts(tmp_path, balancer)
    assert [node.name for node in these.snapshot(["n2", "n1", "n2"]).nodes] == ["n2", "n1"]
    assert these.evacuate(["n1"], R1, [], 0.0, 0.0)["n1"].as_dict()["empty"]
    assert these.validate(["n2"], R1, {"n2": 8}, 1.0)["n2"].after == State(True)
    assert these.settle(R1) == [] and not balancer.changes()
