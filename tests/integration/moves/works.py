# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Counters that can be told apart, how things are made to go wrong for each of them, and what became of each.

A counter writes down every step before it takes the next, and its count is in "GPU" memory too: a step that is lost, or
done twice, shows in its log, and wrong memory ends it.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet import Fleet
from node import Node

NODES = ["gpu-1", "gpu-2", "gpu-3"]
HOME, FIRST, SECOND = NODES
GPUS = 8
FAULTS = "/run/criu-faults"
CRIU = "/usr/local/bin/criu-with-faults"

# CRIU as it is, but for what the file FAULTS says of a process: "PID HOW" a line.
PROGRAM = f"""#!/bin/bash
words=("$@") pid=none images=/nonexistent
while [ $# -gt 0 ]; do
  case $1 in --tree) pid=$2 ;; --images-dir) images=$2 ;; esac
  shift
done
if [ "${{words[0]}}" = restore ]; then
  for core in "$images"/core-*.img; do pid+=" $(basename "$core" .img | tr -dc 0-9)"; done
fi
how=
while read -r one fault; do case " $pid " in *" $one "*) how=${{words[0]}}-$fault ;; esac; done <{FAULTS}
case $how in
  dump-fill) head -c 1G /dev/zero >"$(dirname "$(dirname "$images")")/filler" ;;
  dump-hang|restore-hang) exec sleep 600 ;;
  dump-kill) kill -9 "$pid"; exit 1 ;;
  dump-slow)
    (tracer() {{ sed -n 's/^TracerPid:[[:space:]]*//p' "/proc/$pid/status"; }}
    until [ "$(tracer)" != 0 ]; do :; done; dumper=$(tracer)
    kill -STOP "$dumper"; touch /run/dumping; sleep 3; kill -CONT "$dumper") & ;;
  dump-fail|restore-fail) echo "(00.1) Error (criu/made-up.c:1): told to fail" >"$images/dump.log"; exit 1 ;;
  restore-slow) sleep 5 ;;
  restore-occupy)
    one=${{pid##* }}
    until [ -e "/proc/$one" ]; do echo $((one - 1)) >/proc/sys/kernel/ns_last_pid; sleep 30 & done
    echo $((one + 20000)) >/proc/sys/kernel/ns_last_pid ;;
esac
criu "${{words[@]}}" || exit
case $how in
  dump-short) truncate -s -4096 "$(ls -S "$images"/pages-*.img | head -1)" ;;
  dump-running) kill -CONT "$pid" ;;
  dump-empty) rm -f "$images"/core-*.img ;;
  restore-die)
    one=${{pid##* }}
    log=$(tr '\\0' '\\n' <"/proc/$one/environ" | sed -n 's/^STATE_DIRECTORY=//p')/steps.log
    had=$(wc -l <"$log")
    (while [ -e "/proc/$one" ] && [ "$(wc -l <"$log")" -le $((had + 3)) ]; do sleep 0.05; done; kill -9 "$one") & ;;
esac
exit 0
"""

LOOK = """
import glob, json, os, subprocess
found = {}
for home in glob.glob("/var/lib/work-*"):
    name = os.path.basename(home)[5:]
    if "." in name:
        continue
    try:
        rows = [line.split() for line in open(home + "/steps.log")]
    except FileNotFoundError:
        rows = []
    active = subprocess.run(["systemctl", "is-active", "-q", name.partition("+")[0] + ".service"]).returncode == 0
    found[name] = {"active": active, "steps": [[int(row[0]), row[1]] for row in rows]}
print(json.dumps(found))
"""


