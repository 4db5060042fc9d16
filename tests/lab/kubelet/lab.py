# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node of Kubernetes without a control plane: a real kubelet, containerd, runc and CRIU, that run static pods.

It shares this machine's kernel and files, and has mounts, processes and a network of its own, which end with it. What
pods and playbooks find on it is where it is on any node: /etc/containerd/config.toml, /var/lib/kubelet, port 10250.
"README.md" beside this file says what is real about it and what is not. Needs root.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REGISTRY = "127.0.0.1:5000"
DRIVER = "550.90.07"
READY_SECONDS = 120
UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


class LabError(Exception):
    """Something the person at the keyboard can act on."""


def say(text: str) -> None:
    print(f"lab: {text}", flush=True)


def run(argv: Sequence[str | Path]) -> str:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(map(str, argv))}: rc {done.returncode}: {done.stderr.strip()}")
    return done.stdout


# ---- what is built beforehand ----------------------------------------------------------------------------------------


def built(script: Path) -> Path:
    """The directory that a build names; what it says on the way is shown. Its status is ours if it fails."""
    done = subprocess.run([str(script)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return Path(done.stdout.splitlines()[-1])


def path() -> str:
    """PATH with the programs of a node before those of this machine."""
    programs = [built(HERE / "build") / "bin", built(HERE.parent / "criu/build") / "layer/usr/local/sbin"]
    return os.pathsep.join([*map(str, programs), os.environ["PATH"]])


# ---- the registry ----------------------------------------------------------------------------------------------------

OCI = "application/vnd.oci.image"


class Registry(BaseHTTPRequestHandler):
    """Images of one program each, as the distribution specification of the OCI has them, over plain HTTP."""

    protocol_version = "HTTP/1.1"
    blobs: dict[str, bytes] = {}
    tags: dict[str, str] = {}

    @classmethod
    def add(cls, program: Path) -> None:
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as files:
            for name in ("data", "dev", "etc", "proc", "sys"):
                folder = tarfile.TarInfo(name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                files.addfile(folder)
            entry = tarfile.TarInfo("program")
            entry.size, entry.mode = program.stat().st_size, 0o755
            files.addfile(entry, io.BytesIO(program.read_bytes()))
        content = cls.put(layer.getvalue())
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
        config = {
            "architecture": machine,
            "os": "linux",
            "config": {"Entrypoint": ["/program"]},
            "rootfs": {"type": "layers", "diff_ids": [content["digest"]]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": {"mediaType": f"{OCI}.config.v1+json", **cls.put(json.dumps(config).encode())},
            "layers": [{"mediaType": f"{OCI}.layer.v1.tar", **content}],
        }
        cls.tags[f"/v2/{program.name}/manifests/1"] = cls.put(json.dumps(manifest).encode())["digest"]

    @classmethod
    def put(cls, data: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        cls.blobs[digest] = data
        return {"digest": digest, "size": len(data)}

    def do_GET(self) -> None:
        self.answer(True)

    def do_HEAD(self) -> None:
        self.answer(False)

    def answer(self, whole: bool) -> None:
        where = self.path.partition("?")[0]
        digest = self.tags.get(where, where.rpartition("/")[2])
        data = self.blobs.get(digest)
        self.send_response(404 if data is None else 200)
        kind = f"{OCI}.manifest.v1+json" if "/manifests/" in where else "application/octet-stream"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data or b"")))
        self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if whole:
            self.wfile.write(data or b"")

    def log_message(self, *dummy: Any) -> None: ...


# ---- the node, in namespaces of its own ------------------------------------------------------------------------------


def compile_programs(state: Path) -> None:
    """What pods run, and the stand-in driver: its NVML and the files that this looks at."""
    userland = HERE.parent / "standin/userland"
    for name in ("counter", "pause"):
        run(["gcc", "-static", "-O1", "-o", state / name, HERE / f"{name}.c"])
    (state / "lib").mkdir(exist_ok=True)
    run(
        [
            *("gcc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1"),
            *(f'-DSTANDIN_VERSION="{DRIVER}"', "-o", state / "lib/libnvidia-ml.so.1"),
            *(userland / "nvml.c", userland / "standin.c"),
        ]
    )
    for name in ("nvidiactl", "nvidia0"):
        (state / "driver/dev").mkdir(parents=True, exist_ok=True)
        (state / "driver/dev" / name).touch()
    gpu = state / "driver/proc/driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True, exist_ok=True)
    (gpu / "information").write_text(
        "Model: \t\t NVIDIA A100\nGPU UUID: \t GPU-5ca1ab1e-0000-4000-8000-000000000000\nDevice Minor: \t 0\n"
    )
    (gpu.parents[1] / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {DRIVER}  x\n")


def mount_files(state: Path) -> None:
    """Give the node an /etc and a /var/lib that are changed for it alone, and the driver's part of /proc."""
    own = state / "own"
    own.mkdir(exist_ok=True)
    run(["mount", "--make-rprivate", "/"])
    run(["mount", "-t", "tmpfs", "own", own])
    for name in ("etc", "var/lib"):
        upper, work = own / name / "upper", own / name / "work"
        upper.mkdir(parents=True)
        work.mkdir()
        options = f"lowerdir=/{name},upperdir={upper},workdir={work}"
        run(["mount", "-t", "overlay", "own", "-o", options, f"/{name}"])
    run(["mount", "-t", "tmpfs", "own", "/run"])
    Path("/var/lib/containerd").mkdir(exist_ok=True)  # it has overlays of its own, which cannot lie on another
    run(["mount", "-t", "tmpfs", "own", "/var/lib/containerd"])
    run(["mount", "--bind", state / "driver/proc/driver", "/proc/driver"])


def configure(state: Path) -> None:
    for name in ("/etc/containerd/certs.d", "/etc/kubernetes/manifests", "/var/lib/kubelet/pki"):
        Path(name).mkdir(parents=True, exist_ok=True)
    Path("/etc/containerd/config.toml").write_text(
        f"""version = 3
[plugins.'io.containerd.cri.v1.images'.registry]
  config_path = "/etc/containerd/certs.d"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{REGISTRY}/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
"""
    )
    hosts = Path("/etc/containerd/certs.d", REGISTRY)
    hosts.mkdir(exist_ok=True)
    (hosts / "hosts.toml").write_text(f'server = "http://{REGISTRY}"\n[host."http://{REGISTRY}"]\n')
    pki = Path("/var/lib/kubelet/pki")
    name = "/CN=gpufleet-lab"
    run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", name),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", pki / "kubelet.key", "-out", pki / "kubelet.crt"),
        ]
    )
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "tlsCertFile": str(pki / "kubelet.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(pki / "kubelet.crt")},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "staticPodPath": "/etc/kubernetes/manifests",
        "podLogsDir": str(state / "logs"),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%", "memory.available": "0%"},
        "fileCheckFrequency": "1s",
        "syncFrequency": "1s",
    }
    Path("/var/lib/kubelet/config.json").write_text(json.dumps(settings))


