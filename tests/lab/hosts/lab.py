# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A fleet of GPU machines without a GPU, to try driver upgrades on: systemd, sshd, apt and a stand-in driver.

Each machine is a systemd-nspawn container with its own root (an overlay that survives reboots and power cuts until
"down"), network address and systemd; "README.md" beside this file says what is real about it and what is not.
Needs root, and the packages in tests/lab/packages.txt (tests/setup packages).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "lab"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gpufleet"
REGISTRY = Path("/run/gpufleet-hosts")  # one directory a lab that is up, named by its index
REPO_PORT = 8480
COMPILED = "var/cache/gpufleet-lab"  # where metal/bytecode.py keeps what Python has compiled
REBOOT_REQUESTED = 133  # systemd-nspawn's exit status when the machine rebooted itself
PACKAGE_REVISION = "-0ubuntu0.22.04.1"
CRIU_RIGHTS = "CAP_CHECKPOINT_RESTORE,CAP_NET_ADMIN,CAP_SYS_TIME"  # the last for the clocks of a restored process

# Character devices that exist on about every kernel, may be opened many times over, do nothing by being open, and that
# no program of a lab machine opens. Each stands for one /dev/nvidia* node; the lab takes those that open on this host.
DEVICE_CANDIDATES = (
    (7, 0), (7, 64), (7, 128), (7, 1), (7, 65), (7, 129),  # vcs, vcsu, vcsa: a virtual console's screen contents
    (10, 200), (10, 229), (10, 237), (10, 234), (10, 232),  # tun, fuse, loop-control, btrfs-control, kvm
    (10, 256), (10, 258), (10, 236), (203, 0), (203, 1), (1, 7),  # vga_arbiter, vsock, device-mapper, cpuid, full
)  # fmt: skip


class LabError(Exception):
    """Something the person at the keyboard can act on."""


def say(text: str) -> None:
    print(f"lab: {text}", flush=True)


def run(argv: list[str], deadline: float = 60, check: bool = True, show: bool = False) -> str:
    """Standard output of a command; LabError with its last words if it fails. show: let it speak on standard error."""
    errors = None if show else subprocess.PIPE
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=deadline,
            check=False,
        )
    except FileNotFoundError:
        raise LabError(f"{argv[0]} is missing: run tests/setup packages") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"no end after {deadline:.0f} s: {' '.join(argv)}") from None
    if check and done.returncode:
        words = (done.stderr or done.stdout or "").strip()[-2000:]
        raise LabError(f"rc {done.returncode} from: {' '.join(argv)}\n{words}")
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.chmod(mode)
    part.replace(path)


# ---- processes: every one the lab starts lives in a control group of its own, so "end it" can only mean "ours" ------


def cgroup_roots() -> list[Path]:
    """Where systemd-nspawn wants its caller apart from others: the unified hierarchy first, then version 1's."""
    unified, named = [], []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _source, target, kind, options = line.split()[:4]
        if kind == "cgroup2":
            unified.append(Path(target))
        elif kind == "cgroup" and "name=systemd" in options.split(","):
            named.append(Path(target))
    if not unified:
        raise LabError("no cgroup2 hierarchy is mounted; try: mount -t cgroup2 none /sys/fs/cgroup")
    return unified[:1] + named[:1]


def spawn(group: str, argv: list[str], log: Path) -> None:
    """Start argv in the named control group, on its own."""
    members = []
    for root in cgroup_roots():
        (root / group).mkdir(parents=True, exist_ok=True)
        members.append(root / group / "cgroup.procs")

    def join() -> None:
        for member in members:
            member.write_text("0")

    with log.open("a") as output:
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, preexec_fn=join
        )


def is_populated(group: str) -> bool:
    events = cgroup_roots()[0] / group / "cgroup.events"
    return events.exists() and "populated 1" in events.read_text()


