# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is installed from .debs, what would move, and what stands in the way."""

from __future__ import annotations

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.apt import Apt
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import SourceError, verify
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.preflight import pairing
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

SERVER = ("nvidia-driver", "nvidia-dkms", "nvidia-kernel-common", "libnvidia-compute", "nvidia-utils")


def source(debian, **options) -> Apt:
    return Apt(debian.answers, str(debian.root), str(debian.root / "state"), **options)


def server(branch: str, version: str, status: str = "ii ") -> list[tuple[str, str, str]]:
    return [(f"{stem}-{branch}-server", version, status) for stem in SERVER]


def checks(findings) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def plan(debian, target: str, flavour: str = "proprietary", **options):
    apt = source(debian, **options)
    installed = apt.detect()
    return apt.plan(apt.snapshot(installed), installed, DriverVersion.parse(target), flavour)


def test_a_nvml_01_the_installed_version_is_that_of_the_packages(debian):
    debian.dpkg(("nvidia-driver-550", "550.107.02-0ubuntu0.24.04.1", "ii "), ("bash", "5.1", "ii "))
    found = source(debian).detect()
    assert (found.version, found.branches, list(found.builds())) == ("550.107.02", ("550",), ["nvidia-driver-550"])


def test_a_nvml_02_one_small_library_was_moved_by_an_automatic_upgrade(debian):
    debian.dpkg(
        ("libnvidia-common-460", "460.73.01-0ubuntu0.20.04.1", "ii "),
        ("libnvidia-compute-460", "460.56-0ubuntu0.20.04.1", "hi "),
        ("nvidia-dkms-460", "460.56-0ubuntu0.20.04.1", "hi "),
    )
    log = debian.root / "var/log/apt/history.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "Start-Date: 2021-04-20  06:50:12\nCommandline: /usr/bin/unattended-upgrade\n"
        "Upgrade: libnvidia-common-460:amd64 (460.56-0ubuntu0.20.04.1, 460.73.01-0ubuntu0.20.04.1)\n"
    )
    found = source(debian).detect()
    (problem,) = found.problems
    assert (problem.check, problem.level) == ("drivers.mixed_versions", "warning")
    assert "differing: libnvidia-common-460" in problem.message
    assert "2021-04-20  06:50:12" in problem.message and "unattended-upgrade" in problem.message
    (remark,) = source(debian).remarks(found)
    assert remark.check == "drivers.hold_coverage" and remark.next == "apt-mark hold libnvidia-common-460"


def test_a_nvml_03_two_builds_of_one_short_version_are_two_versions(debian):
    debian.dpkg(
        ("libnvidia-compute-570", "570.124.04-0ubuntu1", "ii "), ("nvidia-dkms-570", "570.124.06-0ubuntu1", "ii ")
    )
    assert source(debian).detect().versions == ("570.124.06", "570.124.04")


def test_a_nvml_05_a_set_at_two_versions_is_not_one_driver(debian):
    debian.dpkg(
        ("libnvidia-compute-570", "570.158.01-0ubuntu1", "ii "),
        ("nvidia-kernel-common-570", "570.133.07-0ubuntu1", "ii "),
        ("nvidia-dkms-570", "570.158.01-0ubuntu1", "ii "),
    )
    found = source(debian).detect()
    assert found.version is None and checks(found.problems) == {"drivers.mixed_versions": "warning"}
    verdict = verify(found, "570.158.01", "570.158.01", "k")
    assert [finding.check for finding in verdict.findings] == ["drivers.mixed_versions"]
    assert "nvidia-kernel-common-570 570.133.07" in verdict.findings[0].message