def inside(state: Path, name: str) -> None:
    """The first process of the node; all others are its children, and end with it."""
    run(["ip", "link", "set", "lo", "up"])
    mount_files(state)
    configure(state)
    for program in ("counter", "pause"):
        Registry.add(state / program)
    begin(state, "containerd")
    while not Path("/run/containerd/containerd.sock").exists():
        time.sleep(0.05)
    begin(state, "kubelet", "--config=/var/lib/kubelet/config.json", f"--hostname-override={name}")
    threading.Thread(target=tell_when_ready, args=(state / "ready",), daemon=True).start()
    signal.signal(signal.SIGCHLD, reap)
    ThreadingHTTPServer(("127.0.0.1", int(REGISTRY.rpartition(":")[2])), Registry).serve_forever()


def begin(state: Path, program: str, *arguments: str) -> None:
    with (state / f"{program}.log").open("w") as log:
        subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def tell_when_ready(file: Path) -> None:
    """Make the file as soon as the kubelet says that it is well."""
    pki = "/var/lib/kubelet/pki"
    trust = ssl.create_default_context(cafile=f"{pki}/kubelet.crt")
    trust.load_cert_chain(f"{pki}/kubelet.crt", f"{pki}/kubelet.key")
    while True:
        try:
            urllib.request.urlopen("https://127.0.0.1:10250/healthz", timeout=5, context=trust).close()
            file.touch()
            return
        except OSError:
            time.sleep(0.1)


