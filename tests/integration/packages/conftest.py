# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node for real apt and dpkg: its own package database, package lists and repository under a temporary directory.

apt and dpkg are pointed there by their own environment variables (APT_CONFIG, DPKG_ADMINDIR, DPKG_ROOT), so the code
under test runs the very commands that it runs on a node, and nothing of this machine changes.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.apt import Apt
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.dnf import Dnf

OLD, NEW = "535.183.01", "550.90.07"
REVISION = "-0ubuntu0.22.04.1"
KERNEL = "6.1.0-57-cloud-amd64"


def need(*programs: str) -> None:
    """Skip, saying so, where a tool is missing."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed; tests/setup packages installs it")


@dataclass
class AptNode:
    """``build`` makes .debs, ``publish`` puts them in the repository, ``run`` is what a source takes as its runner."""

    root: Path
    modules: dict[str, str] = field(default_factory=dict)
    commands: list[tuple[str, ...]] = field(default_factory=list)

    @classmethod
    def make(cls, root: Path) -> AptNode:
        node = cls(root)
        for directory in (
            "var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers", "var/lib/apt/lists/partial",
            "var/cache/apt/archives/partial", "var/log/apt", "etc/apt/apt.conf.d", "etc/apt/preferences.d", "repo",
            "debs", "etc/apt/trusted.gpg.d", "usr/bin",
        ):  # fmt: skip
            (root / directory).mkdir(parents=True, exist_ok=True)
        (root / "var/lib/dpkg/status").write_text("")
        (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] copy:{root}/repo ./\n")
        (root / "apt.conf").write_text(
            f'Dir "{root}/";\nDir::State::status "{root}/var/lib/dpkg/status";\n'
            f'Dir::Bin::dpkg "/usr/bin/dpkg";\nDir::Bin::methods "/usr/lib/apt/methods";\nAPT::Architecture "amd64";\n'
            'DPkg::Options:: "--force-script-chrootless";\nDPkg::Options:: "--force-not-root";\n'
            'APT::Sandbox::User "root";\nDPkg::Path "/usr/sbin:/usr/bin:/sbin:/bin";\n'
        )
        return node

    @property
    def env(self) -> dict[str, str]:
        return {
            "APT_CONFIG": str(self.root / "apt.conf"),
            "DPKG_ADMINDIR": str(self.root / "var/lib/dpkg"),
            "DPKG_ROOT": str(self.root),
        }

    def run(self, argv, *, timeout, env=None, stdin=None):
        self.commands.append(tuple(argv))
        if argv[0] == "modinfo":
            version = self.disk_module()
            return execution.Completed(tuple(argv), 0 if version else 1, f"{version}\n" if version else "", "", 0.0)
        return execution.run(argv, timeout=timeout, env={**(env or {}), **self.env}, stdin=stdin)

    def disk_module(self) -> str | None:
        found = sorted((self.root / "lib/modules" / KERNEL / "updates/dkms").glob("nvidia.ko"))
        return found[0].read_text().strip() if found else None

    def build(
        self, name: str, version: str, *, depends: str = "", conflicts: str = "", provides: str = "",
        description: str = "stand-in", files: dict[str, str] | None = None, postinst: str = "", preinst: str = "",
    ) -> Path:  # fmt: skip
        tree = self.root / "build" / f"{name}_{version}"
        control = tree / "DEBIAN"
        control.mkdir(parents=True)
        fields = [
            f"Package: {name}",
            f"Version: {version}",
            "Architecture: amd64",
            "Maintainer: nobody <n@example.com>",
        ]
        fields += [f"Depends: {depends}"] if depends else []
        fields += [f"Provides: {provides}"] if provides else []
        fields += [f"Conflicts: {conflicts}", f"Replaces: {conflicts}"] if conflicts else []
        fields += [f"Description: {description}", ""]
        (control / "control").write_text("\n".join(fields))
        for path, text in (files or {}).items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        for script, text in (("postinst", postinst), ("preinst", preinst)):
            if text:
                (control / script).write_text(f"#!/bin/sh\nset -e\n{text}\n")
                (control / script).chmod(0o755)
        subprocess.run(
            ["dpkg-deb", "-Zgzip", "-z1", "--root-owner-group", "--build", str(tree), str(self.root / "debs")],
            check=True, capture_output=True,
        )  # fmt: skip
        return self.root / "debs" / f"{name}_{version}_amd64.deb"

    def build_driver(
        self, version: str, *, module: str | None = None, dkms: str = "", skip: tuple[str, ...] = ()
    ) -> None:
        """The driver packages of Ubuntu's server naming; ``module`` is what the module file says it is."""
        branch, full = version.split(".")[0], version + REVISION
        own = [f"nvidia-utils-{branch}-server", f"libnvidia-compute-{branch}-server", f"nvidia-dkms-{branch}-server",
               f"nvidia-kernel-common-{branch}-server"]  # fmt: skip
        self.build(f"nvidia-driver-{branch}-server", full, depends=", ".join(f"{name} (= {full})" for name in own),
                   provides="nvidia-driver-standin", conflicts="nvidia-driver-standin")  # fmt: skip
        ko = f"lib/modules/{KERNEL}/updates/dkms/nvidia.ko"
        for name in own:
            if name.startswith(skip or ("-",)):
                continue
            virtual = name.replace(f"-{branch}-server", "")
            is_dkms = name.startswith("nvidia-dkms")
            self.build(name, full, provides=virtual, conflicts=virtual,
                       files={ko: module or version} if is_dkms else {f"usr/share/{virtual}/version": version},
                       postinst=dkms if is_dkms else "")  # fmt: skip
        self.build(f"nvidia-fabricmanager-{branch}", f"{version}-1", provides="nvidia-fabricmanager",
                   conflicts="nvidia-fabricmanager")  # fmt: skip

    def build_late_killer(self, version: str, script: str) -> None:
        """Rebuild the utilities so that ``script`` runs when they are unpacked, after others are."""
        branch = version.split(".")[0]
        name, virtual = f"nvidia-utils-{branch}-server", "nvidia-utils"
        (self.root / "debs" / f"{name}_{version}{REVISION}_amd64.deb").unlink()
        shutil.rmtree(self.root / "build" / f"{name}_{version}{REVISION}")
        self.build(name, version + REVISION, provides=virtual, conflicts=virtual, preinst=script)

    def build_vendor(self, version: str, *, suffixed: bool) -> None:
        """The open driver packages of NVIDIA's repository for Ubuntu, in the naming of before or from 590."""
        branch = version.split(".")[0]
        tail, full = (f"-{branch}", f"{version}-0ubuntu1") if suffixed else ("", f"{version}-1ubuntu1")
        ko = f"lib/modules/{KERNEL}/updates/dkms/nvidia.ko"
        own = [f"nvidia-driver{tail}-open", f"nvidia-dkms{tail}-open", f"nvidia-kernel-common{tail}",
               f"libnvidia-compute{tail}", f"nvidia-utils{tail}"]  # fmt: skip
        for name in own:
            virtual = "x-" + name.replace(tail, "", 1) if tail else "x-" + name
            self.build(name, full, provides=virtual, conflicts=virtual,
                       depends=own[1] if name == own[0] else "",
                       files={ko: version} if "dkms" in name else None)  # fmt: skip
        self.build(f"nvidia-open{tail}", full, depends=", ".join(f"{name} (= {full})" for name in own))
        self.build("nvidia-fabricmanager", f"{version}-1")
        self.build(f"nvidia-driver-pinning-{branch}", f"{branch}-1ubuntu1", provides="x-pinning", conflicts="x-pinning")

    def publish(self, *patterns: str) -> None:
        """Make the repository hold exactly the .debs that match, and let apt read it."""
        repo = self.root / "repo"
        for old in repo.iterdir():
            old.unlink()
        for pattern in patterns:
            for deb in (self.root / "debs").glob(pattern):
                shutil.copy(deb, repo)
        packages = subprocess.run(
            ["dpkg-scanpackages", "-m", "."], cwd=repo, check=True, capture_output=True, text=True
        ).stdout
        (repo / "Packages").write_text(packages)
        self.must("apt-get", "update")

    def must(self, *argv: str) -> str:
        done = self.run(argv, timeout=60.0)
        assert done.ok, done.describe() + done.stdout + done.stderr
        return done.stdout

    def install(self, *names: str) -> None:
        self.must("apt-get", "-y", "install", *names)

    def packages(self) -> dict[str, str]:
        rows = self.must("dpkg-query", "-W", "-f", "${db:Status-Abbrev}|${Package}|${Version}\n").splitlines()
        return {row.split("|")[1]: row.split("|")[2] for row in rows if row.startswith(("ii", "hi"))}

    def held(self) -> set[str]:
        return set(self.must("apt-mark", "showhold").split())

    def source(self, **options) -> Apt:
        return Apt(self.run, str(self.root), str(self.root / "state"), **{"lock_timeout": 5.0, **options})


