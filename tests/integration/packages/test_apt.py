# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real apt and dpkg move a driver: the whole set, offline, held, withdrawn, broken, killed."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import install
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.preflight import preflight
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import summary
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

KERNEL, OLD, NEW, REVISION = "6.1.0-57-cloud-amd64", "535.183.01", "550.90.07", "-0ubuntu0.22.04.1"
TARGET = DriverVersion.parse(NEW)
clock = itertools.count(1000.0).__next__


@contextlib.contextmanager
def held_lock(path: Path):
    """Another process holds a lock as apt does; yields its pid."""
    code = f"import fcntl, sys; f = open({str(path)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        yield other.pid
        other.stdin.close()


def names(branch: str) -> set[str]:
    server = ("nvidia-driver", "nvidia-utils", "libnvidia-compute", "nvidia-dkms", "nvidia-kernel-common")
    return {f"{stem}-{branch}-server" for stem in server} | {f"nvidia-fabricmanager-{branch}"}


def node_of(apt_node, sys: Path | None = None) -> install.Node:
    return install.Node(apt_node.run, KERNEL, str(apt_node.root / "state"), sys or apt_node.root / "sys")


def journal_of(apt_node) -> Journal:
    return Journal.open(str(apt_node.root / "state"))


def upgrade(apt_node, target=TARGET, **options):
    source = apt_node.source(**options.pop("source", {}))
    journal = journal_of(apt_node)
    try:
        return install.bring(source, journal, node_of(apt_node), target, "auto", clock, **options)
    finally:
        journal.close()


def go_back(apt_node, **options):
    journal = journal_of(apt_node)
    try:
        return install.bring(apt_node.source(), journal, node_of(apt_node), None, "auto", clock, **options)
    finally:
        journal.close()


def test_the_whole_set_moves_and_comes_back(apt_node):
    before = apt_node.packages()
    result = upgrade(apt_node)
    assert result.changed and result.disk_module == NEW
    assert apt_node.packages() == {n: (NEW + REVISION if "fabric" not in n else f"{NEW}-1") for n in names("550")}
    assert not upgrade(apt_node).changed
    back = go_back(apt_node)
    assert back.changed and apt_node.packages() == before and apt_node.disk_module() == OLD
    assert not go_back(apt_node).changed


def test_marks_of_automatic_packages_are_carried(apt_node):
    upgrade(apt_node)
    automatic = set(apt_node.must("apt-mark", "showauto").split())
    assert automatic == names("550") - {"nvidia-driver-550-server", "nvidia-fabricmanager-550"}


def refusal(apt_node, **options) -> str:
    with pytest.raises(install.Refused) as caught:
        upgrade(apt_node, **options)
    return str(caught.value)


def test_check_mode_changes_nothing(apt_node):
    before = sorted((path, path.stat().st_mtime_ns) for path in (apt_node.root / "var/lib/dpkg").rglob("*"))
    result = upgrade(apt_node, check_mode=True)
    assert result.changed and result.after == {
        n: (NEW + REVISION if "fabric" not in n else f"{NEW}-1") for n in names("550")
    }
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (apt_node.root / "var/lib/dpkg").rglob("*"))
    assert not (apt_node.root / "state/packages").exists()


def test_staged_once_then_neither_way_needs_the_repository(apt_node):
    first = stage(apt_node)
    assert first.changed and {file.name for file in first.target.files} == names("550")
    assert {file.name for file in first.rollback.files} == names("535")
    assert not stage(apt_node).changed
    for deb in (apt_node.root / "repo").glob("*.deb"):
        deb.unlink()
    assert upgrade(apt_node).disk_module == NEW
    assert go_back(apt_node).disk_module == OLD


def stage(apt_node, rollback_required=True, check_mode=False, target=TARGET):
    journal = journal_of(apt_node)
    try:
        return install.stage(apt_node.source(), journal, target, "auto", rollback_required, check_mode)
    finally:
        journal.close()


def test_a_staged_file_that_was_changed_is_fetched_again(apt_node):
    file = Path(stage(apt_node).target.directory) / f"nvidia-utils-550-server_{NEW}{REVISION}_amd64.deb"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert stage(apt_node).changed
    assert not stage(apt_node).changed


