# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Slurm cluster on this machine: real munge, slurmctld and one slurmd for each node, up in about two seconds.

Jobs are real processes of this machine; the GPUs are stand-ins (character devices that do nothing). "README.md" beside
this file says what is real and what is not. Needs root, and the packages in tests/lab/packages.txt
(tests/setup packages); the packages' own services are not used and may be stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "lab"
REGISTRY = Path("/run/gpufleet-slurm")  # one link a lab that is up, named by its index
FIRST_PORT, PORTS_EACH, MOST_LABS = 20000, 256, 48
DRIVER = "535.183.01"
CONTROLLER, MUNGE = "slurmctld", "munge"
PACKAGES = ("slurmd", "slurm-wlm-basic-plugins", "libmunge2")  # what a machine needs to run slurmd
GPU_MODEL, MIG_MODEL = "h100", "h100_1g.10gb"
CLIENTS = ("scontrol", "squeue", "scancel", "srun", "sbatch", "sinfo")
CLEAN = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


class LabError(Exception):
    """Something the person at the keyboard can act on."""


def say(text: str) -> None:
    print(f"lab: {text}", flush=True)


def run(argv: list[str], deadline: float = 30, check: bool = True, env: dict[str, str] | None = None) -> str:
    """Standard output of a command; LabError with its last words if it fails."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline, check=False, env=env
        )
    except FileNotFoundError:
        raise LabError(f"{argv[0]} is missing: run tests/setup packages") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"no end after {deadline:.0f} s: {' '.join(argv)}") from None
    if check and done.returncode:
        raise LabError(f"rc {done.returncode} from: {' '.join(argv)}\n{(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def check_state(state: Path) -> None:
    """The daemons run as users of their own and speak over a Unix socket below this directory."""
    if len(str(state)) > 80:
        raise LabError(f"{state}: more than 80 characters, too long for the socket below it; take a shorter --state")
    state.mkdir(parents=True, exist_ok=True)
    for path in (state, *state.parents):
        if not path.stat().st_mode & 0o001:
            raise LabError(f"{path}: users munge and slurm may not enter it; chmod o+x it, or take another --state")


class Lab:
    """What one state directory says is up."""

    def __init__(self, state: Path, data: dict) -> None:
        self.state = state
        self.data = data
        self.index: int = data["index"]
        self.port = FIRST_PORT + self.index * PORTS_EACH
        self.conf = state / "etc/slurm.conf"

    @classmethod
    def load(cls, state: Path) -> Lab:
        try:
            return cls(state, json.loads((state / "lab.json").read_text()))
        except FileNotFoundError:
            raise LabError(f"no lab at {state}; start one with: {PROGRAM} up --state {state}") from None

    @property
    def machines(self) -> dict[str, dict]:
        """The machines of the hosts lab whose nodes these are; none if all nodes are this machine."""
        return {machine["name"]: machine for machine in self.data["machines"]}

    @property
    def nodes(self) -> list[str]:
        if self.machines:
            return list(self.machines)
        return [f"gpu-{number}" for number in range(1, self.data["nodes"] + 1)]

    @property
    def records(self) -> list[str]:
        return [f"record-{number:04d}" for number in range(1, self.data["records"] + 1)]

    @property
    def gres(self) -> dict[str, tuple[str, int]]:
        """Type → its device files without their numbers, and how many there are on each node."""
        gpus, mig = self.data["gpus"], self.data["mig"]
        where = "/dev" if self.machines else f"{self.state}/dev"
        whole = {GPU_MODEL: (f"{where}/nvidia", gpus - bool(mig))}
        return {**whole, **({MIG_MODEL: (f"{where}/nvidia-cap", mig)} if mig else {})}

    @property
    def root(self) -> Path | None:
        """Where the daemons and clients of another release live, as the lab's own processes see it."""
        return self.state / "root/merged" if self.data["root"] else None

    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf), "PATH": f"{self.state}/bin:{os.environ['PATH']}"}

    # -- files

    def configure(self) -> None:
        slurm, munge = pwd.getpwnam("slurm"), pwd.getpwnam("munge")
        for name, mode, owner in (
            ("etc", 0o755, None), ("spool", 0o755, None), ("dev", 0o755, None), ("bin", 0o755, None),
            ("nodes", 0o755, None), ("log", 0o1777, None), ("run", 0o1777, None), ("jobs", 0o1777, None),
            ("ctld", 0o755, slurm), ("munge", 0o755, munge), ("munge/private", 0o700, munge),
        ):  # fmt: skip
            path = self.state / name
            path.mkdir(exist_ok=True)
            path.chmod(mode)
            if owner:
                os.chown(path, owner.pw_uid, owner.pw_gid)
        key = self.state / "munge/private/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        os.chown(key, munge.pw_uid, munge.pw_gid)
        devices = [Path(f"{path}{n}") for path, count in self.gres.values() for n in range(count)]
        for device in [] if self.machines else devices:
            # with plain files a job starts, but is told of no GPU
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
            device.chmod(0o666)
        for name in self.nodes:
            (self.state / "spool" / name).mkdir(exist_ok=True)
            write(self.state / "nodes" / f"{name}.driver", f"{DRIVER}\n")
        write(self.state / "etc/gres.conf", self.gres_conf())
        # 22.05 has no word for "no control groups" and wants the file empty; later releases want the word
        version = run([*(["chroot", self.data["root"]] if self.root else []), "slurmctld", "-V"])
        old = version.split()[-1].startswith(("21.", "22."))
        write(self.state / "etc/cgroup.conf", "" if old else "CgroupPlugin=disabled\n")
        write(self.conf, self.slurm_conf())
        if not self.machines:
            write(self.state / "etc/reboot", REBOOT.format(state=self.state, conf=self.conf), 0o755)
            write(self.state / "bin/nvidia-smi", NVIDIA_SMI.format(state=self.state), 0o755)

    def gres_conf(self) -> str:
        lines = []
        for name in self.nodes:
            for kind, (path, count) in self.gres.items():
                files = f"{path}[0-{count - 1}]" if count > 1 else f"{path}0"
                lines.append(f"NodeName={name} Name=gpu Type={kind} File={files}\n")
        if self.records:
            names = f"record-[0001-{len(self.records):04d}]"
            lines.append(f"NodeName={names} Name=gpu Type={GPU_MODEL} Count={self.data['gpus']}\n")
        return "".join(lines)

    def slurm_conf(self) -> str:
        host = os.uname().nodename
        settings = {
            "ClusterName": "lab",
            "SlurmctldHost": f"{host}({self.data['gateway']})",
            "SlurmctldPort": self.port,
            "SlurmUser": "slurm",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            # the short life of credentials makes a requeued job eligible after 6 s instead of two minutes
            "AuthInfo": f"socket={self.state}/munge/socket,cred_expire=5",
            "CredType": "cred/munge",
            "StateSaveLocation": f"{self.state}/ctld",
            "SlurmdSpoolDir": f"{self.state}/spool/%n",
            "SlurmctldPidFile": f"{self.state}/run/slurmctld.pid",
            "SlurmdPidFile": f"{self.state}/run/%n.pid",
            "SlurmctldLogFile": f"{self.state}/log/slurmctld.log",
            "SlurmdLogFile": f"{self.state}/log/%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerParameters": "sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0",
            "SlurmdParameters": "config_overrides",
            "GresTypes": "gpu",
            "ReturnToService": 1,
            "SlurmdTimeout": 0 if self.records else 20,
            "KillWait": 2,
            "MinJobAge": 3600,
            "JobRequeue": 1,
            "RebootProgram": "/sbin/reboot" if self.machines else f"{self.state}/etc/reboot",
            "ResumeTimeout": 60,
            "MaxArraySize": 10001,
            "MaxJobCount": 50000,
            **dict(text.split("=", 1) for text in self.data["settings"]),
        }
        machine = "CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=4000"
        lines = [f"{name}={value}" for name, value in settings.items()]
        gres = ",".join(f"gpu:{kind}:{count}" for kind, (dummy, count) in self.gres.items() if count)
        lines.append(f"NodeName=DEFAULT {machine} Gres={gres} Feature=lab State=UNKNOWN")
        for number, name in enumerate(self.nodes, 1):
            where = f"NodeAddr={self.machines[name]['address']}" if self.machines else "NodeAddr=127.0.0.1"
            hostname = name if self.machines else host
            lines.append(f"NodeName={name} NodeHostname={hostname} {where} Port={self.port + number}")
        if self.records:
            lines.append(f"NodeName=record-[0001-{len(self.records):04d}] NodeAddr=127.0.0.1 Port={self.port + 255}")
        lines.append("PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        return "\n".join(lines) + "\n"

    # -- processes: all in one process namespace, so that ending its first process ends every one of them

    def start(self, deadline: float) -> None:
        argv = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "sleep", "infinity"]
        outside = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.data["outside"] = outside.pid
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
        limit = time.monotonic() + 5
        while not (found := children.read_text().split()) or not is_called(int(found[0]), "sleep"):
            if time.monotonic() > limit:
                raise LabError("no process namespace within 5 s; may this machine's root run: unshare --pid --fork ?")
            time.sleep(0.01)
        self.data["inside"] = int(found[0])
        self.save()
        if self.root:
            self.enter_root()
        for daemon in (MUNGE, CONTROLLER, *([] if self.machines else self.nodes)):
            self.start_daemon(daemon, fresh=True)
        self.equip(self.nodes if self.machines else [])
        self.wait(deadline)

    def enter_root(self) -> None:
        """Put another release's root under the lab's processes, over which they may write, and clients outside it."""
        assert self.root
        for name in ("upper", "work", "merged"):
            (self.state / "root" / name).mkdir(parents=True, exist_ok=True)
        here = self.root.parent
        layers = f"lowerdir={self.data['root']},upperdir={here}/upper,workdir={here}/work"
        script = f"""set -e
            mount -t overlay overlay -o {layers} {self.root}
            mkdir -p {self.root}{self.state}
            mount --rbind /dev {self.root}/dev
            mount --rbind /proc {self.root}/proc
            mount --bind {self.state} {self.root}{self.state}
            cp /etc/passwd /etc/group /etc/hosts {self.root}/etc/"""
        enter = ["nsenter", "--target", str(self.data["inside"]), "--mount", "--"]
        run([*enter, "sh", "-c", script])
        for name in CLIENTS:
            words = " ".join([*enter, "chroot", str(self.root), f"/usr/bin/{name}"])
            write(self.state / "bin" / name, f'#!/bin/sh\nexec {words} "$@"\n', 0o755)

    def equip(self, names: list[str]) -> None:
        """Put slurmd onto machines of the hosts lab and start it there, also after every boot."""
        if not names:
            return
        files = machine_files()
        slurm = pwd.getpwnam("slurm")
        for name in names:
            root = Path(self.machines[name]["root"])
            if not (root / "etc/passwd").exists():
                raise LabError(f"{name} has no disk at {root}; is the hosts lab up?")
            for path in files:
                target = root / path.relative_to("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target, follow_symlinks=True)
            passwd = root / "etc/passwd"
            if "\nslurm:" not in passwd.read_text():
                passwd.write_text(
                    f"{passwd.read_text()}slurm:x:{slurm.pw_uid}:{slurm.pw_gid}::/nonexistent:/bin/false\n"
                )
            write(root / "etc/systemd/system/slurmd.service", SLURMD_UNIT.format(conf=self.conf))
            wanted = root / "etc/systemd/system/multi-user.target.wants/slurmd.service"
            wanted.parent.mkdir(parents=True, exist_ok=True)
            wanted.unlink(missing_ok=True)
            wanted.symlink_to("../slurmd.service")
            self.on_machine(name, "systemctl daemon-reload && systemctl restart slurmd")

    def on_machine(self, name: str, script: str) -> None:
        lab = [str(HERE.parent / "hosts/lab"), "exec", "--state", self.data["hosts"], name, "--", "sh", "-c", script]
        run(lab)

    def save(self) -> None:
        write(self.state / "lab.json", json.dumps(self.data, indent=2) + "\n")

    def inside(self, argv: list[str], check: bool = True) -> str:
        """Run argv among the daemons."""
        if not is_called(self.data.get("inside", 0), "sleep"):
            raise LabError(f"the lab at {self.state} is not running; end it with: {PROGRAM} down --state {self.state}")
        environment = {**CLEAN, "SLURM_CONF": str(self.conf)}
        enter = ["nsenter", "--target", str(self.data["inside"]), "--pid", "--mount", "--"]
        enter += ["chroot", str(self.root)] if self.root else []
        # a daemon keeps what it is given: neither its output nor its session may be ours
        return run([*enter, "setsid", *argv], check=check, env=environment)

    def pid_file(self, daemon: str) -> Path:
        return self.state / ("munge/private/pid" if daemon == MUNGE else f"run/{daemon}.pid")

    def start_daemon(self, daemon: str, fresh: bool = False, booted: bool = False) -> None:
        if daemon == MUNGE:
            private = self.state / "munge/private"
            argv = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", "--force"]
            argv += [f"--socket={self.state}/munge/socket", f"--key-file={private}/key", f"--log-file={private}/log"]
            argv += [f"--pid-file={private}/pid", f"--seed-file={private}/seed"]
        elif daemon == CONTROLLER:
            argv = ["slurmctld", *(["-c"] if fresh else [])]  # without its state it would forget every job
        elif self.machines:
            self.check_node(daemon)
            return self.on_machine(daemon, "systemctl start slurmd")
        else:
            self.check_node(daemon)
            argv = ["slurmd", *(["-b"] if booted else []), "-N", daemon]
        self.inside(["sh", "-c", 'exec "$@" >/dev/null 2>>"$0"', f"{self.state}/log/start.log", *argv])

    def check_node(self, name: str) -> None:
        if name not in self.nodes:
            raise LabError(f"no daemon {name}; there are: {', '.join((MUNGE, CONTROLLER, *self.nodes))}")

    def kill_daemon(self, daemon: str, sign: int = signal.SIGKILL) -> None:
        """Until it is gone. The pid in a pid file is the namespace's, so the signal is sent in there."""
        if daemon not in (MUNGE, CONTROLLER):
            self.check_node(daemon)
            if self.machines:
                return self.on_machine(daemon, f"systemctl kill --kill-who=main --signal={int(sign)} slurmd")
        # nobody reaps it in there, so it stays as a zombie, which has no program any more
        gone = f'kill -{int(sign)} "$0"; for try in $(seq 200); do [ -e "/proc/$0/exe" ] || exit 0; sleep 0.05; done'
        self.inside(["sh", "-c", f"{gone}; exit 1", self.pid_file(daemon).read_text().strip()])

    def client(self, argv: list[str], deadline: float = 20, check: bool = True) -> str:
        return run(argv, deadline=deadline, check=check, env={**os.environ, **self.environment()})

    def states(self) -> dict[str, str]:
        text = self.client(["sinfo", "--noheader", "--Node", "--format=%N %t"], check=False)
        return dict(line.split() for line in text.splitlines())

    def wait(self, deadline: float) -> None:
        """Until every node is idle."""
        limit = time.monotonic() + deadline
        wanted = {CONTROLLER: "up"} if not self.nodes else dict.fromkeys(self.nodes, "idle")
        while True:
            up = {CONTROLLER: "up"} if "UP" in self.client(["scontrol", "ping"], check=False) else {}
            found = self.states() if up and self.nodes else up
            if wanted.items() <= found.items():
                return
            if time.monotonic() > limit:
                raise LabError(f"not every node is idle after {deadline:.0f} s: {found}; logs: {self.state}/log")
            time.sleep(0.05)

    def end(self) -> None:
        outside = self.data.get("outside", 0)
        if is_called(outside, "unshare"):
            os.kill(outside, signal.SIGKILL)
            limit = time.monotonic() + 20
            while is_called(self.data.get("inside", 0), "sleep"):
                if time.monotonic() > limit:
                    raise LabError(f"processes of the lab at {self.state} are still there after 20 s of SIGKILL")
                time.sleep(0.01)


NVIDIA_SMI = """\
#!/bin/sh
# Stands for nvidia-smi in jobs: one line a GPU of the job, with the version that the lab says the node has.
version=$(cat {state}/nodes/"${{SLURMD_NODENAME:?only in a job}}".driver)
for gpu in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do
  case " $* " in *driver_version*) echo "$version" ;; *) echo "GPU $gpu: NVIDIA H100 (UUID: GPU-$gpu)" ;; esac
done
"""

# RebootProgram is not told for which node it runs: that is read from the slurmd that started it. The new slurmd says
# that its machine has just booted, and must not inherit what a reconfigured one tells its children.
REBOOT = """\
#!/bin/bash
pid=$PPID name=
while [ "$pid" -gt 1 ] && [ -z "$name" ]; do
  mapfile -d '' -t words </proc/"$pid"/cmdline
  case ${{words[0]}} in *slurmd) for i in "${{!words[@]}}"; do
    [ "${{words[$i]}}" != -N ] || name=${{words[$((i + 1))]}}
  done ;; esac
  pid=$(awk '{{print $4}}' /proc/"$pid"/stat)
done
[ -n "$name" ] || exit 1
[ ! -e {state}/nodes/"$name".stuck ] || exit 0
echo booted >>{state}/nodes/"$name".boots
setsid bash -c "kill \\$(cat {state}/run/$name.pid); sleep 2
  exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin SLURM_CONF={conf} slurmd -b -N $name" </dev/null >/dev/null 2>&1 &
"""


SLURMD_UNIT = """\
[Unit]
Description=slurmd of the lab
After=network.target

[Service]
Environment=SLURM_CONF={conf}
ExecStart=/usr/sbin/slurmd -D
Restart=on-failure
RestartSec=2
KillMode=process
LimitMEMLOCK=infinity

[Install]
WantedBy=multi-user.target
"""


def machine_files() -> list[Path]:
    """The programs and libraries of this machine that slurmd is made of."""
    listed = run(["dpkg", "-L", *PACKAGES]).split("\n")
    # Debian's packages know these by other names
    own = [
        *(Path(name) for name in ("/usr/sbin/slurmd", "/usr/sbin/slurmstepd", "/usr/bin/srun")),
        *(Path(name) for name in listed if ".so" in name),
    ]
    own = [path for path in own if path.is_file()]
    needed = run(["ldd", *(str(path) for path in own)], check=False)
    others = {Path(word) for line in needed.split("\n") for word in line.split() if word.startswith("/lib/")}
    return [*own, *(path for path in sorted(others) if path.is_file() and "libc." not in path.name)]


def is_called(pid: int, name: str) -> bool:
    """Whether that process lives and is what we started, not another that got its number."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == name
    except OSError:
        return False


def claim(state: Path, data: dict) -> Lab:
    """Take a free index (it gives the ports); write lab.json, so that "down" can undo."""
    with locked(REGISTRY / "lock"):
        if (state / "lab.json").exists():
            raise LabError(f"a lab is up, or was not ended, at {state}; end it with: {PROGRAM} down --state {state}")
        for index in range(MOST_LABS):
            mark = REGISTRY / str(index)
            if mark.is_symlink():
                if (mark.readlink() / "lab.json").exists():
                    continue
                mark.unlink()
            mark.symlink_to(state)
            lab = Lab(state, {**data, "index": index})
            lab.save()
            return lab
    raise LabError(f"{MOST_LABS} labs are up already; end one with: down --state DIR")


# ---- commands -------------------------------------------------------------------------------------------------------


def up(options: argparse.Namespace) -> None:
    if not (0 <= options.nodes <= 200 and 1 <= options.gpus <= 8 and 0 <= options.records <= 9999):
        raise LabError("--nodes is 0 to 200, --gpus 1 to 8 and --records 0 to 9999")
    if not 0 <= options.mig <= 7 or (options.mig and options.machines):
        raise LabError("--mig is 0 to 7, and not for machines, whose driver is not partitioned")
    if not options.nodes + options.records:
        raise LabError("a cluster needs --nodes or --records")
    for text in options.set:
        if not all(text.partition("=")):
            raise LabError(f"--set {text}: expected NAME=VALUE, as in slurm.conf")
    started = time.monotonic()
    check_state(options.state)
    data = {"nodes": options.nodes, "gpus": options.gpus, "records": options.records, "settings": options.set}
    data |= {"machines": [], "gateway": "127.0.0.1", "hosts": ""}
    data |= {"mig": options.mig, "root": str(options.root or "")}
    if options.machines:
        data |= machines_of(options.machines, options.state)
    lab = claim(options.state, data)
    try:
        lab.configure()
        lab.start(options.deadline)
    except BaseException:
        if not options.keep:
            say("that failed: taking the lab down again (--keep leaves it for a look)")
            remove(lab)
        raise
    nodes = f"{lab.nodes[0]} to {lab.nodes[-1]}" if len(lab.nodes) > 1 else "".join(lab.nodes) or "no node"
    say(f"{nodes} of {options.gpus} GPUs, {len(lab.records)} records, up in {time.monotonic() - started:.1f} s")
    say(f'use it: eval "$({PROGRAM} env --state {options.state})"; sinfo')
    say(f"end it: {PROGRAM} down --state {options.state}")


def machines_of(hosts: Path, state: Path) -> dict:
    try:
        lab = json.loads((hosts / "lab.json").read_text())
    except FileNotFoundError:
        raise LabError(f"no hosts lab at {hosts}; start one with: {HERE.parent}/hosts/lab up --state {hosts}") from None
    if Path(lab["share"]) != state:
        raise LabError(f"the machines of {hosts} do not share {state}; start them with: up --share {state}")
    machines = [
        {"name": node["name"], "address": node["address"], "root": str(hosts / "nodes" / node["name"] / "root")}
        for node in lab["nodes"]
    ]
    gateway = f"10.98.{lab['index']}.1"
    return {"machines": machines, "gateway": gateway, "hosts": str(hosts), "gpus": lab["gpus"], "nodes": len(machines)}


def equip(options: argparse.Namespace) -> None:
    lab = Lab.load(options.state)
    for name in options.nodes:
        lab.check_node(name)
    lab.equip(options.nodes or list(lab.machines))


def remove(lab: Lab) -> None:
    """Each step stands alone: after a crash some of it is not there."""
    lab.end()
    for name in ("etc", "spool", "dev", "bin", "nodes", "log", "run", "jobs", "ctld", "munge", "root"):
        shutil.rmtree(lab.state / name, ignore_errors=True)
    (REGISTRY / str(lab.index)).unlink(missing_ok=True)
    (lab.state / "lab.json").unlink(missing_ok=True)


def down(options: argparse.Namespace) -> None:
    if not (options.state / "lab.json").exists():
        say(f"no lab at {options.state}: nothing to do")
        return
    remove(Lab.load(options.state))
    say(f"the lab at {options.state} is gone")


def status(options: argparse.Namespace) -> None:
    lab = Lab.load(options.state)
    if "UP" not in lab.client(["scontrol", "ping"], check=False):
        say(f"slurmctld does not answer; start it with: {PROGRAM} start --state {options.state} {CONTROLLER}")
        return
    form = "--format=%10N %12T %20G %25f %.60E"
    print(lab.client(["sinfo", "--Node", form, *([f"--nodes={','.join(lab.nodes)}"] if lab.nodes else [])]), end="")
    print(lab.client(["squeue", "--all", "--array"]), end="")


def env(options: argparse.Namespace) -> None:
    for name, value in Lab.load(options.state).environment().items():
        print(f"export {name}={value!r}")


def execute(options: argparse.Namespace) -> None:
    environment = {**os.environ, **Lab.load(options.state).environment()}
    os.execvpe(options.argv[0], options.argv, environment)  # noqa: S606


def daemons(options: argparse.Namespace) -> None:
    lab = Lab.load(options.state)
    for daemon in options.daemons:
        if options.command in ("kill", "stop"):
            lab.kill_daemon(daemon, signal.SIGKILL if options.command == "kill" else signal.SIGTERM)
        else:
            lab.start_daemon(daemon, booted=options.command == "boot")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=str(PROGRAM), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, handler: Callable, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(handler=handler)
        sub.add_argument(
            "--state", type=lambda text: Path(text).resolve(), required=True, metavar="DIR", help="the lab's directory"
        )
        return sub

    sub = command("up", up, "start a cluster")
    sub.add_argument("--nodes", type=int, default=4, metavar="N", help="nodes, named gpu-1 to gpu-N (default 4)")
    sub.add_argument("--gpus", type=int, default=4, metavar="N", help="GPUs in each node, 1 to 8 (default 4)")
    text = "further nodes without a slurmd, named record-0001 and so on (default 0)"
    sub.add_argument("--records", type=int, default=0, metavar="N", help=text)
    text = "make the machines of the hosts lab at DIR the nodes (it has to be up with --share and this lab's --state)"
    sub.add_argument("--machines", type=lambda text: Path(text).resolve(), metavar="DIR", help=text)
    text = "make the last GPU of each node N instances of MIG profile 1g.10gb (default 0: leave it whole)"
    sub.add_argument("--mig", type=int, default=0, metavar="N", help=text)
    text = "a root directory with the Slurm to use, such as tests/lab/slurm/newer makes (default: this machine's own)"
    sub.add_argument("--root", type=lambda text: Path(text).resolve(), metavar="DIR", help=text)
    text = "a line of slurm.conf, in place of the lab's own"
    sub.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "seconds until every node must be idle (default 60)"
    sub.add_argument("--deadline", type=float, default=60, metavar="S", help=text)
    sub.add_argument("--keep", action="store_true", help="leave everything in place if the start fails")
    command("down", down, "end the cluster and its jobs, and remove all it made")
    command("status", status, "show its nodes and jobs")
    command("env", env, "print what a shell needs to use it")
    sub = command("exec", execute, "run a command that uses it")
    sub.add_argument("argv", nargs="+", metavar="ARG")
    sub = command("equip", equip, "put slurmd onto machines of the hosts lab again, after they were reset")
    sub.add_argument("nodes", metavar="NODE", nargs="*", help="default: all")
    for name, text in {
        "kill": "end daemons at once, as a crash does; a node's jobs live on",
        "stop": "ask daemons to end",
        "start": "start daemons again, with the state they had",
        "boot": "start a node's slurmd as after a reboot of the machine",
    }.items():
        sub = command(name, daemons, text)
        sub.add_argument("daemons", metavar="DAEMON", nargs="+", help="munge, slurmctld or the name of a node")

    options = parser.parse_args()
    if os.geteuid() != 0:
        raise LabError("needs root, for namespaces and devices; try: sudo " + " ".join([str(PROGRAM), *sys.argv[1:]]))
    options.handler(options)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
