# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Virtual machines with a real kernel and the stand-in NVIDIA driver, as Ansible hosts.

A machine starts in seconds from a saved state in which the driver is installed and loaded; kill ends it, start boots
the same disk again; a reboot inside is a real one. The lab's folder holds inventory.yml for ansible-playbook -i.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vm
from bake import Baked, bake, say
from vm import LabError, Machine

DEFAULT_DRIVER = "535.183.01"
BOOT_SECONDS = 900  # a cold boot takes 20 s of one core; a loaded machine may need many times that
CONNECTION = ("ControlMaster=auto", "ControlPersist=600s", "ServerAliveInterval=15", "ServerAliveCountMax=8")
NAMESPACE = uuid.UUID("5ca1ab1e-0000-4000-8000-000000000000")


# --- what lies in the state folder ------------------------------------------------------------------------------------


def state_file(state: Path) -> Path:
    return state / "lab.json"


def load(state: Path) -> dict[str, Machine]:
    try:
        text = state_file(state).read_text()
    except FileNotFoundError:
        raise LabError(f"there is no lab in {state}: make one with: tests/lab/metal/lab up --state {state}") from None
    return {entry["name"]: Machine(**entry) for entry in json.loads(text)["machines"]}


def save(state: Path, machines: list[Machine], **more: str) -> None:
    """``more``: ssh_folder, and disk and memory of the saved machine; given once."""
    if not more:
        more = {key: value for key, value in json.loads(state_file(state).read_text()).items() if key != "machines"}
    content = {**more, "machines": [machine.as_dict() for machine in machines]}
    temporary = state_file(state).with_suffix(".new")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(state_file(state))


def one(machines: dict[str, Machine], name: str) -> Machine:
    if name not in machines:
        raise LabError(f"no machine {name} here; there are: {', '.join(machines)}")
    return machines[name]


