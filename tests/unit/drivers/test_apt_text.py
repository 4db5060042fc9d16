# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What apt and dpkg print, read as data."""

from __future__ import annotations

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import apt_text


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("libnvidia-compute-550\tamd64\t550.90.07-0ubuntu1\tii ", ("libnvidia-compute-550", "installed", False)),
        ("libnvidia-compute-550\ti386\t550.90.07-0ubuntu1\tii ", ("libnvidia-compute-550:i386", "installed", False)),
        ("nvidia-utils-550\tamd64\t550.90.07-0ubuntu1\thi ", ("nvidia-utils-550", "installed", True)),
        pytest.param(
            "nvidia-dkms-418-server\tamd64\t418.226.00-0ubuntu0.20.04.2\tiF ",
            ("nvidia-dkms-418-server", "half-configured", False),
            id="A-DKMS-06",
        ),
        ("a\tall\t1\tiHR", ("a", "half-installed, reinstallation required", False)),
        ("a\tall\t1\tiU ", ("a", "unpacked", False)),
        ("a\tall\t1\tit ", ("a", "triggers-pending", False)),
    ],
)
def test_dpkg_rows(row, expected):
    (found,) = apt_text.dpkg_packages(row + "\n", "amd64")
    assert (found.name, found.state, found.held) == expected


@pytest.mark.parametrize("status", ["rc ", "un ", "pn "])
def test_what_is_removed_is_not_there(status):
    assert apt_text.dpkg_packages(f"nvidia-utils-535\tamd64\t535.183.01\t{status}\n", "amd64") == []


WITHDRAWN = """\
nvidia-driver-555:
  Installed: 555.58.02-0ubuntu0~gpu22.04.1
  Candidate: 555.58.02-0ubuntu0~gpu22.04.1
  Version table:
 *** 555.58.02-0ubuntu0~gpu22.04.1 100
        100 /var/lib/dpkg/status
nvidia-fabricmanager-460:
  Installed: 460.73.01-1
  Candidate: 460.91.03-0ubuntu0.20.04.1
  Version table:
     460.91.03-0ubuntu0.20.04.1 500
        500 http://archive.example/ubuntu focal-updates/multiverse amd64 Packages
        500 http://security.example/ubuntu focal-security/multiverse amd64 Packages
 *** 460.73.01-1 -1
         -1 http://repo.example/cuda  Packages
        100 /var/lib/dpkg/status
nvidia-driver-999:
  Installed: (none)
  Candidate: (none)
  Version table:
"""


def test_a_pkg_04_a_version_that_only_dpkg_knows_is_in_no_repository():
    found = apt_text.policies(WITHDRAWN)["nvidia-driver-555"]
    assert found.versions == {"555.58.02-0ubuntu0~gpu22.04.1": ()}


def test_a_fab_02_candidate_and_installed_of_two_origins():
    found = apt_text.policies(WITHDRAWN)["nvidia-fabricmanager-460"]
    assert (found.installed, found.candidate) == ("460.73.01-1", "460.91.03-0ubuntu0.20.04.1")
    assert {version: len(sources) for version, sources in found.versions.items()} == {
        "460.91.03-0ubuntu0.20.04.1": 2,
        "460.73.01-1": 1,
    }


def test_a_package_without_any_version():
    found = apt_text.policies(WITHDRAWN)["nvidia-driver-999"]
    assert (found.installed, found.candidate, found.versions) == (None, None, {})


def test_stanzas_join_continuation_lines_and_skip_comments():
    text = "Package: a\n# no\nDescription: one\n two\n .\n three\n\nPackage: b\n"
    assert apt_text.stanzas(text) == [{"Package": "a", "Description": "one\ntwo\n.\nthree"}, {"Package": "b"}]


def test_a_nvml_02_the_pin_of_minus_one():
    text = "Explanation: site\nPackage: *nvidia*\nPin: release *\nPin-Priority: -1\n\nPackage: x\nPin: version 1\n"
    assert [str(pin) for pin in apt_text.pins(text)] == ["*nvidia*: release * (priority -1)"]


SIMULATED = """\
NOTE: This is only a simulation!
Reading package lists...
Remv nvidia-driver-535-server [535.183.01-0ubuntu0.22.04.1] []
Purg nvidia-utils-535-server [535.183.01-0ubuntu0.22.04.1]
Inst nvidia-utils-550-server (550.90.07-0ubuntu0.22.04.1 Ubuntu:22.04/jammy-updates, Ubuntu:22.04/x [amd64])
Inst libc6 [2.35-0ubuntu3.7] (2.35-0ubuntu3.8 Ubuntu:22.04/jammy-updates [amd64]) [libc6:amd64 ]
Inst standin (1 localhost [all])
Conf nvidia-utils-550-server (550.90.07-0ubuntu0.22.04.1 Ubuntu:22.04/jammy-updates [amd64])
"""


def test_a_pkg_01_the_simulated_transaction():
    assert apt_text.simulation(SIMULATED) == [
        apt_text.Change("nvidia-driver-535-server", "535.183.01-0ubuntu0.22.04.1", None),
        apt_text.Change("nvidia-utils-535-server", "535.183.01-0ubuntu0.22.04.1", None),
        apt_text.Change("nvidia-utils-550-server", None, "550.90.07-0ubuntu0.22.04.1", "amd64"),
        apt_text.Change("libc6", "2.35-0ubuntu3.7", "2.35-0ubuntu3.8", "amd64"),
        apt_text.Change("standin", None, "1", "all"),
    ]