def end_group(group: str, deadline: float = 20) -> None:
    """SIGKILL to every process of the group and wait until they are gone."""
    kill = cgroup_roots()[0] / group / "cgroup.kill"
    if kill.exists():
        kill.write_text("1")
    limit = time.monotonic() + deadline
    while is_populated(group):
        if time.monotonic() > limit:
            raise LabError(f"processes of control group {group} are still there after {deadline:.0f} s of SIGKILL")
        time.sleep(0.02)


def remove_group(group: str) -> None:
    for root in cgroup_roots():
        for directory, _subdirectories, _files in os.walk(root / group, topdown=False):
            with contextlib.suppress(OSError):
                Path(directory).rmdir()


# ---- the layers below every machine's own root ----------------------------------------------------------------------


def standin_repository(payload_mb: int) -> Path:
    """The flat apt repository with the stand-in driver's packages, built once and cached."""
    argv = [str(HERE.parent / "standin" / "build"), "--payload-mb", str(payload_mb)]
    return Path(run(argv, deadline=1800, show=True).splitlines()[-1], "repo")


def criu_layer() -> Path:
    """A layer with a CRIU that works on this kernel; :raises LabError: if there is none, with its own words."""
    layer = Path(run([str(HERE.parent / "criu" / "build")], deadline=600, show=True).splitlines()[-1], "layer")
    run([str(layer / "usr/local/sbin/criu"), "check"])
    return layer


def podman_layer(image: Path) -> Path:
    """A layer with podman and runc; :raises LabError: if they cannot be had."""
    build = [str(HERE.parent / "podman" / "build"), str(image)]
    return Path(run(build, deadline=600, show=True).splitlines()[-1], "layer")


def digest(*parts: object, files: list[Path]) -> str:
    total = hashlib.sha256(repr(parts).encode())
    for path in files:
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


PREPARE = """
set -eu
root=$1 repo=$2 packages=$3 port=$4 options=$5
mount -t overlay gpufleet-lab -o "$options" "$root"
mount -t proc proc "$root/proc"
mkdir -p "$root/repo"
mount --bind "$repo" "$root/repo"
ip link set lo up
chroot "$root" python3 -m http.server --bind 127.0.0.1 --directory /repo "$port" >/dev/null 2>&1 &
server=$!
for try in 1 2 3 4 5 6 7 8 9 10; do (: >/dev/tcp/127.0.0.1/$port) 2>/dev/null && break; sleep 0.3; done
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
chroot "$root" apt-get -qq update
[ -z "$packages" ] || chroot "$root" apt-get -qq -y --no-install-recommends install $packages
chroot "$root" apt-get clean
kill $server
umount "$root/repo"
rmdir "$root/repo"
"""