def test_a_pkg_01_held_packages_are_named_and_refused(apt_node):
    apt_node.must("apt-mark", "hold", "libnvidia-compute-535-server")
    assert "libnvidia-compute-535-server" in refusal(apt_node)
    assert apt_node.disk_module() == OLD and apt_node.held() == {"libnvidia-compute-535-server"}


def test_a_nvml_02_holds_move_to_the_counterparts_and_come_back(apt_node):
    apt_node.must("apt-mark", "hold", "libnvidia-compute-535-server", "nvidia-fabricmanager-535")
    upgrade(apt_node, source={"release_holds": ["*nvidia*"]})
    assert apt_node.held() == {"libnvidia-compute-550-server", "nvidia-fabricmanager-550"}
    go_back(apt_node)
    assert apt_node.held() == {"libnvidia-compute-535-server", "nvidia-fabricmanager-535"}


def test_a_nvml_02_the_complete_set_can_be_held(apt_node):
    upgrade(apt_node, source={"hold_all": True})
    assert apt_node.held() == names("550")
    go_back(apt_node)
    assert apt_node.held() == set()


def test_a_pkg_04_without_a_way_back_nothing_starts(apt_node):
    apt_node.publish("*550*")
    apt_node.must("apt-get", "clean")
    text = refusal(apt_node)
    assert "drivers.rollback_unavailable" in text and f"nvidia-dkms-535-server={OLD}{REVISION}" in text
    assert apt_node.disk_module() == OLD
    assert upgrade(apt_node, rollback_required=False).disk_module == NEW
    with pytest.raises(install.Refused, match="rollback_unavailable"):
        go_back(apt_node)


def test_a_pkg_04_withdrawn_after_staging_is_put_back_from_the_saved_files(apt_node):
    stage(apt_node)
    apt_node.publish("*550*")
    upgrade(apt_node)
    apt_node.publish("nothing*")
    assert go_back(apt_node).disk_module == OLD
    assert apt_node.packages().keys() == names("535")


def test_a_pkg_04_the_package_cache_counts_as_saved(apt_node):
    apt_node.publish("*550*")
    cache = apt_node.root / "var/cache/apt/archives"
    for deb in (apt_node.root / "debs").glob("*535*"):
        deb.rename(cache / deb.name)
    upgrade(apt_node)
    assert go_back(apt_node).disk_module == OLD


def test_a_pkg_11_within_a_branch_the_whole_set_goes_down_again(apt_node):
    newer = "535.216.01"
    apt_node.build_driver(newer)
    apt_node.publish("*.deb")
    before = apt_node.packages()
    assert upgrade(apt_node, target=DriverVersion.parse(newer)).disk_module == newer
    assert go_back(apt_node).after == before


def test_a_dkms_04_label_and_content_differ(apt_node):
    apt_node.build_driver("560.35.03", module="560.28.03")
    apt_node.publish("*.deb")
    with pytest.raises(SourceError, match=r"on disk .* is 560\.28\.03, the packages say 560\.35\.03"):
        upgrade(apt_node, target=DriverVersion.parse("560.35.03"))
    assert journal_of(apt_node).last("packages")["state"] == "failed"
    assert go_back(apt_node).disk_module == OLD


def test_a_dkms_06_a_failed_build_says_why_and_goes_back(apt_node):
    log = apt_node.root / "var/lib/dkms/nvidia-srv/560.35.03/build/make.log"
    log.parent.mkdir(parents=True)
    log.write_text("make[1]: Entering\ncc1: error: unrecognized command-line option '-ftrivial-auto-var-init=zero'\n")
    apt_node.build_driver("560.35.03", dkms="exit 10")
    apt_node.publish("*.deb")
    with pytest.raises(SourceError, match=r"DKMS could not build 560\.35\.03: .*-ftrivial-auto-var-init=zero"):
        upgrade(apt_node, target=DriverVersion.parse("560.35.03"))
    back = go_back(apt_node)
    assert back.disk_module == OLD and apt_node.packages().keys() == names("535")
    assert apt_node.source().detect().problems == ()


