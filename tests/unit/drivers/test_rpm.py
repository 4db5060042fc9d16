# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What rpm, dnf and zypper print, read as data; what the dnf and zypper sources make of it."""

from __future__ import annotations

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import rpm_text
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.dnf import Dnf
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.zypper import Zypper
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

KERNEL = "4.18.0-553.22.1.el8_10.x86_64"


def test_a_16_an_epoch_is_part_of_the_version():
    text = "nvidia-open|3|610.57.04|1.el9|x86_64\nnvidia-fabricmanager|0|580.95.05|1|x86_64\ngarbage\n"
    assert [package.nevra for package in rpm_text.rpm_packages(text)] == [
        "nvidia-open-3:610.57.04-1.el9.x86_64",
        "nvidia-fabricmanager-580.95.05-1.x86_64",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[nvidia-driver]\nname=nvidia-driver\nstream=550-dkms\nprofiles=\nstate=enabled\n", "550-dkms"),
        ("[nvidia-driver]\nname=nvidia-driver\nstream=\nprofiles=\nstate=\n", None),
        ("", None),
        ("not an ini file", None),
    ],
)
def test_a_pkg_07_the_enabled_stream(text, expected):
    assert rpm_text.enabled_stream(text) == expected


TABLE = """\
Dependencies resolved.
================================================================================
 Package                     Arch       Version                 Repo       Size
================================================================================
Installing:
 kmod-nvidia-535.216.01-4.18.0-553.22.1
                             x86_64     3:535.216.01-1.el8      cuda       40 M
 nvidia-fabricmanager        x86_64     580.95.05-1             cuda      5.6 k
     replacing  nvidia-fabric-manager.x86_64 570.86.15-1
Upgrading:
 nvidia-driver-cuda          x86_64     3:535.216.01-1.el8      cuda      5.6 k
Removing dependent packages:
 site-monitor                x86_64     1-1                     @cuda       0  
Switching module streams:
 nvidia-driver                          550-dkms -> 580-open                   

Transaction Summary
================================================================================
Install  1 Package
 not a row
"""  # noqa: W291


def test_the_table_of_a_transaction():
    assert rpm_text.transaction(TABLE) == [
        rpm_text.DnfChange("install", "kmod-nvidia-535.216.01-4.18.0-553.22.1", "3:535.216.01-1.el8", "x86_64"),
        rpm_text.DnfChange("install", "nvidia-fabricmanager", "580.95.05-1", "x86_64"),
        rpm_text.DnfChange("remove", "nvidia-fabric-manager", "570.86.15-1", "x86_64"),
        rpm_text.DnfChange("install", "nvidia-driver-cuda", "3:535.216.01-1.el8", "x86_64"),
        rpm_text.DnfChange("remove", "site-monitor", "1-1", "x86_64"),
    ]


def test_why_dnf_refuses():
    text = (
        "Error: \n Problem: package a-1 requires b = 2, but none of the providers can be installed\n"
        "  - cannot install both b-2 and b-1\n(try to add '--allowerasing')\n"
    )
    assert rpm_text.problems(text) == [
        "package a-1 requires b = 2, but none of the providers can be installed",
        "cannot install both b-2 and b-1",
    ]


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("nvidia-driver-3:550.90.07-1.el9.*", "nvidia-driver"),
        ("kmod-nvidia-open-dkms-3:575.51-1.fc41.*", "kmod-nvidia-open-dkms"),
        ("nvidia-driver-cuda", "nvidia-driver-cuda"),
        ("!nvidia-driver-3:550.90.07-1.el9.*", "nvidia-driver"),
        ("*nvidia*", "*nvidia*"),
    ],
)
def test_the_package_of_a_lock(entry, name):
    assert rpm_text.lock_name(entry) == name


ZYPPER = """\
S | Name                                        | Type    | Version                             | Arch   | Repository
--+---------------------------------------------+---------+-------------------------------------+--------+-----------
v | nvidia-open-driver-G06-signed-cuda-kmp-default | package | 580.105.08_k6.12.0_160000.5-1.1  | x86_64 | SLE
i | nvidia-open-driver-G06-signed-cuda-kmp-default | package | 580.95.05_k6.12.0_160000.5-1.1   | x86_64 | SLE
v | nvidia-compute-utils-G06                    | package | 580.119.02-1                        | x86_64 | NVIDIA
v | nvidia-compute-utils-G06                    | package | 580.105.08-1                        | x86_64 | NVIDIA
i | nvidia-compute-utils-G06                    | package | 580.95.05-1                         | x86_64 | NVIDIA
"""
KMP = "nvidia-open-driver-G06-signed-cuda-kmp-default"


def test_a_pkg_09_the_highest_version_on_both_sides():
    offered: dict[str, list[str]] = {}
    for row in rpm_text.zypper_offers(ZYPPER):
        offered.setdefault(row.name, []).append(row.version)
    assert str(rpm_text.common_version(offered)) == "580.105.08"
    assert rpm_text.common_version({"a": ["580.95.05-1"], "b": ["580.119.02-1"]}) is None
    assert rpm_text.common_version({}) is None


