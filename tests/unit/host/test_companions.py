# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What has to go with the driver, and whether it fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING
from ansible_collections.gpufleet.driver.plugins.module_utils.host import companions

ACTIVE = companions.Unit("nvidia-fabricmanager.service", "active", "enabled")
FAILED = companions.Unit("nvidia-fabricmanager.service", "failed", "enabled")


def having(unit: companions.Unit | None = None, **versions: str) -> dict[str, companions.Companion]:
    return {
        name: companions.Companion(name, {name: version}, version, unit if name == "fabricmanager" else None)
        for name, version in versions.items()
    }


Case = tuple[str, companions.Facts, dict[str, str]]
PAIRS: dict[str, Case] = {
    "A-FAB-01-530": (
        "530.41.03",
        companions.Facts(having(ACTIVE, fabricmanager="530.30.02"), nvswitches=6),
        {"companion.fabricmanager": ERROR},
    ),
    "A-FAB-01-550": (
        "550.107.02",
        companions.Facts(having(ACTIVE, fabricmanager="550.90.07"), nvswitches=4),
        {"companion.fabricmanager": ERROR},
    ),
    "A-FAB-02-moved-by-unattended-upgrade": (
        "460.73.01",
        companions.Facts(having(ACTIVE, fabricmanager="460.91.03"), nvswitches=6),
        {"companion.fabricmanager": ERROR},
    ),
    "A-FAB-01-fits": (
        "550.90.07",
        companions.Facts(having(ACTIVE, fabricmanager="550.90.07"), nvswitches=4),
        {"companion.fabricmanager": OK},
    ),
    "A-FAB-03-not-installed": (
        "535.183.01",
        companions.Facts(nvswitches=4, pci=("2330",) * 8, fabric=("in_progress",) * 8),
        {"companion.fabricmanager": ERROR},
    ),
    "A-FAB-03-inactive": (
        "535.183.01",
        companions.Facts(having(FAILED, fabricmanager="535.183.01"), nvswitches=4),
        {"companion.fabricmanager": OK, "companion.fabricmanager_unit": ERROR},
    ),
    "A-FAB-03-no-switches-no-need": ("535.183.01", companions.Facts(pci=("20b2",)), {}),
    "A-FAB-04-B200-without-nvlsm": (
        "570.133.20",
        companions.Facts(having(ACTIVE, fabricmanager="570.133.20"), pci=("2901",) * 8, fabric=("in_progress",) * 8),
        {"companion.fabricmanager": OK, "companion.nvlsm": ERROR},
    ),
    "A-FAB-04-B200-complete": (
        "570.133.20",
        companions.Facts(
            having(ACTIVE, fabricmanager="570.133.20", nvlsm="2025.03.1"), pci=("2901",) * 8, fabric=("completed",) * 8
        ),
        {"companion.fabricmanager": OK},
    ),
    "A-FAB-04-GB200-by-the-switch-trays": (
        "580.126.20",
        companions.Facts(having(imex="580.126.20"), pci=("2941",) * 4, fabric=("completed",) * 4),
        {"companion.imex": OK},
    ),
    "A-FAB-05-imex-of-another-version": (
        "580.159.04",
        companions.Facts(having(imex="580.126.20"), pci=("2941",) * 4, fabric=("completed",) * 4),
        {"companion.imex": ERROR},
    ),
    "nscq-of-another-version": ("550.90.07", companions.Facts(having(nscq="550.54.15")), {"companion.nscq": ERROR}),
    "A-DCGM-01": ("580.65.06", companions.Facts(having(dcgm="3.3.9")), {"companion.dcgm": ERROR}),
    "A-DCGM-01-new-enough": ("580.65.06", companions.Facts(having(dcgm="4.4.1")), {"companion.dcgm": OK}),
    "A-DCGM-01-old-driver": ("550.90.07", companions.Facts(having(dcgm="3.3.9")), {"companion.dcgm": OK}),
}


@pytest.mark.parametrize(("driver", "facts", "expected"), PAIRS.values(), ids=PAIRS)
def test_pairs(driver: str, facts: companions.Facts, expected: dict[str, str]) -> None:
    found = companions.pairs(driver, facts)
    assert {finding.check: finding.level for finding in found} == expected
    assert all(finding.next for finding in found if finding.level == ERROR)


def test_what_fabric_manager_says_is_in_the_finding() -> None:  # A-FAB-01
    line = (
        "nv-fabricmanager[811]: fabric manager NVIDIA GPU driver interface version 530.30.02 don't match with driver "
        "version 530.41.03. Please update with matching NVIDIA driver package.\n"
    )
    complaint = companions.fabric_manager_complaint(line)
    assert complaint == "Fabric Manager 530.30.02 does not speak to driver 530.41.03"
    manager = companions.Companion("fabricmanager", {}, None, FAILED, complaint)
    (finding,) = companions.pairs("530.41.03", companions.Facts({"fabricmanager": manager}, nvswitches=6))
    assert complaint in finding.message
    assert companions.fabric_manager_complaint("Successfully configured all the available NVSwitches") is None


@pytest.mark.parametrize(
    ("dcgm", "driver", "expected"),
    [
        ("4.5.2", "590.48.01", True),
        ("4.4.1", "590.48.01", False),
        ("4.5.2", "580.95.05", False),
        (None, "590.48.01", False),
    ],
    ids=["A-DCGM-02-detach", "A-DCGM-02-old-dcgm", "A-DCGM-02-old-driver", "unknown"],
)
def test_detaching(dcgm: str | None, driver: str, expected: bool) -> None:
    assert companions.can_detach(dcgm, driver) is expected


