# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The modules that plan, without Ansible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import answers, fleet
from ansible_collections.gpufleet.driver.plugins.modules import upgrade_forecast, upgrade_plan

from .fleets import NEW, fleet_of, workload


def given(module: Any, **values: Any) -> dict[str, Any]:
    options = {name: spec.get("default") for name, spec in module.SPEC["argument_spec"].items()}
    return {**options, "version": NEW, "snapshot": fleet.dump(fleet_of(3, workload("w", "n1"))), **values}


def test_a_plan_is_written_once_and_not_in_check_mode(tmp_path: Path) -> None:
    options = given(upgrade_plan, dest=str(tmp_path / "plan.json"))
    assert upgrade_plan.answer(options, True)["changed"] is True
    assert not list(tmp_path.iterdir())
    made = upgrade_plan.answer(options, False)
    assert made["changed"] is True and json.loads((tmp_path / "plan.json").read_text()) == made["plan"]
    assert upgrade_plan.answer(options, False) == {**made, "changed": False}


def test_an_earlier_plan_may_be_given_in_each_form(tmp_path: Path) -> None:
    made = upgrade_plan.answer(given(upgrade_plan), False)
    (tmp_path / "result.json").write_text(json.dumps(made))
    (tmp_path / "plan.json").write_text(json.dumps(made["plan"]))
    seen = [
        upgrade_plan.answer(given(upgrade_plan, previous=each), False)["review"]
        for each in (made, made["plan"], str(tmp_path / "result.json"), str(tmp_path / "plan.json"))
    ]
    assert seen == [{"safe": True, "next_batch": "canary", "reasons": [], "changes": [], "left_out": []}] * 4
    told = [
        upgrade_forecast.answer(given(upgrade_forecast, plan=each), False)["forecasts"][0]
        for each in (None, made, str(tmp_path / "plan.json"))
    ]
    assert told[0] == told[1] == told[2]


def test_an_impossible_plan_fails_with_the_reason_of_each_node_and_writes_nothing(tmp_path: Path) -> None:
    work = workload("w", "n0", may=frozenset(("protect",)))
    options = given(upgrade_plan, snapshot=fleet.dump(fleet_of(1, work)), dest=str(tmp_path / "plan.json"))
    with pytest.raises(answers.Failed, match=r"No node can be upgraded to .*\n  n0: w is protected") as caught:
        upgrade_plan.answer(options, False)
    assert caught.value.result["plan"]["blocked"][0]["node"] == "n0"
    assert not list(tmp_path.iterdir())
