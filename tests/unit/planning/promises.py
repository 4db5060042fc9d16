# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What docs/snapshot.md promises of every plan, checked by carrying the plan out on paper.

It shares no code with the planner: a snapshot and a plan as JSON, and the options of upgrade_plan, are all it knows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

DURATIONS = {"evacuate": 180.0, "install": 420.0, "validate": 60.0, "reboot": 0.0}
EQUAL = ("architecture", "kernel", "runtime", "cgroup", "security_module", "driver_flavour", "gpu_sku", "ecc")
KEY = ("gpu_model", "gpu_memory", "driver", "mig", "mps", "cpu_features", "topology", "criu", *EQUAL)
FAR = 10**9
"""The turn of a node that keeps its driver."""

Json = dict[str, Any]


def broken(snapshot: Json, options: Json, plan: Json) -> list[str]:
    """Every promise that a plan breaks, in words; none if it keeps them all."""
    return list(_Paper(snapshot, options, plan).check())


class _Paper:
    def __init__(self, snapshot: Json, options: Json, plan: Json) -> None:
        self.options, self.plan, self.version = options, plan, options["version"]
        self.nodes: dict[str, Json] = {node["name"]: node for node in snapshot["nodes"]}
        self.keys: Json = snapshot.get("keys", {})
        self.budgets: dict[str, int] = snapshot.get("budgets", {})
        self.queue: dict[str, Json] = snapshot.get("queue", {})
        self.durations = DURATIONS | snapshot.get("durations", {})
        self.batches: list[Json] = plan["batches"]
        self.turn = {name: number for number, batch in enumerate(self.batches) for name in batch["nodes"]}
        self.items: dict[str, tuple[Json, list[Json]]] = {}
        for work in snapshot.get("workloads", ()):
            if work.get("gang", True) or len(work["members"]) == 1:
                self.items[work["name"]] = (work, work["members"])
            else:
                self.items.update({f"{work['name']}/{n}": (work, [each]) for n, each in enumerate(work["members"])})
        self.place = 0
        self.domains = self._joined(options.get("keep_together", ["nvlink", "imex"]))

    def _joined(self, kinds: Sequence[str]) -> list[set[str]]:
        """Nodes that share a domain of these kinds, also through others."""
        found: list[set[str]] = []
        for name, node in self.nodes.items():
            mates = {
                other
                for other, each in self.nodes.items()
                for kind in kinds
                if kind in node.get("domains", {}) and each.get("domains", {}).get(kind) == node["domains"][kind]
            } | {name}
            touching = [group for group in found if group & mates]
            found = [group for group in found if group not in touching] + [mates.union(*touching)]
        return found

    def check(self) -> Iterator[str]:
        yield from self._every_node_once()
        yield from self._order()
        for number, batch in enumerate(self.batches):
            yield from self._size(number, batch)
            yield from self._limits(batch)
            yield from self._clock(number, batch)
        yield from self._carried_out()

    def _left_out(self, node: Json) -> bool:
        if node.get("skip"):
            return True
        if node.get("unfinished"):
            return False
        models = self.options.get("gpu_models") or [node.get("gpu_model")]
        done = node.get("loaded") == self.version and node.get("installed") in (None, self.version)
        other = node.get("gpu_model") not in models or node.get("gpu_model") in self.options.get("unsupported", ())
        return bool(not node.get("gpus") or other or node.get("cordoned_by") or done)

    def _out(self, node: Json) -> bool:
        return bool(node.get("gpus")) and bool(node.get("cordoned_by") or not node.get("schedulable", True))

    def _due(self, name: str) -> bool:
        return bool(self.nodes[name].get("unfinished")) or self._out(self.nodes[name])

    def _first(self, name: str) -> bool:
        """Whether it or a node that is kept together with it is due: nothing keeps it from being first."""
        return any(self._due(mate) for group in self.domains if name in group for mate in group & self.turn.keys())

    def _every_node_once(self) -> Iterator[str]:
        times = Counter(name for batch in self.batches for name in batch["nodes"])
        skipped = {each["node"]: each["reason"] for each in self.plan["skipped"]}
        blocked = {each["node"] for each in self.plan["blocked"]}
        for name, node in self.nodes.items():
            if times[name] + (name in skipped) != 1:
                yield f"{name} is in {times[name]} batches and left out: {name in skipped}"
            if self._left_out(node) and (name in times or name in blocked):
                yield f"{name} is not to be upgraded"
            if name in skipped and (not skipped[name] or self._left_out(node) == (name in blocked)):
                yield f"{name} is left out for {skipped[name]!r}, blocked: {name in blocked}"
        for group in self.domains:
            here = {name for name in group if self.nodes[name].get("gpus")}
            turns = {self.turn[name] for name in here if name in self.turn}
            split = any(self.nodes[n].get("loaded") == self.version or self.nodes[n].get("unfinished") for n in here)
            if len(turns) > 1 or (turns and not split and not here <= self.turn.keys()):
                yield f"the domain of {', '.join(sorted(here))} is split"
        if [name for batch in self.batches for name in batch["nodes"]] != self.plan["order"]:
            yield "order is not that of the batches"
        if [len(batch["nodes"]) for batch in self.batches] != self.plan["serial"]:
            yield "serial is not the sizes of the batches"

    def _order(self) -> Iterator[str]:
        """Canaries and nodes that are due first, the reserve last."""
        canary, asked = self.plan["canary"], self.options.get("canary", 1)
        first = self.batches[0]["nodes"] if self.batches else []
        if canary and (canary != first or self.batches[0]["name"] != "canary"):
            yield f"the canary {canary} is not the first batch"
        if isinstance(asked, list):
            absent = {name for name in asked if name in self.turn} - set(canary)
            if absent:
                yield f"the canaries {absent} are not in the first batch"
        elif asked:
            for model, count in Counter(self.nodes[name].get("gpu_model") for name in self.turn).items():
                have = sum(self.nodes[name].get("gpu_model") == model for name in canary)
                if have < min(asked, count) and not any(f"canary of {model}" in note for note in self.plan["notes"]):
                    yield f"{have} canaries of {model} and no word about it"
        late = {name for name in self.turn if self._due(name) and self.turn[name]}
        if late:
            yield f"{late} are due and not in the first batch"
        named = set(self.options.get("reserve", ())) & self.turn.keys()
        reserve = {name for group in self.domains if group & named for name in group}
        rest = [turn for name, turn in self.turn.items() if name not in reserve]
        early = [name for name in reserve if self.turn.get(name, FAR) <= max(rest, default=-1) and not self._due(name)]
        if early:
            yield f"{early} of the reserve have their turn before or with others"

    def _size(self, number: int, batch: Json) -> Iterator[str]:
        total, names = len(self.turn), batch["nodes"]
        sizes = [self._count(size, total) for size in self._listed(self.options.get("batch_size", "20%"))]
        growth, last = self.options.get("growth", 1), sizes[-1]
        if batch["name"] != "canary":
            whole = max(len(group & set(names)) for group in self.domains)
            while True:
                place = self.place
                self.place += 1
                most = sizes[place] if place < len(sizes) else int(last * growth ** (place - len(sizes) + 1) + 1e-9)
                if most >= whole or place > 1000:
                    break
            if len(names) > most:
                yield f"{batch['name']} has {len(names)} nodes and not at most {most}"
        limit = self.options.get("max_unavailable")
        if limit is not None:
            down = {name for name, node in self.nodes.items() if self._out(node) and name not in self.turn}
            down |= {name for name in names if not self._due(name)}
            if len(down) > self._count(limit, total) and any(not self._due(name) for name in names):
                yield f"max_unavailable: {sorted(down)} are down in {batch['name']}"

    def _listed(self, value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    def _count(self, size: Any, total: int) -> int:
        text = str(size)
        return max(1, int(total * float(text[:-1]) / 100)) if text.endswith("%") else int(text)

    def _alone(self, names: Collection[str]) -> bool:
        """Whether it is one node or one domain: these may exceed what cannot be divided, as may nodes that are due."""
        return any(group.issuperset(names) for group in self.domains) or any(self._due(name) for name in names)

    def _limits(self, batch: Json) -> Iterator[str]:
        for kind, most in self.options.get("max_per_domain", {}).items():
            of_domain: dict[str, list[str]] = {}
            for name in batch["nodes"]:
                domain = self.nodes[name].get("domains", {}).get(kind)
                if domain:
                    of_domain.setdefault(domain, []).append(name)
            for domain, names in of_domain.items():
                if len(names) > most and not self._alone(names):
                    yield f"{batch['name']} has too many nodes of the {kind} {domain}: {names}"
        for model, bound in self.options.get("max_pending", {}).items():
            demand = self.queue.get(model, {})
            slot = self.durations["evacuate"] + self._swap()
            wanted = demand.get("gpus", 0) + demand.get("arrivals_per_hour", 0) * slot / 3600
            ours = {name: node for name, node in self.nodes.items() if node.get("gpu_model") == model}
            free = sum(n.get("free", {}).get("gpu", 0) for n in ours.values() if not self._out(n))
            down = sum(ours[name]["gpus"] for name in batch["nodes"] if name in ours and not self._first(name))
            if down and wanted - free + down > bound + 1e-6:
                yield f"{batch['name']} lets {wanted - free + down} GPUs of {model} be missing"
        for name, (work, members) in self.items.items():
            pair = {members[0]["node"], work.get("stand_in")}
            if len(pair) == 2 and pair <= set(batch["nodes"]) and not self._alone(batch["nodes"]):
                yield f"{batch['name']} has the node of {name} and its stand-in"

    def _swap(self) -> float:
        return float(self.durations["install"] + self.durations["validate"] + self.durations["reboot"])

    def _clock(self, number: int, batch: Json) -> Iterator[str]:
        before = self.batches[number - 1]["ends_seconds"] if number else 0
        starts, wait, ends = (batch[f"{what}_seconds"] for what in ("starts", "wait", "ends"))
        if starts < before - 1:
            yield f"{batch['name']} starts before the one before it ends"
        saves = [self.items[e["workload"]][0].get("capture", 60) for e in batch["workloads"] if e["fate"] == "move"]
        length = max([self.durations["evacuate"], *saves]) + self._swap()
        if abs(ends - starts - wait - length) > 2:
            yield f"{batch['name']} takes {ends - starts} s and not {wait + length}"
        if wait > self.options.get("max_wait", 7200) + 1:
            yield f"{batch['name']} waits for {wait} s"
        if self.options.get("windows"):
            now = datetime.fromisoformat(self.options["now"]).timestamp()
            shut = [at for at in range(int(starts) + 30, int(ends) - 30, 60) if not self._is_open(now + at)]
            if shut:
                yield f"{batch['name']} is at work {shut[0]} s from the start, when no window is open"
        if number + 1 == len(self.batches) and abs(ends - self.plan["finish_seconds"]) > 1:
            yield "finish is not the end of the last batch"

    def _is_open(self, moment: float) -> bool:
        for window in self.options["windows"]:
            there = datetime.fromtimestamp(moment, ZoneInfo(window.get("tz", "UTC")))
            days = window.get("days") or ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
            clock, start, end = f"{there:%H:%M}", window["start"], window["end"]
            today, yesterday = (f"{there - timedelta(days=ago):%a}".lower() in days for ago in (0, 1))
            if start < end:
                if today and start <= clock < end:
                    return True
            elif (today and clock >= start) or (yesterday and clock < end):
                return True
        return False

    def _carried_out(self) -> Iterator[str]:
        """Play the batches: where everything is, when it ends, what is free on every node after each step."""
        self.free = {name: Counter(node.get("free", {})) for name, node in self.nodes.items()}
        self.where = {name: [each["node"] for each in members] for name, (dummy, members) in self.items.items()}
        self.end = {name: _or_never(work.get("remaining")) for name, (work, dummy) in self.items.items()}
        self.moved: set[str] = set()
        self.began: dict[str, float] = {}
        lost: Counter[str] = Counter()
        for number, batch in enumerate(self.batches):
            starts, names = batch["starts_seconds"], set(batch["nodes"])
            ended = {name for name, end in self.end.items() if end <= starts + 0.5}
            certain = {name for name in ended if self.end[name] <= starts - 0.5}
            for name in ended - certain:  # on the very second: as the plan says
                if name in {entry["workload"] for entry in batch["workloads"]}:
                    ended.discard(name)
            for name in ended:
                self._put(name, [])
            here = {name for name, where in self.where.items() if names & set(where)}
            told = Counter(entry["workload"] for entry in batch["workloads"])
            if here != set(told) or max(told.values(), default=1) > 1:
                yield f"{batch['name']} has {sorted(here)} on its nodes and tells of {dict(told)}"
                return
            going_home = []
            for entry in batch["workloads"]:
                name, fate = entry["workload"], entry["fate"]
                yield from (f"{name}, {fate} in {batch['name']}: {text}" for text in self._fate(number, batch, entry))
                if fate == "wait":
                    self._put(name, [])
                    self.end[name] = -1.0
                else:
                    self._put(name, entry["to"])
                    lost["moves" if fate == "move" else "cold_starts"] += entry["lost_gpu_hours"]
                    if fate == "move" and self.items[name][0].get("stays_home"):
                        going_home.append(name)
            yield from self._no_room(batch["name"])
            for name in going_home:
                self._put(name, [each["node"] for each in self.items[name][1]])
            yield from self._no_room(f"{batch['name']}, at home again,")
            yield from self._within_budgets(batch)
        for cause in ("moves", "cold_starts"):
            if abs(lost[cause] - self.plan["lost_gpu_hours"][cause]) > 0.01 * max(1, len(self.items)):
                yield f"{cause} lose {self.plan['lost_gpu_hours'][cause]} in all and {lost[cause]} one by one"

    def _put(self, name: str, where: Sequence[str]) -> None:
        for sign, nodes in ((1, self.where[name]), (-1, where)):
            for node, member in zip(nodes, self.items[name][1]):
                for what, amount in member["resources"].items():
                    self.free[node][what] += sign * amount
        self.where[name] = list(where)

    def _no_room(self, when: str) -> Iterator[str]:
        for name, free in self.free.items():
            if any(amount < 0 for amount in free.values()):
                yield f"{name} after {when} has {dict(free)} left"

    def _within_budgets(self, batch: Json) -> Iterator[str]:
        """One node or domain may exceed a budget, and work that has moved."""
        used: Counter[str] = Counter()
        down: Counter[str] = Counter()
        homes: dict[str, set[str]] = {}
        for entry in batch["workloads"]:
            if entry["fate"] == "cold_start" and set(entry["to"]) & set(batch["nodes"]):
                down.update(self.items[entry["workload"]][0].get("budgets", ()))
            work = self.items[entry["workload"]][0]
            for name in work.get("budgets", ()) if entry["fate"] in ("move", "cold_start") else ():
                used[name] += 1
                homes.setdefault(name, set()).update(set(entry["nodes"]) & set(batch["nodes"]))
        for name, number in down.items():
            if number > self.budgets[name]:
                yield f"{batch['name']} has {number} of budget {name} down at once, which allows {self.budgets[name]}"
        for name, number in used.items():
            told = any(note.startswith(f"budget {name} ") and batch["name"] in note for note in self.plan["notes"])
            one = any(homes[name] <= group for group in self.domains) or any(map(self._first, homes[name]))
            if number > self.budgets[name] and not (told and (one or self.moved)):
                yield f"{batch['name']} disturbs {number} of budget {name}, which allows {self.budgets[name]}"

    def _fate(self, number: int, batch: Json, entry: Json) -> Iterator[str]:
        name, fate, to, starts = entry["workload"], entry["fate"], entry["to"], batch["starts_seconds"]
        work, members = self.items[name]
        may = set(work.get("may", ("wait", "restart")))
        if fate == "wait":
            if "wait" not in may and may - {"protect"}:
                yield "it may not be waited for"
            if self.end[name] > starts + batch["wait_seconds"] + 1:
                yield f"it ends at {self.end[name]}, after the wait"
            return
        if fate not in ("move", "cold_start"):
            yield "there is no such fate"
            return
        if any(self.budgets[each] == 0 for each in work.get("budgets", ())):
            yield "its budget allows none"
        if len(to) != len(members):
            yield f"its {len(members)} members go to {to}"
        if fate == "move":
            if "move" not in may or not work.get("backends") or name in self.moved:
                yield f"it may not move, or not again: {sorted(may)}"
            self.moved.add(name)
            for target in to:
                yield from self._takes_saved(number, name, target)
            pause = work.get("capture", 60) + work.get("restore", 60)
            self.end[name] += pause
            loss = pause * (2 if work.get("stays_home") else 1)
        else:
            if "restart" not in may:
                yield "it may not start again"
            pause = work.get("capture", 60) + work.get("restore", 60)
            own = "move" in may and {"hook", "slurm"} & set(work.get("backends", ()))
            risk = min(work.get("at_risk", 0), pause if own else math.inf, starts - self.began.get(name, -math.inf))
            loss = work.get("start_cost", 60) + risk
            if to == self.where[name]:
                loss += self._swap()
            else:
                crowded = self._crowded(batch, work)
                for target in to:
                    yield from self._takes_new(number, name, target, crowded)
            self.end[name], self.began[name] = math.inf, starts
        if to != self.where[name] and work.get("together"):
            shared = {self.nodes[target].get("domains", {}).get(work["together"]) for target in to}
            if len(shared) > 1:
                yield f"its members are apart: {to}"
        gpus = sum(_gpus(member["resources"]) for member in members)
        if abs(gpus * loss / 3600 - entry["lost_gpu_hours"]) > 0.002 * max(1, gpus):
            yield f"it loses {gpus * loss / 3600:.3f} GPU-hours and not {entry['lost_gpu_hours']}"

    def _upgraded(self, number: int, target: str) -> bool:
        return self.turn.get(target, FAR) < number or self.nodes[target].get("loaded") == self.version

    def _takes_work(self, number: int, name: str, target: str) -> Iterator[str]:
        node, (work, members) = self.nodes[target], self.items[name]
        back = node.get("unfinished") and self.turn.get(target, FAR) < number
        serves = back or node.get("schedulable", True)
        if self.turn.get(target) == number or not node.get("gpus") or not serves:
            yield f"{target} takes no work then"
        if node.get("cordoned_by") and not back:
            yield f"{target} is cordoned by {node['cordoned_by']}"
        for label, values in work.get("requires", {}).items():
            if {**node.get("domains", {}), **node.get("labels", {})}.get(label) not in values:
                yield f"{target} has no {label} of {values}"
        for taint in set(node.get("taints", ())) - set(work.get("tolerates", ())):
            yield f"{target} has the taint {taint}"
        if any(self.nodes[each["node"]].get("gpu_model") != node.get("gpu_model") for each in members):
            yield f"{target} has other GPUs"

    def _crowded(self, batch: Json, work: Json) -> bool:
        """Whether a batch has more work of one of its budgets than may be down at once: it has to run elsewhere."""
        also = [self.items[e["workload"]][0].get("budgets", ()) for e in batch["workloads"] if e["fate"] != "wait"]
        return any(sum(name in each for each in also) > self.budgets[name] for name in work.get("budgets", ()))

    def _takes_new(self, number: int, name: str, target: str, crowded: bool) -> Iterator[str]:
        yield from self._takes_work(number, name, target)
        if not self._upgraded(number, target) and not crowded:
            yield f"{target} is not upgraded yet"
        if self.items[name][0].get("stays_home"):
            yield "it starts at home only"

    def _takes_saved(self, number: int, name: str, target: str) -> Iterator[str]:
        yield from self._takes_work(number, name, target)
        work, members = self.items[name]
        backends = work["backends"]
        own = bool({"hook", "slurm"} & set(backends))
        compared = {"gpu_model", "driver"} if list(backends) in (["slurm"], ["host"]) else set(KEY)
        compared -= set(self.options.get("waive", ())) | ({"driver", "driver_flavour"} if own else set())
        if self.turn.get(target, FAR) < number and not (own and not work.get("stays_home")):
            yield f"{target} is upgraded by then"
        offered = self._facts(self.nodes[target])
        if self.turn.get(target, FAR) < number:
            offered["driver"] = self.version
        for member in members:
            saved = self._facts(self.nodes[member["node"]]) | self._key(work)
            for field in compared:
                one, other = saved.get(field), offered.get(field)
                if one is None or other is None or not _agree(field, one, other):
                    yield f"{field} on {target} is {other} and not {one}"

    def _key(self, thing: Json) -> Json:
        key = thing.get("key", {})
        return dict(self.keys[key] if isinstance(key, str) else key)

    def _facts(self, node: Json) -> Json:
        return {"gpu_model": node.get("gpu_model"), **self._key(node), "driver": node.get("loaded")}


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _gpus(resources: Json) -> float:
    shares = (n * int(name[4:].split("g")[0]) / 7 for name, n in resources.items() if name.startswith("mig-"))
    return float(resources.get("gpu", 0) + sum(shares))


def _agree(field: str, one: Any, other: Any) -> bool:
    if field == "gpu_memory":
        return bool(other >= one)
    if field == "cpu_features":
        return set(one) <= set(other)
    return bool(one == other and (field not in ("mig", "mps") or one == "off"))
