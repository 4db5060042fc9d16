# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Ansible does by itself when a node fails or vanishes, and what it does with the parts of this collection.

Each pair of tests plays the same accident twice. If Ansible ever changes its mind, the first of the pair fails and says
that a part here has become needless.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
STEP = "      - {name: step, ansible.builtin.shell: 'echo {{ inventory_hostname }} >> {{ touched }}'}\n"
VANISH = """
      - name: vanish
        ansible.builtin.ping:
        vars: {ansible_connection: ssh, ansible_port: 1, ansible_host: 127.0.0.1}
        when: inventory_hostname == 'a'
"""
GATE = """
      - name: gate
        gpufleet.driver.upgrade_gate:
          outcomes: "{{ dict(judged | zip(judged | map('extract', hostvars, ['gpu_outcome', 'name']))) }}"
          lost: "{{ ansible_play_hosts_all | difference(ansible_play_hosts) }}"
        vars:
          judged: >-
            {{ ansible_play_hosts_all | map('extract', hostvars) | selectattr('gpu_outcome', 'defined')
               | map(attribute='inventory_hostname') | list }}
        delegate_to: localhost
        run_once: true
        register: gate
      - {ansible.builtin.meta: end_play, when: not gate.open}
"""
REPORT = """
- hosts: localhost
  gather_facts: false
  tasks:
    - {ansible.builtin.debug: {msg: the report was written}}
"""


def head(keywords: str = "") -> str:
    return f"- hosts: gpu_nodes\n  serial: 2\n  gather_facts: false\n{keywords}  tasks:\n"


@pytest.mark.parametrize("brake", ["  max_fail_percentage: 0\n", "  any_errors_fatal: true\n"])
def test_ansible_alone_starts_batch_2_after_an_unreachable_host(play: Callable, brake: str) -> None:
    assert "c" in play(head(brake) + VANISH + STEP).touched


def test_with_the_gate_batch_2_never_starts_after_an_unreachable_host(play: Callable) -> None:
    played = play(head() + GATE + VANISH + STEP + REPORT)
    assert played.touched == ["b"]
    assert "the report was written" in played.output


FAIL_IN_ALWAYS = """
      - name: block with only always
        block:
          - {ansible.builtin.fail: {msg: broken}, when: inventory_hostname == 'a'}
        always:
          - {ansible.builtin.debug: {msg: tidy up}}
"""


def test_ansible_alone_starts_batch_2_after_a_failure_in_a_block_with_always(play: Callable) -> None:
    assert "c" in play(head("  max_fail_percentage: 0\n") + FAIL_IN_ALWAYS + STEP).touched


def test_with_the_gate_a_failure_in_a_block_with_always_stops(play: Callable) -> None:
    assert play(head() + GATE + FAIL_IN_ALWAYS + STEP).touched == ["b"]


RESCUED = """
      - name: rescued
        block:
          - {ansible.builtin.fail: {msg: broken}, when: inventory_hostname == 'a'}
          - {ansible.builtin.set_fact: {gpu_outcome: {name: upgraded}}}
        rescue:
          - {ansible.builtin.set_fact: {gpu_outcome: {name: rolled_back}}}
"""


def test_ansible_alone_calls_a_rescued_upgrade_a_success(play: Callable) -> None:
    played = play(head("  max_fail_percentage: 0\n") + RESCUED + STEP)
    assert sorted(played.touched) == ["a", "b", "c", "d"] and played.rc == 0


def test_with_the_gate_a_rescued_upgrade_is_a_failed_one(play: Callable) -> None:
    played = play(head() + GATE + RESCUED + STEP)
    assert sorted(played.touched) == ["a", "b"]


def test_ansible_alone_skips_a_run_once_task_whose_first_host_is_skipped(play: Callable) -> None:
    once = (
        "      - {ansible.builtin.debug: {msg: ran for everybody}, run_once: true, when: inventory_hostname != 'a'}\n"
    )
    assert play(head() + once).output.count("for everybody") == 1


def test_the_gate_runs_in_every_batch_though_the_first_host_has_nothing_to_do(play: Callable) -> None:
    skip_first = "      - {ansible.builtin.debug: {msg: work}, when: \"inventory_hostname not in ['a', 'c']\"}\n"
    played = play(head() + GATE + skip_first + STEP)
    assert sorted(played.touched) == ["a", "b", "c", "d"]
    assert played.output.count("TASK [gate]") == 2


UNREACHABLE_NODE = "-e", '{"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}'


def test_ansible_alone_does_not_rescue_an_unreachable_host(play: Callable) -> None:
    rescue = """
      - block:
          - ansible.builtin.ping:
        rescue:
          - {ansible.builtin.debug: {msg: rescued it}}
"""
    played = play(head() + rescue, *UNREACHABLE_NODE)
    assert "rescued it" not in played.output and "UNREACHABLE" in played.output