def test_a_nvml_06_a_tool_pulled_a_second_branch(debian):
    debian.dpkg(
        ("libnvidia-compute-470", "470.57.02-0ubuntu0.20.04.1", "ii "),
        ("libnvidia-compute-495", "495.44-0ubuntu0.20.04.1", "ii "),
        ("nvidia-dkms-495", "495.44-0ubuntu0.20.04.1", "ii "),
    )
    log = debian.root / "var/log/apt/history.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "Start-Date: 2021-11-01  10:00:00\nCommandline: apt install nvtop\n"
        "Install: libnvidia-compute-470:amd64 (470.57.02-0ubuntu0.20.04.1, automatic), nvtop:amd64 (1.2-1)\n"
    )
    (problem,) = source(debian).detect().problems
    assert (problem.check, problem.level) == ("drivers.two_branches", "error")
    assert "470, 495" in problem.message and "libnvidia-compute-470 came at" in problem.message
    assert "apt install nvtop" in problem.message


def test_a_dkms_06_a_package_dpkg_did_not_finish(debian):
    debian.dpkg(("nvidia-dkms-418-server", "418.226.00-0ubuntu0.20.04.2", "iF "))
    (problem,) = source(debian).detect().problems
    assert problem.level == "error" and "nvidia-dkms-418-server (half-configured)" in problem.message


def test_an_interrupted_dpkg(debian):
    debian.dpkg(("bash", "5.1", "ii "))
    (debian.root / "var/lib/dpkg/updates").mkdir()
    (debian.root / "var/lib/dpkg/updates/0003").write_text("")
    assert checks(source(debian).detect().problems) == {"drivers.package_state": "error"}


def test_two_flavours_at_once(debian):
    debian.dpkg(("nvidia-dkms-570", "570.86.15-0ubuntu1", "ii "), ("nvidia-dkms-570-open", "570.86.15-0ubuntu1", "ii "))
    assert checks(source(debian).detect().problems) == {"drivers.two_flavours": "error"}


def test_one_flavour_is_no_problem(debian):
    debian.dpkg(("nvidia-dkms-570-open", "570.86.15-0ubuntu1", "ii "))
    found = source(debian).detect()
    assert (found.flavour, found.problems) == ("open", ())


def test_tools_of_another_origin_are_not_part_of_the_set(debian):
    debian.dpkg(
        *server("535", "535.183.01-0ubuntu0.22.04.1"),
        ("nvidia-settings", "510.47.03-0ubuntu1", "ii "),
        ("nvidia-modprobe", "535.183.01-0ubuntu1", "ii "),
    )
    assert {"nvidia-settings", "nvidia-modprobe"} & source(debian).detect().builds().keys() == {"nvidia-modprobe"}


def test_a_pkg_01_the_whole_set_has_its_counterparts(debian):
    old, new = "450.102.04-0ubuntu0.20.04.1", "460.32.03-0ubuntu0.20.04.1"
    debian.dpkg(*server("450", old), ("nvidia-compute-utils-450-server", old, "ii "))
    names = [f"{stem}-460-server" for stem in (*SERVER, "nvidia-compute-utils")]
    debian.offers({name: [new] for name in names}, {})
    found = plan(debian, "460.32.03")
    assert {build.name: build.version for build in found.install} == dict.fromkeys(names, new)
    assert set(found.remove) == {f"{stem}-450-server" for stem in (*SERVER, "nvidia-compute-utils")}
    assert not found.refused


def test_the_same_packager_is_kept_where_two_offer_the_version(debian):
    debian.dpkg(("nvidia-utils-535", "535.183.01-0ubuntu0.22.04.1", "ii "))
    debian.offers({"nvidia-utils-550": ["550.90.07-0ubuntu1", "550.90.07-0ubuntu0.22.04.1"]})
    assert [build.version for build in plan(debian, "550.90.07").install] == ["550.90.07-0ubuntu0.22.04.1"]


def test_a_pkg_02_the_candidate_jumps_to_another_branch(debian):
    debian.dpkg(*server("450", "450.102.04-0ubuntu0.20.04.1"))
    debian.offers({f"{stem}-460-server": ["470.57.02-0ubuntu0.20.04.1"] for stem in SERVER})
    found = plan(debian, "460.91.03")
    assert found.refused
    messages = [finding.message for finding in found.findings if finding.check == "drivers.not_available"]
    assert any("offers nvidia-dkms-460-server 470.57.02" in m and "another branch" in m for m in messages)


