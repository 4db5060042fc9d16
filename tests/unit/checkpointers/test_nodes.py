# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An artefact on its way between two hosts of one inventory, over Ansible's own connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.errors import AnsibleError
from ansible.playbook.play_context import PlayContext

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact
from ansible_collections.gpufleet.driver.plugins.plugin_utils import nodes as subject
from ansible_collections.gpufleet.driver.plugins.plugin_utils.nodes import Nodes, parted, runs

P = artefact.PIECE


def test_small_files_travel_together_and_large_ones_by_pieces() -> None:
    sizes = {"a": 1, "b": P, "c": 3 * P, "d": P, "e": P, "f": P}
    missing = [("f", 0), ("c", 0), ("c", 2), ("a", 0), ("b", 0), ("d", 0), ("e", 0)]
    small, large = parted(missing, sizes)
    assert small == [["a", "b", "d", "e"], ["f"]]
    assert large == [("c", 0), ("c", 2)]


def test_neighbouring_pieces_travel_in_one_command() -> None:
    missing = [("b", 0), *(("a", index) for index in (0, 1, 2, 3, 4, 6))]
    assert runs(missing) == [("a", 0, 4), ("a", 4, 1), ("a", 6, 1), ("b", 0, 1)]


class Connection:
    """One that runs commands here, and writes down whether what it is told may be shown."""

    become = None
    allow_executable = False

    def __init__(self) -> None:
        self._play_context = PlayContext()
        self.hidden: list[bool] = []

    def exec_command(self, command: str, in_data: bytes, sudoable: bool) -> tuple[int, bytes, bytes]:
        self.hidden.append(bool(self._play_context.no_log))
        done = subprocess.run(["sh", "-c", command], input=in_data, capture_output=True, check=False, timeout=60)
        return done.returncode, done.stdout, done.stderr


def reached_by(connection: Connection) -> Nodes:
    task = type("Task", (), {"delegate_to": None})
    return Nodes(type("Action", (), {"_connection": connection, "_task": task}), {"inventory_hostname": "one"})


def test_what_is_saved_is_shown_at_no_verbosity() -> None:
    connection = Connection()
    assert reached_by(connection).tell("one", ["cat"], b"memory") == b"memory"
    assert connection.hidden == [True] and not connection._play_context.no_log


def test_a_store_that_does_not_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "PATIENCE", 0.2)
    with pytest.raises(AnsibleError, match=r"one: sleep 1000: did not end within 0\.2 s"):
        reached_by(Connection()).tell("one", ["sleep", "1000"])


@pytest.mark.parametrize("broken", [False, True], ids=["from-nothing", "after-a-broken-one"])
def test_an_artefact_arrives_whole(tmp_path: Path, broken: bool) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    staged = artefact.stage(here, "save-1")
    (staged / "images").mkdir()
    (staged / "images/pages-1.img").write_bytes(os.urandom(P + 12345))
    for number in range(20):
        (staged / f"images/core-{number}.img").write_bytes(os.urandom(100 * number))
    manifest = artefact.publish(staged, "save-1", {})
    if broken:
        artefact.receive(there, manifest)
        (there / ".stage-save-1/images/core-3.img").write_bytes((here / "save-1/images/core-3.img").read_bytes())
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "inventory.yml").write_text(json.dumps({"all": {"hosts": {"one": {}, "two": {}}, "vars": local}}))
    options = {"artefact": "save-1", "source": "one", "store": str(there), "source_store": str(here)}
    command = ["ansible", "-i", str(tmp_path / "inventory.yml"), "two", "-m", "gpufleet.driver.checkpoint_fetch"]

    def fetch(*flags: str) -> subprocess.CompletedProcess[str]:
        argv = [*command, "-a", json.dumps(options), *flags]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)

    before = sorted(there.rglob("*"))
    looked = fetch("--check")
    assert '"changed": true' in looked.stdout and sorted(there.rglob("*")) == before, looked.stdout
    done = fetch()
    assert done.returncode == 0, done.stdout + done.stderr
    assert artefact.verify(there, "save-1") == []
    assert f'"moved_pieces": {20 if broken else 21}' in done.stdout
    assert '"changed": false' in fetch("--check").stdout
    options["artefact"] = "save-2"
    assert "FAILED" in fetch("--check").stdout, "there is no such save"


SSH = """#!/bin/sh
for command; do :; done
echo "{name} $command" >> {log}
exec sh -c "$command"
"""
PLAY = """
- hosts: one
  gather_facts: false
  tasks:
    - gpufleet.driver.checkpoint_fetch: {{artefact: save-1, source: one, source_store: {here}, store: {there}}}
      delegate_to: two
    - gpufleet.driver.gang_checkpoint:
        members: [{{node: three, workload: {{name: x, unit: none.service}}}}]
        store: {here}
        state_dir: {here}/state
      delegate_to: two
      ignore_errors: true
"""


def test_each_end_is_reached_over_its_own_connection_also_where_the_task_is_delegated(tmp_path: Path) -> None:
    """And no directory for temporary files is left, on whichever node a module ran."""
    here, log = tmp_path / "here", tmp_path / "log"
    (artefact.stage(here, "save-1") / "state").write_text("7")
    artefact.publish(here / ".stage-save-1", "save-1", {})
    hosts = {}
    for name in ("one", "two", "three"):
        ssh = tmp_path / f"ssh-{name}"
        ssh.write_text(SSH.format(name=name, log=log))
        ssh.chmod(0o700)
        hosts[name] = {"ansible_ssh_executable": str(ssh), "ansible_remote_tmp": str(tmp_path / f"tmp-{name}")}
    own = {"ansible_python_interpreter": sys.executable, "ansible_ssh_transfer_method": "piped"}
    own |= {"ansible_pipelining": False}
    (tmp_path / "inventory.yml").write_text(json.dumps({"all": {"hosts": hosts, "vars": own}}))
    (tmp_path / "play.yml").write_text(PLAY.format(here=here, there=tmp_path / "there"))
    command = ["ansible-playbook", "-i", str(tmp_path / "inventory.yml"), str(tmp_path / "play.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert artefact.verify(tmp_path / "there", "save-1") == []
    lines = log.read_text().splitlines()
    assert {line.split()[0] for line in lines if f"cat {here}/save-1" in line} == {"one"}
    assert {line.split()[0] for line in lines if "AnsiballZ_checkpoint_fetch.py" in line} == {"two"}
    assert {line.split()[0] for line in lines if "AnsiballZ_workload_checkpoint.py" in line} == {"three"}
    assert [path.name for path in tmp_path.glob("tmp-*/*")] == []
