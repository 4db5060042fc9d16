# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real dnf and rpm move a driver: streams, precompiled modules, locks, renamed packages, offline and back."""

from __future__ import annotations

import itertools

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import install, rpm_text
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

clock = itertools.count(1000.0).__next__
DKMS, OPEN_DKMS = "kmod-nvidia-latest-dkms", "kmod-nvidia-open-dkms"


def call(node, function, *arguments, **options):
    journal = Journal.open(str(node.base / "state"))
    source = node.source(**options.pop("source", {}))
    where = install.Node(node.run, "5.14.0-503.23.2.el9_5.x86_64", str(node.base / "state"), node.base / "sys")
    try:
        if function is install.stage:
            return install.stage(source, journal, *arguments, True, False)
        return function(source, journal, where, *arguments, clock, **options)
    finally:
        journal.close()


def upgrade(node, version, flavour="auto", **options):
    return call(node, install.bring, DriverVersion.parse(version), flavour, **options)


def go_back(node, **options):
    return call(node, install.bring, None, "auto", **options)


@pytest.fixture
def streams(dnf_node):
    """On 550-dkms; 580-open, 580-dkms and 550-dkms are published."""
    published = {
        "550-dkms": dnf_node.build_stream("550.90.07", "550-dkms", DKMS),
        "580-open": dnf_node.build_stream("580.95.05", "580-open", OPEN_DKMS, conflicts=(DKMS,)),
    }
    dnf_node.publish(published)
    dnf_node.must("dnf", "-y", "module", "enable", "nvidia-driver:550-dkms")
    dnf_node.must("dnf", "-y", "install", DKMS, "nvidia-driver-cuda")
    return dnf_node


def enabled(node) -> str | None:
    return rpm_text.enabled_stream((node.root / "etc/dnf/modules.d/nvidia-driver.module").read_text())


def test_a_pkg_07_dnf_itself_refuses_to_switch_an_enabled_stream(streams):
    done = streams.run(["dnf", "-y", "module", "enable", "nvidia-driver:580-open"], timeout=60)
    assert not done.ok and "not possible to switch enabled streams" in done.stderr


def test_a_pkg_07_stream_and_packages_move_in_one_transaction_and_back(streams):
    before = streams.packages()
    result = upgrade(streams, "580.95.05", "open")
    assert result.after == {
        OPEN_DKMS: "3:580.95.05-1.el9",
        "nvidia-driver-cuda": "3:580.95.05-1.el9",
        "nvidia-driver-cuda-libs": "3:580.95.05-1.el9",
        "nvidia-kmod-common": "3:580.95.05-1.el9",
    }
    assert enabled(streams) == "580-open" and result.disk_module == "580.95.05"
    assert not upgrade(streams, "580.95.05", "open").changed
    assert go_back(streams).changed
    assert streams.packages() == before and enabled(streams) == "550-dkms"
    assert not go_back(streams).changed


def test_staged_once_then_neither_way_needs_the_repository(streams):
    staged = call(streams, install.stage, DriverVersion.parse("580.95.05"), "open")
    assert staged.changed and len(staged.target.files) == len(staged.rollback.files) == 4
    assert not call(streams, install.stage, DriverVersion.parse("580.95.05"), "open").changed
    assert enabled(streams) == "550-dkms" and streams.packages()[DKMS] == "3:550.90.07-1.el9"


def test_offline_from_a_repository_on_the_network(streams, http_repository):
    call(streams, install.stage, DriverVersion.parse("580.95.05"), "open")
    http_repository.stop()
    assert upgrade(streams, "580.95.05", "open").disk_module == "580.95.05"
    assert go_back(streams).disk_module == "550.90.07"


def test_check_mode_changes_nothing(streams):
    result = upgrade(streams, "580.95.05", "open", check_mode=True)
    assert result.changed and result.after[OPEN_DKMS] == "3:580.95.05-1.el9"
    assert enabled(streams) == "550-dkms" and streams.packages()[DKMS] == "3:550.90.07-1.el9"


def test_a_pkg_06_no_precompiled_module_for_this_kernel(dnf_node):
    kernel = "5.14.0-503.23.2"
    old = f"kmod-nvidia-535.183.06-{kernel}"
    dnf_node.build_stream("535.183.06", None, old)
    dnf_node.build_stream("535.216.01", None, "kmod-nvidia-535.216.01-5.14.0-427.13.1")
    dnf_node.publish()
    dnf_node.must("dnf", "-y", "install", old, "nvidia-driver-cuda-3:535.183.06-1.el9")
    with pytest.raises(install.Refused, match=r"no precompiled module of 535\.216\.01 for kernel 5\.14\.0-503\.23\.2"):
        upgrade(dnf_node, "535.216.01")
    new = f"kmod-nvidia-535.216.01-{kernel}"
    dnf_node.build_stream("535.216.01", None, new)
    dnf_node.publish()
    dnf_node.source().update()
    assert upgrade(dnf_node, "535.216.01").after[new] == "3:535.216.01-1.el9"
    assert go_back(dnf_node).after[old] == "3:535.183.06-1.el9"