def test_a_dkms_06_a_broken_database_that_is_not_ours_is_refused(apt_node):
    apt_node.build("broken", "1", postinst="exit 1")
    apt_node.publish("*.deb")
    apt_node.run(["apt-get", "-y", "install", "broken"], timeout=60)
    assert "broken (half-configured)" in refusal(apt_node)


@pytest.mark.parametrize("moment", ["nvidia-dkms-550-server.postinst", "unpack"])
def test_killed_in_the_middle_it_goes_on(apt_node, moment):
    """dpkg and apt are killed while they work, as by a power cut; the same call finishes the move."""
    kill = "kill -9 $(cat /proc/$PPID/stat | cut -d' ' -f4) $PPID"
    once = apt_node.root / "killed-once"
    script = f'[ -e "{once}" ] || {{ : > "{once}"; {kill}; sleep 5; }}'
    apt_node.build_driver("560.35.03", dkms=script if moment != "unpack" else "")
    if moment == "unpack":
        apt_node.build_late_killer("560.35.03", script)
    apt_node.publish("*.deb")
    target = DriverVersion.parse("560.35.03")
    with pytest.raises(SourceError):
        upgrade(apt_node, target=target)
    assert once.exists() and apt_node.source().detect().problems
    journal = journal_of(apt_node)
    assert not install.stage(apt_node.source(), journal, target, "auto", True, False).changed
    journal.close()
    assert upgrade(apt_node, target=target).disk_module == "560.35.03"
    assert apt_node.packages().keys() == names("560")
    assert go_back(apt_node).disk_module == OLD


def test_a_package_that_depends_on_the_old_driver_is_not_lost(apt_node):
    apt_node.build("slurm-gpu", "1", depends=f"libnvidia-compute-535-server (= {OLD}{REVISION})")
    apt_node.publish("*.deb")
    apt_node.install("slurm-gpu")
    text = refusal(apt_node)
    assert "slurm-gpu" in text and ("drivers.collateral" in text or "drivers.transaction" in text)


def test_a_pkg_12_no_kernel_comes_along(apt_node):
    apt_node.build("linux-image-9.9.9-generic", "9.9.9")
    apt_node.build("nvidia-kernel-common-565-server", f"565.57.01{REVISION}", depends="linux-image-9.9.9-generic")
    apt_node.build_driver("565.57.01", skip=("nvidia-kernel-common",))
    apt_node.publish("*.deb")
    assert "linux-image-9.9.9-generic" in refusal(apt_node, target=DriverVersion.parse("565.57.01"))


def test_a_pkg_02_a_transitional_package_does_not_lead_to_another_branch(apt_node):
    apt_node.build_driver("570.86.15")
    for stem in ("nvidia-driver", "nvidia-utils", "libnvidia-compute", "nvidia-dkms", "nvidia-kernel-common"):
        apt_node.build(f"{stem}-555-server", f"570.86.15{REVISION}", description=f"Transitional package for {stem}-570")
    apt_node.publish("*.deb")
    text = refusal(apt_node, target=DriverVersion.parse("555.58.02"))
    assert "not available at 555.58.02" in text and "leads to another branch" in text


def test_loaded_is_refused_unless_allowed(apt_node):
    module = apt_node.root / "sys/module/nvidia"
    module.mkdir(parents=True)
    (module / "version").write_text(f"{OLD}\n")
    assert "drivers.loaded" in refusal(apt_node)
    assert apt_node.disk_module() == OLD
    result = upgrade(apt_node, loaded_allowed=True)
    assert result.reboot_reasons and OLD in result.reboot_reasons[0]


def test_previous_without_memory_is_unchanged(apt_node):
    result = go_back(apt_node)
    assert not result.changed and "nothing to put back" in result.message


def test_alone_each_upgrade_remembers_the_one_before_it(apt_node):
    apt_node.build_driver("560.35.03")
    apt_node.publish("*.deb")
    upgrade(apt_node)
    upgrade(apt_node, target=DriverVersion.parse("560.35.03"))
    assert go_back(apt_node).disk_module == NEW


