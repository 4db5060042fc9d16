# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The least loss possible for a small fleet, by constraint programming: what the planner is measured against.

The same rules as the planner's schedule (idle GPUs count a quarter if nobody queues), but order, batches, waits, fates
and landing places are all left to OR-tools CP-SAT. Workloads sit on one node each and may be restarted; the number of
batches is given.
"""

from __future__ import annotations

from ortools.sat.python import cp_model

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Snapshot


def least_loss(
    snapshot: Snapshot, sizes: list[int], canary: dict[str, int], max_wait: int, seconds: float
) -> tuple[float, bool]:
    """GPU-seconds lost by the best plan found with batches of at most ``sizes``, and whether none is better.

    :param canary: nodes of each GPU model that make up the first batch.
    :param seconds: the solver's effort in its own time, about seconds: how busy the machine is makes no difference.
    """
    model = cp_model.CpModel()
    nodes, works = snapshot.nodes, snapshot.workloads
    number = {node.name: index for index, node in enumerate(nodes)}
    batches = range(len(sizes))
    slot = int(snapshot.durations.swap + snapshot.durations.evacuate)
    swap = int(snapshot.durations.swap)
    horizon = len(sizes) * (slot + max_wait)
    x = {(n, k): model.new_bool_var("") for n in range(len(nodes)) for k in batches}
    place = {n: model.new_int_var(0, len(sizes) - 1, "") for n in range(len(nodes))}
    for n in range(len(nodes)):
        model.add_exactly_one(x[n, k] for k in batches)
        model.add(place[n] == sum(k * x[n, k] for k in batches))
    for k in batches:
        inside = [x[n, k] for n in range(len(nodes))]
        model.add(sum(inside) <= sizes[k])
        model.add(sum(inside) >= 1)
    for name, count in canary.items():
        model.add(sum(x[n, 0] for n, node in enumerate(nodes) if node.gpu_model == name) == count)
    wait = [model.new_int_var(0, max_wait, "") for dummy in batches]
    start = [model.new_int_var(0, horizon, "") for dummy in batches]
    model.add(start[0] == 0)
    for k in batches[1:]:
        model.add(start[k] == start[k - 1] + wait[k - 1] + slot)

    quarters = {node.gpu_model: 4 if node.gpu_model in snapshot.queue else 1 for node in nodes}
    idles: list[cp_model.LinearExpr] = []
    costs: list[cp_model.LinearExpr] = []
    spent: dict[int, list[cp_model.LinearExpr]] = {k: [] for k in batches}
    lefts: dict[int, list[cp_model.LinearExpr]] = {k: [0] for k in batches}
    returning: dict[int, list[tuple[int, cp_model.IntVar]]] = {n: [] for n in range(len(nodes))}
    landed: dict[int, list[tuple[int, cp_model.IntVar]]] = {n: [] for n in range(len(nodes))}
    arrived: dict[int, list[tuple[int, int, cp_model.IntVar]]] = {n: [] for n in range(len(nodes))}
    over: dict[tuple[int, int, int], cp_model.IntVar] = {}

    def is_over(w: int, extra: int, k: int) -> cp_model.IntVar:
        if (w, extra, k) not in over:
            over[w, extra, k] = ended = model.new_bool_var("")
            remaining = works[w].remaining
            if remaining is None:
                model.add(ended == 0)
            else:
                model.add(start[k] >= int(remaining) + extra).only_enforce_if(ended)
                model.add(start[k] < int(remaining) + extra).only_enforce_if(~ended)
        return over[w, extra, k]

    def fates(w: int, node: int, k: int, extra: int, here: cp_model.IntVar, move: cp_model.IntVar | None) -> None:
        """What may happen to ``w`` on ``node`` when batch ``k`` comes, if ``here``."""
        work = works[w]
        gpus = work.members[0].resources["gpu"]
        cold = gpus * int(work.start_cost + work.at_risk)
        waits, elsewhere, in_place = (model.new_bool_var("") for dummy in range(3))
        options = [waits, elsewhere, in_place] + ([move] if move is not None else [])
        ended = model.new_bool_var("")
        model.add_implication(ended, is_over(w, extra, k))
        model.add(sum(options) + ended == here)
        if work.remaining is None or "wait" not in work.may:
            model.add(waits == 0)
        else:
            left = model.new_int_var(0, max_wait, "")
            model.add(start[k] + wait[k] >= int(work.remaining) + extra).only_enforce_if(waits)
            model.add(left <= max_wait * waits)
            model.add(left == int(work.remaining) + extra - start[k]).only_enforce_if(waits)
            spent[k].append(quarters[nodes[node].gpu_model] * gpus * left)
            lefts[k].append(left)
        costs.append(cold * elsewhere)
        costs.append((cold + gpus * swap) * in_place)
        returning[node].append((gpus, in_place))
        targets = []
        for m, other in enumerate(nodes):
            if m == node or other.gpu_model != nodes[node].gpu_model:
                continue
            chosen = model.new_bool_var("")
            model.add(place[m] < k).only_enforce_if(chosen)
            landed[m].append((gpus, chosen))
            targets.append(chosen)
        model.add(sum(targets) == elsewhere)

    for w, work in enumerate(works):
        home = number[work.members[0].node]
        gpus = work.members[0].resources["gpu"]
        pause = int(work.capture + work.restore)
        moves = {k: model.new_bool_var("") for k in batches}
        for k in batches:
            fates(w, home, k, 0, x[home, k], moves[k])
        if "move" not in work.may:
            model.add(sum(moves.values()) == 0)
            continue
        targets = []
        for m, other in enumerate(nodes):
            if m == home or other.gpu_model != nodes[home].gpu_model:
                continue
            chosen = model.new_bool_var("")
            model.add(place[m] > place[home]).only_enforce_if(chosen)
            costs.append(gpus * pause * chosen)
            arrived[m].append((w, home, chosen))
            targets.append(chosen)
            for k in batches:
                here = model.new_bool_var("")
                model.add_bool_and(chosen, x[m, k]).only_enforce_if(here)
                model.add_bool_or(~chosen, ~x[m, k], here)
                fates(w, m, k, pause, here, None)
        model.add(sum(targets) == sum(moves.values()))

    residents: dict[int, list[int]] = {n: [] for n in range(len(nodes))}
    for w, work in enumerate(works):
        residents[number[work.members[0].node]].append(w)
    for m, node in enumerate(nodes):
        for k in batches[:-1]:
            later = model.new_bool_var("")
            model.add(place[m] > k).only_enforce_if(later)
            model.add(place[m] <= k).only_enforce_if(~later)
            load = [works[w].members[0].resources["gpu"] * (1 - is_over(w, 0, k)) for w in residents[m]]
            for w, home, chosen in arrived[m]:
                pause = int(works[w].capture + works[w].restore)
                present = model.new_bool_var("")
                came = model.new_bool_var("")
                model.add(place[home] <= k).only_enforce_if(came)
                model.add(place[home] > k).only_enforce_if(~came)
                model.add_bool_or(~chosen, ~came, is_over(w, pause, k), present)
                load.append(works[w].members[0].resources["gpu"] * present)
            model.add(sum(load) <= node.gpus).only_enforce_if(later)
        model.add(sum(gpus * chosen for gpus, chosen in returning[m] + landed[m]) <= node.gpus)

    for k in batches:
        model.add_max_equality(wait[k], lefts[k])
        idle = model.new_int_var(0, 32 * len(nodes) * max_wait, "")
        stands = []
        for n, node in enumerate(nodes):
            part = model.new_int_var(0, 4 * node.gpus * max_wait, "")
            model.add(part >= quarters[node.gpu_model] * node.gpus * wait[k]).only_enforce_if(x[n, k])
            stands.append(part)
        model.add(idle >= sum(stands) - sum(spent[k]))
        idles.append(idle)
    model.minimize(4 * sum(costs) + sum(idles))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return float("inf"), False
    return solver.objective_value / 4, status == cp_model.OPTIMAL
