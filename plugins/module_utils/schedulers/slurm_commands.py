# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm's own commands, run with a deadline. Reads give data; whether a change came true is for the next read to say.

While slurmctld does not answer, each client waits ten seconds and more, and while munge does not, the better part of a
minute. So it is asked first whether they are there, which takes milliseconds and is given up after seconds, and a
controller that restarts is waited for.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, TypeVar

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import NOT_FOUND_RC, Completed, Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import slurm_text
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import SchedulerError

_AT_ONCE = 8
_MOST_NAMES = 1000
_ONE_SIGNAL = 4.0
_PING = 10.0
_ALIEN = ("SLURM_", "SQUEUE_", "SRUN_", "SCONTROL_")
_NEEDED = ("SLURM_CONF", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def refusal(said: Completed) -> str:
    """What Slurm says against a change, and who may make it."""
    return (
        f"{said.describe()}; if for lack of rights: it takes root, SlurmUser or AdminLevel=Administrator "
        "(gpu_scheduler_become)"
    )


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

    def jobs(self, each_task: bool = False) -> list[slurm_text.Job]:
        """Every job that has not finished. The waiting tasks of an array are one, with what is said of any of them,
        unless ``each_task`` wants them one by one."""
        nonce = secrets.token_hex(8)
        one_by_one = ["--array"] if each_task else []
        text = self._read(["squeue", "--noheader", "--all", *one_by_one, "--Format", slurm_text.job_format(nonce)])
        try:
            return slurm_text.jobs(text, nonce)
        except ValueError as exc:
            raise SchedulerError(f"{exc}; expected the output of Slurm 22.05 or later: squeue --version") from exc

    def reservations(self) -> dict[str, slurm_text.Reservation]:
        return slurm_text.reservations(self._read(["scontrol", "-o", "show", "reservation"]))

    def credential_seconds(self) -> int:
        return slurm_text.credential_seconds(self._read(["scontrol", "show", "config"]))

    def change(self, *words: str, timeout: float | None = None) -> Completed:
        """Run a command that changes something; if slurmctld was not there, wait for it and try once more.

        :raises SchedulerError: if it does not come back.
        """
        self._wait()
        said = self.start(list(words), timeout or self.timeout)
        if not said.ok and not self._answers():
            self._wait()
            said = self.start(list(words), timeout or self.timeout)
        return said

    def signal(self, job: slurm_text.Job, signal: str) -> Completed:
        """Send a signal to a job's batch script. Where other tasks of its array wait, Slurm sends it and refuses it all
        the same, and scancel sends it ten times, for the first time again after five seconds: so it is ended then."""
        task = "_" in job.id
        patience = min(_ONE_SIGNAL, self.timeout) if task else self.timeout
        said = self.change("scancel", f"--signal={signal}", "--batch", job.id, timeout=patience)
        return replace(said, rc=0) if task and said.timed_out else said

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
        return self._ping(_PING).ok

    def _ping(self, seconds: float) -> Completed:
        said = self.start(["scontrol", "ping"], max(1.0, min(_PING, seconds)))
        # one of several controllers is enough, but the exit status may then still say that one is down
        self._there = said.ok or " is UP" in said.stdout
        return replace(said, rc=0) if self._there else said

    def _wait(self) -> None:
        end = self.clock() + self.timeout
        while not self._there:
            said = self._ping(end - self.clock())
            if said.rc == NOT_FOUND_RC:
                raise SchedulerError(f"{said.describe()}; run this where Slurm's commands are (gpu_scheduler_host)")
            left = end - self.clock()
            if not said.ok and left <= 0:
                raise SchedulerError(_silent(said, self.timeout))
            if not said.ok:
                self.sleep(min(1.0, left))


def _silent(ping: Completed, seconds: float) -> str:
    """Who has not answered: slurmctld, or the munge that each client needs on its own machine. Of that, a client says
    something only after the better part of a minute, if munge has died without taking its socket away."""
    of_munge = [line.strip() for line in ping.stderr.splitlines() if "munge" in line.lower()]
    if of_munge:
        return (
            f"munge on this machine has not answered for {seconds:.0f} s ({of_munge[-1]}); see: systemctl status munge"
        )
    if ping.timed_out:
        return (
            f"munge on this machine, or slurmctld, has not answered for {seconds:.0f} s ({ping.describe()}); "
            "see here: systemctl status munge; on the controller: systemctl status slurmctld munge"
        )
    down = next((line.strip() for line in ping.stdout.splitlines() if " is DOWN" in line), ping.describe())
    return f"slurmctld has not answered for {seconds:.0f} s ({down}); see there: systemctl status slurmctld munge"