def test_a_node_lost_during_one_of_our_modules_is_rescued(play: Callable) -> None:
    rescue = """
      - block:
          - gpufleet.driver.driver_info:
        rescue:
          - {ansible.builtin.debug: {msg: "rescued it, lost is {{ ansible_failed_result.lost }}"}}
"""
    played = play(head() + rescue, *UNREACHABLE_NODE)
    assert "rescued it, lost is True" in played.output and "unreachable=0" in played.output


def service_roles(tmp_path: Path, damaged: str) -> tuple[str, Path]:
    """Plays of the roles cordon and uncordon with a made load balancer; ``damaged`` is the role before which the
    journal of host b is damaged. Also the directory that holds a file for each node in service."""
    service = tmp_path / "in-service"
    service.mkdir()
    for name in ("a", "b"):
        (service / name).touch()
    script = tmp_path / "lb"
    script.write_text(
        f'#!/bin/sh\ncd {service}; case $1 in drain) rm "$2";; enable) touch "$2";; state) test -e "$2";; esac\n'
    )
    script.chmod(0o700)
    text = f"""
- hosts: a,b
  gather_facts: false
  vars:
    gpu_run_id: first
    gpu_driver_version: 550.90.07
    gpu_state_dir: "{tmp_path}/{{{{ inventory_hostname }}}}"
    gpu_scheduler_options:
      state_dir: "{tmp_path}/marks"
      cordon_command: [{script}, drain, "{{node}}"]
      uncordon_command: [{script}, enable, "{{node}}"]
      state_command: [{script}, state, "{{node}}"]
  tasks:
"""
    for role in ("cordon", "uncordon"):
        if role == damaged:
            text += f"""
    - when: inventory_hostname == 'b'
      block:
        - {{ansible.builtin.file: {{path: "{tmp_path}/b", state: directory}}}}
        - {{ansible.builtin.copy: {{content: "{{", dest: "{tmp_path}/b/journal.json"}}}}
"""
        text += f"""
    - block:
        - ansible.builtin.import_role: {{name: gpufleet.driver.{role}}}
      rescue:
        - {{ansible.builtin.set_fact: {{gpu_outcome: {{name: quarantined}}}}}}
    - {{ansible.builtin.fail: , when: "(gpu_outcome | default({{}})).name | default('') == 'quarantined'"}}
"""
        if damaged == "cordon":
            break
    return text, service


def test_a_node_whose_journal_could_not_be_begun_stays_in_service(play: Callable, tmp_path: Path) -> None:
    """The task that tells the load balancer runs once for the batch, and before the rescue of any node."""
    text, service = service_roles(tmp_path, damaged="cordon")
    assert "is damaged" in play(text).output
    assert [path.name for path in service.iterdir()] == ["b"]


def test_a_node_whose_work_could_not_be_started_stays_out_of_service(play: Callable, tmp_path: Path) -> None:
    text, service = service_roles(tmp_path, damaged="uncordon")
    assert "is damaged" in play(text).output
    assert [path.name for path in service.iterdir()] == ["a"]


END_A = "      - {ansible.builtin.meta: end_host, when: inventory_hostname == 'a'}\n"
REFUSE_A = "      - {ansible.builtin.set_fact: {gpu_outcome: {name: refused}}, when: inventory_hostname == 'a'}\n"


def test_a_node_whose_turn_was_ended_early_is_left_alone_and_counts(play: Callable) -> None:
    assert play(head() + REFUSE_A + GATE + END_A + STEP).touched == []
    assert sorted(play(head() + REFUSE_A + END_A + STEP).touched) == ["b", "c", "d"]
    played = play(head() + GATE + REFUSE_A + END_A + STEP)
    assert played.touched[3:] == ["b"], "the gate of batch 2 counts a"


def test_a_damaged_journal_is_told_at_once(play: Callable, tmp_path: Path) -> None:
    """Only a module that is still at work is waited for, half an hour if need be."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/journal.json").write_text("{")
    played = play(f"""
- hosts: a
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {{name: gpufleet.driver.rollback}}
      vars: {{gpu_state_dir: {tmp_path}/a, gpu_failure: it broke}}
    - ansible.builtin.debug: {{msg: "{{{{ gpu_outcome.name }}}}: {{{{ gpu_outcome.reason }}}}"}}