def test_within_a_run_the_first_memory_stays(apt_node):
    apt_node.build_driver("560.35.03")
    apt_node.publish("*.deb")
    journal = journal_of(apt_node)
    journal.begin("run-1", NEW, OLD, 1.0)
    journal.close()
    upgrade(apt_node)
    target = DriverVersion.parse("560.35.03")
    journal = Journal.open(str(apt_node.root / "state"), read_only=True)
    seen = preflight(apt_node.source(), journal, node_of(apt_node), target, "auto", True, lambda plan: ())
    assert [finding.message for finding in seen.findings if finding.check == "node.given_up"] == [
        f"the run run-1 to {NEW} was never concluded and is given up; the way back leads to {OLD}"
    ]
    upgrade(apt_node, target=target)
    assert go_back(apt_node).disk_module == OLD


def test_a_run_that_is_gone_on_with_needs_the_way_back_to_where_the_node_came_from(apt_node):
    """Not to the driver that it has reached meanwhile, whose builds are still there."""
    apt_node.build_driver("560.35.03")
    apt_node.publish("*.deb")
    journal = journal_of(apt_node)
    journal.begin("run-1", NEW, OLD, 1.0)
    journal.close()
    upgrade(apt_node)
    shutil.rmtree(apt_node.root / "state/packages" / OLD)
    apt_node.publish("*550*", "*560*")
    apt_node.must("apt-get", "clean")
    target = DriverVersion.parse("560.35.03")
    journal = Journal.open(str(apt_node.root / "state"), read_only=True)
    seen = preflight(apt_node.source(), journal, node_of(apt_node), target, "auto", True, lambda plan: ())
    for found in (summary(seen.findings), refusal(apt_node, target=target)):
        assert "drivers.rollback_unavailable" in found and f"nvidia-dkms-535-server={OLD}{REVISION}" in found
    with pytest.raises(install.Refused, match="rollback_unavailable"):
        stage(apt_node, target=target)
    assert apt_node.disk_module() == NEW


def test_a_pkg_14_the_lock_of_another_package_manager(apt_node):
    source = apt_node.source(lock_timeout=2.0)
    assert source.busy() is None
    lock = apt_node.root / "var/lib/dpkg/lock-frontend"
    with held_lock(lock) as pid:
        assert source.busy() == f"process {pid} ({Path(sys.executable).name})"
    assert source.busy() is None


def test_a_pkg_03_suffixes_go_at_590_and_come_back(apt_node):
    apt_node.build_vendor("580.95.05", suffixed=True)
    apt_node.build_vendor("590.48.01", suffixed=False)
    apt_node.publish("*.deb")
    apt_node.must("apt-get", "-y", "remove", *names("535"))
    apt_node.install("nvidia-open-580", "nvidia-driver-pinning-580", "nvidia-fabricmanager")
    before = apt_node.packages()
    result = upgrade(apt_node, target=DriverVersion.parse("590.48.01"))
    assert result.after == {
        "nvidia-open": "590.48.01-1ubuntu1",
        "nvidia-driver-open": "590.48.01-1ubuntu1",
        "nvidia-dkms-open": "590.48.01-1ubuntu1",
        "nvidia-kernel-common": "590.48.01-1ubuntu1",
        "libnvidia-compute": "590.48.01-1ubuntu1",
        "nvidia-utils": "590.48.01-1ubuntu1",
        "nvidia-fabricmanager": "590.48.01-1",
        "nvidia-driver-pinning-590": "590-1ubuntu1",
    }
    assert go_back(apt_node).after == before


def test_a_nvml_02_a_pin_of_minus_one_does_not_stop_an_exact_version(apt_node):
    preferences = apt_node.root / "etc/apt/preferences.d/site"
    preferences.write_text("Package: *nvidia*\nPin: release *\nPin-Priority: -1\n")
    assert apt_node.source().detect().pins == ("*nvidia*: release * (priority -1)",)
    assert upgrade(apt_node).disk_module == NEW
    assert preferences.exists()