def reap(*dummy: Any) -> None:
    """Collect the orphans that a first process inherits."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


# ---- commands --------------------------------------------------------------------------------------------------------


def first_process(state: Path) -> int:
    """Process id, here, of the node's first process; :raises LabError: if the node does not run."""
    try:
        outer = int((state / "pid").read_text())
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        raise LabError(f"no node runs in {state}; start one with: lab up --state {state}") from None


def enter(state: Path) -> list[str]:
    """The command to which one that runs on the node is added."""
    given = json.loads((state / "lab.json").read_text())
    words = [f"PATH={given['path']}", f"LD_LIBRARY_PATH={state / 'lib'}", f"NVIDIA_STANDIN_ROOT={state / 'driver'}"]
    return ["nsenter", "--mount", "--net", "--pid", f"--target={first_process(state)}", "env", *words]


def up(options: argparse.Namespace) -> None:
    state = options.state
    if os.geteuid() != 0:
        raise LabError("needs root")
    if (state / "pid").exists():
        raise LabError(f"{state} has a node already; end it with: lab down --state {state}")
    state.mkdir(parents=True, exist_ok=True)
    given = path()
    (state / "lab.json").write_text(json.dumps({"path": given}))
    compile_programs(state)
    begun = time.monotonic()
    with (state / "node.log").open("w") as log:
        node = subprocess.Popen(
            [*UNSHARE, sys.executable, str(HERE / "lab.py"), "inside", "--state", str(state), options.name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": given},
            start_new_session=True,
        )
    (state / "pid").write_text(str(node.pid))
    try:
        while not (state / "ready").exists():
            if node.poll() is not None or time.monotonic() - begun > READY_SECONDS:
                said = "".join(log.read_text()[-1000:] for log in state.glob("*.log"))
                raise LabError(f"the node does not come up:\n{said}")
            time.sleep(0.1)
    except BaseException:
        node.kill()  # and with it all that runs on the node
        (state / "pid").unlink()
        raise
    say(f"{options.name} is up after {time.monotonic() - begun:.1f} s; pods: files in /etc/kubernetes/manifests there")


def down(options: argparse.Namespace) -> None:
    """The kernel ends all processes of the node with its first one; its mounts and network are gone then, too."""
    outer, first = int((options.state / "pid").read_text()), first_process(options.state)
    containers = [one.name for one in Path(f"/proc/{first}/root/run/containerd").glob("*.v2.task/k8s.io/*")]
    os.kill(first, signal.SIGKILL)
    while Path(f"/proc/{outer}").exists():
        time.sleep(0.05)
    for one in containers:
        for group in Path("/sys/fs/cgroup").glob(f"**/k8s.io/{one}"):
            group.rmdir()
    shutil.rmtree(options.state)


def execute(options: argparse.Namespace) -> None:
    sys.exit(subprocess.run([*enter(options.state), *options.argv], check=False).returncode)


def build(options: argparse.Namespace) -> None:
    print(path().partition(os.pathsep)[0])


def main() -> int:
    parser = argparse.ArgumentParser(prog=str(HERE / "lab"), description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, handler: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(handler=handler)
        return sub

    def on_node(name: str, handler: Any, text: str) -> argparse.ArgumentParser:
        sub = command(name, handler, text)
        place = {"type": lambda text: Path(text).resolve(), "required": True, "metavar": "DIR"}
        sub.add_argument("--state", help="the node's directory", **place)
        return sub

    sub = on_node("up", up, "start a node")
    sub.add_argument("--name", default="node-1", help="what it is called (default node-1)")
    on_node("down", down, "end the node and remove all it made")
    on_node("exec", execute, "run a command on the node").add_argument("argv", nargs="+", metavar="COMMAND")
    command("build", build, "print where the programs of a node are, after building them if need be")
    sub = on_node("inside", lambda given: inside(given.state, given.name), "be a node's first process; used by up")
    sub.add_argument("name", metavar="NAME")
    options = parser.parse_args()
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
