# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of driver packages: taken apart, and carried to another branch."""

from __future__ import annotations

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import naming
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.naming import OPEN, PROPRIETARY, Stream
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

ARCHIVE, VENDOR, PLAIN = "535.183.01-0ubuntu0.22.04.1", "580.95.05-0ubuntu1", "525.85.12-1"


@pytest.mark.parametrize(
    ("name", "stem", "role", "branch", "server", "is_open", "version", "kernel"),
    [
        ("nvidia-driver-535-server", "nvidia-driver", "meta", "535", True, False, None, None),
        ("nvidia-dkms-580-open", "nvidia-dkms", "kernel", "580", False, True, None, None),
        ("nvidia-dkms-550-server-open", "nvidia-dkms", "kernel", "550", True, True, None, None),
        ("nvidia-dkms-open", "nvidia-dkms", "kernel", None, False, True, None, None),
        ("nvidia-headless-no-dkms-460-server", "nvidia-headless-no-dkms", "meta", "460", True, False, None, None),
        ("nvidia-firmware-535-server-535.183.01", "nvidia-firmware", "firmware", "535", True, False, "535.183.01",
         None),
        ("libnvidia-compute", "libnvidia-compute", "compute", None, False, False, None, None),
        ("libcuda1", "libcuda1", "compute", None, False, False, None, None),
        ("nvidia-open-kernel-dkms", "nvidia-open-kernel-dkms", "kernel", None, False, True, None, None),
        ("nvidia-driver-pinning-580", "nvidia-driver-pinning", "pin", "580", False, False, None, None),
        ("nvidia-driver-pinning-580.95.05", "nvidia-driver-pinning", "pin", None, False, False, "580.95.05", None),
        ("nvidia-open-580", "nvidia-open", "meta", "580", False, True, None, None),
        ("linux-modules-nvidia-535-server-5.15.0-113-generic", "linux-modules-nvidia", "kernel", "535", True, False,
         None, "5.15.0-113-generic"),
        ("linux-modules-nvidia-550-open-generic-hwe-22.04", "linux-modules-nvidia", "kernel", "550", False, True,
         None, "generic-hwe-22.04"),
    ],
)  # fmt: skip
def test_deb_names_are_taken_apart(name, stem, role, branch, server, is_open, version, kernel):
    assert naming.parse_deb(name) == naming.DriverPackage(name, stem, role, branch, server, is_open, version, kernel)


@pytest.mark.parametrize(
    "name",
    [
        "nvidia-container-toolkit", "libnvidia-container1", "nvidia-cuda-toolkit", "cuda-toolkit-12-4", "nvtop",
        "cuda-compat-12-4", "datacenter-gpu-manager", "libnvidia-egl-wayland1", "nvidia-fs-dkms", "gdrdrv-dkms",
        "nvidia-prime", "linux-image-5.15.0-113-generic", "nvidia-docker2",
    ],
)  # fmt: skip
def test_what_is_not_the_driver_is_left_alone(name):
    assert naming.parse_deb(name) is None


