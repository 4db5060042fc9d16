# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Kubernetes cluster of GPU nodes without a GPU: a real control plane on loopback, and simulated kubelets.

"README.md" beside this file says what is real about it and what is not. Needs no root.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import parts  # noqa: E402
from api import MERGE, Api, ApiError  # noqa: E402

READY_SECONDS = 180
STOP_SECONDS = 20
MISSING = 3
"""Exit status where there is no control plane to be had: tests are skipped for that, and for nothing else."""
KUBELETS = "kubelets"
PARTS = (*parts.NAMES, KUBELETS)
PLAY_KUBELETS = [sys.executable, str(HERE / "kubelets.py")]
DRIVER = "570.133.20"

Object = dict[str, Any]


class LabError(Exception):
    """Something the person at the keyboard can act on."""


def say(text: str) -> None:
    print(f"lab: {text}", flush=True)


# ---- processes -------------------------------------------------------------------------------------------------------


def started_at(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; with its number this names it for good."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


class Control:
    """The parts of one lab: their commands and processes, kept in its directory."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.kubeconfig = state / "kubeconfig"
        self._file = state / "lab.json"
        self.commands: dict[str, list[str]] = {}
        self.running: dict[str, list[Any]] = {}
        if self._file.exists():
            known = json.loads(self._file.read_text())
            self.commands, self.running = known["commands"], known["running"]

    def save(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({"commands": self.commands, "running": self.running}, indent=1))
        part.replace(self._file)

    def start(self, name: str) -> None:
        if self.is_running(name):
            return
        with (self.state / f"{name}.log").open("a") as log:
            child = subprocess.Popen(
                self.commands[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.running[name] = [child.pid, started_at(child.pid)]
        self.save()

    def is_running(self, name: str) -> bool:
        pid, since = self.running.get(name, (0, None))
        if since is None or started_at(pid) != since:
            return False
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def stop(self, name: str, sign: int = signal.SIGKILL) -> None:
        if self.is_running(name):
            os.kill(self.running[name][0], sign)
        end = time.monotonic() + STOP_SECONDS
        while self.is_running(name):
            if time.monotonic() > end:
                raise LabError(f"{name} (process {self.running[name][0]}) is still there after {STOP_SECONDS} s")
            time.sleep(0.02)
        self.running.pop(name, None)
        self.save()

    def last_words(self) -> str:
        gone = [name for name in self.commands if not self.is_running(name)]
        logs = {name: (self.state / f"{name}.log").read_text().splitlines()[-8:] for name in gone or ["kube-apiserver"]}
        return "\n".join(f"{name}: {line}" for name, lines in logs.items() for line in lines)


# ---- the control plane -----------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    listening = [socket.socket() for dummy in range(count)]
    for each in listening:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in listening]
    for each in listening:
        each.close()
    return ports


OPENSSL = shlex.split(
    "req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=gpufleet-lab -addext subjectAltName=IP:127.0.0.1"
)


def certificate(state: Path) -> None:
    """A key and a certificate for 127.0.0.1: the server's, and what service accounts are signed with."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise LabError("openssl is missing: install it")
    subprocess.run(
        [openssl, *OPENSSL, "-keyout", str(state / "tls.key"), "-out", str(state / "tls.crt")],
        check=True,
        capture_output=True,
    )


USERS = {
    "admin": ("admin", "system:masters"),
    "kcm": ("system:kube-controller-manager", "system:masters"),
    "scheduler": ("system:kube-scheduler", "system:masters"),
    "kubelets": ("kubelets", "system:masters"),
}


def write_config(state: Path, server: str, tokens: dict[str, str]) -> None:
    """The kubeconfig: the admin's, with the other users in it; and one file each for the parts that take one."""
    users = [{"name": name, "user": {"token": token}} for name, token in tokens.items()]
    for name in ("admin", "kcm", "scheduler"):
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "lab", "cluster": {"server": server, "certificate-authority": str(state / "tls.crt")}}
            ],
            "users": users,
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
            "current-context": "lab",
        }
        path = state / ("kubeconfig" if name == "admin" else f"{name}.kubeconfig")
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))


AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts:gpufleet"]}, {"level": "None"}],
}
"""Who did what is written down for the service accounts of one namespace."""


POLICIES = "admissionregistration.k8s.io/v1/mutatingadmissionpolic"
NO_POLICIES = [
    f"--runtime-config={POLICIES}ies=false,{POLICIES}ybindings=false",
    "--disable-admission-plugins=MutatingAdmissionPolicy",
]


