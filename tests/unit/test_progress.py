# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.callback.progress import BAD, GOOD, Line, Progress, plain

PLAN = {"batches": [{"name": "canary", "nodes": ["g1"]}, {"name": "batch 1", "nodes": ["g2", "g3"]}]}


class Watched:
    """A progress and its clock."""

    def __init__(self) -> None:
        self.progress = Progress(1000.0)
        self.now = 1000.0
        self.lines: list[Line] = []

    def say(self, event: str, *about: Any) -> None:
        self.lines += getattr(self.progress, event)(*about, self.now)

    def task(
        self, name: str, role: str | None, *hosts: str, seconds: float = 0.0, action: str = "driver_swap", **result: Any
    ) -> None:
        self.say("task", name, role, action)
        for host in hosts:
            self.say("host", host)
        self.now += seconds
        for host in hosts:
            self.say("done", host, action, result)

    @property
    def text(self) -> list[str]:
        return [text for text, dummy in self.lines]


def test_an_upgrade_is_told_in_a_few_lines() -> None:
    watched = Watched()
    watched.say("play", "Plan")
    watched.task("Publish the plan", "plan", "localhost", action="set_fact", ansible_facts={"gpu_plan": PLAN})
    watched.task("Show the plan", "plan", "localhost", action="debug", msg=["plan 1", "canary g1"])
    watched.say("play", "Upgrade, batch by batch")
    watched.task("May this batch start?", None, "g1")
    watched.task("Cordon", "cordon", "g1", seconds=0.5)
    watched.task("Swap the packages", "install", "g1", seconds=61)
    watched.task("Load", "install", "g1", seconds=0.2)
    watched.task("Prove the node", "validate", "g1", seconds=3)
    upgraded = {"gpu_outcome": {"name": "upgraded"}}
    watched.task("Conclude", None, "g1", action="set_fact", ansible_facts=upgraded)
    watched.task("Uncordon", "uncordon", "g1")
    watched.say("play", "Upgrade, batch by batch")
    watched.task("Cordon", "cordon", "g2", "g3")
    watched.say("end")
    assert watched.text == [
        "", "  0:00 Plan", "       plan 1", "       canary g1",
        "", "  0:00 canary (1 of 2): g1",
        "  0:00   install …",
        "  1:01     swap the packages  1 min 01 s",
        "  1:01   install    g1 1 min 01 s",
        "  1:04     g1 upgraded",
        "  1:04   validate   g1 3 s",
        "", "  1:04 batch 1 (2 of 2): g2, g3",
        "", "  1:04 ended after 1 min 05 s",
    ]  # fmt: skip
    assert ("  1:04     g1 upgraded", GOOD) in watched.lines


@pytest.mark.parametrize(
    ("outcome", "mood"),
    [("upgraded", GOOD), ("rolled_back", ""), ("skipped", ""), ("quarantined", BAD), ("refused", BAD)],
)
def test_only_what_needs_a_look_is_red(outcome: str, mood: str) -> None:
    watched = Watched()
    watched.say("done", "g1", "set_fact", {"ansible_facts": {"gpu_outcome": {"name": outcome}}})
    assert watched.lines[-1][1] == mood


def test_a_failure_has_its_reason_and_an_item_is_no_riddle() -> None:
    watched = Watched()
    watched.say("play", "Upgrade, batch by batch")
    watched.task("x", "install", "g1")
    watched.say("failed", "g1", "Swap", {"msg": "no space\nfree some"})
    items = [{"msg": "a is held", "failed": True}, {"msg": "fine"}, {"msg": "b is held", "failed": True}]
    watched.say("failed", "g1", "Loop", {"msg": "One or more items failed", "results": items})
    watched.say("failed", "g1", "Odd", {})
    assert watched.lines[-4:] == [
        ("  0:00     g1 failed: Swap: no space", BAD),
        ("       free some", BAD),
        ("  0:00     g1 failed: Loop: a is held; b is held", BAD),
        ("  0:00     g1 failed: Odd: no message", BAD),
    ]