@dataclass
class Work:
    """A counter: one process, or two if ``pair``; ``setting`` is one more of its environment."""

    name: str
    gpu: int = 0
    pair: bool = False
    exec_before: str = ""
    setting: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    artefact: str = ""

    @property
    def logs(self) -> list[str]:
        return [self.name, *([f"{self.name}+"] if self.pair else [])]

    def declared(self) -> dict[str, Any]:
        save = {
            "paths": [f"/var/lib/work-{log}" for log in self.logs],
            "progress": ["sh", "-c", f"wc -l </var/lib/work-{self.name}/steps.log"],
        }
        extra = dict(self.extra)
        return {"name": self.name, "unit": f"{self.name}.service", "save": {**save, **extra.pop("save", {})}, **extra}

    def unit(self, port: int) -> str:
        counter = "/usr/lib/gpufleet-lab/gpu-counter"
        command = counter
        if self.pair:
            second = f"STATE_DIRECTORY=/var/lib/work-{self.name}+ PORT={port + 100} {counter} &"
            command = f"/bin/sh -c '{second} exec {counter}'"
        if self.exec_before:
            command = f"/bin/sh -c '{self.exec_before} exec {counter}'"
        return (
            f"[Service]\nExecStart={command}\nStateDirectory={' '.join(f'work-{log}' for log in self.logs)}\n"
            f"Environment=STATE_DIRECTORY=/var/lib/work-{self.name} PORT={port} GPU_MIB=1 {self.setting}\n"
            f"Environment=CUDA_VISIBLE_DEVICES={self.gpu}\nRestart=on-failure\nRestartSec=1\nTimeoutStopSec=10\n"
        )