def inventory(machines: list[Machine], ssh_folder: str) -> str:
    """Ansible inventory: group gpu_nodes, an ordinary user with sudo, patience for machines slow under load."""
    hosts = {machine.name: {"ansible_host": "127.0.0.1", "ansible_port": machine.port} for machine in machines}
    common = f"-o IdentitiesOnly=yes -o StrictHostKeyChecking=yes -o UserKnownHostsFile={machines[0].known_hosts}"
    variables = {
        "ansible_user": "ops",
        "ansible_become": True,
        "ansible_ssh_private_key_file": machines[0].key,
        "ansible_ssh_common_args": common,
        "ansible_ssh_args": " ".join(f"-o {option}" for option in CONNECTION),
        "ansible_control_path_dir": ssh_folder,
        "ansible_ssh_pipelining": True,
        "ansible_ssh_retries": 3,
        "ansible_ssh_timeout": 120,
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    # JSON is YAML; written so because the standard library has no YAML.
    return json.dumps({"gpu_nodes": {"hosts": hosts, "vars": variables}}, indent=2) + "\n"


# --- commands ---------------------------------------------------------------------------------------------------------


# journalctl looks under the new machine-id, while journald writes under the old one until the next boot: so the link.
IDENTITY = """
set -e
date -s "@$1" >/dev/null
old=$(cat /etc/machine-id)
for journal in /run/log/journal /var/log/journal; do
  [ ! -d "$journal/$old" ] || ln -sfn "$old" "$journal/$3"
done
echo "$3" >/etc/machine-id
echo "$2" >/etc/hostname
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$2" >/etc/hosts
hostname "$2"
"""


def give_identity(machine: Machine) -> None:
    """A restored machine is the saved one: tell it the time, its name, and the machine-id of its next boot."""
    now, machine_id = f"{time.time():.0f}", uuid.uuid5(NAMESPACE, machine.name).hex
    machine.ssh("sh", "-c", IDENTITY, "identity", now, machine.name, machine_id, timeout=300)


def new_machine(name: str, state: Path, baked: Baked, repository: Path) -> Machine:
    machine = Machine(
        name=name,
        folder=str(state),
        port=vm.free_port(),
        kernel=str(baked.kernel),
        initrd=str(baked.initrd),
        key=str(baked.key),
        known_hosts=str(state / "known_hosts"),
        repository=str(repository),
    )
    machine.make_disk(baked.disk)
    return machine


def up(options: argparse.Namespace) -> None:
    state: Path = options.state
    if state_file(state).exists():
        raise LabError(f"there is a lab in {state} already: end it with: tests/lab/metal/lab down --state {state}")
    state.mkdir(parents=True, exist_ok=True)
    baked = bake(options.driver)
    started = time.monotonic()
    names = [f"node{number}" for number in range(1, options.nodes + 1)]
    repository = options.repo or baked.repository
    machines = [new_machine(name, state, baked, repository) for name in names]
    known = "".join(f"[127.0.0.1]:{machine.port} {baked.host_key}\n" for machine in machines)
    (state / "known_hosts").write_text(known)
    ssh_folder = tempfile.mkdtemp(prefix="gpufleet-ssh-")  # short: a socket's path may not exceed 107 bytes
    save(state, machines, ssh_folder=ssh_folder, disk=str(baked.disk), memory=str(baked.state))
    try:
        resume(state, machines, machines)
    except BaseException:
        for machine in machines:
            machine.kill()
        say(f"could not start; see {state}/*.console, then remove it with: tests/lab/metal/lab down --state {state}")
        raise
    (state / "inventory.yml").write_text(inventory(machines, ssh_folder))
    say(f"{len(machines)} machines up after {time.monotonic() - started:.1f} s; inventory: {state / 'inventory.yml'}")


def resume(state: Path, machines: list[Machine], all_machines: list[Machine]) -> None:
    """Start machines from the saved memory, over disks as new."""
    memory = Path(json.loads(state_file(state).read_text())["memory"])
    for machine in machines:
        machine.start(memory)
        save(state, all_machines)
    with ThreadPoolExecutor(len(machines)) as pool:
        list(pool.map(lambda machine: machine.wait(BOOT_SECONDS), machines))
        list(pool.map(give_identity, machines))


def reset(options: argparse.Namespace) -> None:
    machines = load(options.state)
    chosen = [one(machines, name) for name in options.nodes] or list(machines.values())
    disk = Path(json.loads(state_file(options.state).read_text())["disk"])
    for machine in chosen:
        machine.kill()
        machine.make_disk(disk)
    resume(options.state, chosen, list(machines.values()))


def down(options: argparse.Namespace) -> None:
    state: Path = options.state
    machines = load(state)
    ssh_folder = json.loads(state_file(state).read_text())["ssh_folder"]
    for machine in machines.values():
        machine.kill()
        for path in (machine.disk, machine.monitor, machine.console, state / f"{machine.name}.qemu"):
            path.unlink(missing_ok=True)
    shutil.rmtree(ssh_folder, ignore_errors=True)
    for name in ("inventory.yml", "known_hosts", "lab.json"):
        (state / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        state.rmdir()


def kill(options: argparse.Namespace) -> None:
    machines = load(options.state)
    one(machines, options.node).kill()
    save(options.state, list(machines.values()))


def start(options: argparse.Namespace) -> None:
    machines = load(options.state)
    machine = one(machines, options.node)
    machine.start()
    save(options.state, list(machines.values()))
    machine.wait(BOOT_SECONDS)


def status(options: argparse.Namespace) -> None:
    machines = load(options.state)
    if options.json:
        rows = {
            name: {
                "running": machine.running(),
                "pid": machine.pid,
                "port": machine.port,
                "console": str(machine.console),
            }
            for name, machine in machines.items()
        }
        print(json.dumps(rows, indent=2))
        return
    for name, machine in machines.items():
        what = f"running, pid {machine.pid}" if machine.running() else "off"
        print(f"{name}: {what}, ssh port {machine.port}, console {machine.console}")


def execute(options: argparse.Namespace) -> None:
    machine = one(load(options.state), options.node)
    if not options.words:
        raise LabError("exec needs a command: tests/lab/metal/lab exec NODE --state DIR -- COMMAND")
    if not machine.running():
        raise LabError(f"{machine.name} is off: start it with: tests/lab/metal/lab start {machine.name}")
    argv = machine.ssh_argv(*options.words)
    os.execvp(argv[0], argv)  # noqa: S606


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/lab/metal/lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def folder(text: str) -> Path:
        return Path(text).resolve()

    def command(name: str, action: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("--state", type=folder, required=True, metavar="DIR", help="the lab's folder")
        made.set_defaults(action=action)
        return made

    made = command("up", up, "start machines node1..nodeN and write DIR/inventory.yml")
    made.add_argument("--nodes", type=int, default=1, metavar="N", help="how many (default 1; a busy one takes a core)")
    made.add_argument(
        "--driver", default=DEFAULT_DRIVER, help="version installed and loaded, or none (default %(default)s)"
    )
    made.add_argument(
        "--repo", type=folder, help="package repository to serve to the machines (default: the stand-in's)"
    )
    command("down", down, "end the machines and remove their disks")
    made = command("kill", kill, "end one machine at once, as a power cut does")
    made.add_argument("node", metavar="NODE")
    made = command("start", start, "boot a machine that is off, with the disk it had")
    made.add_argument("node", metavar="NODE")
    made = command("reset", reset, "give machines a new disk and continue from the saved state: as after up")
    made.add_argument("nodes", metavar="NODE", nargs="*", help="default: all")
    made = command("status", status, "say which machines run, and where they are reached")
    made.add_argument("--json", action="store_true")
    made = command("exec", execute, "run what follows -- as root in a machine; its exit status is this one's")
    made.add_argument("node", metavar="NODE")

    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.words = words[cut + 1 :]
    try:
        options.action(options)
    except LabError as error:
        print(f"metal: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