def prepare(control: Control, found: parts.Parts, machines: str, policies: bool) -> None:
    """Certificates, accounts and commands of a new control plane."""
    state = control.state
    api_port, etcd_port, peer_port = free_ports(3)
    certificate(state)
    tokens = {name: secrets.token_hex(16) for name in USERS}
    accounts = state / "accounts.csv"
    accounts.touch(mode=0o600)
    accounts.write_text("".join(f'{tokens[n]},{user},{n},"{group}"\n' for n, (user, group) in USERS.items()))
    write_config(state, f"https://127.0.0.1:{api_port}", tokens)
    etcd, peer = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
    (state / "etcd.json").write_text(
        json.dumps(
            {
                "name": "lab",
                "data-dir": str(state / "etcd"),
                "listen-client-urls": etcd,
                "advertise-client-urls": etcd,
                "listen-peer-urls": peer,
                "initial-advertise-peer-urls": peer,
                "initial-cluster": f"lab={peer}",
                "unsafe-no-fsync": True,
                "log-level": "warn",
            }
        )
    )
    (state / "audit.json").write_text(json.dumps(AUDIT))
    key, cert = f"{state}/tls.key", f"{state}/tls.crt"
    control.commands = {
        "etcd": [*found["etcd"], *([] if len(found["etcd"]) > 1 else ["--config-file"]), str(state / "etcd.json")],
        "kube-apiserver": [
            *found["kube-apiserver"],
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={api_port}",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--tls-cert-file={cert}",
            f"--tls-private-key-file={key}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={accounts}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            f"--audit-policy-file={state}/audit.json",
            f"--audit-log-path={state}/audit.log",
            *([] if policies else NO_POLICIES),
        ],
        "kube-controller-manager": [
            *found["kube-controller-manager"],
            f"--kubeconfig={state}/kcm.kubeconfig",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={cert}",
            "--leader-elect=false",
            "--secure-port=0",
            "--node-monitor-grace-period=10m",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        ],
        "kube-scheduler": [
            *found["kube-scheduler"],
            f"--kubeconfig={state}/scheduler.kubeconfig",
            "--leader-elect=false",
            "--secure-port=0",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        ],
        KUBELETS: [*PLAY_KUBELETS, str(control.kubeconfig), "kubelets", "60", machines],
    }


def wait_usable(control: Control, api: Api) -> None:
    """Until the API server is ready and the controllers work: they make every namespace its service account."""
    end = time.monotonic() + READY_SECONDS
    try:
        api.wait_ready(READY_SECONDS)
        for name in control.commands:
            control.start(name)
        while api.find("/api/v1/namespaces/default/serviceaccounts/default") is None:
            if time.monotonic() > end:
                raise TimeoutError(f"no default service account after {READY_SECONDS} s")
            time.sleep(0.1)
    except TimeoutError as exc:
        raise LabError(f"{exc}\n{control.last_words()}") from None


# ---- nodes -----------------------------------------------------------------------------------------------------------


def node(name: str, number: int, gpus: int = 8, driver: str = DRIVER, model: str = "NVIDIA-H100-80GB-HBM3") -> Object:
    """A GPU node as a cluster with NVIDIA's device plugin and feature discovery shows it."""
    major, minor, revision = [*driver.split("."), ""][:3]
    capacity = {"cpu": "128", "memory": "1Ti", "pods": "110", "ephemeral-storage": "1Ti"}
    if gpus:
        capacity["nvidia.com/gpu"] = str(gpus)
    labels = {
        "lab.gpufleet/node": "true",
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/zone": f"zone-{number % 3}",
        "topology.kubernetes.io/rack": f"rack-{number // 8}",
        "feature.node.kubernetes.io/kernel-version.full": "6.8.0-60-generic",
        "feature.node.kubernetes.io/system-os_release.ID": "ubuntu",
        "feature.node.kubernetes.io/system-os_release.VERSION_ID": "22.04",
    }
    if gpus:
        labels |= {
            "feature.node.kubernetes.io/pci-10de.present": "true",
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.product": model,
            "nvidia.com/gpu.count": str(gpus),
            "nvidia.com/gpu.memory": "81559",
            "nvidia.com/gpu.family": "hopper",
            "nvidia.com/gpu.replicas": "1",
            "nvidia.com/mig.capable": "true",
            "nvidia.com/mig.strategy": "single",
            "nvidia.com/cuda.driver-version.full": driver,
            "nvidia.com/cuda.driver-version.major": major,
            "nvidia.com/cuda.driver-version.minor": minor,
            "nvidia.com/cuda.driver-version.revision": revision,
            "nvidia.com/gfd.timestamp": str(int(time.time())),
        }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "nodeInfo": {
                "architecture": "amd64",
                "bootID": f"boot-{number}",
                "containerRuntimeVersion": "containerd://2.1.9",
                "kernelVersion": "6.8.0-60-generic",
                "kubeProxyVersion": "",
                "kubeletVersion": "v1.36.3",
                "machineID": f"machine-{number}",
                "operatingSystem": "linux",
                "osImage": "Ubuntu 22.04.5 LTS",
                "systemUUID": f"uuid-{number}",
            },
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "KubeletReady"},
                {"type": "MemoryPressure", "status": "False", "reason": "KubeletHasSufficientMemory"},
                {"type": "DiskPressure", "status": "False", "reason": "KubeletHasNoDiskPressure"},
                {"type": "PIDPressure", "status": "False", "reason": "KubeletHasSufficientPID"},
            ],
        },
    }


