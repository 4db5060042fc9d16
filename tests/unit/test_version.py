# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import version


@pytest.mark.parametrize(
    ("package", "driver"),
    [
        ("550.107.02-0ubuntu0.24.04.1", "550.107.02"),
        ("535.183.01-0ubuntu0.22.04.1", "535.183.01"),
        ("550.54.15-0ubuntu1", "550.54.15"),
        ("550.54.15-1", "550.54.15"),
        ("615.71.09-1ubuntu1", "615.71.09"),
        ("555.58.02-0ubuntu0~gpu22.04.1", "555.58.02"),
        ("3:570.86.10-1.el9", "570.86.10"),
        ("3:535.183.06-3.el8_10", "535.183.06"),
        ("535.183.01_k6.4.0_150600.21-1.1", "535.183.01"),
        ("525.85.12-1", "525.85.12"),
        ("5.15.0-113.123", None),
        ("5.15.0-113.123+1", None),
        ("6.1.0-57.1", None),
        ("1.17.4-1", None),
    ],
)
def test_driver_version_inside_a_package_version(package: str, driver: str | None) -> None:
    found = version.of_package(package)
    assert (found.text if found else None) == driver


@pytest.mark.parametrize("text", ["580", "", "latest", "580.", "580.95.05.01", "v580.95.05", "580.95.05 ", "580-open"])
def test_what_is_not_a_full_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected something like"):
        version.DriverVersion.parse(text)


def test_compared_as_numbers_kept_as_text() -> None:
    short, long = version.DriverVersion.parse("550.90.7"), version.DriverVersion.parse("550.90.07")
    assert short == long and hash(short) == hash(long)
    assert str(long) == "550.90.07" and long.branch == "550"
    assert version.DriverVersion.parse("565.77") < version.DriverVersion.parse("570.86.15")
    assert version.DriverVersion.parse("570.124.06") > version.DriverVersion.parse("570.124.04")
    assert version.DriverVersion.parse("99.10.1") < version.DriverVersion.parse("100.1.1")


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.25  Sun", "390.25"),
        ("gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)", "11.4.0"),
        ("nothing here", None),
    ],
)
def test_find(text: str, driver: str | None) -> None:
    found = version.find(text)
    assert (found.text if found else None) == driver