def test_many_nodes_stay_one_line_and_unfit_ones_are_told_later() -> None:
    watched = Watched()
    names = [f"g{number}" for number in range(6)]
    watched.say("play", "Look at every node")
    watched.task("Observe", "preflight", *names, seconds=2)
    watched.say("failed", "g4", "Refuse", {"msg": "a wall of text"})
    watched.say("play", "Plan")
    assert watched.text[-1] == "  0:02   look       6 nodes, 2 s to 2 s; not fit: g4"
    assert "a wall of text" not in "".join(watched.text)


def test_what_ends_the_run_while_it_looks_is_told_at_the_end() -> None:
    watched = Watched()
    watched.say("play", "Look at every node")
    for host in ("g1", "g2"):
        watched.say("failed", host, "Refuse a run without a driver version", {"msg": "no driver version was given"})
    assert watched.text == []
    watched.say("end")
    assert watched.text[0].endswith("  g1, g2: no driver version was given")
    assert watched.lines[0][1] == BAD


def test_only_the_first_play_needs_hosts() -> None:
    watched = Watched()
    watched.say("play", "Look at the nodes to bring back")
    assert watched.progress.nobody() == [("no host matches: see -i and -e gpu_hosts", BAD)]
    watched.say("play", "Bring back, batch by batch")
    assert watched.progress.nobody() == []


def test_waits_say_what_for() -> None:
    watched = Watched()
    watched.say(
        "waits", "g1", "Evacuate", {"nodes": {"g1": {"waiting": []}, "g2": {"waiting": ["job 7 ends by 14:05"]}}}
    )
    watched.say("waits", "g1", "Install", {"nodes": {"g1": {"waiting": "its driver pod p starts"}}})
    watched.say("waits", "g1", "Evacuate", {"msg": "busy"})
    watched.say("waits", "g1", "Evacuate", {})
    watched.task("Let the canary work, in seconds: 60", None, "g1", action="wait_for")
    assert watched.text == [
        "  0:00     g2 waits for job 7 ends by 14:05",
        "  0:00     g1 waits: its driver pod p starts",
        "  0:00     g1 waits: busy",
        "  0:00     g1 waits: Evacuate",
        "  0:00   let the canary work, in seconds: 60 …",
    ]


PLAYBOOK = """
- name: Try
  hosts: localhost
  gather_facts: false
  tasks:
    - name: Say
      ansible.builtin.debug:
        msg: [one, two]
    - name: Loop
      ansible.builtin.fail:
        msg: "no {{ item }}"
      loop: [space, headers]
      ignore_errors: true
    - name: Break
      ansible.builtin.fail:
        msg: it is broken
"""


def test_nothing_steers_the_terminal() -> None:
    assert plain("r\u00e9serv\u00e9 \x1b[31m\u202eby\r bob") == "r\u00e9serv\u00e9 \\x1b[31m\\u202eby\\r bob"


def test_ansible_takes_it_as_its_callback(tmp_path: Path) -> None:
    top = Path(__file__).resolve().parents[2]
    (tmp_path / "try.yml").write_text(PLAYBOOK)
    environment = {
        **os.environ,
        "ANSIBLE_STDOUT_CALLBACK": "gpufleet.driver.progress",
        "ANSIBLE_COLLECTIONS_PATH": str(top / ".build"),
        "ANSIBLE_HOME": str(tmp_path / "home"),
        "ANSIBLE_NOCOLOR": "1",
    }
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [str(program), "-i", "localhost,", "-c", "local", str(tmp_path / "try.yml")],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    told = [line.strip() for line in done.stdout.splitlines() if line]
    assert done.returncode == 2, done.stdout + done.stderr
    assert told[:3] == ["0:00 Try", "one", "two"], told
    assert told[3].endswith("localhost failed: Break: it is broken") and "ended after" in told[4]