def test_a_pkg_02_an_installed_meta_package_would_jump(debian):
    debian.dpkg(("nvidia-driver-460-server", "460.91.03-0ubuntu0.20.04.1", "ii "))
    debian.offers(
        {"nvidia-driver-460-server": ["470.57.02-0ubuntu0.20.04.1"]},
        {"nvidia-driver-460-server": "460.91.03-0ubuntu0.20.04.1"},
    )
    apt = source(debian)
    assert checks(apt.remarks(apt.detect())) == {"drivers.transitional_candidate": "warning"}


def test_a_pkg_03_a_suffixed_set_moves_to_the_names_of_590(debian):
    debian.dpkg(
        ("nvidia-dkms-580-open", "580.95.05-0ubuntu1", "ii "),
        ("libnvidia-compute-580", "580.95.05-0ubuntu1", "ii "),
        ("nvidia-driver-pinning-580", "580-1ubuntu1", "ii "),
    )
    new = "590.48.01-1ubuntu1"
    debian.offers(
        {"nvidia-dkms-open": [new], "libnvidia-compute": [new], "nvidia-driver-pinning-590": ["590-1ubuntu1"]}
    )
    found = plan(debian, "590.48.01", "open")
    assert [build.name for build in found.install] == [
        "libnvidia-compute", "nvidia-dkms-open", "nvidia-driver-pinning-590",
    ]  # fmt: skip
    assert set(found.remove) == {"nvidia-dkms-580-open", "libnvidia-compute-580", "nvidia-driver-pinning-580"}


def test_a_pkg_04_the_installed_version_is_gone(debian):
    old = "555.58.02-0ubuntu0~gpu22.04.1"
    debian.dpkg(("nvidia-driver-555", old, "ii "))
    debian.offers({}, {"nvidia-driver-555": old})
    apt = source(debian)
    (finding,) = apt.obtainable(apt.snapshot(apt.detect()))
    assert (finding.check, finding.level) == ("drivers.rollback_unavailable", "error")
    assert f"nvidia-driver-555={old}" in finding.message


def test_a_pkg_05_a_meta_package_that_brings_no_driver(debian):
    debian.dpkg(("cuda-drivers", "595.71.05-1ubuntu1", "ii "))
    debian.offers({"cuda-drivers": ["615.71.09-1ubuntu1"]}, {"cuda-drivers": "595.71.05-1ubuntu1"})
    debian.answers.set(
        "apt-cache", "show", out="Package: cuda-drivers\nVersion: 615.71.09-1ubuntu1\nDescription: NVIDIA drivers\n"
    )
    found = plan(debian, "615.71.09")
    assert checks(found.findings) == {"drivers.empty_meta": "error"} and "nvidia-open" in found.findings[0].next


def test_a_pkg_12_pre_built_modules_are_chosen_by_what_they_depend_on(debian):
    kernel = "5.15.0-113-generic"
    debian.dpkg((f"linux-modules-nvidia-535-server-{kernel}", "5.15.0-113.123", "ii "),
                ("libnvidia-compute-535-server", "535.183.01-0ubuntu0.22.04.1", "ii "))  # fmt: skip
    new = f"linux-modules-nvidia-550-server-{kernel}"
    debian.offers(
        {new: ["5.15.0-113.123+1"], "libnvidia-compute-550-server": ["550.90.07-0ubuntu0.22.04.1"]},
    )
    record = f"Package: {new}\nVersion: 5.15.0-113.123+1\nDepends: nvidia-kernel-common-550-server (<= 550.90.07-1)\n"
    debian.answers.set("apt-cache", "show", f"{new}=5.15.0-113.123+1", out=record)
    assert {build.name: build.version for build in plan(debian, "550.90.07").install}[new] == "5.15.0-113.123+1"
    refused = plan(debian, "550.107.02")
    assert refused.refused and any(new in finding.message for finding in refused.findings)