def add_nodes(api: Api, nodes: list[Object]) -> None:
    """Create nodes, or put the status of those that are there back to what is given."""

    def one(item: Object) -> None:
        path = f"/api/v1/nodes/{item['metadata']['name']}"
        try:
            api.post("/api/v1/nodes", item)
        except ApiError as exc:
            if exc.status != 409:
                raise
            api.patch(path, {"metadata": {"labels": item["metadata"]["labels"]}})
            api.ask("PATCH", f"{path}/status", {"status": item["status"]}, MERGE)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, nodes))


def remove_nodes(api: Api) -> None:
    for item in api.get("/api/v1/nodes", labelSelector="lab.gpufleet/node=true")["items"]:
        api.delete(f"/api/v1/nodes/{item['metadata']['name']}")


# ---- commands --------------------------------------------------------------------------------------------------------


def up(options: argparse.Namespace) -> None:
    control = Control(options.state)
    options.state.mkdir(parents=True, exist_ok=True)
    if any(control.is_running(name) for name in PARTS):
        raise LabError(f"a lab is up in {options.state}; end it with: {HERE / 'lab'} down --state {options.state}")
    begun = time.monotonic()
    given = os.environ.get("GPUFLEET_TEST_KUBECONFIG")
    if given:
        control.kubeconfig.unlink(missing_ok=True)
        control.kubeconfig.symlink_to(Path(given).resolve())
        control.commands = {KUBELETS: [*PLAY_KUBELETS, str(control.kubeconfig), "", "10", options.machines]}
    else:
        prepare(control, parts.find(), options.machines, not options.without_policies)
        control.start("etcd")
        control.start("kube-apiserver")
    api = Api.of(control.kubeconfig)
    try:
        wait_usable(control, api)
        names = [f"gpu-{number}" for number in range(1, options.nodes + 1)]
        add_nodes(api, [node(name, n, options.gpus, options.driver) for n, name in enumerate(names)])
    except BaseException:
        if not options.keep:
            for name in PARTS:
                control.stop(name)
        raise
    say(f"{options.nodes} nodes are up after {time.monotonic() - begun:.1f} s")
    say(f"export KUBECONFIG={control.kubeconfig}")


def down(options: argparse.Namespace) -> None:
    control = Control(options.state)
    if list(control.commands) == [KUBELETS]:
        remove_nodes(Api.of(control.kubeconfig))
    for name in reversed(PARTS):
        control.stop(name)
    shutil.rmtree(options.state, ignore_errors=True)


def start(options: argparse.Namespace) -> None:
    control = Control(options.state)
    control.start(options.part)
    try:
        Api.of(control.kubeconfig).wait_ready(READY_SECONDS)
    except TimeoutError as exc:
        raise LabError(str(exc)) from None


def kill(options: argparse.Namespace) -> None:
    Control(options.state).stop(options.part)


def status(options: argparse.Namespace) -> None:
    control = Control(options.state)
    for name in PARTS:
        print(f"{name}: {'runs, process ' + str(control.running[name][0]) if control.is_running(name) else 'down'}")


def build(options: argparse.Namespace) -> None:
    given = os.environ.get("GPUFLEET_TEST_KUBECONFIG")
    print(given or parts.find()["kube-apiserver"][0])


def main() -> int:
    parser = argparse.ArgumentParser(prog=str(HERE / "lab"), description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, handler: Any, text: str, state: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(handler=handler)
        if state:
            sub.add_argument(
                "--state", type=lambda t: Path(t).resolve(), required=True, metavar="DIR", help="the lab's directory"
            )
        return sub

    sub = command("up", up, "start a cluster")
    sub.add_argument("--nodes", type=int, default=3, metavar="N", help="nodes, named gpu-1 to gpu-N (default 3)")
    sub.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of each node (default 8)")
    sub.add_argument("--driver", default=DRIVER, metavar="V", help=f"driver they say they have (default {DRIVER})")
    sub.add_argument(
        "--machines",
        default="",
        metavar="DIR",
        help="state directory of a hosts lab: pods on nodes of its machines' names are processes there",
    )
    sub.add_argument(
        "--without-policies",
        action="store_true",
        help="a server that knows no MutatingAdmissionPolicy, as before Kubernetes 1.34",
    )
    sub.add_argument("--keep", action="store_true", help="leave everything in place if the start fails")
    command("down", down, "end the cluster and remove all it made")
    command("status", status, "say which parts run")
    for name, handler, text in (("kill", kill, "end a part at once"), ("start", start, "start a part again")):
        command(name, handler, text).add_argument("part", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    command(
        "build",
        build,
        "print where the control plane is, after building one if need be",
        state=False,
    )
    options = parser.parse_args()
    options.handler(options)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except parts.Missing as error:
        print(f"lab: {error}", file=sys.stderr)
        sys.exit(MISSING)
    except (LabError, parts.Broken) as error:
        print(f"lab: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
