# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the parts of a control plane come from: programs that are there, or one of our own, built once and cached."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "control_plane"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gpufleet"
NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
BUILD = ("nice", "-n", "10", "go", "build", "-modcacherw", "-trimpath")
BUILD_SECONDS = 3600
NEEDED_GIB = 6

Parts = dict[str, list[str]]
"""The command of each part, to which its own arguments are added."""


class Missing(Exception):
    """There is no control plane, and nothing to build one with: no Go, no network. The text says what helps."""


class Broken(Exception):
    """There should be a control plane, and there is none: a build that fails, a setting that is wrong."""


_NO_NETWORK = re.compile(
    r"dial tcp|no such host|i/o timeout|TLS handshake timeout|network is unreachable|proxyconnect|connection reset"
)
_NO_GO = re.compile(r"requires go >= |toolchain not available")


def find() -> Parts:
    """The parts in $KUBEBUILDER_ASSETS and on PATH, or those of our own program, which is built if need be.

    :raises Missing: if there are none, and nothing to build them with.
    :raises Broken: if there should be.
    """
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        path = os.pathsep.join([assets, os.environ.get("PATH", "")])
        found = {name: shutil.which(name, path=path) for name in NAMES}
        absent = [name for name, program in found.items() if program is None]
        if absent:
            raise Broken(f"KUBEBUILDER_ASSETS is {assets}, but there and on PATH is no {' and no '.join(absent)}")
        return {name: [str(program)] for name, program in found.items()}
    program = _built()
    return {name: [str(program), name] for name in NAMES}


def _built() -> Path:
    total = hashlib.sha256()
    for name in ("main.go", "go.mod", "go.sum"):
        total.update((SOURCE / name).read_bytes())
    directory = CACHE / f"kubernetes-{total.hexdigest()[:12]}"
    if (directory / "control-plane").exists():
        return directory / "control-plane"
    if shutil.which("go") is None:
        raise Missing(
            "no kube-apiserver: install Go 1.26 to have one built (10 to 20 minutes, once), or set KUBEBUILDER_ASSETS "
            "(setup-envtest fetches it) or GPUFLEET_TEST_KUBECONFIG"
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "kubernetes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (directory / "control-plane").exists():
            return directory / "control-plane"
        free = shutil.disk_usage(CACHE).free >> 30
        if free < NEEDED_GIB:
            raise Broken(f"building a control plane takes {NEEDED_GIB} GiB in {CACHE}, of which {free} are free")
        work = CACHE / "kubernetes.work"  # kept if the build breaks off, so that the next one goes on from there
        release = re.search(r"k8s\.io/kubernetes (v(\d+)\.(\d+)\.\d+)", (SOURCE / "go.mod").read_text())
        if release is None:
            raise Broken(f"{SOURCE / 'go.mod'} names no release of k8s.io/kubernetes")
        names = dict(zip(("gitVersion", "gitMajor", "gitMinor"), release.groups()))
        flags = ["-s", "-w", *(f"-X k8s.io/component-base/version.{name}={value}" for name, value in names.items())]
        print(f"lab: building Kubernetes {release[1]} (10 to 20 minutes of two cores, once)", flush=True)
        directory.mkdir(exist_ok=True)
        part = directory / "control-plane.part"
        try:
            done = subprocess.run(
                [*BUILD, "-ldflags", " ".join(flags), "-o", str(part), "."],
                cwd=SOURCE,
                env={
                    **os.environ,
                    "CGO_ENABLED": "0",
                    "GOCACHE": str(work / "build"),
                    "GOMODCACHE": str(work / "modules"),
                    "GOFLAGS": "-mod=readonly -buildvcs=false",
                },
                stderr=subprocess.PIPE,
                text=True,
                timeout=BUILD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Broken(
                f"the control plane was not built within {BUILD_SECONDS} s; run it again, it goes on"
            ) from None
        if done.returncode:
            said = done.stderr.strip()[-1500:]
            if _NO_GO.search(said) or _NO_NETWORK.search(said):
                raise Missing(f"no kube-apiserver, and none can be built without Go 1.26 and a network: {said}")
            raise Broken(f"the control plane could not be built: {said}")
        part.rename(directory / "control-plane")
        shutil.rmtree(work)
        return directory / "control-plane"
