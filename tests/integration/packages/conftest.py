# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node for real apt and dpkg: its own package database, package lists and repository under a temporary directory.

apt and dpkg are pointed there by their own environment variables (APT_CONFIG, DPKG_ADMINDIR, DPKG_ROOT), so the code
under test runs the very commands that it runs on a node, and nothing of this machine changes.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.apt import Apt

OLD, NEW = "535.183.01", "550.90.07"
REVISION = "-0ubuntu0.22.04.1"
KERNEL = "6.1.0-57-cloud-amd64"


def need(*programs: str) -> None:
    """Skip, saying so, where a tool is missing."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


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
            'Debug::NoLocking "false";\nDPkg::Options:: "--force-script-chrootless";\nDPkg::Options:: "--force-not-root";\n'
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
        description: str = "stand-in", files: dict[str, str] | None = None, postinst: str = "",
    ) -> Path:  # fmt: skip
        tree = self.root / "build" / f"{name}_{version}"
        control = tree / "DEBIAN"
        control.mkdir(parents=True)
        fields = [f"Package: {name}", f"Version: {version}", "Architecture: amd64", "Maintainer: nobody <n@example.com>"]
        fields += [f"Depends: {depends}"] if depends else []
        fields += [f"Provides: {provides}"] if provides else []
        fields += [f"Conflicts: {conflicts}", f"Replaces: {conflicts}"] if conflicts else []
        (control / "control").write_text("\n".join([*fields, f"Description: {description}", ""]))
        for path, text in (files or {}).items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        if postinst:
            (control / "postinst").write_text(f"#!/bin/sh\nset -e\n{postinst}\n")
            (control / "postinst").chmod(0o755)
        subprocess.run(
            ["dpkg-deb", "-Zgzip", "-z1", "--root-owner-group", "--build", str(tree), str(self.root / "debs")],
            check=True, capture_output=True,
        )  # fmt: skip
        return self.root / "debs" / f"{name}_{version}_amd64.deb"

    def build_driver(self, version: str, *, module: str | None = None, dkms: str = "", fabric: bool = True) -> None:
        """The driver packages of Ubuntu's server naming; ``module`` is what the module file says it is."""
        branch, full = version.split(".")[0], version + REVISION
        own = [f"nvidia-utils-{branch}-server", f"libnvidia-compute-{branch}-server", f"nvidia-dkms-{branch}-server",
               f"nvidia-kernel-common-{branch}-server"]  # fmt: skip
        self.build(f"nvidia-driver-{branch}-server", full, depends=", ".join(f"{name} (= {full})" for name in own),
                   provides="nvidia-driver-standin", conflicts="nvidia-driver-standin")  # fmt: skip
        ko = f"lib/modules/{KERNEL}/updates/dkms/nvidia.ko"
        for name in own:
            virtual = name.replace(f"-{branch}-server", "")
            is_dkms = name.startswith("nvidia-dkms")
            self.build(name, full, provides=virtual, conflicts=virtual,
                       files={ko: module or version} if is_dkms else {f"usr/share/{virtual}/version": version},
                       postinst=dkms if is_dkms else "")  # fmt: skip
        if fabric:
            self.build(f"nvidia-fabricmanager-{branch}", f"{version}-1", provides="nvidia-fabricmanager",
                       conflicts="nvidia-fabricmanager")  # fmt: skip

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