@pytest.mark.parametrize(
    ("name", "installed", "target", "flavour", "expected"),
    [
        # Ubuntu's archive keeps the branch in the name, also beyond 590
        ("nvidia-driver-535-server", ARCHIVE, "550.90.07", PROPRIETARY, ("nvidia-driver-550-server",)),
        ("libnvidia-compute-535-server", ARCHIVE, "595.71.05", PROPRIETARY, ("libnvidia-compute-595-server",)),
        ("nvidia-dkms-535-server", ARCHIVE, "550.90.07", OPEN, ("nvidia-dkms-550-server-open",)),
        ("nvidia-dkms-550-server-open", ARCHIVE, "570.86.15", PROPRIETARY, ("nvidia-dkms-570-server",)),
        ("nvidia-kernel-common-535-server", ARCHIVE, "550.90.07", OPEN, ("nvidia-kernel-common-550-server",)),
        ("linux-modules-nvidia-535-server-5.15.0-113-generic", "5.15.0-113.123", "550.90.07", OPEN,
         ("linux-modules-nvidia-550-server-open-5.15.0-113-generic",)),
        ("linux-objects-nvidia-535-server-5.15.0-113-generic", "5.15.0-113.123", "550.90.07", PROPRIETARY,
         ("linux-objects-nvidia-550-server-5.15.0-113-generic",)),
        # NVIDIA's repository for Ubuntu drops it from 590, Fabric Manager and friends from 580
        ("libnvidia-compute-580", VENDOR, "590.48.01", OPEN, ("libnvidia-compute", "libnvidia-compute-590")),
        ("nvidia-dkms-580-open", VENDOR, "590.48.01", OPEN, ("nvidia-dkms-open", "nvidia-dkms-590-open")),
        ("nvidia-dkms-570-open", VENDOR, "580.95.05", OPEN, ("nvidia-dkms-580-open", "nvidia-dkms-open")),
        ("nvidia-dkms-open", "590.48.01-1ubuntu1", "580.95.05", OPEN, ("nvidia-dkms-580-open", "nvidia-dkms-open")),
        ("nvidia-firmware-570-570.86.15", VENDOR, "580.95.05", OPEN,
         ("nvidia-firmware-580-580.95.05", "nvidia-firmware-580", "nvidia-firmware")),
        ("cuda-drivers-580", VENDOR, "590.48.01", PROPRIETARY, ("cuda-drivers",)),
        ("cuda-drivers-570", VENDOR, "580.95.05", PROPRIETARY, ("cuda-drivers-580", "cuda-drivers")),
        ("cuda-drivers", "595.71.05-1ubuntu1", "615.71.09", OPEN, ("nvidia-open",)),
        ("nvidia-open-580", VENDOR, "590.48.01", OPEN, ("nvidia-open",)),
        ("nvidia-driver-pinning-580", "580-1ubuntu1", "590.48.01", OPEN, ("nvidia-driver-pinning-590",)),
        ("nvidia-driver-pinning-580.95.05", "580-1ubuntu1", "590.48.01", OPEN, ("nvidia-driver-pinning-590.48.01",)),
        # Debian's own names have no branch at all
        ("libcuda1", PLAIN, "535.216.01", PROPRIETARY, ("libcuda1",)),
        ("nvidia-kernel-dkms", PLAIN, "535.216.01", OPEN, ("nvidia-open-kernel-dkms", "nvidia-kernel-open-dkms")),
        ("nvidia-open-kernel-dkms", PLAIN, "535.216.01", PROPRIETARY, ("nvidia-kernel-dkms",)),
        ("nvidia-driver", PLAIN, "535.216.01", PROPRIETARY, ("nvidia-driver", "nvidia-driver-535")),
    ],
)  # fmt: skip
def test_deb_counterparts(name, installed, target, flavour, expected):
    package = naming.parse_deb(name)
    found = naming.deb_counterparts(package, DriverVersion.parse(target), flavour, naming.deb_origin(installed))
    assert found == expected


@pytest.mark.parametrize(
    ("installed", "version", "target", "expected"),
    [
        ("nvidia-fabricmanager-550", "550.90.07-1", "570.172.08", ("nvidia-fabricmanager-570", "nvidia-fabricmanager")),
        ("nvidia-fabricmanager-570", "570.172.08-1", "580.95.05", ("nvidia-fabricmanager", "nvidia-fabricmanager-580")),
        ("nvidia-fabricmanager", "580.95.05-1", "570.172.08", ("nvidia-fabricmanager-570", "nvidia-fabricmanager")),
        ("nvidia-fabricmanager-570", ARCHIVE, "580.95.05", ("nvidia-fabricmanager-580", "nvidia-fabricmanager")),
        ("nvidia-imex-570", "570.172.08-1", "580.95.05", ("nvidia-imex", "nvidia-imex-580")),
        ("libnvidia-nscq-570", "570.172.08-1", "580.95.05", ("libnvidia-nscq", "libnvidia-nscq-580")),
    ],
)
def test_a_pkg_13_fab_01_fabric_packages_move_with_the_driver(installed, version, target, expected):
    package = naming.parse_deb(installed)
    found = naming.deb_counterparts(package, DriverVersion.parse(target), PROPRIETARY, naming.deb_origin(version))
    assert found == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("550.107.02-0ubuntu0.24.04.1", "archive"),
        ("555.58.02-0ubuntu0~gpu22.04.1", "ppa"),
        ("550.54.15-0ubuntu1", "nvidia"),
        ("615.71.09-1ubuntu1", "nvidia"),
        ("525.85.12-1", "debian"),
    ],
)
def test_a_16_who_packaged_a_deb(version, expected):
    assert naming.deb_origin(version) == expected


@pytest.mark.parametrize(
    ("name", "version", "description", "expected"),
    [
        pytest.param("nvidia-driver-460-server", "470.57.02-0ubuntu0.20.04.1", "", True, id="A-PKG-02 other branch"),
        pytest.param("nvidia-375", "384.90-0ubuntu1", "transitional package for nvidia-384", True, id="A-PKG-02 word"),
        pytest.param("nvidia-driver-470-server", "470.57.02-0ubuntu0.20.04.1", "NVIDIA driver", False, id="itself"),
        pytest.param("linux-modules-nvidia-535-server-generic", "5.15.0-113.123", "", False, id="kernel's version"),
    ],
)
def test_transitional_packages(name, version, description, expected):
    assert naming.is_transitional(name, version, description) is expected


KMOD = "kmod-nvidia-535.183.06-4.18.0-553.22.1"


