# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A crowd of real processes for the benchmarks of the census, and the comparison of the census with a peer among them.

2,000 processes with 60,000 open files; five of them hold a real character device, and one more holds it in a mount
namespace of its own, by a node that nobody else can see. Needs root: a mount namespace and mknod.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEVICE = "/dev/tty40"
PROCESSES, FILES, HOLDERS = 2000, 60_000, 5


@dataclass(frozen=True)
class Crowd:
    """``holders`` have :data:`DEVICE` open; ``hidden`` has it open by its own node, in its own mount namespace."""

    holders: frozenset[int]
    hidden: int
    number: tuple[int, int]

    @property
    def all(self) -> frozenset[int]:
        return self.holders | {self.hidden}


@contextlib.contextmanager
def crowd(processes: int = PROCESSES, files: int = FILES) -> Iterator[Crowd]:
    """Start the crowd and give it; its parent ends every process of it by its id when this ends."""
    with tempfile.TemporaryDirectory(prefix="crowd-") as directory:
        words = [DEVICE, str(processes), str(files), str(HOLDERS), directory]
        parent = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "crowd_host.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            line = parent.stdout.readline() if parent.stdout else ""
            pids = [int(word) for word in line.split()]
            if len(pids) != HOLDERS + 1:
                raise RuntimeError("the crowd did not start; it needs root")
            number = Path(DEVICE).stat().st_rdev
            yield Crowd(frozenset(pids[:-1]), pids[-1], (os.major(number), os.minor(number)))
        finally:
            parent.communicate()


def cpu_of(argv: Sequence[str]) -> tuple[float, str]:
    """User and system seconds of ``argv`` and all it waited for, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(list(argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def floor(directory: str) -> list[str]:
    """Compile the floor: a C program that reads every link under /proc/*/fd and does nothing else."""
    program = f"{directory}/fd_floor"
    subprocess.run(["cc", "-O2", "-o", program, str(HERE / "fd_floor.c")], check=True)
    return [program]


def compare(peer: Sequence[str], there: Crowd, rounds: int = 7) -> dict[str, Any]:
    """Run the census and ``peer`` in turn and give the medians of the CPU seconds of both, and who found whom.

    ``ours`` is a whole process: the start of the interpreter, modules, the walk, who each holder is. Without the start,
    which a module of Ansible pays in any case, it is ``ours_census`` and ``ratio_census``.

    :raises SystemExit: if the census missed a holder or named a process that is none.
    """
    ours, whole, theirs = [], [], []
    found: set[int] = set()
    for dummy in range(rounds):
        seconds, text = cpu_of([sys.executable, str(HERE / "census_once.py"), *map(str, there.number)])
        answer = json.loads(text)
        ours.append(answer["cpu_s"])
        whole.append(seconds)
        found = set(answer["pids"])
        seconds, text = cpu_of(peer)
        theirs.append(seconds)
    peer_found = {int(word.rstrip("mFe")) for word in text.replace(":", " ").split() if word.rstrip("mFe").isdigit()}
    mine, census, other = (statistics.median(seconds) for seconds in (whole, ours, theirs))
    if found != there.all:
        missed, wrong = sorted(there.all - found), sorted(found - there.all)
        sys.exit(f"the census missed {missed} and wrongly names {wrong}")
    return {
        "ratio": round(mine / other, 3),
        "ours": round(mine, 4),
        "peer": round(other, 4),
        "unit": "cpu_s",
        "ours_census": round(census, 4),
        "ratio_census": round(census / other, 3),
        "peer_is": " ".join([Path(peer[0]).name, *peer[1:]]),
        "processes": PROCESSES,
        "open_files": FILES,
        "mappings_each": len(Path(f"/proc/{min(there.holders)}/maps").read_text().splitlines()),
        "ours_finds": len(found & there.all),
        "ours_finds_other_namespace": there.hidden in found,
        "peer_finds": len(peer_found & there.all),
        "peer_finds_other_namespace": there.hidden in peer_found,
    }
