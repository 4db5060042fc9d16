# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA's installer: recognised, verified, run, and taken away by itself."""

from __future__ import annotations

import hashlib
import io
import itertools
import subprocess
import tarfile
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
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


ARCHIVE = """\
#!/bin/sh
# a shell script with an archive behind it, which checks itself and runs what it unpacks, as makeself's do
skip={skip}
MD5={md5}
where=$(mktemp -d) && trap 'rm -rf "$where"' EXIT
if [ "$(tail -n +$skip "$0" | md5sum | cut -d' ' -f1)" != $MD5 ]; then
  echo "Error in MD5 checksums: $MD5 is different" >&2
  exit 2
fi
tail -n +$skip "$0" | tar -xf - -C "$where"
cd "$where" && ./nvidia-installer "$@"
exit $?
"""
INSTALLER = """\
#!/bin/sh
root={root}
[ -e "$root/broken" ] || {{
  echo "install {version}" >>"$root/done"
  for word; do case $word in
    --silent|--no-x-check|--no-nouveau-check|--kernel-name=*|--kernel-module-type=*|-m=kernel-open|--dkms) ;;
    *) echo "ERROR: invalid option: $word" >"$root/var/log/nvidia-installer.log"; exit 1 ;;
  esac; done
  echo "installer version: {version}" >"$root/var/log/nvidia-installer.log"
  echo {version} >"$root/module"
  cp nvidia-uninstall "$root/usr/bin/"
}}
[ ! -e "$root/broken" ] || echo "ERROR: No compiler." >"$root/var/log/nvidia-installer.log"
[ ! -e "$root/fails" ] && [ ! -e "$root/broken" ]
"""
UNINSTALLER = """\
#!/bin/sh
[ "$*" = --silent ] || exit 1
echo uninstall >>{root}/done
rm {root}/module "$0"
"""


class Machine:
    """A machine with real installer files, which run and leave behind what NVIDIA's do; only the kernel's modinfo is
    answered for. A file ``fails`` lets an installer end with a failure, ``broken`` also without a module."""

    def __init__(self, root, answers):
        self.root, self.answers = root, answers
        (root / "usr/bin").mkdir(parents=True)
        (root / "var/log").mkdir(parents=True)
        subprocess.run(["sh", self.file(OLD)[0], "--silent"], check=True)
        (root / "done").unlink()

    @property
    def done(self):
        path = self.root / "done"
        return path.read_text().splitlines() if path.exists() else []

    def file(self, version):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, text in {"nvidia-installer": INSTALLER, "nvidia-uninstall": UNINSTALLER}.items():
                data = text.format(root=self.root, version=version).encode()
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o755
                archive.addfile(member, io.BytesIO(data))
        md5 = hashlib.md5(packed.getvalue(), usedforsecurity=False).hexdigest()
        head = ARCHIVE.format(skip=len(ARCHIVE.splitlines()) + 1, md5=md5)
        path = self.root / f"NVIDIA-Linux-x86_64-{version}.run"
        path.write_bytes(head.encode() + packed.getvalue())
        return str(path), hashlib.sha256(path.read_bytes()).hexdigest()

    def __call__(self, argv, *, timeout, env=None, stdin=None):
        if argv[0] == "sh" or argv[0].endswith("nvidia-uninstall"):
            return execution.run(argv, timeout=timeout)
        path = self.root / "module"
        self.answers.set(
            "modinfo",
            "-k",
            KERNEL,
            "-F",
            "version",
            out=path.read_text() if path.exists() else "",
            rc=int(not path.exists()),
        )
        self.answers.set("modinfo", "-k", KERNEL, "-F", "license", out="NVIDIA\n", rc=int(not path.exists()))
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
    (machine.root / "fails").touch()
    target = DriverVersion.parse(NEW)
    assert call(machine, install.bring, target, "auto", file=file, checksum=checksum, previous=previous).changed


def test_a_failure_with_other_modules_is_one(machine):
    file, checksum = machine.file(NEW)
    previous, dummy = machine.file(OLD)
    (machine.root / "broken").touch()
    with pytest.raises(SourceError, match=r"the installer of 550\.90\.07 failed: No compiler\."):
        call(machine, install.bring, DriverVersion.parse(NEW), "auto", file=file, checksum=checksum, previous=previous)
    assert machine.done == ["uninstall"]
    # and back: there is nothing to take away any more, and the old installer was kept
    (machine.root / "broken").unlink()
    assert call(machine, install.bring, None, "auto").after == {"NVIDIA-Linux": OLD}
    assert machine.done == ["uninstall", f"install {OLD}"]


def test_an_installer_that_is_replaced_after_its_check_is_not_kept(machine, monkeypatch):
    file, checksum = machine.file(NEW)
    previous, dummy = machine.file(OLD)
    copy = runfile.shutil.copyfile

    def replaced(source, to):
        if str(source) == file:
            Path(file).write_text("#!/bin/sh\nid\n")
        copy(source, to)

    monkeypatch.setattr(runfile.shutil, "copyfile", replaced)
    with pytest.raises(SourceError, match="has changed since it was checked"):
        call(machine, install.bring, DriverVersion.parse(NEW), "auto", file=file, checksum=checksum, previous=previous)
    assert machine.done == [] and not list(machine.root.glob(f"state/**/*{NEW}.run"))


def test_a_kept_installer_that_has_rotted_is_not_run(machine):
    file, checksum = machine.file(NEW)
    previous, dummy = machine.file(OLD)
    target = DriverVersion.parse(NEW)
    call(machine, install.bring, target, "auto", file=file, checksum=checksum, previous=previous)
    for kept in machine.root.glob(f"state/**/NVIDIA-Linux-x86_64-{OLD}.run"):
        data = kept.read_bytes()
        kept.write_bytes(data[:-600] + b"x" + data[-599:])
    with pytest.raises((install.Refused, SourceError)):
        call(machine, install.bring, None, "auto")
    assert machine.done == ["uninstall", f"install {NEW}"], "the driver that works is left alone"