UNMET = """\
Some packages could not be installed.
The following packages have unmet dependencies:
 nvidia-headless-460-server : Depends: nvidia-headless-no-dkms-460-server (= 460.32.03) but it is not going to be installed
                              Depends: nvidia-dkms-460-server but it is not going to be installed
 nvidia-utils-460-server : Conflicts: nvidia-utils
                           Recommends: nvidia-settings but it is not going to be installed
E: Unable to correct problems, you have held broken packages.
"""  # noqa: E501


def test_a_pkg_01_the_blocking_pairs():
    assert apt_text.blocking(UNMET) == [
        "nvidia-headless-460-server: depends nvidia-headless-no-dkms-460-server (= 460.32.03) but it is not going to "
        "be installed",
        "nvidia-headless-460-server: depends nvidia-dkms-460-server but it is not going to be installed",
        "nvidia-utils-460-server: conflicts nvidia-utils",
    ]


HISTORY = """\

Start-Date: 2021-04-20  06:50:12
Commandline: /usr/bin/unattended-upgrade
Upgrade: libnvidia-common-460:amd64 (460.56-0ubuntu0.20.04.1, 460.73.01-0ubuntu0.20.04.1), tzdata:all (1, 2)
End-Date: 2021-04-20  06:50:20

Start-Date: 2021-04-21  10:00:00
Commandline: apt-get install nvtop
Requested-By: ops (1000)
Install: libnvidia-compute-470:amd64 (470.57.02-0ubuntu0.20.04.1, automatic), nvtop:amd64 (1.2-1)
Remove: old:amd64 (1)
End-Date: 2021-04-21  10:00:05
"""


def test_a_nvml_02_the_history_tells_when_and_by_what():
    automatic, by_hand = apt_text.history(HISTORY)
    assert automatic.automatic and automatic.start == "2021-04-20  06:50:12"
    assert automatic.changed["libnvidia-common-460"] == (
        "upgrade", "460.56-0ubuntu0.20.04.1", "460.73.01-0ubuntu0.20.04.1",
    )  # fmt: skip
    assert not by_hand.automatic
    assert by_hand.changed == {
        "libnvidia-compute-470": ("install", None, "470.57.02-0ubuntu0.20.04.1"),
        "nvtop": ("install", None, "1.2-1"),
        "old": ("remove", "1", None),
    }


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        pytest.param(
            "make[1]: Entering directory\ncc: error: unrecognized command-line option '-ftrivial-auto-var-init=zero'\n",
            "the compiler is older than the kernel's: cc: error: unrecognized command-line option "
            "'-ftrivial-auto-var-init=zero'",
            id="A-DKMS-01",
        ),
        pytest.param(
            "make: *** /lib/modules/5.11.0-25-generic/build: No such file or directory.  Stop.\n",
            "no kernel headers: make: *** /lib/modules/5.11.0-25-generic/build: No such file or directory.  Stop.",
            id="A-DKMS-02",
        ),
        ("fatal: No space left on device\n", "the disk is full: fatal: No space left on device"),
        ("all well\nnv-mmap.c:1: error: implicit declaration\n", "nv-mmap.c:1: error: implicit declaration"),
        ("all well\n", None),
    ],
)
def test_why_a_build_failed(log, cause):
    assert apt_text.make_log_cause(log) == cause


def test_automatic() -> None:
    text = (
        "Package: libnvidia-compute-535-server\nArchitecture: amd64\nAuto-Installed: 1\n\n"
        "Package: libnvidia-compute-535-server\nArchitecture: i386\nAuto-Installed: 1\n\n"
        "Package: nvidia-driver-535-server\nArchitecture: amd64\nAuto-Installed: 0\n\n"
    )
    expected = {"libnvidia-compute-535-server", "libnvidia-compute-535-server:i386"}
    assert apt_text.automatic(text, "amd64") == expected
    assert apt_text.automatic("", "amd64") == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("E: Unable to locate package x\nReading\n", ["E: Unable to locate package x"], id="apt"),
        pytest.param(
            "Unpacking x (1) ...\ndpkg: error processing archive /x.deb (--unpack):\n"
            " cannot copy extracted data for './a' to '/a.dpkg-new': failed to write (No space left on device)\n"
            "E: Sub-process /usr/bin/dpkg returned an error code (1)\n",
            [
                "dpkg: error processing archive /x.deb (--unpack): cannot copy extracted data for './a' to "
                "'/a.dpkg-new': failed to write (No space left on device)",
                "E: Sub-process /usr/bin/dpkg returned an error code (1)",
            ],
            id="an archive that does not fit",
        ),
        pytest.param(
            "dpkg: unrecoverable fatal error, aborting:\n unable to fill /var/lib/dpkg/updates/tmp.i: No space left\n",
            ["dpkg: unrecoverable fatal error, aborting: unable to fill /var/lib/dpkg/updates/tmp.i: No space left"],
            id="a database that does not fit",
        ),
        pytest.param("dpkg: warning: x:\n y\nE: z:\n", ["E: z:"], id="warnings are none"),
    ],
)
def test_errors_with_their_cause(text: str, expected: list[str]) -> None:
    assert apt_text.errors(text) == expected
