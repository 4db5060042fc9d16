# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode tells what would become of work, and changes nothing on any machine."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from works import CRIU, FIRST, HOME, Work, Works

# Processes and units, but for what looks at them, and every file but the counters' own and the stand-in driver's.
STATE = r"""
ps -eo pid,lstart,args --no-headers | grep -vE 'sshd|bash -c|ps -eo|grep -|find /|awk |sleep'
systemctl list-units --all --no-legend --plain | grep -vE '^(session|user|sshd?@)' | awk '{print $1, $3, $4}'
find /etc /usr /var/lib /run /dev/shm /tmp /root -xdev \( -path '*/work-*' -o -path '/root/.ansible*' -o -path /tmp \
  -o -path '/run/gpufleet-lab*' -o -path '/run/nvidia-standin*' \) -prune -o -printf '%p %s %T@ %m\n'
"""


def state(works: Works) -> list[list[str]]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda node: sorted(works.sh(node, STATE).splitlines()), (HOME, FIRST)))


def play(works: Works, *flags: str, **about: Any) -> str:
    book = works.fleet.state / "play.json"
    book.write_text(json.dumps([{"gather_facts": False, "become": True, **about}]))
    argv = ["ansible-playbook", "-i", str(works.fleet.inventory), str(book), *flags]
    done = subprocess.run(
        argv, env=works.fleet.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def task(module: str, that: str, **options: Any) -> list[dict[str, Any]]:
    """A module, and what is expected of it."""
    done = {f"gpufleet.driver.{module}": options, "register": "told", "failed_when": False}
    return [done, {"ansible.builtin.assert": {"that": that, "fail_msg": "{{ told | string }}"}}]


def test_what_is_foretold_changes_nothing(works: Works) -> None:
    left, right = Work("left"), Work("right", gpu=1)
    works.sh(HOME, "echo 30000 >/proc/sys/kernel/ns_last_pid")  # so that the other machine has no process of its id
    works.start(left)
    works.start(right, on=FIRST)
    looked = task("checkpoint_info", "told.facts | length > 0")
    play(works, hosts=f"{HOME},{FIRST}", tasks=looked)  # CRIU keeps what it finds out of the kernel
    before = state(works)
    members = [{"node": HOME, "workload": left.declared()}, {"node": FIRST, "workload": right.declared()}]
    variables = {"gpu_workloads": [left.declared()], "gpu_move_to": [FIRST], "gpu_takes_in": True}
    told = play(
        works, "--check", "--diff", hosts=HOME,
        pre_tasks=task("gang_checkpoint", "told.workloads | map(attribute='ok') == [true, true]", members=members),
        roles=[{"role": "gpufleet.driver.evacuate", "vars": variables}],
    )  # fmt: skip
    assert f"left: would be moved to {FIRST}" in told and '"left": "stopped"' in told, told
    assert state(works) == before

    works.checkpoint("captured", [left])
    before = state(works)
    fetch = {"artefact": left.artefact, "source": HOME}
    play(works, "--check", "--diff", hosts=FIRST, tasks=task("checkpoint_fetch", "told.changed", **fetch))
    assert state(works) == before

    assert not works.nodes[FIRST].run("checkpoint_fetch", **fetch)["failed"]
    before = state(works)
    order = {**left.declared(), "artefact": left.artefact}
    tasks = task("checkpoint_fetch", "not told.changed", **fetch)
    for act in ("prepared", "restored", "home", "absent", "discarded"):
        tasks += task(
            "workload_restore", "told.changed and told.workloads[0].ok", state=act, workloads=[order], criu=CRIU
        )
    none = {**order, "artefact": "no-such-save"}
    tasks += task(
        "workload_restore", "told.workloads[0].reason.reason == 'hash_mismatch'", state="prepared", workloads=[none]
    )
    play(works, "--check", "--diff", hosts=FIRST, tasks=tasks)
    assert state(works) == before
    works.checkpoint("aborted", [left])
