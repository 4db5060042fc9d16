# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the documents tell a reader to type exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import compatibility, plan, policy

TOP = Path(__file__).resolve().parents[2]
DOCUMENTS = [TOP / "README.md", TOP / "docs/awx.md", TOP / "docs/snapshot.md"]


def settings() -> set[str]:
    """Every variable a user may set: those of the roles and of the playbooks."""
    found: set[str] = {"gpu_hosts", "gpu_snapshot"}
    for path in TOP.glob("roles/*/meta/argument_specs.yml"):
        found |= set(yaml.safe_load(path.read_text())["argument_specs"]["main"]["options"])
    return found | set(yaml.safe_load((TOP / "playbooks/vars/settings.yml").read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_variable_and_playbook_exists(document: Path) -> None:
    text = document.read_text()
    names_of_others = {
        "gpu_nodes",
        "gpu_settings",
        "gpu_services",
        "gpu_operator",
        "gpu_memory",
        "gpu_model",
        "gpu_sku",
    }
    told = set(re.findall(r"\bgpu_[a-z_]+\b", text)) - names_of_others
    assert told - settings() == set()
    playbooks = set(re.findall(r"ansible-playbook gpufleet\.driver\.([a-z_]+)", text))
    playbooks |= set(re.findall(r"\b([a-z]+)\.yml`", text)) - {"inventory"}
    assert {name for name in playbooks if not (TOP / f"playbooks/{name}.yml").exists()} == set()


def test_the_snapshot_that_is_shown_can_be_planned_with_and_every_field_is_told() -> None:
    text = (TOP / "docs/snapshot.md").read_text()
    (shown,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    made = plan.make(fleet.parse(json.loads(shown)), policy.Policy("580.95.05"))
    assert set(made.order) | dict(made.skipped).keys() | dict(made.blocked).keys() == {f"gpu-{n}" for n in range(1, 6)}
    assert made.order and not made.blocked
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:4]
    for part, known in zip(parts, (fleet.SNAPSHOT_FIELDS, fleet.NODE_FIELDS, fleet.WORKLOAD_FIELDS), strict=True):
        told = {
            name for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        assert told == set(known)


def test_what_has_to_match_for_saved_work_is_told() -> None:
    (told,) = re.findall(r"^Saved work only.*?^$", (TOP / "docs/snapshot.md").read_text(), re.DOTALL | re.MULTILINE)
    compared = {each.name for each in compatibility.FIELDS if each.scope == compatibility.NODE}
    assert compared - {"driver", "gpu_model"} <= set(re.findall(r"`(\w+)`", told))


def test_the_workflow_for_awx_hangs_together() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (TOP / "docs/awx.md").read_text(), re.DOTALL)
    data = next(found for found in map(yaml.safe_load, blocks) if "controller_workflows" in found)
    templates = {one["name"]: one["playbook"] for one in data["controller_templates"]}
    assert all((TOP / "playbooks" / playbook).exists() for playbook in templates.values())
    (workflow,) = data["controller_workflows"]
    nodes = {node["identifier"]: node for node in workflow["workflow_nodes"]}
    reached = {"plan"}
    for node in nodes.values():
        for following in node.get("related", {}).values():
            reached |= {one["identifier"] for one in following}
        job = node["unified_job_template"]
        assert job["type"] == "workflow_approval" or job["name"] in templates
        assert set(node.get("extra_data", {})) <= settings()
    assert reached == set(nodes), "every node is reached, and every node that is named exists"