class Works:
    """Counters on the first machine, the machines they may go to, and what is told of them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.nodes = {name: Node(fleet, name) for name in NODES}
        self.works: dict[str, Work] = {}
        for name in NODES:
            self.prepare(name)

    def prepare(self, node: str) -> None:
        """What a machine needs after each start: CRIU that goes wrong when it is told to."""
        script = f"cat >{CRIU}; chmod 755 {CRIU}; touch {FAULTS}"
        self.sh(node, f"cat <<'END' | (umask 022; {script})\n{PROGRAM}\nEND")

    @property
    def share(self) -> Path:
        """A directory that every machine has, at the same place."""
        return self.fleet.state.parent / "share"

    def sh(self, node: str, script: str) -> str:
        return self.nodes[node].sh(script)

    def start(self, *works: Work, on: str = HOME) -> None:
        """Have them run on a machine, each some steps on; their ``pids`` are known then."""
        script = ""
        for number, work in enumerate(works, len(self.works)):
            self.works[work.name] = work
            unit = f"/etc/systemd/system/{work.name}.service"
            script += f"printf %s {shlex.quote(work.unit(8100 + number))} >{unit}\n"
        names = " ".join(work.name for work in works)
        logs = " ".join(f"/var/lib/work-{log}/steps.log" for work in works for log in work.logs)
        script += f"systemctl daemon-reload; systemctl start {names}\n"
        script += f'for log in {logs}; do timeout 60 sh -c "until [ -s $log ]; do sleep 0.1; done"; done\n'
        script += "group() { cat /sys/fs/cgroup{/systemd,}/system.slice/$1.service/cgroup.procs 2>/dev/null; }\n"
        script += f"for name in {names}; do echo $name $(group $name); done"
        for line in self.sh(on, script).splitlines():
            name, *pids = line.split()
            self.works[name].pids = [int(pid) for pid in pids]

    def trouble(self, node: str, driver: Iterable[str] = (), criu: Iterable[str] = ()) -> None:
        """Tell a machine's driver (``knob.function.pid=value``) and CRIU (``pid how``) what is to go wrong."""
        lines = "\n".join([*driver, ""])
        self.sh(node, f"mkdir -p /run/nvidia-standin; printf %s {shlex.quote(lines)} >>/run/nvidia-standin/state")
        self.sh(node, f"printf %s {shlex.quote(''.join(f'{line}{chr(10)}' for line in criu))} >>{FAULTS}")

    def move(self, *works: Work, to: Iterable[str] = (FIRST,), **options: Any) -> dict[str, dict[str, Any]]:
        """What workload_move says of each."""
        given = {"workloads": [work.declared() for work in works], "candidates": list(to), **QUICK, **options}
        told = self.nodes[HOME].run("workload_move", **given)
        assert "workloads" in told, told
        return {one["workload"]: one for one in told["workloads"]}

    def checkpoint(self, state: str, works: Iterable[Work], **options: Any) -> dict[str, Any]:
        """What workload_checkpoint says of each at home."""
        return self._ask(HOME, "workload_checkpoint", state, works, options)

    def restore(self, state: str, works: Iterable[Work], node: str, **options: Any) -> dict[str, Any]:
        """What workload_restore says of each on another machine."""
        return self._ask(node, "workload_restore", state, works, options)

    def _ask(
        self, node: str, module: str, state: str, works: Iterable[Work], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        orders = [{**work.declared(), "artefact": work.artefact or None} for work in works]
        given = {key: QUICK[key] for key in ("concurrency", "criu")}
        told = self.nodes[node].run(module, state=state, workloads=orders, **given, **options)
        assert not told["failed"], told
        for one in told["workloads"]:
            self.works[one["workload"]].artefact = one.get("artefact") or self.works[one["workload"]].artefact
        return {one["workload"]: one for one in told["workloads"]}

    def order(self, act: str, name: str, **options: Any) -> dict[str, Any]:
        """What die.py is to do for a work."""
        work = self.works[name]
        return {
            "act": act,
            "work": work.declared(),
            "artefact": work.artefact,
            "store": "/var/lib/gpufleet/store",
            **options,
        }

    def carry_out(self, node: str, orders: Iterable[Mapping[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        """Have die.py do all at the same time; the exit code of each, and why it failed if it says so."""
        share, lines = self.share, []
        for number, order in enumerate(orders):
            said = f"/tmp/said-{number}"
            words = f"python3 {share}/die.py {share} {shlex.quote(json.dumps(order))}"
            lines.append(f"({words} >{said}; echo $? $(cat {said}) >{said}-end) &")
        ends = f"for number in $(seq 0 {len(lines) - 1}); do cat /tmp/said-$number-end; done"
        told = self.sh(node, " ".join([*lines, "wait;", ends]))
        rows = [line.partition(" ") for line in told.splitlines()]
        return [(int(code), json.loads(said or "{}")) for code, dummy, said in rows]

    def left_behind(self, node: str) -> str:
        """Files of a move that nobody needs any more: saves, drop-ins but the one that keeps a moved unit from being
        started, timers, and what was set aside."""
        script = (
            "ls -A /var/lib/gpufleet/store 2>/dev/null; ls -d /var/lib/*.before-* 2>/dev/null;"
            "find /run/systemd /etc/systemd -name '*gpufleet-frozen*' -o -name '*gpufleet-restore*';"
            "systemctl list-timers --all --no-legend 'gpufleet*'"
        )
        return self.sh(node, f"{script}; true")

    def look(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Machine → counter → whether its unit is active, and its steps with the machine each was taken on."""
        with ThreadPoolExecutor() as pool:
            return dict(zip(NODES, pool.map(self.look_at, NODES), strict=True))

    def look_at(self, node: str) -> dict[str, dict[str, Any]]:
        return dict(json.loads(self.sh(node, f"python3 -c {shlex.quote(LOOK)}")))

    def assert_runs(self, work: Work, node: str, since: Mapping[str, Any], whole: bool = True) -> None:
        """:meth:`assert_run` of one work."""
        self.assert_run({work.name: node}, since, () if whole else (work.name,))

    def assert_run(self, where: Mapping[str, str], since: Mapping[str, Any], repeated: Container[str] = ()) -> None:
        """All processes of each work take steps on its machine, and its unit is active on no other. No step was lost or
        done twice, but for those that were started from an older save (``repeated``), which may do some twice."""
        deadline = time.monotonic() + 60
        while True:
            now = self.look()
            taken = {
                (name, log): [len(looked[node].get(log, {"steps": ()})["steps"]) for looked in (since, now)]
                for name, node in where.items()
                for log in self.works[name].logs
            }
            late = [log for (name, log), (before, after) in taken.items() if after <= before]
            if not late:
                break
            assert time.monotonic() < deadline, f"{', '.join(late)} take no step"
            time.sleep(0.2)
        for name, log in taken:
            active = [node for node in NODES if now[node].get(name, {}).get("active")]
            assert active == [where[name]], f"{name} is active on {active}"
            steps = now[where[name]][log]["steps"]
            assert steps[-1][1] == where[name]
            if name not in repeated:
                numbers = [step for step, dummy in steps]
                assert numbers == list(range(1, len(numbers) + 1)), f"{log}: steps lost or repeated"


QUICK = {"settle": 2, "lock_timeout": 1, "concurrency": 16, "criu": CRIU, "patience": 30}