def test_a_pkg_06_a_precompiled_kmod_carries_version_and_kernel():
    package = naming.parse_rpm(KMOD)
    assert (package.stem, package.version, package.kernel, package.flavour) == (
        "kmod-nvidia", "535.183.06", "4.18.0-553.22.1", PROPRIETARY,
    )  # fmt: skip
    assert naming.kernel_release("4.18.0-553.22.1.el8_10.x86_64") == "4.18.0-553.22.1"
    assert naming.rpm_counterparts(package, DriverVersion.parse("535.216.01"), PROPRIETARY, "4.18.0-553.27.1") == (
        "kmod-nvidia-535.216.01-4.18.0-553.27.1",
    )


@pytest.mark.parametrize(
    ("name", "target", "flavour", "expected"),
    [
        ("kmod-nvidia-latest-dkms", "580.95.05", OPEN, ("kmod-nvidia-open-dkms",)),
        ("kmod-nvidia-open-dkms", "580.95.05", PROPRIETARY, ("kmod-nvidia-latest-dkms",)),
        (KMOD, "580.95.05", OPEN, ("kmod-nvidia-open-580.95.05-4.18.0-553.22.1",)),
        ("nvidia-driver-cuda-libs", "580.95.05", OPEN, ("nvidia-driver-cuda-libs",)),
        ("nvidia-fabric-manager", "550.144.03", OPEN, ("nvidia-fabric-manager",)),
        ("nvidia-fabric-manager", "580.95.05", OPEN, ("nvidia-fabricmanager",)),
        ("nvidia-fabricmanager-devel", "550.144.03", OPEN, ("nvidia-fabric-manager-devel",)),
        ("nvidia-fabricmanager-570", "580.95.05", OPEN, ("nvidia-fabricmanager",)),
        ("cuda-drivers", "580.95.05", OPEN, ("nvidia-open",)),
        ("nvidia-imex-570", "580.95.05", OPEN, ("nvidia-imex", "nvidia-imex-580")),
        ("libnvidia-nscq-550", "570.86.15", OPEN, ("libnvidia-nscq-570", "libnvidia-nscq")),
    ],
)
def test_rpm_counterparts(name, target, flavour, expected):
    assert naming.rpm_counterparts(naming.parse_rpm(name), DriverVersion.parse(target), flavour) == expected


@pytest.mark.parametrize(
    ("name", "role", "flavour"),
    [
        ("nvidia-open-driver-G06-signed-kmp-default", "kernel", OPEN),
        ("nvidia-open-driver-G06-signed-cuda-kmp-default", "kernel", OPEN),
        ("nvidia-driver-G06-kmp-default", "kernel", PROPRIETARY),
        ("nvidia-compute-G06", "compute", None),
        ("nvidia-compute-utils-G06", "utils", None),
    ],
)
def test_a_pkg_09_suse_names(name, role, flavour):
    package = naming.parse_rpm(name)
    assert (package.role, package.flavour) == (role, flavour)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("580.105.08_k6.12.0_160000.5-1.1", "580.105.08-1.1"),
        ("535.183.01_k6.4.0_150600.21-1.1", "535.183.01-1.1"),
        ("580.119.02-1.1", "580.119.02-1.1"),
    ],
)
def test_a_pkg_09_the_kernel_is_stripped(version, expected):
    assert naming.strip_kernel(version) == expected


@pytest.mark.parametrize(
    ("text", "branch", "is_open", "dkms"),
    [
        ("550-dkms", "550", False, True),
        ("550", "550", False, False),
        ("570-open", "570", True, True),
        ("latest", "latest", False, False),
        ("latest-dkms", "latest", False, True),
        ("open-dkms", "latest", True, True),
        ("515-open-dkms", "515", True, True),
    ],
)
def test_a_pkg_07_streams(text, branch, is_open, dkms):
    assert Stream.parse(text) == Stream(text, branch, is_open, dkms)


@pytest.mark.parametrize("text", ["525.125.06", "580.95.05-open", "open", "dkms", "55", "", "550-dkms ", "550-DKMS"])
def test_a_pkg_07_what_is_not_a_stream(text):
    with pytest.raises(ValueError, match="is not a stream of nvidia-driver"):
        Stream.parse(text)


def test_a_pkg_07_a_full_version_gets_a_hint():
    with pytest.raises(ValueError, match="525-dkms or 525-open may be meant"):
        Stream.parse("525.125.06")


@pytest.mark.parametrize(
    ("current", "flavour", "expected"),
    [
        ("550-dkms", OPEN, "580-open"),
        ("550-dkms", PROPRIETARY, "580-dkms"),
        ("550", PROPRIETARY, "580"),
        ("570-open", OPEN, "580-open"),
    ],
)
def test_a_pkg_07_the_stream_of_a_target(current, flavour, expected):
    assert naming.stream_for(Stream.parse(current), DriverVersion.parse("580.95.05"), flavour) == expected
