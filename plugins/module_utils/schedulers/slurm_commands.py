# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm's own commands, run with a deadline. Reads give data; whether a change came true is for the next read to say.

While slurmctld does not answer, each client waits ten seconds and more. So it is asked first whether it is there,
which takes milliseconds, and a controller that restarts is waited for.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, TypeVar

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed, Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import slurm_text
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import SchedulerError

_AT_ONCE = 8
_MOST_NAMES = 1000
_ALIEN = ("SLURM_", "SQUEUE_", "SRUN_", "SCONTROL_")
_NEEDED = ("SLURM_CONF", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK")
_BEFORE_IT_REPEATS = 4.0
"""Seconds. Told to signal a task of an array with waiting tasks, slurmctld does so and says that it could not, so that
scancel tries again, for the first time after five seconds, and ten times in all."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def each(act: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """``act`` on every item, several at once; the results in the order of the items."""
    if not items:
        return []
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(items))) as pool:
        return list(pool.map(act, items))


@dataclass
class Commands:
    """``timeout`` is for one command, in seconds, and also how long a silent slurmctld is waited for. ``conf`` is the
    path of slurm.conf and ``directory`` that of the commands, where they are not where Slurm's packages put them."""

    run: Runner
    timeout: float = 60.0
    conf: str | None = None
    directory: str | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _there: bool = field(default=False, init=False)

    def nodes(self, names: Iterable[str] = ()) -> dict[str, slurm_text.Node]:
        """All nodes, or those that are named; ``names`` must exist.

        :raises SchedulerError: as every read here, if slurmctld does not answer or refuses.
        """
        wanted = list(names)
        listed = [",".join(wanted)] if 0 < len(wanted) <= _MOST_NAMES else []
        found = slurm_text.nodes(self._read(["scontrol", "-o", "-d", "show", "node", *listed]))
        return {name: found[name] for name in wanted if name in found} if wanted else found

    def jobs(self) -> list[slurm_text.Job]:
        """Every job that has not finished; the waiting tasks of an array are one, also those that were requeued."""
        return self._jobs()

    def jobs_with_requeued_tasks(self) -> list[slurm_text.Job]:
        """As :meth:`jobs`, and besides each waiting task of an array that was requeued held or bears a note by itself:
        squeue hides it behind the tasks that never ran."""
        found = self._jobs()
        if any(job.folded for job in found):
            nonce = secrets.token_hex(8)
            words = ["--array", "--states=PENDING", "--Format", slurm_text.requeued_format(nonce)]
            names = slurm_text.requeued_tasks(self._read(["squeue", "--noheader", "--all", *words]), nonce)
            for start in range(0, len(names), _MOST_NAMES):
                found += self._jobs(f"--jobs={','.join(names[start : start + _MOST_NAMES])}")
        return found

    def _jobs(self, *words: str) -> list[slurm_text.Job]:
        nonce = secrets.token_hex(8)
        text = self._read(["squeue", "--noheader", "--all", *words, "--Format", slurm_text.job_format(nonce)])
        try:
            return slurm_text.jobs(text, nonce)
        except ValueError as exc:
            raise SchedulerError(f"{exc}; expected the output of Slurm 22.05 or later: squeue --version") from exc

    def reservations(self) -> dict[str, slurm_text.Reservation]:
        return slurm_text.reservations(self._read(["scontrol", "-o", "show", "reservation"]))

    def credential_seconds(self) -> int:
        return slurm_text.credential_seconds(self._read(["scontrol", "show", "config"]))

    def change(self, *words: str) -> Completed:
        """Run a command that changes something; if slurmctld was not there, wait for it and try once more.

        :raises SchedulerError: if it does not come back.
        """
        self._wait()
        timeout = min(self.timeout, _BEFORE_IT_REPEATS) if words[0] == "scancel" else self.timeout
        said = self.start(list(words), timeout)
        if not said.ok and not self._answers():
            self._wait()
            said = self.start(list(words), timeout)
        return said

    def update_nodes(self, names: Sequence[str], *words: str) -> Completed:
        """``scontrol update`` of nodes (at least one) that exist, in portions that fit on a command line; the first
        that failed, or the last."""
        answers = [
            self.change("scontrol", "update", f"nodename={','.join(names[start : start + _MOST_NAMES])}", *words)
            for start in range(0, len(names), _MOST_NAMES)
        ]
        return next((said for said in answers if not said.ok), answers[-1])

    def start(self, argv: Sequence[str], timeout: float) -> Completed:
        """One of Slurm's commands in the environment it needs."""
        environment = {"SLURM_TIME_FORMAT": "%s", **({"SLURM_CONF": self.conf} if self.conf else {})}
        # what a person set to see things otherwise, or the job that this runs in, must not change what is done
        alien = [name for name in os.environ if name.startswith(_ALIEN) and not name.startswith(_NEEDED)]
        unset = [word for name in alien for word in ("-u", name)]
        program = str(Path(self.directory, argv[0])) if self.directory else argv[0]
        return self.run([*(["env", *unset] if unset else []), program, *argv[1:]], timeout=timeout, env=environment)

    def _read(self, argv: Sequence[str]) -> str:
        self._wait()
        said = self.start(argv, self.timeout)
        if not said.ok and not self._answers():
            self._wait()
            said = self.start(argv, self.timeout)
        if not said.ok:
            raise SchedulerError(f"{said.describe()}; expected an answer of slurmctld. Nothing was done")
        return said.stdout

    def _answers(self) -> bool:
        said = self.start(["scontrol", "ping"], self.timeout)
        # one of several controllers is enough, but the exit status may then still say that one is down
        self._there = said.ok or " is UP" in said.stdout
        return self._there

    def _wait(self) -> None:
        end = self.clock() + self.timeout
        while not self._there and not self._answers():
            said = self.start(["scontrol", "ping"], self.timeout)
            if said.rc == 127:
                raise SchedulerError(f"{said.describe()}; run this where Slurm's commands are (gpu_scheduler_host)")
            if self.clock() >= end:
                raise SchedulerError(
                    f"no slurmctld answered within {self.timeout:.0f} s ({said.describe()}); "
                    "see that it and munge run: systemctl status slurmctld munge"
                )
            self.sleep(1.0)
