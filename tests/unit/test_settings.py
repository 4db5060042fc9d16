# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.gpufleet.driver.plugins.module_utils import settings

ROLES = Path(__file__).resolve().parents[2] / "roles"


def test_settings_of_roles_are_their_options_without_defaults() -> None:
    specs = [yaml.safe_load(file.read_text()) for file in sorted(ROLES.glob("*/meta/argument_specs.yml"))]
    found = settings.of_roles(specs)
    assert found["gpu_driver_reboot"]["choices"] == ["auto", "never", "always"]
    assert not [name for name, option in found.items() if "default" in option or "required" in option]


@pytest.mark.parametrize(
    ("numbers", "state_dir", "expected"),
    [
        ({}, "/", []),
        ({"gpu_lock_ttl": ""}, "/", []),
        ({"gpu_lock_ttl": 0, "gpu_batch_seconds": "1.5"}, "/var", []),
        ({"gpu_lock_ttl": "-1"}, "/", ["gpu_lock_ttl is -1, expected 0 or more"]),
        ({"gpu_batch_seconds": -0.5}, "/", ["gpu_batch_seconds is -0.5, expected 0 or more"]),
        ({}, "var", ["gpu_state_dir is 'var', expected an absolute path"]),
    ],
)
def test_senseless_settings(numbers: dict[str, Any], state_dir: str, expected: list[str]) -> None:
    assert settings.senseless(numbers, state_dir, "gpu-1") == expected


@pytest.mark.parametrize("node", ["gpu-1", "10.0.0.1", "fd00::1", "GPU_1.example"])
def test_names_that_a_command_line_takes(node: str) -> None:
    assert settings.senseless({}, "/", node) == []


@pytest.mark.parametrize("node", ["-gpu", "gpu 1", "gpu;1", "", "gpu-1\n"])
def test_names_that_a_command_line_would_misread(node: str) -> None:
    (said,) = settings.senseless({}, "/", node)
    assert f"the inventory calls it '{node}'" in said


def test_misspelt_settings_are_found_and_names_of_others_are_not() -> None:
    known = ["gpu_canary", "gpu_max_failed", "gpu_hosts"]
    assert settings.misspelt(["gpu_canery", "gpu_hosts", "gpu_model", "gpu_max_faild"], known) == [
        "gpu_canery (did you mean gpu_canary?)",
        "gpu_max_faild (did you mean gpu_max_failed?)",
    ]
