# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A loss that no plan can go below, by constraint programming: each node's turn is chosen, as far as batches allow.

Less than any real plan loses: every end is known, there is room for every move and start, and times count in whole
steps, to the plan's advantage. Used by the benchmarks lost_vs_*.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ortools.sat.python import cp_model

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Snapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.bins import together
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.model import Model
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.plan import prepare
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import Policy

STEP = 120


def least(snapshot: Snapshot, policy: Policy, size: int, hours: float) -> float:
    """GPU-hours lost at least by any plan with batches of ``size`` nodes whose last one begins within ``hours``."""
    model = prepare(snapshot, policy)
    times = range(0, int(hours * 3600) + 1, STEP)
    solver_model = cp_model.CpModel()
    starts = [solver_model.new_bool_var("") for dummy in times]
    taken: list[list[cp_model.LinearExpr]] = [[] for dummy in times]
    costs = []
    for nodes in together(model, model.moving):
        turn = [solver_model.new_bool_var("") for dummy in times]
        solver_model.add_exactly_one(turn)
        for place, time in enumerate(times):
            taken[place].append(len(nodes) * turn[place])
            costs.append(int(_cost(model, nodes, time, times[-1])) * turn[place])
    apart = int(model.slot) // STEP
    for place, start in enumerate(starts):
        solver_model.add(sum(taken[place]) <= size * start)
        solver_model.add(sum(starts[place : place + apart]) <= 1)
    solver_model.minimize(sum(costs))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = 60
    solver.parameters.random_seed = 1
    solver.solve(solver_model)
    return solver.best_objective_bound / 3600


def _cost(model: Model, nodes: Sequence[int], time: float, last: float) -> float:
    cost = 0.0
    for index in {item for node in nodes for item in model.residents[node]}:
        item = model.items[index]
        share = sum(node in nodes for node in item.nodes) / len(item.nodes)
        if item.end < time + STEP:
            cost += share * item.idle * min(max(0.0, time - item.end), model.gap[nodes[0]])
        else:
            moves = item.kind.movable and item.kind.restorable and (item.end + item.pause <= last + STEP or model.kept)
            cost += share * min(
                item.cold if item.kind.restartable else inf, item.gpus * item.pause if moves else inf, item.gpus * last
            )
    return cost
