# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whoever conducts or carries out a move may end at any moment, and so may a machine: the next run finishes it, and no
step of the work is ever lost or done twice."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

from works import CRIU, FAULTS, FIRST, GPUS, HOME, QUICK, SECOND, Work, Works

# act of a side of the move → what it is in the code, and which time it comes
CAPTURE = {
    "intent": ("suspend", "write_record", 1),
    "guard": ("service", "guard", 1),
    "timer": ("service", "arm", 1),
    "stage": ("artefact", "stage", 1),
    "lock": ("backend", "_lock", 1),
    "suspend": ("backend", "_checkpoint", 1),
    "dump": ("backend", "_dump", 1),
    "files": ("backend", "_carry", 1),
    "hash": ("artefact", "hash_files", 1),
    "manifest": ("artefact", "_write_manifest", 1),
    "publish": ("artefact", "publish", 1),
    "saved": ("suspend", "write_record", 2),
}
COMMIT = {
    "committing": ("suspend", "write_record", 1),
    "untimed": ("service", "disarm", 1),
    "held": ("moved", "place", 1),
    "guarded": ("service", "guard", 1),
    "let-go": ("service", "guard", 1),
    "ended": ("service", "end", 1),
    "killing": ("suspend", "write_record", 2),
    "committed": ("suspend", "write_record", 3),
}
RESTORE = {
    "starting": ("suspend", "write_record", 1),
    "unpacked": ("backend", "_unpack", 1),
    "started": ("service", "start_from", 1),
    "there": ("backend", "_restart", 1),
    "resumed": ("backend", "_phase", 1),
    "unlocked": ("backend", "_phase", 2),
    "settled": ("service", "settle", 1),
    "proven": ("backend", "_verify", 1),
}


def die(works: Works, node: str, act: str, points: dict[str, tuple[str, str, int]], **options: Any) -> None:
    """Have the module of each work end after its act, all at once."""
    orders = [works.order(act, name, after=after, **options) for name, after in points.items()]
    told = works.carry_out(node, orders)
    assert [code for code, dummy in told] == [137] * len(points), told


def test_a_capture_that_ends_after_any_act_is_taken_up_again(works: Works) -> None:
    """Or during the dump: CRIU is then still at work, and would stop what the next run has let go on."""
    rows = [Work(name, gpu=number % GPUS) for number, name in enumerate([*CAPTURE, "dumping"])]
    works.start(*rows)
    die(works, HOME, "capture", CAPTURE, store="/var/lib/gpufleet/store")
    works.trouble(HOME, criu=[f"{rows[-1].pids[0]} slow"])
    words = shlex.join(["python3", f"{works.share}/die.py", str(works.share)])
    order = shlex.quote(json.dumps(works.order("capture", "dumping", criu=CRIU)))
    works.sh(HOME, f"{words} {order} & until [ -e /run/dumping ]; do sleep 0.05; done; kill -KILL $!; : >{FAULTS}")
    told = works.move(*rows, to=[FIRST, SECOND])
    after = works.look()
    for one in told.values():
        assert one["how"] == "moved", one
    works.assert_run({name: one["to"] for name, one in told.items()}, after)
    assert works.left_behind(HOME) == ""


def test_an_end_or_a_restore_that_ends_after_any_act_is_taken_up_again(works: Works) -> None:
    """For some, the end at the source is cut off; for others, which were given to the second machine, the restore. One
    of the first its timer lets go on, as nothing of it was ended yet: it is saved anew."""
    rows = [Work(name, gpu=number % GPUS) for number, name in enumerate([*COMMIT, *RESTORE])]
    ending, coming = rows[: len(COMMIT)], rows[len(COMMIT) :]
    store = {"store": str(works.share / "store")}
    works.start(*rows)
    works.checkpoint("captured", rows, **store)
    works.restore("prepared", ending, FIRST, **store)
    works.restore("prepared", coming, SECOND, **store)
    works.checkpoint("committed", coming, target=SECOND, **store)
    die(works, HOME, "commit", COMMIT, target=FIRST, **store)
    die(works, SECOND, "restore", RESTORE, **store)
    works.sh(HOME, "systemctl start gpufleet-thaw-let-go.service.2.service")
    assert "thawed" in works.sh(HOME, "cat /var/lib/gpufleet/checkpoints/let-go.json")
    assert works.sh(HOME, "ls /etc/systemd/system/let-go.service.d 2>/dev/null; true") == ""
    told = works.move(*rows, to=[FIRST, SECOND], shared=True, **store)
    after = works.look()
    where = {**{work.name: FIRST for work in ending}, **{work.name: SECOND for work in coming}}
    for name, to in where.items():
        assert (told[name]["how"], told[name]["to"]) == ("moved", to), told[name]
    works.assert_run(where, after)
    for node in (HOME, SECOND):
        assert works.left_behind(node) == ""


SSH = """#!/bin/bash
# ssh, but in the command whose turn it is, whoever conducts is killed: after it, or a moment after it has begun.
read -r controller at how <{place}/order
count=$(($(cat {place}/count) + 1))
echo $count >{place}/count
end() {{ kill -KILL $controller; kill -KILL -- -$(($(ps -o pgid= $$))); }}
[ $count -eq $at ] || exec ssh "$@"
if [ $how = during ]; then (sleep 0.4; end) & fi
ssh "$@"
end
"""


