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


SPEC = {
    "gpu_lock_ttl": {"type": "int"},
    "gpu_batch_seconds": {"type": "float"},
    "gpu_state_dir": {"type": "path"},
    "gpu_driver_reboot": {"type": "str", "choices": ["auto", "never"]},
    "gpu_workloads": {"type": "list", "elements": "dict", "options": {"name": {"type": "str"}}},
}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, []),
        (
            {"gpu_lock_ttl": None, "gpu_workloads": None},
            ["gpu_lock_ttl is null: give it a value, or", "gpu_workloads is null: give it a value ([] for none), or"],
        ),
        ({"gpu_lock_ttl": 0, "gpu_batch_seconds": "1.5", "gpu_state_dir": "/var"}, []),
        ({"gpu_lock_ttl": ""}, ["gpu_lock_ttl"]),
        ({"gpu_lock_ttl": "-1"}, ["gpu_lock_ttl is -1, expected 0 or more"]),
        ({"gpu_batch_seconds": -0.5}, ["gpu_batch_seconds is -0.5, expected 0 or more"]),
        ({"gpu_state_dir": "var"}, ["gpu_state_dir is 'var', expected an absolute path"]),
        ({"gpu_driver_reboot": "perhaps", "gpu_lock_ttl": -1}, ["gpu_driver_reboot", "gpu_lock_ttl is -1"]),
        ({"gpu_workloads": [{"nmae": "x"}]}, ["gpu_workloads.nmae"]),
        (
            {"gpu_workloads": "[{'name': 'x'}]", "gpu_lock_ttl": ""},
            ["gpu_workloads is text and not a list: give it as JSON, -e '{\"gpu_workloads\": [...]}'", "gpu_lock_ttl"],
        ),
    ],
)
def test_wrong_settings(values: dict[str, Any], told: list[str]) -> None:
    said = settings.wrong(values, SPEC, "gpu-1")
    assert [text in one for text, one in zip(told, said, strict=True)] == [True] * len(told)


@pytest.mark.parametrize("node", ["gpu-1", "10.0.0.1", "fd00::1", "GPU_1.example"])
def test_names_that_a_command_line_takes(node: str) -> None:
    assert settings.wrong({}, {}, node) == []


@pytest.mark.parametrize("node", ["-gpu", "gpu 1", "gpu;1", "", "gpu-1\n"])
def test_names_that_a_command_line_would_misread(node: str) -> None:
    (said,) = settings.wrong({}, {}, node)
    assert f"the inventory calls it '{node}'" in said


def test_misspelt_settings_are_found_and_names_of_others_are_not() -> None:
    known = ["gpu_canary", "gpu_max_failed", "gpu_hosts"]
    names = ["gpu_canery", "gpu_hosts", "gpu_model", "gpu_host", "gpu_max_faild"]
    told = ["gpu_canery (did you mean gpu_canary?)", "gpu_host (did you mean gpu_hosts?)"]
    assert settings.misspelt(names, known, ["gpu_max_faild"]) == told
    assert settings.misspelt(names, known, "gpu_max_faild, gpu_canery,gpu_host") == []