@pytest.fixture
def apt_node(tmp_path: Path) -> AptNode:
    """A node on 535.183.01 with Fabric Manager, whose repository has 535.183.01 and 550.90.07."""
    need("apt-get", "dpkg-deb", "dpkg-scanpackages")
    node = AptNode.make(tmp_path / "node")
    node.build_driver(OLD)
    node.build_driver(NEW)
    node.publish("*.deb")
    node.install("nvidia-driver-535-server", "nvidia-fabricmanager-535")
    return node


@dataclass
class DnfNode:
    """A node for real dnf and rpm: an install root with its own repositories, reached through the same commands."""

    root: Path
    base: Path
    options: tuple[str, ...] = ()
    module: str | None = None

    @classmethod
    def make(cls, base: Path) -> DnfNode:
        node = cls(base / "root", base)
        for directory in ("root/etc/dnf/plugins", "repo", "rpms", "none", "vars"):
            (base / directory).mkdir(parents=True)
        (base / "dnf.conf").write_text(
            f"[main]\ngpgcheck=0\nreposdir={base}/none\nvarsdir={base}/vars\nlogdir={base}/log\n"
            f"persistdir={base}/persist\nplugins=0\nmodule_platform_id=platform:el9\nbest=1\nmetadata_expire=0\n"
            f"[cuda]\nname=cuda\nbaseurl=file://{base}/repo\n"
        )
        return node

    def run(self, argv, *, timeout, env=None, stdin=None):
        argv = list(argv)
        if argv[0] == "modinfo":
            kmod = [name for name in self.packages() if name.startswith("kmod-nvidia")]
            version = self.packages()[kmod[0]].split(":")[-1].split("-")[0] if kmod else ""
            version = self.module or version
            return execution.Completed(tuple(argv), 0 if version else 1, f"{version}\n" if version else "", "", 0.0)
        if argv[0] == "rpm":
            argv[1:1] = ["--root", str(self.root)]
        elif argv[0] == "dnf":
            argv[1:1] = ["-c", str(self.base / "dnf.conf"), "--installroot", str(self.root), "--releasever", "9"]
        return execution.run(argv, timeout=timeout, env=env, stdin=stdin)

    def must(self, *argv: str) -> str:
        done = self.run(argv, timeout=60.0)
        assert done.ok, done.describe() + done.stdout + done.stderr
        return done.stdout

    def build(
        self, name: str, version: str, *, release: str = "1.el9", requires: tuple[str, ...] = (),
        provides: tuple[str, ...] = (), conflicts: tuple[str, ...] = (), obsoletes: tuple[str, ...] = (),
        stream: str | None = None, epoch: int = 3,
    ) -> None:  # fmt: skip
        spec = self.base / "rpms" / f"{name}-{version}.spec"
        lines = [f"Name: {name}", f"Epoch: {epoch}", f"Version: {version}", f"Release: {release}", "Summary: stand-in",
                 "License: MIT"]  # fmt: skip
        lines += [f"ModularityLabel: nvidia-driver:{stream}:1:abc"] if stream else []
        for field_name, values in (
            ("Requires", requires), ("Provides", provides), ("Conflicts", conflicts), ("Obsoletes", obsoletes),
        ):  # fmt: skip
            lines += [f"{field_name}: {value}" for value in values]
        spec.write_text("\n".join([*lines, "%description", "stand-in", "%files", ""]))
        subprocess.run(
            ["rpmbuild", "-bb", "--quiet", "--target", "x86_64", "--define", f"_topdir {self.base}/rpms", "--define",
             f"_rpmdir {self.base}/rpms/out", str(spec)],
            check=True, capture_output=True,
        )  # fmt: skip

    def build_stream(self, version: str, stream: str | None, kmod: str, **extra) -> list[str]:
        """The driver packages of one version; ``kmod`` is the name of the package with the kernel modules."""
        self.build(kmod, version, provides=(f"nvidia-kmod = 3:{version}",), conflicts=extra.get("conflicts", ()),
                   requires=(f"nvidia-kmod-common = 3:{version}",), stream=stream)  # fmt: skip
        self.build("nvidia-kmod-common", version, requires=(f"nvidia-kmod = 3:{version}",), stream=stream)
        self.build("nvidia-driver-cuda-libs", version, stream=stream)
        needed = (f"nvidia-driver-cuda-libs = 3:{version}", f"nvidia-kmod-common = 3:{version}")
        self.build("nvidia-driver-cuda", version, stream=stream, requires=needed)
        return [f"{n}-3:{version}-1.el9.x86_64" for n in
                (kmod, "nvidia-kmod-common", "nvidia-driver-cuda-libs", "nvidia-driver-cuda")]  # fmt: skip

    def publish(self, streams: dict[str, list[str]] | None = None, only: str = "*") -> None:
        repo = self.base / "repo"
        shutil.rmtree(repo)
        shutil.rmtree(self.root / "var/cache/dnf", ignore_errors=True)  # dnf: made in one second, so the same
        repo.mkdir()
        for rpm in (self.base / "rpms/out").rglob(f"{only}.rpm"):
            shutil.copy(rpm, repo)
        subprocess.run(["createrepo_c", "-q", str(repo)], check=True, capture_output=True)
        if streams:
            documents = self.base / "modules.yaml"
            documents.write_text("".join(_module(stream, rpms) for stream, rpms in streams.items()))
            subprocess.run(["modifyrepo_c", "--mdtype=modules", str(documents), str(repo / "repodata")], check=True,
                           capture_output=True)  # fmt: skip

    def packages(self) -> dict[str, str]:
        rows = self.must("rpm", "-qa", "--qf", "%{NAME} %{EPOCHNUM}:%{VERSION}-%{RELEASE}\n").splitlines()
        return dict(row.split() for row in rows)

    def source(self, **options) -> Dnf:
        return Dnf(self.run, str(self.root), str(self.base / "state"), **{"kernel": EL_KERNEL, **options})