@pytest.fixture
def plain(dnf_node):
    """Without streams, as on Enterprise Linux 10: 570.86.15 installed, with Fabric Manager; 580.95.05 published."""
    for version in ("570.86.15", "580.95.05"):
        dnf_node.build_stream(version, None, OPEN_DKMS)
    dnf_node.build("nvidia-fabric-manager", "570.86.15", epoch=0)
    dnf_node.build("nvidia-fabricmanager", "580.95.05", epoch=0, conflicts=("nvidia-fabric-manager",))
    dnf_node.publish()
    dnf_node.must("dnf", "-y", "install", f"{OPEN_DKMS}-3:570.86.15", "nvidia-driver-cuda-3:570.86.15",
                  "nvidia-fabric-manager")  # fmt: skip
    return dnf_node


def test_a_pkg_13_fabric_manager_changes_its_name_and_back(plain):
    before = plain.packages()
    assert upgrade(plain, "580.95.05").after["nvidia-fabricmanager"] == "580.95.05-1.el9"
    assert "nvidia-fabric-manager" not in plain.packages()
    assert go_back(plain).changed and plain.packages() == before


def test_locked_packages_are_refused_or_released_and_locked_again(plain):
    locks = plain.root / "etc/dnf/plugins/versionlock.list"
    locks.write_text("# by the site\nnvidia-driver-cuda-3:570.86.15-1.el9.*\nkernel-0:5.14.0-503.23.2.el9_5.*\n")
    with pytest.raises(install.Refused, match="locked packages would have to move: nvidia-driver-cuda"):
        upgrade(plain, "580.95.05")
    upgrade(plain, "580.95.05", source={"release_holds": ["nvidia-*"]})
    assert locks.read_text().splitlines() == [
        "kernel-0:5.14.0-503.23.2.el9_5.*",
        "nvidia-driver-cuda-3:580.95.05-1.el9.*",
    ]
    go_back(plain)
    assert "nvidia-driver-cuda-3:570.86.15-1.el9.*" in locks.read_text().splitlines()


def test_a_pkg_04_withdrawn_after_staging_is_put_back_from_the_saved_files(plain):
    upgrade(plain, "580.95.05")
    plain.publish(only="*580.95.05*")
    plain.source().update()
    assert go_back(plain).after["nvidia-driver-cuda"] == "3:570.86.15-1.el9"


def test_a_pkg_04_without_a_way_back_nothing_starts(plain):
    plain.publish(only="*580.95.05*")
    with pytest.raises(install.Refused, match="rollback_unavailable"):
        upgrade(plain, "580.95.05")
    assert upgrade(plain, "580.95.05", rollback_required=False).disk_module == "580.95.05"


def test_a_pkg_08_a_mixed_set_is_moved_as_a_whole(plain):
    plain.must("rpm", "-e", "--nodeps", "nvidia-driver-cuda-libs")
    plain.must("rpm", "-i", "--nodeps", *[str(p) for p in (plain.base / "repo").glob("*cuda-libs-580*")])
    assert [p.check for p in plain.source().detect().problems] == ["drivers.mixed_versions"]
    assert set(upgrade(plain, "580.95.05").after.values()) == {"3:580.95.05-1.el9", "580.95.05-1.el9"}


def test_a_package_that_depends_on_the_old_driver_is_not_lost(plain):
    plain.build("site-monitor", "1", requires=("nvidia-driver-cuda-libs = 3:570.86.15",))
    plain.publish()
    plain.must("dnf", "-y", "install", "site-monitor")
    with pytest.raises(install.Refused, match=r"site-monitor"):
        upgrade(plain, "580.95.05")


def test_a_dkms_04_label_and_content_differ(plain):
    plain.module = "575.57.08"
    with pytest.raises(SourceError, match=r"on disk .* is 575\.57\.08, the packages say 580\.95\.05"):
        upgrade(plain, "580.95.05")


def test_half_a_transaction_is_finished(streams):
    """The state that a killed rpm transaction leaves: new packages beside the old ones."""
    call(streams, install.stage, DriverVersion.parse("580.95.05"), "open")
    journal = Journal.open(str(streams.base / "state"))
    source = streams.source()
    journal.remember("packages", source.snapshot(source.detect()).as_dict())
    journal.start("packages", 1.0)
    journal.close()
    half = next((streams.base / "repo").glob("nvidia-driver-cuda-libs-580*"))
    streams.must("rpm", "-i", "--force", "--nodeps", str(half))
    assert upgrade(streams, "580.95.05", "open").disk_module == "580.95.05"
    assert streams.must("rpm", "-q", "nvidia-driver-cuda-libs").split() == [
        "nvidia-driver-cuda-libs-580.95.05-1.el9.x86_64"
    ]
    assert go_back(streams).disk_module == "550.90.07"
