# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Slurm lab as the tests see it: its commands, jobs that do this or that, and our backend on top."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Evacuated, Fate, Mark
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm import Settings, Slurm
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_commands import Commands
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_text import Job, Node

TOP = Path(__file__).resolve().parents[2]
LAB = TOP / "tests/lab/slurm/lab"
OLD, NEW = "535.183.01", "550.90.07"

# Counts steps and keeps the number in a file; USR1 makes it write the file, TERM ends it at once, a file does so well.
COUNTER = """\
#!/bin/bash
{hold}
step=$(cat {file} 2>/dev/null || echo 0)
echo "start $step on $SLURMD_NODENAME$(sed 's/^/ with /' /sys/module/nvidia/version 2>/dev/null)" >>{file}.log
save() {{ sleep {takes}; echo $step >{file}.part && mv {file}.part {file}; }}
trap save USR1
until [ -e {file}.end ]; do step=$((step + 1)); echo $step >{file}.now; sleep 0.2; done
"""


def until(found: Callable[[], Any], what: str, timeout: float = 30) -> Any:
    """The first true value of ``found``; says what was waited for if there is none."""
    end = time.monotonic() + timeout
    while not (value := found()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(0.1)
    return value


class Cluster:
    def __init__(self, state: Path, names: Sequence[str]) -> None:
        self.state = state
        self.names = list(names)
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(state / "etc/slurm.conf"),
            "PATH": f"{state}/bin:{os.environ['PATH']}",
        }
        self.commands = Commands(execution.run, timeout=20, conf=str(state / "etc/slurm.conf"))

    @classmethod
    @contextmanager
    def up(cls, state: Path, *flags: str, nodes: int = 4) -> Iterator[Cluster]:
        """Its jobs and clients find their way by the environment, so that is set too."""
        subprocess.run([str(LAB), "up", "--state", str(state), "--nodes", str(nodes), *flags], check=True, timeout=120)
        cluster = cls(state, [f"gpu-{number}" for number in range(1, nodes + 1)])
        before = os.environ["PATH"]
        os.environ["PATH"] = cluster.environment["PATH"]
        try:
            yield cluster
        finally:
            os.environ["PATH"] = before
            cluster.lab("down")

    @classmethod
    @contextmanager
    def fresh(cls, *flags: str, nodes: int = 4) -> Iterator[Cluster]:
        """One in a directory of its own: pytest's are closed to the users that Slurm's daemons run as."""
        state = Path(tempfile.mkdtemp(prefix="gpufleet-slurm-"))
        state.chmod(0o755)
        try:
            with cls.up(state, *flags, nodes=nodes) as cluster:
                yield cluster
        finally:
            shutil.rmtree(state)

    def lab(self, command: str, *words: str) -> None:
        subprocess.run([str(LAB), command, "--state", str(self.state), *words], check=True, timeout=120)

    def sh(self, *argv: str, check: bool = True, user: str = "", timeout: float = 60) -> str:
        """Standard output of one of Slurm's commands; with ``check=False`` standard error too."""
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        done = subprocess.run(
            [*become, *argv],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.state / "jobs",
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(argv)}: rc {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip() + ("" if check else done.stderr)

    def play(self, name: str, directory: Path, **options: int) -> str:
        """What one of the playbooks prints for a fleet of one machine without a driver, this one; it has to succeed."""
        inventory = directory / "hosts.ini"
        inventory.write_text(f"[gpu_nodes]\na ansible_connection=local ansible_python_interpreter={sys.executable}\n")
        settings = {
            "gpu_scheduler": "slurm",
            "gpu_scheduler_options": {"slurm_conf": f"{self.state}/etc/slurm.conf", **options},
            "ansible_become": False,
            "gpu_state_dir": f"{directory}/state",
        }
        argv = ["ansible-playbook", f"gpufleet.driver.{name}", "-i", str(inventory), "-e", json.dumps(settings)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=directory)
        if done.returncode:
            raise AssertionError(f"{name}: rc {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    # -- jobs

    def submit(self, script: str, *flags: str, user: str = "", node: str = "") -> str:
        """The id of a batch job."""
        path = self.state / "jobs" / f"job-{time.time_ns()}.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        where = [f"--nodelist={node}"] if node else []
        return self.sh("sbatch", "--parsable", "--output=/dev/null", *where, *flags, str(path), user=user)

    def counter(self, name: str, *flags: str, takes: float = 0, node: str = "", hold: str = "", may: str = "") -> str:
        """A job that saves itself on USR1 and goes on from what it saved."""
        file = self.state / "jobs" / name
        script = COUNTER.format(file=shlex.quote(str(file)), takes=takes, hold=hold)
        comment = f"gpufleet.signal=USR1 gpufleet.saved={file}" + (f" gpufleet.may={may}" if may else "")
        return self.submit(script, f"--comment={comment}", "--gres=gpu:1", "--requeue", *flags, node=node)

    def touch(self, name: str) -> None:
        (self.state / "jobs" / name).touch()

    def text(self, name: str) -> str:
        path = self.state / "jobs" / name
        return path.read_text() if path.exists() else ""

    def job(self, number: str) -> Job | None:
        found = [job for job in self.commands.jobs(each_task=True) if number in (job.id, job.shown)]
        return found[0] if found else None

    def running(self, number: str, timeout: float = 30) -> Job:
        def found() -> Job | None:
            job = self.job(number)
            return job if job and job.state == "RUNNING" else None

        return until(found, f"job {number} runs", timeout)

    def state_of(self, number: str) -> str:
        """Also of a job that has ended."""
        text = self.sh("scontrol", "-o", "show", "job", number)
        return text.partition("JobState=")[2].split()[0]

    def restarts(self, number: str) -> int:
        text = self.sh("scontrol", "-o", "show", "job", number)
        return int(text.partition("Restarts=")[2].split()[0])

    # -- nodes

    def node(self, name: str) -> Node:
        return self.commands.nodes([name])[name]

    def drain(self, *names: str, reason: str = "bad DIMM") -> None:
        self.sh("scontrol", "update", f"nodename={','.join(names)}", "state=drain", f"reason={reason}")

    def saved(self, text: str) -> None:
        """Until slurmctld has written what it knows of nodes, which takes it some seconds: a crash forgets the rest."""
        path = self.state / "ctld/node_state"
        until(lambda: path.exists() and text.encode() in path.read_bytes(), f"slurmctld has saved {text}")

    def backend(self, **settings: Any) -> Slurm:
        return Slurm(self.commands, Settings(**settings))

    def backend_as(self, user: str) -> Slurm:
        """One whose commands a user runs, to whom Slurm refuses what only root may do."""
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return Slurm(replace(self.commands, run=lambda argv, **how: execution.run([*become, *argv], **how)))

    def empty(
        self,
        names: Sequence[str],
        mark: Mark,
        fate: str = "",
        patience: float = 30,
        deadline: float = 3600,
        to: tuple[str, ...] = (),
        **settings: Any,
    ) -> dict[str, Evacuated]:
        """Evacuate with one fate for every job."""
        fates = [Fate(f"job {job.shown}", fate, to) for job in self.commands.jobs()] if fate else []
        return self.backend(**settings).evacuate(names, mark, fates, time.time() + deadline, patience)

    def _idle(self) -> bool:
        """Whether every node is; others are resumed, also one that slurmctld takes for rebooted only after a resume."""
        others = [name for name, node in self.commands.nodes().items() if node.state != {"IDLE"}]
        if others:
            self.sh("scontrol", "update", f"nodename={','.join(others)}", "state=resume", check=False)
        return not others

    def reset(self) -> None:
        """No job, reservation or drain, and the features and drivers as at the start."""
        for daemon in ("munge", "slurmctld", *self.names):
            path = self.state / ("munge/private/pid" if daemon == "munge" else f"run/{daemon}.pid")
            assert path.exists(), f"{daemon} was left dead"
        for job in self.commands.jobs():
            if job.state == "SUSPENDED":
                self.sh("scontrol", "resume", job.id, check=False)
            self.sh("scancel", "--signal=KILL", "--full", job.id, check=False)
            self.sh("scancel", job.id, check=False)
        for name in self.commands.reservations():
            until(lambda name=name: not self.sh("scontrol", "delete", f"reservationname={name}", check=False), name)
        listed = ",".join(self.names)
        self.sh("scontrol", "update", f"nodename={listed}", "state=resume", check=False)
        self.sh("scontrol", "update", f"nodename={listed}", "state=undrain", check=False)
        self.sh("scontrol", "update", f"nodename={listed}", "availablefeatures=lab", "activefeatures=lab")
        for name in self.names:
            (self.state / "nodes" / f"{name}.driver").write_text(f"{OLD}\n")
        until(self._idle, "every node is idle", 60)
        until(lambda: not self.commands.jobs(), "no job is left", 60)