EL_KERNEL = "5.14.0-503.23.2.el9_5.x86_64"


def _module(stream: str, rpms: list[str]) -> str:
    artifacts = "\n".join(f"    - {rpm}" for rpm in rpms)
    return (
        f'---\ndocument: modulemd\nversion: 2\ndata:\n  name: nvidia-driver\n  stream: "{stream}"\n  version: 1\n'
        "  context: abc\n  arch: x86_64\n  summary: driver\n  description: driver\n  license:\n    module: [MIT]\n"
        f"  profiles:\n    default:\n      rpms: [nvidia-driver-cuda]\n  artifacts:\n    rpms:\n{artifacts}\n...\n"
    )


@pytest.fixture
def dnf_node(tmp_path: Path) -> DnfNode:
    need("dnf", "rpm", "rpmbuild", "createrepo_c", "modifyrepo_c")
    return DnfNode.make(tmp_path)


@pytest.fixture
def http_repository(dnf_node: DnfNode):
    """Serve the repository over HTTP, as a mirror would; ``stop`` makes it unreachable."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *dummy):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(dnf_node.base / "repo"))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    conf = dnf_node.base / "dnf.conf"
    conf.write_text(conf.read_text().replace(f"file://{dnf_node.base}/repo", f"http://127.0.0.1:{server.server_port}"))

    def stop() -> None:
        server.shutdown()
        server.server_close()

    server.stop = stop
    yield server
    stop()