def prepared_layer(image: Path, repo: Path, driver: str) -> Path:
    """An overlay layer over the image: stand-in kernel, workload, the driver's packages. Made once for each recipe."""
    standin = [HERE / "standin" / name for name in ("kernel.py", "syscalls.c", "gpufleet-lab-kernel.service")]
    workload = [HERE / "workload" / name for name in ("gpu_counter.py", "gpu-counter.service")]
    debs = sorted(repo.glob("*.deb"))
    key = digest(image.name, driver, PREPARE, files=[*standin, *workload, repo / "Packages"])
    directory = CACHE / f"hosts-{key}"
    with locked(CACHE / "hosts.lock"):
        if (directory / ".complete").exists():
            os.utime(directory)
            return directory / "layer"
        say(f"preparing the machines' common layer with driver {driver} ({len(debs)} packages in the repository)")
        partial = CACHE / f"hosts-{key}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        layer, work, root = (partial / name for name in ("layer", "work", "root"))
        for path in (layer, work, root):
            path.mkdir(parents=True)
        library = layer / "usr/lib/gpufleet-lab"
        library.mkdir(parents=True)
        release = (image / "kernel").read_text().strip()
        shared = library / "syscalls.so"
        run(["gcc", "-O2", "-shared", "-fPIC", f'-DRELEASE="{release}"', "-o", str(shared), str(standin[1]), "-ldl"])
        for source, name in ((standin[0], "kernel"), (workload[0], "gpu-counter")):
            write(library / name, f"#!/usr/bin/python3\n{source.read_text()}", mode=0o755)
        units = layer / "etc/systemd/system"
        for unit in (standin[2], workload[1]):
            write(units / unit.name, unit.read_text())
        wanted = units / "sysinit.target.wants" / standin[2].name
        wanted.parent.mkdir()
        wanted.symlink_to(f"../{wanted.name}")
        # It asks for a right that no container has; here syscalls.so does what the right is for.
        write(units / "systemd-modules-load.service.d/lab.conf", "[Unit]\nConditionCapability=\n")
        for unit_name in ("systemd-networkd.service", "systemd-networkd.socket"):
            (units / unit_name).symlink_to("/dev/null")  # addresses are given from outside
        write(layer / "etc/ld.so.preload", "/usr/lib/gpufleet-lab/syscalls.so\n")
        write(layer / "etc/apt/sources.list.d/lab.list", f"deb [trusted=yes] http://repo.lab:{REPO_PORT}/ ./\n")
        write(layer / "etc/hosts", "127.0.0.1 localhost repo.lab\n")
        packages = ""
        if driver != "none":
            packages = f"nvidia-driver-{driver.partition('.')[0]}-server={driver}{PACKAGE_REVISION}"
        arguments = [str(root), str(repo), packages, str(REPO_PORT), overlay_options([image / "root"], layer, work)]
        # In namespaces of its own, so that nothing is left mounted or running however this ends.
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
        run([*unshare, "bash", "-c", PREPARE, "prepare", *arguments], deadline=600)
        (partial / ".complete").touch()
        partial.rename(directory)
        run([str(HERE.parent / "prune"), "hosts"], deadline=300)
    return directory / "layer"


def overlay_options(lower: list[Path], upper: Path, work: Path) -> str:
    for path in (*lower, upper, work):
        if set(str(path)) & set(",:\\ "):
            raise LabError(f"{path}: an overlay's path may not hold a comma, a colon, a blank or a backslash")
    layers = ":".join(str(path) for path in lower)
    return f"lowerdir={layers},upperdir={upper},workdir={work}"


# ---- devices --------------------------------------------------------------------------------------------------------


def usable_devices(scratch: Path) -> list[tuple[int, int]]:
    """The candidates that this host's kernel lets a process open twice."""
    found = []
    node = scratch / "probe"
    for major, minor in DEVICE_CANDIDATES:
        os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(major, minor))
        try:
            for descriptor in [os.open(node, os.O_RDWR | os.O_NOCTTY) for dummy in range(2)]:
                os.close(descriptor)
            found.append((major, minor))
        except OSError:
            pass
        finally:
            node.unlink()
    return found


def device_table(gpus: int, scratch: Path) -> str:
    names = [
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidiactl",
        "nvidia-modeset",
        *(f"nvidia{index}" for index in range(gpus)),
    ]
    numbers = usable_devices(scratch)
    if len(numbers) < len(names):
        raise LabError(
            f"this kernel has {len(numbers)} spare character devices; {gpus} GPUs need {len(names)}: use fewer --gpus"
        )
    return "".join(f"{name} {major} {minor}\n" for name, (major, minor) in zip(names, numbers, strict=False))


def make_room_for_watches(machines: int) -> None:
    """Each systemd holds about 7 inotify instances, and the limit is one for all of root's, so for all labs."""
    limit = Path("/proc/sys/fs/inotify/max_user_instances")
    used = 0
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            used += "inotify" in os.readlink(descriptor)  # noqa: PTH115 (not a path)
    has, wanted = int(limit.read_text()), used + 8 * machines
    if wanted <= has:
        return
    wanted = max(1024, 2 * wanted)
    try:
        limit.write_text(str(wanted))
    except OSError as exc:
        raise LabError(
            f"{machines} machines need {8 * machines} inotify instances; {used} of the kernel's {has} are in use, and "
            f"the limit cannot be raised here: {exc}. Start fewer, or: sysctl -w fs.inotify.max_user_instances={wanted}"
        ) from None
    say(f"raised fs.inotify.max_user_instances from {has} to {wanted} (until the next boot)")


