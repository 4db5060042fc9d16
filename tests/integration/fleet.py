# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A lab's machines, as the tests see them: run a playbook, look at a machine, cut its power."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
PLAYBOOKS = "gpufleet.driver"


@dataclass(frozen=True)
class Played:
    """What a playbook did. ``nodes`` is the report: node → its line."""

    rc: int
    output: str
    nodes: dict[str, dict[str, Any]]

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: line["outcome"] for name, line in self.nodes.items()}

    def changed(self, node: str) -> int:
        """The ``changed=`` figure of the recap."""
        found = re.search(rf"^{re.escape(node)}\s*:.*changed=(\d+)", self.output, re.MULTILINE)
        if found is None:
            raise AssertionError(f"no recap line for {node} in:\n{self.output[-3000:]}")
        return int(found.group(1))


class Fleet:
    """The machines of one lab, started by ``tests/lab/KIND/lab``."""

    def __init__(self, kind: str, state: Path, names: Sequence[str]) -> None:
        self.kind = kind
        self.state = state
        self.names = list(names)
        self.inventory = state / "inventory.yml"

    def lab(self, *arguments: str, timeout: float = 900) -> str:
        command, *rest = arguments
        done = subprocess.run(
            [str(TOP / "tests/lab" / self.kind / "lab"), command, "--state", str(self.state), *rest],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"lab {' '.join(arguments)}: rc {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def sh(self, node: str, script: str, check: bool = True) -> str:
        """Standard output of a shell script run as root on a machine."""
        done = subprocess.run(
            [
                str(TOP / "tests/lab" / self.kind / "lab"),
                "exec",
                "--state",
                str(self.state),
                node,
                "--",
                "bash",
                "-c",
                script,
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{node}: {script}: rc {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def loaded(self, node: str) -> str:
        return self.sh(node, "cat /sys/module/nvidia/version 2>/dev/null || echo none").strip()

    def packages(self, node: str) -> dict[str, str]:
        """Installed NVIDIA packages: name → version, and hold state."""
        text = self.sh(node, "dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev}\\n' '*nvidia*'")
        rows = [line.split() for line in text.splitlines()]
        return {row[0]: f"{row[1]} {row[2]}" for row in rows if len(row) == 3 and row[2] in ("ii", "hi")}

    def journal(self, node: str) -> dict[str, Any]:
        text = self.sh(node, "cat /var/lib/gpufleet/journal.json 2>/dev/null || echo '{}'")
        return json.loads(text)

    def wait_for_step(self, node: str, step: str, timeout: float = 300) -> None:
        """Until the journal of a machine of the hosts lab says that a step has begun, once more if it has before."""
        file = self.state / "nodes" / node / "root/var/lib/gpufleet/journal.json"  # seen from outside: costs it nothing

        def times() -> int:
            return file.read_text().count(f'"name": "{step}"') if file.exists() else 0

        before, end = times(), time.monotonic() + timeout
        while times() <= before:
            if time.monotonic() > end:
                raise AssertionError(f"{node}: {step!r} did not begin within {timeout:.0f} s")
            time.sleep(0.02)

    def reach(self, playing: Playing, node: str, step: str) -> None:
        """Until a task of a role has begun ("evacuate : Stop …"), or an act of the swap on a machine ("packages")."""
        if " : " in step:
            playing.wait_for(f"TASK [gpufleet.driver.{step}]")
        else:
            self.wait_for_step(node, step)

    def vary(self, node: str, **variables: Any) -> None:
        """Give one host of the inventory variables of its own, until the machines are made anew."""
        file = self.state / "host_vars" / f"{node}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(variables))

    def argv(self, playbook: str, **variables: Any) -> list[str]:
        extra = {"gpu_report_dir": str(self.state), "gpu_reconnect_timeout": 20, **variables}
        return [
            "ansible-playbook", "-i", str(self.inventory), f"{PLAYBOOKS}.{playbook}", "-e", json.dumps(extra),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{TOP}/.build/venv/bin:{os.environ['PATH']}",
            "ANSIBLE_COLLECTIONS_PATH": str(TOP / ".build"),
            "ANSIBLE_HOME": str(TOP / ".build/ansible"),
            "ANSIBLE_NOCOLOR": "1",
        }

    def play(self, playbook: str, *flags: str, timeout: float = 1200, **variables: Any) -> Played:
        return self.begin(playbook, *flags, **variables).end(timeout)

    def begin(self, playbook: str, *flags: str, **variables: Any) -> Playing:
        """Start a playbook and return at once, to disturb it."""
        report = Path(variables.get("gpu_report_dir", self.state)) / "gpu-upgrade-report.json"
        report.unlink(missing_ok=True)
        log = self.state / f"{playbook}-{time.time_ns()}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*self.argv(playbook, **variables), *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )
        return Playing(process, log, report)


class Playing:
    """A playbook under way."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, report: Path) -> None:
        self.process = process
        self.log = log
        self.report = report

    def wait_for(self, text: str, timeout: float = 300) -> None:
        """Until the output shows ``text``."""
        end = time.monotonic() + timeout
        while text not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{text!r} never came:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def kill(self, sign: int = signal.SIGKILL) -> None:
        """End the controller and all its workers, as a cancelled AWX job or a lost terminal does."""
        os.killpg(self.process.pid, sign)
        self.process.wait(30)

    def end(self, timeout: float = 1200) -> Played:
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end after {timeout} s:\n{self.log.read_text()[-4000:]}") from None
        nodes = {}
        if self.report.exists():
            nodes = {line["name"]: line for line in json.loads(self.report.read_text())["nodes"]}
        return Played(rc, self.log.read_text(), nodes)
