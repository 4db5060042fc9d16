# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which source a node's driver comes from, and what the modules' options turn into."""

from __future__ import annotations

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import detect, install
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import Installed, PackagePlan, SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.preflight import preflight
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

VERSION = "550.90.07-0ubuntu0.22.04.1"


def uninstaller(root):
    (root / "usr/bin/nvidia-uninstall").write_text("")
    (root / "var/log").mkdir(parents=True, exist_ok=True)
    (root / "var/log/nvidia-installer.log").write_text("installer version: 535.183.01\n")


def test_nothing(debian, answers):
    debian.dpkg(("bash", "5.1", "ii "))
    found = detect.detect(answers, str(debian.root))
    assert (found.source, found.version, found.methods) == ("none", None, ())


def test_packages(debian, answers):
    debian.dpkg(("nvidia-utils-550-server", VERSION, "ii "))
    found = detect.detect(answers, str(debian.root))
    assert (found.source, found.version) == ("apt", "550.90.07")
    assert found.as_dict()["packages"] == {
        "nvidia-utils-550-server": {"version": VERSION, "arch": "amd64", "state": "installed"}
    }


def test_a_pkg_10_packages_and_runfile_are_two_methods(debian, answers):
    debian.dpkg(("nvidia-utils-550-server", VERSION, "ii "))
    uninstaller(debian.root)
    found = detect.detect(answers, str(debian.root))
    assert [method["source"] for method in found.methods] == ["apt", "runfile"]
    assert [problem.check for problem in found.problems] == ["drivers.two_methods"]


def test_a_pkg_10_the_log_alone_is_a_trace_of_the_past(debian, answers):
    debian.dpkg(("nvidia-utils-550-server", VERSION, "ii "))
    uninstaller(debian.root)
    (debian.root / "usr/bin/nvidia-uninstall").unlink()
    assert detect.detect(answers, str(debian.root)).problems == ()


def test_a_opr_03_a_driver_container_beside_host_packages(debian, answers):
    debian.dpkg(("nvidia-utils-550-server", VERSION, "ii "))
    container = debian.root / "run/nvidia/driver/usr/bin"
    container.mkdir(parents=True)
    (container / "nvidia-smi").write_text("")
    found = detect.detect(answers, str(debian.root))
    assert [method["source"] for method in found.methods] == ["apt", "operator"] and found.problems


def test_a_driver_container_alone(debian, answers):
    debian.dpkg(("bash", "5.1", "ii "))
    (debian.root / "run/nvidia").mkdir(parents=True)
    (debian.root / "run/nvidia/nvidia-driver.pid").write_text("1")
    assert detect.detect(answers, str(debian.root)).source == "operator"


@pytest.mark.parametrize(
    ("asked", "installed", "expected"),
    [("auto", "apt", "apt"), ("auto", "runfile", "runfile"), ("apt", "apt", "apt"), ("runfile", "none", "runfile")],
)
def test_the_source_to_work_with(asked, installed, expected):
    assert detect.choose(asked, Installed(source=installed)) == expected


def test_another_source_than_the_one_that_installed_it_is_refused():
    with pytest.raises(SourceError, match="installed by apt, and runfile was asked for"):
        detect.choose("runfile", Installed(source="apt"))


@pytest.mark.parametrize(
    ("file", "expected"), [("usr/bin/dnf", "dnf"), ("usr/bin/zypper", "zypper"), ("usr/bin/apt-get", None)]
)
def test_the_package_manager_of_a_system(tmp_path, file, expected):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("")
    assert detect.native(str(tmp_path)) == expected


class TestPreflight:
    """Ready, already there, or neither."""

    NAMES = ("libnvidia-compute", "nvidia-dkms")

    @pytest.fixture
    def ask(self, debian, answers, tmp_path):
        def asked(target="550.90.07", disk="535.183.01", loaded=None, host=(), rollback=True):
            answers.set("modinfo", out=f"{disk}\n")
            if loaded:
                (tmp_path / "sys/module/nvidia").mkdir(parents=True)
                (tmp_path / "sys/module/nvidia/version").write_text(loaded)
            source = detect.make("apt", answers, str(debian.root), str(tmp_path / "state"), lock_timeout=0.0)
            node = install.Node(answers, "k", str(tmp_path / "state"), tmp_path / "sys")
            journal = Journal.open(str(tmp_path / "state"), read_only=True)
            version = DriverVersion.parse(target)
            return preflight(source, journal, node, version, "auto", rollback, lambda plan: host)

        return asked

    @pytest.fixture
    def on_535(self, debian):
        old = "535.183.01-0ubuntu0.22.04.1"
        debian.dpkg(*[(f"{name}-535-server", old, "ii ") for name in self.NAMES])
        debian.offers(
            {f"{name}-550-server": [VERSION] for name in self.NAMES}
            | {f"{name}-535-server": [old] for name in self.NAMES}
        )

    def test_ready(self, on_535, ask):
        found = ask()
        assert found.ready and not found.already and found.findings == ()
        assert found.as_dict()["plan"]["install"] == {f"{name}-550-server": VERSION for name in self.NAMES}

    def test_what_the_machine_says_counts(self, on_535, ask):
        space = Finding("boot.space", "error", "/boot has 3 MiB free", {})
        assert not ask(host=[space]).ready

    def test_the_machine_is_shown_the_plan(self, on_535, ask, debian):
        record = (
            f"Package: nvidia-dkms-550-server\nVersion: {VERSION}\nDepends: dkms, nvidia-kernel-common-550-server\n"
        )
        debian.answers.set("apt-cache", "show", out=record)
        assert ask().plan.builds_module

    def test_a_pkg_08_already_means_packages_disk_and_memory(self, debian, ask, tmp_path):
        debian.dpkg(*[(f"{name}-550-server", VERSION, "ii ") for name in self.NAMES])
        debian.offers({f"{name}-550-server": [VERSION] for name in self.NAMES})
        assert not ask(disk="550.90.07").already
        assert ask(disk="550.90.07", loaded="550.90.07").already
        assert not ask(disk="535.183.01").already

    def test_a_lost_way_back_is_an_error_or_a_warning(self, debian, ask):
        debian.dpkg(*[(f"{name}-535-server", "535.183.01-0ubuntu0.22.04.1", "ii ") for name in self.NAMES])
        debian.offers({f"{name}-550-server": [VERSION] for name in self.NAMES})
        assert not ask().ready
        assert ask(rollback=False).ready

    def test_a_transaction_of_ours_that_was_interrupted_does_not_stop_us(self, debian, ask, tmp_path, on_535):
        debian.dpkg(*[(f"{name}-535-server", "535.183.01-0ubuntu0.22.04.1", "iU ") for name in self.NAMES])
        assert not ask().ready
        journal = Journal.open(str(tmp_path / "state"))
        source = detect.make("apt", debian.answers, str(debian.root), str(tmp_path / "state"))
        journal.remember("packages", source.snapshot(source.detect()).as_dict())
        journal.start("packages", 1.0)
        journal.close()
        assert ask().ready

    def test_an_empty_plan_is_a_plan(self):
        assert PackagePlan("apt", "550.90.07", "open").empty
