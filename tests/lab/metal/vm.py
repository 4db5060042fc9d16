# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One QEMU machine: its command line, its QMP monitor, its SSH port."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY_URL = "http://10.0.2.100/"
MEMORY_MIB = 768
KERNEL_ARGUMENTS = (
    "console=ttyS0 net.ifnames=0 mitigations=off nokaslr apparmor=0 audit=0 random.trust_cpu=on rw panic=10 quiet"
)


class LabError(Exception):
    """What went wrong, and what to do about it."""


def accelerator() -> list[str]:
    """TCG unless GPUFLEET_ACCEL=kvm: emulation also works where /dev/kvm exists but cannot run a plain kernel."""
    name = os.environ.get("GPUFLEET_ACCEL", "tcg")
    if name == "kvm":
        return ["-accel", "kvm", "-cpu", "host"]
    if name != "tcg":
        raise LabError(f"GPUFLEET_ACCEL={name}: expected tcg or kvm")
    return ["-accel", "tcg,thread=multi,tb-size=256", "-cpu", "Nehalem"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(*argv: str | Path, timeout: float = 600) -> str:
    """Standard output of a command that must succeed."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise LabError(f"{words[0]} is missing: run tests/setup packages") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"{words[0]} did not end within {timeout} s") from None
    if done.returncode:
        raise LabError(
            f"{shlex.join(words)} failed with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


class Qmp:
    """QEMU's monitor protocol over a UNIX socket, one command at a time."""

    def __init__(self, path: Path, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while True:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(timeout)
            try:
                self.socket.connect(str(path))
                break
            except OSError as error:
                self.socket.close()
                if time.monotonic() > deadline:
                    raise LabError(f"QEMU's monitor {path} does not answer: {error}") from None
                time.sleep(0.05)
        self.stream = self.socket.makefile("rw")
        self.stream.readline()
        self("qmp_capabilities")

    def __call__(self, command: str, **arguments: object) -> Any:
        self.stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.stream.flush()
        while line := self.stream.readline():
            answer = json.loads(line)
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise LabError(f"QEMU refused {command}: {answer['error']['desc']}")
        raise LabError(f"QEMU ended during {command}")

    def __enter__(self) -> Qmp:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.socket.close()


@dataclass
class Machine:
    """A virtual machine with its disk and sockets in folder; pid 0 while it is off."""

    name: str
    folder: str
    port: int
    kernel: str
    initrd: str
    key: str  # private SSH key that logs in as root
    known_hosts: str
    repository: str  # folder served as REPOSITORY_URL
    pid: int = 0
    started: int = 0  # start time of pid in clock ticks after boot, so that a reused pid is not taken for ours

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    @property
    def disk(self) -> Path:
        return Path(self.folder) / f"{self.name}.qcow2"

    @property
    def monitor(self) -> Path:
        return Path(self.folder) / f"{self.name}.qmp"

    @property
    def console(self) -> Path:
        return Path(self.folder) / f"{self.name}.console"

    def make_disk(self, backing: Path) -> None:
        run("qemu-img", "create", "-q", "-f", "qcow2", "-b", backing, "-F", "qcow2", self.disk)

    def start(self, saved_state: Path | None = None) -> None:
        """Start QEMU: from the saved state, or by a cold boot of the disk."""
        if self.running():
            raise LabError(f"{self.name} is running already (pid {self.pid})")
        self.monitor.unlink(missing_ok=True)
        serve = shlex.join([sys.executable, str(HERE / "serve.py"), self.repository]).replace(",", ",,")
        argv = [
            "qemu-system-x86_64", "-name", self.name, "-M", "q35,hpet=off", *accelerator(),
            "-smp", "1", "-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-display", "none",
            "-serial", f"file:{self.console}", "-qmp", f"unix:{self.monitor},server=on,wait=off",
            "-kernel", self.kernel, "-initrd", self.initrd, "-append", KERNEL_ARGUMENTS,
            "-drive", f"file={self.disk},if=virtio,cache=unsafe",
            "-netdev", f"user,id=n0,hostfwd=tcp:127.0.0.1:{self.port}-:22,guestfwd=tcp:10.0.2.100:80-cmd:{serve}",
            "-device", "virtio-net-pci,netdev=n0", "-device", "virtio-rng-pci",
        ]  # fmt: skip
        if saved_state:
            argv += ["-incoming", f"exec:cat {shlex.quote(str(saved_state))}"]
        with (Path(self.folder) / f"{self.name}.qemu").open("w") as output:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.pid, self.started = process.pid, start_time(process.pid)

    def running(self) -> bool:
        return self.pid > 0 and start_time(self.pid) == self.started

    def kill(self) -> None:
        """End QEMU as a power cut ends a machine. What the guest had not yet written out is gone."""
        if self.running():
            os.kill(self.pid, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while self.running():
                if time.monotonic() > deadline:
                    raise LabError(f"QEMU of {self.name} (pid {self.pid}) does not end")
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self.pid, os.WNOHANG)
                time.sleep(0.05)
        self.pid = self.started = 0

    def ssh_argv(self, *command: str) -> list[str]:
        options = ["StrictHostKeyChecking=yes", f"UserKnownHostsFile={self.known_hosts}", "ConnectTimeout=60"]
        flags = [word for option in options for word in ("-o", option)]
        target = ["-i", self.key, "-o", "IdentitiesOnly=yes", "-p", str(self.port), "root@127.0.0.1"]
        return ["ssh", "-q", *flags, *target, "--", shlex.join(command)]

    def ssh(self, *command: str, timeout: float = 120) -> str:
        """Run a command as root in the machine; its output."""
        return run(*self.ssh_argv(*command), timeout=timeout)

    def wait(self, seconds: float) -> None:
        """Until sshd answers.

        One patient connection at a time: QEMU accepts before the guest does, and many short tries pile up in the guest.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.running():
                text = (Path(self.folder) / f"{self.name}.qemu").read_text()[-1000:]
                raise LabError(f"QEMU of {self.name} ended by itself: {text.strip() or 'no output'}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                connection.settimeout(40)
                if connection.recv(64).startswith(b"SSH"):
                    return
            time.sleep(0.3)
        raise LabError(
            f"{self.name} gave no SSH banner on port {self.port} within {seconds:.0f} s; its console: {self.console}"
        )


def start_time(pid: int) -> int:
    """Start time of a process in clock ticks after boot (field 22 of /proc/PID/stat); -1 where none lives.

    A process whose first thread is a zombie lives on, with its files, in the others (field 20 counts them).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" and int(fields[17]) <= 1 else int(fields[19])