""")
    assert "quarantined: it broke; then" in played.output and "is damaged" in played.output


def test_nothing_to_bring_back_is_no_error(play: Callable, tmp_path: Path) -> None:
    played = play(
        "- ansible.builtin.import_playbook: gpufleet.driver.rollback\n",
        "-e",
        f"gpu_state_dir={tmp_path}/state gpu_hosts=a ansible_become=false gpu_report_dir={tmp_path}",
    )
    assert played.rc == 0, played.output[-3000:]
    assert "No node of 'a' that answered was upgraded since it last went back" in played.output


def test_what_a_run_is_refused_for(play: Callable, tmp_path: Path) -> None:
    """None of these is played with other nodes than were meant, nor stopped by a variable of somebody else."""
    status = "- ansible.builtin.import_playbook: gpufleet.driver.status\n"
    rollback = "- ansible.builtin.import_playbook: gpufleet.driver.rollback\n"
    common = json.dumps(
        {"gpu_state_dir": f"{tmp_path}/state", "ansible_become": False, "gpu_report_dir": f"{tmp_path}"}
    )
    cut = play(status, "-e", common, "--limit", "gpu_nodes:!d")
    assert cut.rc != 0 and "Say -e gpu_hosts='gpu_nodes:!d' instead" in cut.output, cut.output[-3000:]
    whole = play(status, "-e", common, "-e", "gpu_hosts=a", "--limit", "a:localhost")
    assert whole.rc == 0 and '"a ' in whole.output, whole.output[-3000:]
    model = play(rollback, "-e", common, "-e", "gpu_hosts=a gpu_model=H100")
    assert model.rc != 0 and "(did you mean gpu_models?); if it is a variable of your own" in model.output
    ours = play(rollback, "-e", common, "-e", "gpu_hosts=a gpu_model=H100 gpu_own_variables=gpu_model")
    assert ours.rc == 0, ours.output[-3000:]
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text("gpu_hosts: a")
    told = play(rollback, "-e", common)
    assert told.rc != 0 and "the inventory sets gpu_hosts, where no play sees it" in told.output, told.output[-3000:]


@pytest.mark.parametrize("size", ["0", "-1", "0%", "150%", "two"])
def test_batches_that_are_none_are_refused(play: Callable, tmp_path: Path, size: str) -> None:
    """Ansible takes 0 for all nodes at once."""
    played = play(
        "- ansible.builtin.import_playbook: gpufleet.driver.rollback\n",
        "-e",
        f"gpu_state_dir={tmp_path}/state gpu_hosts=a ansible_become=false gpu_batch_size={size}",
    )
    assert played.rc != 0 and f"gpu_batch_size is {size}, expected a number of nodes of 1 or more" in played.output


def test_recover_does_not_call_a_silent_node_well(play: Callable, tmp_path: Path) -> None:
    silent = '{"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}'
    played = play(
        "- ansible.builtin.import_playbook: gpufleet.driver.recover\n",
        "-e",
        f"gpu_hosts=a gpu_report_dir={tmp_path}",
        "-e",
        silent,
    )
    assert played.rc != 0
    assert "could not be looked at, so nobody knows how they are: a: " in played.output, played.output[-3000:]


def test_a_part_of_an_upgrade_is_refused(play: Callable) -> None:
    """Ansible alone plays what is tagged, which is next to nothing, and calls it a success."""
    played = play("- ansible.builtin.import_playbook: gpufleet.driver.upgrade\n", "--tags", "install")
    assert played.rc != 0 and "Run it whole" in played.output, played.output[-3000:]


ASK = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.add_host: {name: login, ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1}
"""


def test_ansible_alone_drops_who_asks_a_scheduler_that_does_not_answer(play: Callable) -> None:
    ask = "    - {ansible.builtin.ping: , delegate_to: login, failed_when: false}\n"
    assert "the report was written" not in play(ASK + ask + REPORT).output


def test_the_report_is_written_though_nothing_could_be_taken_away_at_the_end(play: Callable) -> None:
    """Nor does the run end well then: it says what to do."""
    played = play(
        ASK
        + f"""
    - ansible.builtin.set_fact: {{gpu_run: r1}}
    - ansible.builtin.include_tasks: {TOP}/playbooks/tasks/settle.yml
      vars: {{__settle_nodes: [], gpu_scheduler: slurm, gpu_scheduler_host: login}}
    - ansible.builtin.debug: {{msg: "left: {{{{ gpu_settle_failed }}}}"}}
"""
        + REPORT
    )
    assert "left: ['login does not answer (gpufleet.driver.fleet_settle): " in played.output, played.output
    assert "the report was written" in played.output


@pytest.mark.parametrize(
    "holder, left",
    [("another", "nothing was taken away that runs have left, as this run no longer has the fleet"), ("r1", "login ")],
)
def test_only_the_run_that_has_the_fleet_settles(play: Callable, tmp_path: Path, holder: str, left: str) -> None:
    """A keeper that does not answer is no reason to leave anything behind."""
    played = play(
        ASK
        + f"""
    - ansible.builtin.set_fact:
        {{gpu_run: r1, gpu_lock_keepers: [localhost, login], gpu_lock_lasts: 600, gpu_state_dir: {tmp_path}/state}}
    - gpufleet.driver.fleet_lock: {{state: held, run_id: {holder}, state_dir: "{{{{ gpu_state_dir }}}}"}}
    - {{ansible.builtin.set_fact: {{gpu_lock_answer: {{lock: {{run_id: r1}}}}}}, loop: [localhost, login],
       delegate_to: "{{{{ item }}}}", delegate_facts: true}}
    - ansible.builtin.include_tasks: {TOP}/playbooks/tasks/settle_own.yml
      vars: {{__settle_nodes: [], __settle_leased: false, gpu_scheduler: slurm, gpu_scheduler_host: login}}
    - ansible.builtin.debug: {{msg: "left: {{{{ gpu_settle_failed }}}}"}}
"""
    )
    assert f"left: ['{left}" in played.output, played.output
