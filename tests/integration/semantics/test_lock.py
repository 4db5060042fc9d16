# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lock of the fleet: who gets it, and what a lost node, a killed run and a takeover do to it.

Hosts a, b and c keep it; d has no say. The "nodes" are directories of this machine; a lost one is a closed port.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
LOST = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_retries": 0}


class Runs:
    """Runs of a small upgrade: take the lock, touch each node, give the lock back."""

    def __init__(self, play: Callable, tmp_path: Path) -> None:
        self.play = play
        self.tmp_path = tmp_path

    def run(self, name: str, nodes: str, lost: str = "", dies: bool = False, takeover: str = "") -> str:
        """What it says if it does not get the lock, else nothing. ``dies``: it never gives the lock back."""
        variables = self.tmp_path / "host_vars"
        variables.mkdir(exist_ok=True)
        for host in "abcd":
            state = {"gpu_state_dir": str(self.tmp_path / "state" / host), "ansible_become": False}
            (variables / f"{host}.json").write_text(json.dumps(state | (LOST if host in lost else {})))
        text = f"""
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact: {{gpu_run: {name}}}
    - ansible.builtin.import_tasks: {TOP}/playbooks/tasks/lock_keepers.yml
    - ansible.builtin.add_host: {{name: "{{{{ item }}}}", groups: queue}}
      loop: {list(nodes)}
- ansible.builtin.import_playbook: gpufleet.driver.lock
  vars: {{gpu_lock_queue: queue}}
- hosts: queue
  gather_facts: false
  vars: {{gpu_run_id: {name}}}
  tasks:
    - ansible.builtin.import_tasks: {TOP}/playbooks/tasks/lock_renew.yml
    - gpufleet.driver.upgrade_gate:
        outcomes: {{}}
        run_id: {name}
        lock_keepers: "{{{{ hostvars['localhost'].gpu_lock_keepers }}}}"
        lock_answers: "{{{{ dict(gpu_lock_renewed.results | map(attribute='item') | zip(gpu_lock_renewed.results)) }}}}"
      delegate_to: localhost
      run_once: true
      register: gate
    - ansible.builtin.assert: {{that: gate.open}}
"""
        if not dies:
            text += "- ansible.builtin.import_playbook: gpufleet.driver.unlock\n  vars: {gpu_lock_queue: queue}\n"
        played = self.play(text, "-e", f"gpu_hosts={','.join(nodes)}", "-e", f"gpu_lock_takeover={takeover}")
        refused = "nothing was changed." in played.output
        assert refused == (played.rc != 0), played.output[-3000:]
        return played.output[played.output.index("nothing was changed.") :] if refused else ""

    def all_well(self, *runs: Sequence[str]) -> None:
        for run in runs:
            assert self.run(*run) == "", run


@pytest.fixture
def runs(play: Callable, tmp_path: Path) -> Runs:
    return Runs(play, tmp_path)


def test_one_after_the_other_and_parts_of_a_fleet_meet(runs: Runs) -> None:
    runs.all_well(("r1", "abcd"), ("r1", "ab"), ("r2", "d"))
    assert runs.run("r3", "d", dies=True) == ""
    assert "a, b, c: the fleet is locked by run r3" in runs.run("r4", "ab")
    assert runs.run("r4", "ab", takeover="r3") == ""
    runs.all_well(("r5", "abcd"))


def test_a_lost_node_keeps_nobody_out(runs: Runs) -> None:
    assert runs.run("r1", "abcd", lost="a") == ""
    assert runs.run("r2", "bcd", lost="b") == ""
    assert "does not answer" in runs.run("r3", "cd", lost="ab"), "two of the three that decide"


def test_a_lease_that_could_not_be_given_back_does_not_count(runs: Runs) -> None:
    assert runs.run("r1", "abcd", dies=True) == ""
    assert runs.run("r2", "bcd", lost="a", takeover="r1") == "", "a still has the lease of r1"
    assert runs.run("r3", "ad", lost="b") == "", "c knows that r1 has ended, and tells a"


def test_two_runs_cannot_both_have_it_whatever_is_lost(runs: Runs) -> None:
    assert runs.run("r1", "ab", lost="c", dies=True) == ""
    for lost in ("", "a", "b", "c", "ab", "bc", "ac"):
        assert runs.run("r2", "d", lost=lost) != "", lost