@pytest.fixture
def suse(answers, tmp_path):
    answers.set("rpm", "-qa", out=f"{KMP}|0|580.95.05_k6.12.0_160000.5|1.1|x86_64\n"
                "nvidia-compute-utils-G06|0|580.95.05|1|x86_64\n")  # fmt: skip
    answers.set("zypper", out=ZYPPER)
    return Zypper(answers, str(tmp_path), str(tmp_path / "state"))


def test_a_pkg_09_suse_is_judged_and_not_moved(suse):
    installed = suse.detect()
    assert (installed.version, installed.flavour) == ("580.95.05", "open")
    base = suse.snapshot(installed)
    (ahead,) = suse.plan(base, installed, DriverVersion.parse("580.119.02"), "open").findings
    assert KMP in ahead.message and "the highest version that all of them have is 580.105.08" in ahead.message
    (both,) = suse.plan(base, installed, DriverVersion.parse("580.105.08"), "open").findings
    assert (
        "zypper install --oldpackage" in both.next
        and f"{KMP}=580.105.08_k6.12.0_160000.5-1.1" in both.next
        and "zypper addlock" in both.next
    )
    assert suse.plan(base, installed, DriverVersion.parse("580.95.05"), "open").empty
    with pytest.raises(SourceError, match="does not change the driver of a SUSE system"):
        suse.apply(suse.plan(base, installed, DriverVersion.parse("580.95.05"), "open"), 1.0)


def rows(*packages: str) -> str:
    """``name 3:550.90.07-1.el9`` rows as rpm prints them."""
    text = ""
    for package in packages:
        name, version = package.split()
        epoch, dummy, rest = version.rpartition(":")
        text += "|".join([name, epoch or "0", *rest.split("-"), "x86_64"]) + "\n"
    return text


@pytest.fixture
def el(answers, tmp_path):
    (tmp_path / "state/packages/dnf-cache").mkdir(parents=True)
    answers.set("dnf")
    return Dnf(answers, str(tmp_path), str(tmp_path / "state"), kernel=KERNEL)


def test_a_pkg_08_two_versions_side_by_side(el, answers):
    answers.set("rpm", "-qa", out=rows("nvidia-driver 3:550.90.07-1.el9", "nvidia-driver-cuda 3:570.86.15-1.el9"))
    installed = el.detect()
    assert installed.version is None and installed.versions == ("570.86.15", "550.90.07")
    assert [problem.check for problem in installed.problems] == ["drivers.mixed_versions"]


def test_one_package_twice_is_an_interrupted_transaction(el, answers):
    answers.set("rpm", "-qa", out=rows("nvidia-driver 3:550.90.07-1.el9", "nvidia-driver 3:570.86.15-1.el9"))
    assert [problem.level for problem in el.detect().problems if problem.check == "drivers.package_state"] == ["error"]


def test_a_pkg_06_user_space_without_a_module_for_this_kernel(el, answers):
    old = "kmod-nvidia-535.183.06-4.18.0-553.22.1"
    answers.set("rpm", "-qa", out=rows(f"{old} 3:535.183.06-3.el8_10", "nvidia-driver 3:535.183.06-1.el8"))
    offered = f"{old}|3|535.183.06|3.el8_10|x86_64|cuda|1\nnvidia-driver|3|535.216.01|1.el8|x86_64|cuda|1\n"
    cache = f"--setopt=cachedir={el.state_dir}/packages/dnf-cache"
    answers.set("dnf", "--cacheonly", cache, out=offered)
    installed = el.detect()
    plan = el.plan(el.snapshot(installed), installed, DriverVersion.parse("535.216.01"), "proprietary")
    (finding,) = [finding for finding in plan.findings if finding.level == "error"]
    assert finding.check == "drivers.no_precompiled" and KERNEL in finding.message
    assert "kmod-nvidia-535.216.01-4.18.0-553.22.1" in finding.message


def test_a_pkg_07_an_unreadable_stream_is_refused(el, answers, tmp_path):
    answers.set("rpm", "-qa", out=rows("nvidia-driver 3:550.90.07-1.el9"))
    file = tmp_path / "etc/dnf/modules.d/nvidia-driver.module"
    file.parent.mkdir(parents=True)
    file.write_text("[nvidia-driver]\nname=nvidia-driver\nstream=525.125.06\nstate=enabled\n")
    installed = el.detect()
    plan = el.plan(el.snapshot(installed), installed, DriverVersion.parse("550.90.07"), "proprietary")
    assert plan.refused and any("525-dkms or 525-open may be meant" in finding.message for finding in plan.findings)


def test_a_32_bit_half_is_not_silently_left_behind(el, answers):
    text = rows("nvidia-driver-libs 3:550.90.07-1.el9")
    answers.set("rpm", "-qa", out=text + text.replace("x86_64", "i686"))
    installed = el.detect()
    assert [problem.check for problem in installed.problems] == ["drivers.foreign_architecture"]
    assert [package.arch for package in installed.packages] == ["x86_64"]


def test_an_unreadable_database_says_what_to_do(el, answers):
    answers.set("rpm", "-qa", rc=1, err="error: rpmdb: damaged header")
    with pytest.raises(SourceError, match="rpm --rebuilddb"):
        el.detect()