CDI_YAML = """\
---
cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  mounts:
  - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.535.161.07
    hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.535.161.07
    options: [ro]
  - hostPath: "/lib/firmware/nvidia/535.161.07/gsp_ga10x.bin"
    containerPath: /lib/firmware/nvidia/535.161.07/gsp_ga10x.bin
  - {containerPath: /x, hostPath: /not/read/in/flow/style}
  - hostPath: /run/nvidia-persistenced/socket
kind: nvidia.com/gpu
"""
CDI_JSON = '{\n "kind": "nvidia.com/gpu",\n  "hostPath": "/usr/lib64/libnvidia-ml.so.535.171.04",\n}\n'


def test_parse_cdi() -> None:  # A-CTR-01
    assert companions.parse_cdi(CDI_YAML) == (
        [
            "/usr/lib/x86_64-linux-gnu/libcuda.so.535.161.07",
            "/lib/firmware/nvidia/535.161.07/gsp_ga10x.bin",
            "/run/nvidia-persistenced/socket",
        ],
        ["535.161.07"],
    )
    assert companions.parse_cdi(CDI_JSON) == (["/usr/lib64/libnvidia-ml.so.535.171.04"], ["535.171.04"])


def test_stale_cdi_file(tmp_path: Path) -> None:  # A-CTR-01, A-NVML-04
    for name, text in {"a/nvidia.yaml": CDI_YAML, "b/nvidia.json": CDI_JSON, "b/other.yaml": "kind: x.com/y\n"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    directories = (str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "none"))
    specs = companions.read_cdi(directories, exists=lambda path: path != "/run/nvidia-persistenced/socket")
    assert [Path(spec.path).name for spec in specs] == ["nvidia.yaml", "nvidia.json"]
    (finding,) = companions.pairs("535.171.04", companions.Facts(cdi=tuple(specs)))
    assert (finding.check, finding.level) == ("companion.cdi", WARNING)
    assert "names driver 535.161.07, not 535.171.04; missing: /run/nvidia-persistenced/socket" in finding.message
    assert finding.next == f"nvidia-ctk cdi generate --output={tmp_path}/a/nvidia.yaml"


def test_links_below_dev_char(tmp_path: Path) -> None:  # A-CTR-02
    (tmp_path / "char").mkdir()
    (tmp_path / "char/195:255").touch()
    finding = companions.dev_char_finding([(195, 255), (195, 0)], str(tmp_path))
    assert finding is not None
    assert (finding.level, finding.evidence) == (WARNING, {"missing": ["195:0"]})
    assert companions.dev_char_finding([(195, 255)], str(tmp_path)) is None


PACKAGES = (
    "nvidia-fabricmanager-550\t550.54.15-1\tii \n"
    "nvidia-fabricmanager-dev-550\t550.54.15-1\tii \n"
    "nvidia-fabricmanager-535\t535.183.01-1\trc \n"
    "datacenter-gpu-manager\t1:3.3.9\thi \n"
    "libnvidia-nscq-550\t550.54.15-1\tii \n"
    "nvidia-imex-550\t\tun \n"
)
UNITS = (
    "Id=nvidia-fabricmanager.service\nLoadState=loaded\nActiveState=failed\nUnitFileState=enabled\n\n"
    "Id=nvlsm.service\nLoadState=not-found\nActiveState=inactive\nUnitFileState=\n\n"
    "Id=nvidia-dcgm.service\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\n\n"
    "Id=nvidia-dcgm.service\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\n\n"
    "Id=nvidia-persistenced.service\nLoadState=masked\nActiveState=inactive\nUnitFileState=masked\n"
)


def test_observe() -> None:  # A-MOD-11, A-PM-01
    def run(argv: list[str], *, timeout: float) -> Completed:
        text = {"dpkg-query": PACKAGES, "systemctl": UNITS}.get(argv[0], "")
        return Completed(tuple(argv), 0 if text else 127, text, "", 0.1)

    found = companions.observe(run)
    assert {name: (item.version, item.unit.active if item.unit else None) for name, item in found.items()} == {
        "fabricmanager": ("550.54.15", "failed"),
        "nscq": ("550.54.15", None),
        "dcgm": ("3.3.9", "active"),
        "persistenced": (None, "inactive"),
    }
    assert found["fabricmanager"].packages == {"nvidia-fabricmanager-550": "550.54.15-1"}
    unit = found["persistenced"].unit
    assert unit is not None
    assert unit.enabled == "masked"


def test_observe_by_rpm() -> None:
    def run(argv: list[str], *, timeout: float) -> Completed:
        text = {"rpm": "nvidia-fabric-manager\t3:580.95.05-1\nnvlsm\t0:2025.06.5-1\n"}.get(argv[0], "")
        return Completed(tuple(argv), 0 if text else 127, text, "", 0.1)

    found = companions.observe(run)
    assert (found["fabricmanager"].version, found["nvlsm"].version) == ("580.95.05", "2025.06.5")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("dcgmi  version: 3.3.9\n", "3.3.9"), ("dcgmi  version: 4.4.1\nBuild: x", "4.4.1"), ("", None)],
    ids=["A-DCGM-01", "DCGM-4", "nothing"],
)
def test_dcgm_version(text: str, expected: str | None) -> None:
    assert companions.parse_dcgm_version(text) == expected