def test_a_library_without_a_counterpart_is_named_and_goes(debian):
    debian.dpkg(
        ("libnvidia-gpucomp-580", "580.95.05-0ubuntu1", "ii "), ("nvidia-utils-580", "580.95.05-0ubuntu1", "ii ")
    )
    debian.offers({"nvidia-utils-570": ["570.86.15-0ubuntu1"]})
    found = plan(debian, "570.86.15")
    assert checks(found.findings) == {"drivers.dropped": "warning"} and "libnvidia-gpucomp-580" in found.remove


def test_a_held_package_that_would_move(debian):
    debian.dpkg(*server("535", "535.183.01-0ubuntu0.22.04.1", "hi "))
    debian.offers({f"{stem}-550-server": ["550.90.07-0ubuntu0.22.04.1"] for stem in SERVER})
    assert checks(plan(debian, "550.90.07").findings) == {"drivers.held": "error"}
    allowed = plan(debian, "550.90.07", release_holds=["*nvidia*"])
    assert not allowed.refused and set(allowed.hold) == {f"{stem}-550-server" for stem in SERVER}


def test_nothing_to_do_is_an_empty_plan(debian):
    debian.dpkg(*server("550", "550.90.07-0ubuntu0.22.04.1"))
    debian.offers({f"{stem}-550-server": ["550.90.07-0ubuntu0.22.04.1"] for stem in SERVER})
    assert plan(debian, "550.90.07").empty


def test_nothing_installed_has_no_set_to_move(debian):
    debian.dpkg(("bash", "5.1", "ii "))
    assert checks(plan(debian, "550.90.07").findings) == {"drivers.nothing_installed": "error"}


def test_a_fab_01_fabric_manager_of_the_branch_but_another_version(debian):
    debian.dpkg(
        ("nvidia-dkms-550-server", "550.90.07-0ubuntu0.22.04.1", "ii "),
        ("nvidia-fabricmanager-550", "550.107.02-1", "ii "),
    )
    (finding,) = pairing(source(debian).detect(), "550.90.07")
    assert finding.check == "drivers.fabric_version" and "550.107.02" in finding.message


def test_a_fab_02_an_automatic_upgrade_would_move_fabric_manager(debian):
    debian.dpkg(("nvidia-fabricmanager-460", "460.73.01-1", "ii "), ("nvidia-dkms-460", "460.73.01-0ubuntu1", "hi "))
    debian.offers(
        {"nvidia-fabricmanager-460": ["460.91.03-0ubuntu0.20.04.1"]}, {"nvidia-fabricmanager-460": "460.73.01-1"}
    )
    apt = source(debian)
    found = {finding.check: finding for finding in apt.remarks(apt.detect())}
    assert "460.91.03-0ubuntu0.20.04.1" in found["drivers.fabric_candidate"].message


def test_a_pkg_14_a_lock_that_stays_is_reported_with_its_holder(debian, monkeypatch):
    debian.answers.set("dpkg", "--configure")
    waits = []
    apt = source(debian, lock_timeout=3.0, sleep=waits.append)
    monkeypatch.setattr(
        "ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base.lock_holder",
        lambda path: "process 1123 (unattended-upgr)",
    )
    with pytest.raises(SourceError, match=r"process 1123 \(unattended-upgr\) still holds dpkg's lock"):
        apt.recover(60.0)
    assert waits == [1.0, 1.0, 1.0] and ("dpkg", "--configure", "-a") not in [a[:3] for a in debian.answers.asked]


def test_a_pkg_14_only_active_timers_are_stopped_and_started(debian):
    (debian.root / "run/systemd/system").mkdir(parents=True)
    debian.answers.set("systemctl", "is-active", out="active\ninactive\nactive\n", rc=3)
    debian.answers.set("systemctl", "stop")
    debian.answers.set("systemctl", "start")
    debian.dpkg(("bash", "5.1", "ii "))
    apt = source(debian)
    timers = apt.snapshot(apt.detect()).timers
    assert timers == ("apt-daily.timer", "unattended-upgrades.service")
    apt.pause_automatic(timers)
    apt.resume_automatic(timers)
    assert debian.answers.asked[-2:] == [("systemctl", "stop", *timers), ("systemctl", "start", *timers)]