# ---- a lab ----------------------------------------------------------------------------------------------------------


class Lab:
    """What one state directory says is up. Everything on the host is named by the index, so "down" finds it by name."""

    def __init__(self, state: Path, data: dict) -> None:
        self.state = state
        self.data = data
        self.index: int = data["index"]
        self.group = f"gpufleet-{self.index}"
        self.bridge = f"gf{self.index}"

    @classmethod
    def load(cls, state: Path) -> Lab:
        try:
            return cls(state, json.loads((state / "lab.json").read_text()))
        except FileNotFoundError:
            raise LabError(f"no lab at {state}; start one with: {PROGRAM} up --state {state}") from None

    def node(self, name: str) -> dict:
        for node in self.data["nodes"]:
            if node["name"] == name:
                return node
        raise LabError(f"no machine {name}; there are: {', '.join(node['name'] for node in self.data['nodes'])}")

    @property
    def gateway(self) -> str:
        return f"10.98.{self.index}.1"

    def directory(self, node: dict) -> Path:
        return self.state / "nodes" / node["name"]

    def namespace(self, node: dict) -> str:
        return f"gf{self.index}-{node['name']}"

    def port(self, node: dict) -> str:
        return f"gf{self.index}v{node['number']}"

    def node_group(self, node: dict) -> str:
        return f"{self.group}/{node['name']}"

    # -- up

    def start_network(self) -> None:
        run(["ip", "link", "add", self.bridge, "type", "bridge"])
        run(["ip", "address", "add", f"{self.gateway}/24", "dev", self.bridge])
        run(["ip", "link", "set", self.bridge, "up"])

    def start_repository(self) -> None:
        repo = self.state / "repo"
        argv = [sys.executable, "-m", "http.server", "--bind", self.gateway, "--directory", str(repo), str(REPO_PORT)]
        spawn(f"{self.group}/repo", argv, self.state / "repo.log")

    def make_disk(self, node: dict) -> None:
        """The machine's root, as new."""
        directory = self.directory(node)
        upper, work, root = (directory / name for name in ("upper", "work", "root"))
        for path in (upper, work, root):
            path.mkdir(parents=True)
        others = "".join(f"{other['address']} {other['name']}\n" for other in self.data["nodes"])
        write(upper / "etc/hostname", f"{node['name']}\n")
        write(upper / "etc/hosts", f"127.0.0.1 localhost\n{others}{self.gateway} repo.lab\n")
        write(upper / "etc/machine-id", f"{uuid.uuid4().hex}\n", mode=0o444)
        write(upper / "etc/gpufleet-lab/devices", self.data["devices"])
        options = f"gpus={self.data['gpus']}"
        if self.data["criu"]:
            options += " serial=0"  # the same GPU UUIDs everywhere: drivers before 580 restore to no others
            write(upper / "etc/gpufleet-lab/first-pid", f"{20000 * node['number']}\n")
            write(upper / "etc/nvidia-standin/state", "proc_used_mib=8\n")
        write(upper / "etc/modprobe.d/gpufleet-lab.conf", f"options nvidia {options}\n")
        if self.data["workload"]:
            wanted = upper / "etc/systemd/system/multi-user.target.wants/gpu-counter.service"
            wanted.parent.mkdir(parents=True)
            wanted.symlink_to("../gpu-counter.service")
        if self.data.get("compiled"):
            packages = upper / "usr/lib/python3/dist-packages"
            packages.mkdir(parents=True)
            shutil.copy(HERE.parent / "metal/bytecode.py", packages / "gpufleet_lab_bytecode.py")
            write(packages / "gpufleet_lab_bytecode.pth", "import gpufleet_lab_bytecode\n")
            link_files(self.state / "bytecode", upper / COMPILED)
        options = overlay_options([Path(path) for path in self.data["layers"]], upper, work)
        run(["mount", "-t", "overlay", "gpufleet-lab", "-o", options, str(root)])

    def remove_disk(self, node: dict) -> None:
        directory = self.directory(node)
        link_files(directory / "upper" / COMPILED, self.state / "bytecode")
        if os.path.ismount(directory / "root"):
            run(["umount", str(directory / "root")])
        shutil.rmtree(directory, ignore_errors=True)

    def connect(self, node: dict) -> None:
        namespace, port = self.namespace(node), self.port(node)
        run(["ip", "netns", "add", namespace])
        run(["ip", "link", "add", port, "type", "veth", "peer", "name", "lan0", "netns", namespace])
        run(["ip", "link", "set", port, "master", self.bridge])
        run(["ip", "-n", namespace, "address", "add", f"{node['address']}/24", "dev", "lan0"])
        for device in ("lo", "lan0"):
            run(["ip", "-n", namespace, "link", "set", device, "up"])
        run(["ip", "-n", namespace, "route", "add", "default", "via", self.gateway])

    def power_on(self, node: dict) -> None:
        if is_populated(self.node_group(node)):
            raise LabError(f"{node['name']} is running already")
        remove_group(self.node_group(node))
        self.plug(node, True)
        inner = [root / self.node_group(node) / "machine" for root in cgroup_roots()]
        for path in inner:
            path.mkdir(parents=True, exist_ok=True)
        join = "; ".join(f"echo 0 >'{path}/cgroup.procs'" for path in inner)
        loop = f'while :; do ({join}; exec "$@"); [ $? -eq {REBOOT_REQUESTED} ] || exit; done'
        nspawn = [
            "systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--console=pipe", "--settings=no",
            "--link-journal=no", "--resolv-conf=off", "--timezone=off", f"--machine={self.namespace(node)}",
            f"--hostname={node['name']}", f"--network-namespace-path=/run/netns/{self.namespace(node)}",
            f"--directory={self.directory(node) / 'root'}",
            *([f"--bind={self.data['share']}"] if self.data.get("share") else []),
        ]  # fmt: skip
        if self.data.get(
            "podman"
        ):  # a runtime in a machine of the first version of control groups may only look at them
            nspawn = ["env", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1", *nspawn]
        if self.data["criu"]:  # which cannot look into processes under a system call filter, nor from below one
            nspawn = ["env", "SYSTEMD_SECCOMP=0", *nspawn, f"--capability={CRIU_RIGHTS}"]
        spawn(
            self.node_group(node), ["/bin/sh", "-c", loop, node["name"], *nspawn], self.directory(node) / "console.log"
        )

    def power_off(self, node: dict) -> None:
        """As when the power goes: no shutdown, and from this instant no answer on the network."""
        self.plug(node, False)
        end_group(self.node_group(node))

    def plug(self, node: dict, connected: bool) -> None:
        run(["ip", "link", "set", self.port(node), "up" if connected else "down"])

    def ssh(self, node: dict, argv: list[str]) -> list[str]:
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=10"]
        flags = [flag for option in options for flag in ("-o", option)]
        return ["ssh", *flags, "-i", str(self.state / "id_ed25519"), f"root@{node['address']}", *argv]

    def wait(self, node: dict, deadline: float) -> str:
        """Until the machine has booted: its loaded driver version, or "none"."""
        limit = time.monotonic() + deadline
        while time.monotonic() < limit:
            with contextlib.suppress(OSError), socket.create_connection((node["address"], 22), 2) as connection:
                connection.settimeout(5)
                if connection.recv(4) == b"SSH-":
                    break
            time.sleep(0.05)
        question = "systemctl is-system-running --wait; cat /sys/module/nvidia/version 2>/dev/null || echo none"
        try:
            answer = run(self.ssh(node, [question]), deadline=max(5, limit - time.monotonic())).split()
        except LabError as error:
            raise LabError(
                f"{node['name']} did not come up: {error}; its console: {self.directory(node) / 'console.log'}"
            ) from None
        if answer[0] not in ("running", "degraded"):
            raise LabError(
                f"{node['name']} is {answer[0]}; look at it: "
                f"{PROGRAM} exec --state {self.state} {node['name']} -- systemctl --failed"
            )
        return answer[1]

    def write_inventory(self) -> None:
        hosts = "".join(
            f"        {node['name']}:\n          ansible_host: {node['address']}\n" for node in self.data["nodes"]
        )
        ssh = (
            "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o ConnectTimeout=10 "
            "-o ServerAliveInterval=5 -o ServerAliveCountMax=3 "
            f"-o ControlMaster=auto -o ControlPersist=60s -o ControlPath={REGISTRY}/{self.index}/%C"
        )
        text = f"""\
# Written by tests/lab/hosts/lab. Host keys are not checked because these machines live for minutes.
all:
  children:
    gpu_nodes:
      hosts:
{hosts}      vars:
        ansible_user: ops
        ansible_become: true
        ansible_ssh_private_key_file: {self.state / "id_ed25519"}
        ansible_ssh_args: {ssh}
        ansible_ssh_pipelining: true
        ansible_python_interpreter: /usr/bin/python3
"""
        write(self.state / "inventory.yml", text)

    # -- down

    def remove(self) -> None:
        """Each step stands alone: after a crash some of it is not there."""
        end_group(self.group)
        remove_group(self.group)
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for target in mounts:
            if Path(target).is_relative_to(self.state / "nodes"):
                run(["umount", target])
        for name in list_names("/run/netns", f"gf{self.index}-"):
            run(["ip", "netns", "delete", name])
        for name in list_names("/sys/class/net", f"gf{self.index}v"):
            run(["ip", "link", "delete", name], check=False)  # the other end may be gone, and this one with it
        if Path("/sys/class/net", self.bridge).exists():
            run(["ip", "link", "delete", self.bridge])
        for name in list_names("/run/systemd/nspawn/propagate", f"gf{self.index}-"):
            shutil.rmtree(Path("/run/systemd/nspawn/propagate", name), ignore_errors=True)
        for name in ("nodes", "repo", "bytecode"):
            shutil.rmtree(self.state / name, ignore_errors=True)
        for name in ("inventory.yml", "id_ed25519", "repo.log"):
            (self.state / name).unlink(missing_ok=True)
        shutil.rmtree(REGISTRY / str(self.index), ignore_errors=True)
        (self.state / "lab.json").unlink(missing_ok=True)


def link_files(source: Path, target: Path) -> None:
    """Have the files of one directory in another as well; their names are hashes of what is in them."""
    if source.is_dir():
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in source.iterdir():
            if "." not in path.name and not (target / path.name).exists():
                (target / path.name).hardlink_to(path)


def list_names(directory: str, prefix: str) -> list[str]:
    path = Path(directory)
    return [entry.name for entry in path.iterdir() if entry.name.startswith(prefix)] if path.is_dir() else []


def claim(state: Path, data: dict) -> Lab:
    """Take a free index (it gives the subnet and every name on the host); write lab.json, so that "down" can undo."""
    with locked(REGISTRY / "lock"):
        if (state / "lab.json").exists():
            raise LabError(f"a lab is up, or was not ended, at {state}; end it with: {PROGRAM} down --state {state}")
        taken = run(["ip", "-o", "address"])
        for index in range(1, 250):
            mark = REGISTRY / str(index)
            if mark.exists():
                owner = (mark / "state").readlink()
                if (owner / "lab.json").exists():
                    continue
                say(f"removing what is left of a lab whose directory {owner} is gone")
                Lab(owner, {"index": index, "nodes": []}).remove()
            if f" 10.98.{index}." in taken:
                continue
            mark.mkdir(mode=0o700)
            (mark / "state").symlink_to(state)
            data["index"] = index
            for node in data["nodes"]:
                node["address"] = f"10.98.{index}.{10 + node['number']}"
            write(state / "lab.json", json.dumps(data, indent=2) + "\n")
            return Lab(state, data)
    raise LabError("249 labs are up already; end one with: down --state DIR")


# ---- commands -------------------------------------------------------------------------------------------------------


def up(options: argparse.Namespace) -> None:
    if not (1 <= options.nodes <= 200 and 1 <= options.gpus <= 8):
        raise LabError("--nodes is 1 to 200 and --gpus 1 to 8")
    make_room_for_watches(options.nodes)
    started = time.monotonic()
    state: Path = options.state
    state.mkdir(parents=True, exist_ok=True)
    image = Path(run([str(HERE.parent / "image" / "build")], deadline=2400, show=True).splitlines()[-1])
    repo = standin_repository(options.payload_mb)
    layer = prepared_layer(image, repo, options.driver)
    nodes = [{"name": f"gpu-{number}", "number": number} for number in range(1, options.nodes + 1)]
    data = {"driver": options.driver, "gpus": options.gpus, "workload": options.workload, "nodes": nodes}
    data |= {
        "compiled": options.compiled,
        "share": str(options.share or ""),
        "criu": options.criu or options.podman,
        "podman": options.podman,
        "layers": [str(layer), str(image / "root")],
        "devices": device_table(options.gpus, state),
    }
    if data["podman"]:
        data["layers"].insert(0, str(podman_layer(image)))
    if data["criu"]:
        data["layers"].insert(0, str(criu_layer()))
    lab = claim(state, data)
    try:
        shutil.copy(image / "id_ed25519", state / "id_ed25519")
        (state / "id_ed25519").chmod(0o600)
        shutil.copytree(repo, state / "repo")
        lab.start_network()
        lab.start_repository()
        say(f"booting {', '.join(node['name'] for node in nodes)} on 10.98.{lab.index}.0/24")
        for node in nodes:
            lab.make_disk(node)
            lab.connect(node)
            lab.power_on(node)
        wait_for_all(lab, nodes, options.deadline)
        lab.write_inventory()
    except BaseException:
        if not options.keep:
            say("that failed: taking the lab down again (--keep leaves it for a look)")
            lab.remove()
        raise
    say(f"ready after {time.monotonic() - started:.1f} s. Inventory: {state / 'inventory.yml'}")


def wait_for_all(lab: Lab, nodes: list[dict], deadline: float) -> None:
    """Until every machine has booted with the driver it was made with."""
    wanted, gpus = lab.data["driver"], lab.data["gpus"]
    with concurrent.futures.ThreadPoolExecutor(len(nodes)) as pool:
        versions = list(pool.map(lambda node: lab.wait(node, deadline), nodes))
    for node, version in zip(nodes, versions, strict=True):
        if version != wanted:
            raise LabError(
                f"{node['name']} has driver {version} loaded, wanted {wanted}; look at it (with up --keep): "
                f"{PROGRAM} exec --state {lab.state} {node['name']} -- journalctl -b"
            )
        say(f"{node['name']} {node['address']} is up: driver {version}, {gpus} GPUs")


def reset(options: argparse.Namespace) -> None:
    lab = Lab.load(options.state)
    nodes = [lab.node(name) for name in options.nodes] or lab.data["nodes"]
    for node in nodes:
        lab.power_off(node)
        lab.remove_disk(node)
        lab.make_disk(node)
        lab.power_on(node)
    wait_for_all(lab, nodes, options.deadline)


def down(options: argparse.Namespace) -> None:
    if not (options.state / "lab.json").exists():
        say(f"no lab at {options.state}: nothing to do")
        return
    lab = Lab.load(options.state)
    lab.remove()
    say(f"lab {lab.index} at {options.state} is gone")


def machine(options: argparse.Namespace) -> None:
    lab = Lab.load(options.state)
    node = lab.node(options.node)
    if options.command == "kill":
        lab.power_off(node)
    elif options.command == "start":
        lab.power_on(node)
        say(f"{node['name']} is up: driver {lab.wait(node, options.deadline)}")
    else:
        lab.plug(node, options.command == "plug")


def execute(options: argparse.Namespace) -> None:
    lab = Lab.load(options.state)
    argv = lab.ssh(lab.node(options.node), ["--", shlex.join(options.argv)])
    os.execvp(argv[0], argv)  # noqa: S606


def status(options: argparse.Namespace) -> None:
    lab = Lab.load(options.state)
    print(f"{'machine':<10} {'address':<14} {'power':<6} network")
    for node in lab.data["nodes"]:
        power = "on" if is_populated(lab.node_group(node)) else "off"
        port = Path("/sys/class/net", lab.port(node), "operstate").read_text().strip()
        print(f"{node['name']:<10} {node['address']:<14} {power:<6} {port}")


def add_deadline(parser: argparse.ArgumentParser) -> None:
    text = "seconds a machine may take to boot (default 90)"
    parser.add_argument("--deadline", type=float, default=90, metavar="S", help=text)


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

    sub = command("up", up, "start a fleet")
    sub.add_argument("--nodes", type=int, default=3, metavar="N", help="machines, named gpu-1 to gpu-N (default 3)")
    sub.add_argument(
        "--driver",
        default="535.183.01",
        metavar="V",
        help='driver installed and loaded at the start (default 535.183.01; "none")',
    )
    sub.add_argument("--gpus", type=int, default=4, metavar="N", help="GPUs in each machine, 1 to 8 (default 4)")
    sub.add_argument(
        "--payload-mb",
        type=int,
        default=0,
        metavar="M",
        help="ballast in the driver's packages, for a download that takes time (default 0)",
    )
    text = "a directory of this machine that every machine of the lab has at the same path"
    sub.add_argument("--share", type=lambda text: Path(text).resolve(strict=True), metavar="DIR", help=text)
    sub.add_argument("--workload", action="store_true", help="run gpu-counter.service on every machine (port 8000)")
    sub.add_argument(
        "--compiled",
        action="store_true",
        help="keep what Python has compiled of the modules that Ansible sends, also over a reset: for tests, since "
        "real machines compile them anew each time",
    )
    text = "machines whose processes can be saved and restored on another, with a CRIU that works on this kernel"
    sub.add_argument("--criu", action="store_true", help=text)
    text = "machines with podman and runc, whose containers can be saved; as --criu otherwise"
    sub.add_argument("--podman", action="store_true", help=text)
    add_deadline(sub)
    sub.add_argument("--keep", action="store_true", help="leave everything in place if the start fails")
    command("down", down, "end the fleet and remove all it made")
    command("status", status, "say which machines are on")
    for name, text in {
        "kill": "cut a machine's power: it vanishes at once",
        "start": "switch a machine on again, with the disk it had",
        "unplug": "pull a machine's network cable: it goes on running",
        "plug": "put the network cable back",
    }.items():
        sub = command(name, machine, text)
        sub.add_argument("node", metavar="NODE")
        if name == "start":
            add_deadline(sub)
    sub = command("reset", reset, "give machines a new disk and boot them: as after up, in a second")
    sub.add_argument("nodes", metavar="NODE", nargs="*", help="default: all")
    add_deadline(sub)
    sub = command("exec", execute, "run a command on a machine as root")
    sub.add_argument("node", metavar="NODE")
    sub.add_argument("argv", nargs="+", metavar="ARG")

    options = parser.parse_args()
    if os.geteuid() != 0:
        raise LabError(
            "needs root, for network namespaces and mounts; try: sudo " + " ".join([str(PROGRAM), *sys.argv[1:]])
        )
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