def test_the_controller_may_be_killed_in_any_call(works: Works, tmp_path: Path) -> None:
    """Again and again: the first run in its first call to a machine, the next in its second, until one comes to an end.
    By turns the call is over by then, or goes on without anybody who waits for it. What the work has in its
    environment, and so in its memory, is told to nobody, however much they want to see."""
    secret = "s3cr3t-of-the-work"
    work = Work("work", pair=True, setting=f"API_TOKEN={secret}")
    works.start(work)
    program = tmp_path / "ssh"
    program.write_text(SSH.format(place=tmp_path))
    program.chmod(0o755)
    given = {"workloads": [work.declared()], "candidates": [FIRST], **QUICK, "settle": 1}
    argv = works.nodes[HOME].argv("workload_move", given)
    calls, shown = 0, ""
    while True:
        calls += 1
        (tmp_path / "count").write_text("0\n")
        how = "after" if calls % 2 else "during"
        begin = f'echo $$ {calls} {how} >{tmp_path}/order; exec "$@"'
        done = subprocess.run(
            ["bash", "-c", begin, "-", *argv, "-vvv", "-e", f"ansible_ssh_executable={program}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=works.fleet.environment(), timeout=300, start_new_session=True, check=False,
        )  # fmt: skip
        shown += done.stdout
        if done.returncode != -signal.SIGKILL:
            break
    assert done.returncode == 0, done.stdout
    assert secret not in shown and "ESTABLISH SSH CONNECTION" in shown
    assert calls > 6, "looks, capture, transfer and place are calls of their own"
    works.assert_runs(work, FIRST, works.look())
    for node in (HOME, FIRST):
        assert works.left_behind(node) == ""
        assert secret not in works.sh(node, "journalctl --boot --no-pager"), "what is logged, others may read"


def test_a_source_that_loses_power_while_its_work_stands_still(works: Works) -> None:
    """What was saved by then goes on elsewhere; what was not, starts again from its own state."""
    saved, unsaved = Work("saved"), Work("unsaved", gpu=1)
    works.start(saved, unsaved)
    works.checkpoint("captured", [saved])
    die(works, HOME, "capture", {"unsaved": CAPTURE["dump"]}, store="/var/lib/gpufleet/store")
    works.fleet.lab("kill", HOME)
    works.fleet.lab("start", HOME)
    works.prepare(HOME)
    told = works.move(saved, unsaved)
    after = works.look()
    assert (told["saved"]["how"], told["saved"]["to"]) == ("moved", FIRST), told
    assert (told["unsaved"]["how"], told["unsaved"]["reasons"][0]["reason"]) == ("cold_start", "lost_source"), told
    works.assert_run({"saved": FIRST, "unsaved": HOME}, after, repeated=["unsaved"])


def test_a_target_that_vanishes_while_work_comes_back(works: Works) -> None:
    """Nobody else may have the work, as it could run there. Once it is back, the next run finishes."""
    work = Work("work")
    works.start(work)
    works.trouble(FIRST, criu=[f"{work.pids[0]} slow"])
    given = {"workloads": [work.declared()], "candidates": [FIRST, SECOND], **QUICK, "patience": 3}
    moving = works.nodes[HOME].begin("workload_move", **given)
    works.sh(
        FIRST, "timeout 120 sh -c 'until grep -qs starting /var/lib/gpufleet/restores/work.json; do sleep 0.1; done'"
    )
    works.fleet.lab("kill", FIRST)
    told, dummy = moving.communicate(timeout=300)
    assert moving.returncode != 0 and "work may run on gpu-2" in told, told
    active = [node for node in (HOME, SECOND) if works.look_at(node).get("work", {}).get("active")]
    assert active == []
    works.fleet.lab("start", FIRST)
    works.prepare(FIRST)
    again = works.move(work, to=[FIRST, SECOND])["work"]
    assert (again["how"], again["to"]) == ("moved", FIRST), again
    works.assert_runs(work, FIRST, works.look())


def test_of_two_at_once_only_one_has_the_work(works: Works) -> None:
    """Of two who end it in favour of different machines; and of two who bring it back on the same."""
    work = Work("work")
    store = {"store": str(works.share / "race")}
    works.start(work)
    works.checkpoint("captured", [work], **store)
    for node in (FIRST, SECOND):
        works.restore("prepared", [work], node, **store)
    ends = works.carry_out(HOME, [works.order("commit", "work", target=to, **store) for to in (FIRST, SECOND)])
    assert sorted(code for code, dummy in ends) == [0, 1], ends
    record = json.loads(works.sh(HOME, "cat /var/lib/gpufleet/checkpoints/work.json"))
    told = works.carry_out(record["target"], [works.order("restore", "work", **store) for dummy in range(2)])
    assert [code for code, dummy in told] == [0, 0], told
    moved = works.move(work, to=[FIRST, SECOND], shared=True, **store)["work"]
    assert (moved["how"], moved["to"]) == ("moved", record["target"]), moved
    works.assert_runs(work, record["target"], works.look())


def test_of_two_whole_moves_at_once_one_moves_the_work(works: Works) -> None:
    """To the same machine, and to different ones; both come to an end, and neither undoes what the other did."""
    rows = {"same": [FIRST], "other": [FIRST, SECOND]}
    everybody = [Work(name, gpu=gpu) for gpu, name in enumerate(rows)]
    works.start(*everybody)
    for work, first in zip(everybody, rows.values(), strict=True):
        moving = [
            works.nodes[HOME].begin("workload_move", workloads=[work.declared()], candidates=[to], **QUICK)
            for to in (first[0], first[-1])
        ]
        told = [one.communicate(timeout=240)[0] for one in moving]
        after = works.look()
        where = [node for node in (FIRST, SECOND) if after[node].get(work.name, {}).get("active")]
        assert len(where) == 1 and where[0] in first, told
        assert any(f'"{work.name}": "{where[0]}"' in text for text in told), told
        works.assert_runs(work, where[0], after)
