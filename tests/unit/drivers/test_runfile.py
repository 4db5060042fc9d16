# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA's installer: recognised, verified, run, and taken away by itself."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import install, runfile
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.runfile import Runfile
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

OLD, NEW, KERNEL = "535.183.01", "550.90.07", "6.1.0-57-cloud-amd64"
clock = itertools.count(1.0).__next__


@pytest.mark.parametrize(
    ("name", "version"),
    [
        pytest.param("NVIDIA-Linux-x86_64-550.90.07.run", "550.90.07", id="A-PKG-10"),
        ("NVIDIA-Linux-aarch64-580.95.05.run", "580.95.05"),
        ("NVIDIA-Linux-x86_64-570.124.06-grid.run", "570.124.06"),
        ("NVIDIA-Linux-x86_64-565.77.run", "565.77"),
        ("cuda_12.4.1_550.54.15_linux.run", None),
        ("NVIDIA-Linux-x86_64-550.run", None),
    ],
)
def test_the_version_in_a_file_name(name, version):
    assert runfile.file_version(name) == version


LOG = """\
nvidia-installer log file '/var/log/nvidia-installer.log'
creation time: Mon Jul  1 10:00:00 2024
installer version: 535.183.01

ERROR: An error occurred while performing the step: "Building kernel modules". See
       /var/log/nvidia-installer.log for details.
-> Something else.
ERROR: Installation has failed.
"""


def test_the_log_of_the_installer():
    assert runfile.log_version(LOG) == OLD
    assert runfile.log_errors(LOG) == [
        'An error occurred while performing the step: "Building kernel modules". See /var/log/nvidia-installer.log for '
        "details.",
        "Installation has failed.",
    ]
    assert runfile.log_version("") is None


@pytest.mark.parametrize(
    ("version", "flavour", "dkms", "tail"),
    [
        ("580.95.05", "open", True, ["--kernel-module-type=open", "--dkms"]),
        ("580.95.05", "proprietary", False, ["--kernel-module-type=proprietary"]),
        ("550.90.07", "open", False, ["-m=kernel-open"]),
        ("550.90.07", "proprietary", True, ["--dkms"]),
    ],
)
def test_how_the_installer_is_run(tmp_path, version, flavour, dkms, tail):
    file = tmp_path / "NVIDIA.run"
    argv = runfile.installer_argv(file, DriverVersion.parse(version), flavour, KERNEL, dkms)
    assert argv == [
        "sh", str(file), "--silent", "--no-x-check", "--no-nouveau-check", f"--kernel-name={KERNEL}", *tail,
    ]  # fmt: skip


class Machine:
    """A machine whose installer and uninstaller do what NVIDIA's leave behind."""

    def __init__(self, root, answers):
        self.root, self.answers = root, answers
        self.module, self.installer_rc = OLD, 0
        (root / "usr/bin").mkdir(parents=True)
        (root / "var/log").mkdir(parents=True)
        self.put(OLD)
        self.done: list[str] = []

    def put(self, version):
        (self.root / "usr/bin/nvidia-uninstall").write_text("")
        (self.root / "var/log/nvidia-installer.log").write_text(f"installer version: {version}\n")
        self.module = version

    def file(self, version):
        path = self.root / f"NVIDIA-Linux-x86_64-{version}.run"
        path.write_text(f"installer of {version}")
        return str(path), hashlib.sha256(path.read_bytes()).hexdigest()

    def __call__(self, argv, *, timeout, env=None, stdin=None):
        self.answers.set("modinfo", "-k", KERNEL, "-F", "version", out=f"{self.module}\n", rc=0 if self.module else 1)
        self.answers.set("modinfo", "-k", KERNEL, "-F", "license", out="NVIDIA\n", rc=0 if self.module else 1)
        if argv[0].endswith("nvidia-uninstall"):
            self.done.append("uninstall")
            (self.root / "usr/bin/nvidia-uninstall").unlink()
            self.module = None
            self.answers.set(argv[0])
        if argv[0] == "sh":
            self.done.append(f"install {runfile.file_version(argv[1].rpartition('/')[2])}")
            self.put(runfile.file_version(argv[1].rpartition("/")[2]))
            self.answers.set("sh", rc=self.installer_rc)
        return self.answers(argv, timeout=timeout)

    def source(self, **options):
        return Runfile(self, str(self.root), str(self.root / "state"), kernel=KERNEL, **options)


@pytest.fixture
def machine(tmp_path, answers):
    return Machine(tmp_path, answers)


def call(machine, function, *arguments, **options):
    journal = Journal.open(str(machine.root / "state"))
    source = machine.source(**options)
    node = install.Node(machine, KERNEL, str(machine.root / "state"), machine.root / "sys")
    try:
        return function(source, journal, node, *arguments, clock)
    finally:
        journal.close()


def test_a_pkg_10_the_old_one_goes_by_its_own_means_and_comes_back(machine):
    file, checksum = machine.file(NEW)
    previous, dummy = machine.file(OLD)
    target = DriverVersion.parse(NEW)
    result = call(machine, install.bring, target, "auto", file=file, checksum=checksum, previous=previous)
    assert result.changed and machine.done == ["uninstall", f"install {NEW}"]
    assert not call(machine, install.bring, target, "auto", file=file, checksum=checksum).changed
    assert call(machine, install.bring, None, "auto", file=file, checksum=checksum).after == {"NVIDIA-Linux": OLD}
    assert machine.done[2:] == ["uninstall", f"install {OLD}"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "is not on this node"),
        ({"file": "{old}", "checksum": "0"}, "is not the installer of 550.90.07"),
        ({"file": "{new}"}, "no checksum was given"),
        ({"file": "{new}", "checksum": "0" * 64}, "expected 000"),
    ],
)
def test_a_pkg_10_what_is_refused(machine, options, expected):
    names = {"old": machine.file(OLD)[0], "new": machine.file(NEW)[0]}
    options = {key: value.format(**names) for key, value in options.items()}
    with pytest.raises(install.Refused, match=expected):
        call(machine, install.bring, DriverVersion.parse(NEW), "auto", previous=names["old"], **options)
    assert machine.done == []


def test_a_pkg_10_without_the_old_installer_there_is_no_way_back(machine):
    file, checksum = machine.file(NEW)
    with pytest.raises(install.Refused, match=r"the installer of 535\.183\.01 was not kept"):
        call(machine, install.bring, DriverVersion.parse(NEW), "auto", file=file, checksum=checksum)


def test_a_dkms_07_a_failure_status_with_the_right_modules_is_a_success(machine):
    file, checksum = machine.file(NEW)
    previous, dummy = machine.file(OLD)
    machine.installer_rc = 1
    target = DriverVersion.parse(NEW)
    assert call(machine, install.bring, target, "auto", file=file, checksum=checksum, previous=previous).changed


def test_a_failure_with_other_modules_is_one(machine, monkeypatch):
    file, checksum = machine.file(NEW)
    previous, dummy = machine.file(OLD)
    machine.installer_rc = 1
    monkeypatch.setattr(
        machine, "put", lambda version: (machine.root / runfile._LOG).write_text("ERROR: No compiler.\n")
    )
    with pytest.raises(SourceError, match=r"the installer of 550\.90\.07 failed: No compiler\."):
        call(machine, install.bring, DriverVersion.parse(NEW), "auto", file=file, checksum=checksum, previous=previous)
