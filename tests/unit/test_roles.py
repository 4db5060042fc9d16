# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A role's defaults, argument_specs and README say the same, and its tasks use only variables it declares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ansible_collections.gpufleet.driver.plugins.module_utils import settings

TOP = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (TOP / "roles").iterdir() if path.is_dir())
SHARED_FACTS = {"gpu_node", "gpu_plan", "gpu_plan_forecast", "gpu_outcome", "gpu_hosts"}
SHARED_FACTS |= {"gpu_plan_outcomes", "gpu_plan_review", "gpu_plan_next"}


MODULES = {"gpu_services", "gpu_settings", "gpu_nodes", "gpu_operator", "gpu_operator_driver", "gpu_operator_info"}
"""What is called like a variable and is none."""


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text()) or {}


@pytest.mark.parametrize("role", ROLES)
def test_defaults_specs_and_readme_agree(role: str) -> None:
    here = TOP / "roles" / role
    defaults = load(here / "defaults/main.yml")
    options = load(here / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    assert set(defaults) == {name for name, option in options.items() if not option.get("required")}
    for name, option in options.items():
        if "default" in option:
            assert defaults[name] == option["default"], name
    rows = re.findall(r"^\| `(gpu_\w+)` \|", (here / "README.md").read_text(), re.MULTILINE)
    assert set(rows) == set(options)


@pytest.mark.parametrize("role", ROLES)
def test_tasks_use_declared_variables_and_use_them_all(role: str) -> None:
    here = TOP / "roles" / role
    text = "\n".join(path.read_text() for part in ("tasks", "templates", "vars") for path in (here / part).glob("*.*"))
    used = set(re.findall(r"\bgpu_[a-z_]+\b", text)) - SHARED_FACTS - MODULES
    declared = set(load(here / "meta/argument_specs.yml")["argument_specs"]["main"]["options"])
    assert used == declared


def test_every_module_that_needs_a_connection_is_routed_to_the_action_that_makes_a_lost_machine_a_failure() -> None:
    """Those for the fleet are delegated to where its scheduler is asked. Planning is done on the controller."""
    own = {path.stem for path in (TOP / "plugins/action").glob("*.py")}
    routed = set(load(TOP / "meta/runtime.yml")["plugin_routing"]["modules"]) | own
    planning = {"workload_placement"}
    modules = {path.stem for path in (TOP / "plugins/modules").glob("*.py")}
    assert routed == modules - planning


def test_numbers_and_truths_given_on_the_command_line_are_converted() -> None:
    """``-e name=5`` gives a text, and a role's check of its settings does not convert it."""
    convert = re.compile(r"( \| default\(.*?\))? \| (int|float|bool)\b")
    alone = re.compile(r"( \| default\(.*\))? }}")
    wrong = []
    options = settings.of_roles(load(path) for path in TOP.glob("roles/*/meta/argument_specs.yml"))
    options |= load(TOP / "playbooks/vars/settings.yml")
    typed = "|".join(name for name, option in options.items() if option["type"] in ("int", "float", "bool"))
    for path in (*TOP.glob("roles/*/tasks/*.yml"), *TOP.glob("playbooks/**/*.yml")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for found in re.finditer(rf"(?<![\w.'-])({typed})(?![\w=:])", line.partition(" # ")[0].partition("#  ")[0]):
                before, after = line[: found.start()], line[found.end() :]
                if not convert.match(after) and not (before.endswith("{{ ") and alone.match(after)):
                    wrong.append(f"{path.relative_to(TOP)}:{number}: {found.group()}")
    assert wrong == []


def test_action_groups_are_what_the_modules_say() -> None:
    groups = load(TOP / "meta/runtime.yml")["action_groups"]
    said: dict[str, set[str]] = {"fleet": set(), "node": set()}
    for path in (TOP / "plugins/modules").glob("*.py"):
        for group in re.findall(r"^  - gpufleet\.driver\.attributes\.(fleet|node)$", path.read_text(), re.MULTILINE):
            said[group].add(path.stem)
    assert {name: set(members) for name, members in groups.items()} == said


def test_what_a_play_goes_by_is_not_a_variable_of_its_nodes() -> None:
    """None of them is known when a play begins: what the inventory sets for the nodes would be without effect."""
    for path in TOP.glob("playbooks/*.yml"):
        for play in load(path):
            assert str(play.get("serial", "{{ hostvars['localhost'].")).startswith("{{ hostvars['localhost']."), path


def test_the_settings_of_the_playbooks_are_documented() -> None:
    rows = re.findall(r"^\| `(gpu_\w+)` \|", (TOP / "docs/variables.md").read_text(), re.MULTILINE)
    assert rows == sorted(load(TOP / "playbooks/vars/settings.yml"))


def test_the_settings_of_every_role_are_checked_before_anything_is_touched() -> None:
    tasks = load(TOP / "playbooks/tasks/settings.yml")
    assert tasks[0]["vars"]["__settings_of_roles"] == ROLES
