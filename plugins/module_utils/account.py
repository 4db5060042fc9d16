# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person is told about many nodes: reasons said once, what to type next, what runs where, where time went.

Pure functions over what the playbooks know of each node; they make text and data, and print nothing.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

NAMES_SHOWN = 4
GOOD = ("upgraded", "already")
"""Outcomes of an upgrade with which nothing is left to do."""

_VARYING = re.compile(r"\bPID \d+|\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?Z?|\b\d+(?:\.\d+)? s\b")
"""What differs between nodes that have the same trouble."""


def named(names: Sequence[str], shown: int = NAMES_SHOWN) -> str:
    """``a, b, c and 9 more``."""
    more = len(names) - shown
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:shown])} and {more} more"


def grouped(nodes: Iterable[Mapping[str, Any]], field: str = "reason") -> list[dict[str, Any]]:
    """Nodes by what is said of them in ``field``, the largest group first; a node of which nothing is said is left out,
    and one whose field is a list of texts is in a group for each.

    Each group has its ``nodes``, the ``reason`` in the words of the first, and ``text``: ``3 nodes (a, b, c): reason``.
    Reasons that differ only in the node's name, process ids, times and durations are one.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for node in nodes:
        name, content = str(node["name"]), node.get(field) or ()
        for text in (content,) if isinstance(content, str) else content:
            groups.setdefault(_VARYING.sub("*", str(text).replace(name, "*")), []).append((name, str(text)))
    out = []
    for members in sorted(groups.values(), key=len, reverse=True):
        names = [name for name, dummy in members]
        said = list(dict.fromkeys(text for dummy, text in members))
        who = names[0] if len(names) == 1 else f"{len(names)} nodes ({named(names)})"
        example = f"for example of {names[0]}: " if len(said) > 1 else ""
        out.append({"nodes": names, "reason": said[0], "text": f"{who}: {example}{said[0]}"})
    return out


def reasons(findings: Iterable[Mapping[str, Any]]) -> str:
    """What findings of level error say and what to do about each, as one text; messages of one check that end alike are
    one: ``a, b are not available at 550.1``. Empty if there is no error."""
    by_check: dict[str, list[Mapping[str, Any]]] = {}
    for finding in findings:
        if finding["level"] == "error":
            by_check.setdefault(finding["check"], []).append(finding)
    said = []
    for members in by_check.values():
        following = next((str(one["next"]) for one in members if one.get("next")), "")
        text = _folded(list(dict.fromkeys(str(one["message"]) for one in members)))
        said.append(f"{text} (next: {following})" if following else text)
    return "; ".join(dict.fromkeys(said))


def _folded(messages: Sequence[str]) -> str:
    words = [message.split(" ") for message in messages]
    same = 0
    while same < min(map(len, words)) - 1 and len({tuple(each[-same - 1 :]) for each in words}) == 1:
        same += 1
    if len(messages) == 1 or same < 2:
        return "; ".join(messages)
    first, *rest = words[0][-same:]
    ending = " ".join(["are" if first == "is" else first, *rest])
    return f"{', '.join(' '.join(each[:-same]) for each in words)} {ending}"


_MEND = ("refused", "rolled back", "skipped")
_LOOK = ("quarantined",)
_BRING_UP = ("lost",)
_GO_ON = ("not started", "left for later")


def next_steps(
    nodes: Sequence[Mapping[str, Any]], playbook: str, command: str, good: Sequence[str] = GOOD, hosts: str = ""
) -> list[dict[str, str]]:
    """What to do after a run, in order: a sentence each, and the command to type.

    :param nodes: the lines of the report, with name and outcome
    :param playbook: what ran: upgrade, rollback or recover
    :param command: how it was started, without the playbook's name and ``gpu_hosts``, quoted: ``-i inventory.yml -e …``
    :param hosts: the ``gpu_hosts`` that it was started with, if any
    """

    def those(outcomes: Sequence[str]) -> list[str]:
        seen = ((str(node["name"]), _MEND[0] if node.get("go_on") else node["outcome"]) for node in nodes)
        return [name for name, outcome in seen if outcome in outcomes]

    def typed(name: str, names: Sequence[str]) -> str:
        whom = ",".join(names) or hosts
        parts = (
            f"ansible-playbook gpufleet.driver.{name}",
            command,
            shlex.join(("-e", f"gpu_hosts={whom}")) if whom else "",
        )
        return " ".join(part for part in parts if part)

    steps = []
    for outcomes, playbook_then, say in (
        (_BRING_UP, "recover", "bring up"),
        (_LOOK, "recover", "look at"),
        (_MEND, playbook, "mend what is said of"),
    ):
        names = those([outcome for outcome in outcomes if outcome not in good])
        if names:
            ends = (
                "then, back to the former driver and into service" if playbook_then == "recover" else "then try again"
            )
            steps.append({"say": f"{say} {named(names)}; {ends}", "command": typed(playbook_then, names)})
    waiting = those(_GO_ON)
    if waiting:
        first = "when that is done, " if steps else ""
        steps.append({"say": f"{first}go on with the other {len(waiting)}", "command": typed(playbook, ())})
    return steps


def started_with(inventories: Iterable[str], settings: Mapping[str, Any]) -> str:
    """The part of a command to type that says of what inventories and with what settings; one without a value is left
    out."""
    words: list[str] = []
    for inventory in inventories:
        words += ["-i", str(inventory)]
    for name, value in settings.items():
        words += ["-e", f"{name}={value}"] if value else []
    return shlex.join(words)


def outcomes(
    nodes: Iterable[str], hostvars: Mapping[str, Mapping[str, Any]], only: Sequence[str] = ()
) -> dict[str, str]:
    """What became of nodes so far, node → outcome: of all of which something is known, or just those whose outcome is
    one of ``only``."""
    about = ((node, hostvars[node]) for node in nodes)  # Ansible works them out anew each time
    known = {node: str(variables["gpu_outcome"]["name"]) for node, variables in about if "gpu_outcome" in variables}
    return {node: outcome for node, outcome in known.items() if not only or outcome in only}


def driver_versions(
    nodes: Iterable[Mapping[str, Any]], hostvars: Mapping[str, Mapping[str, Any]], target: str
) -> dict[str, str | None]:
    """The driver on each node now: as it was found (``gpu_node``), or ``target`` once the node is upgraded, or what it
    came from once it is rolled back."""
    nodes = list(nodes)
    found = {str(node["name"]): node["loaded"] for node in nodes}
    former = {str(node["name"]): _previous(node) for node in nodes}
    now = {"rolled_back": former, "upgraded": dict.fromkeys(found, target)}
    moved = outcomes(found, hostvars, list(now))
    return {**found, **{name: now[outcome][name] for name, outcome in moved.items()}}


def doubles(nodes: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """The names of each machine that has several: nodes (``gpu_node``) of one ``machine``, its boot id and its own name
    for itself. Copies of a virtual machine may share the boot id. A node of which nothing is known is left out."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        if node.get("machine"):
            names.setdefault(node["machine"], []).append(str(node["name"]))
    return [each for each in names.values() if len(each) > 1]


def upgrade_lines(
    nodes: Iterable[Mapping[str, Any]],
    hostvars: Mapping[str, Mapping[str, Any]],
    plan: Mapping[str, Any],
    target: str,
    only_canary: bool = False,
) -> list[dict[str, Any]]:
    """What became of every node of an upgrade: ``name``, ``batch``, driver ``before`` and ``after`` (``?`` if nobody
    knows), ``outcome``, ``reason``, ``next``, the ``journal`` of its run, the ``moves`` of its work, and why it
    ``stays`` out of service though it is good, if somebody else wants it so.

    :param nodes: what was found of each before (``gpu_node``)
    :param hostvars: by node, with ``gpu_outcome`` and ``gpu_gate`` where there are any
    :param only_canary: the other nodes were left for later on purpose
    """
    nodes = list(nodes)
    batch_of = {node: batch["name"] for batch in plan["batches"] for node in batch["nodes"]}
    skipped = {one["node"]: one["reason"] for one in plan["skipped"]}
    gates = [hostvars[node["name"]].get("gpu_gate") or {} for node in nodes]
    closed = [gate["reasons"] for gate in gates if not gate.get("open", True)]
    stopped = f"no further batch started: {'; '.join(closed[0])}" if closed else ""
    out = []
    for node in nodes:
        name = node["name"]
        known = hostvars[name].get("gpu_outcome") or {}
        if node["already"]:
            otherwise, reason = "already", ""
        elif name in skipped:
            otherwise, reason = "skipped", skipped[name]
        else:
            otherwise, reason = (
                "left for later" if only_canary and name not in plan["canary"] else "not started",
                stopped,
            )
        outcome = known.get("name", otherwise)
        after = "?"
        if outcome == "upgraded" or node["already"]:
            after = target
        elif outcome == "rolled_back":
            after = _previous(node)
        elif outcome not in ("lost", "quarantined"):
            after = node["loaded"]
        line = {
            "name": name,
            "batch": batch_of.get(name, "-"),
            "before": _previous(node) or node["installed"],
            "after": known.get("loaded", after),
            "go_on": known.get("go_on", False),
        }
        about = {"outcome": outcome, "reason": known.get("reason", reason), "next": known.get("next", "")}
        out.append(_told({**line, **about}, hostvars[name]))
    return out


def return_lines(nodes: Iterable[Mapping[str, Any]], hostvars: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What became of nodes that were to go back to their former driver; each line as of :func:`upgrade_lines`."""
    out = []
    for node in nodes:
        known = hostvars[node["name"]].get("gpu_outcome") or {"name": "not started"}
        after = {
            "rolled_back": node["run"].get("previous", ""),
            "refused": node["loaded"],
            "not started": node["loaded"],
        }
        line = {"name": node["name"], "batch": "-", "before": _before(node), "after": after.get(known["name"], "?")}
        good = known["name"] == "rolled_back"
        about = {key: "" if good else known.get(key, "") for key in ("reason", "next")}
        out.append(_told({**line, "outcome": known["name"], **about}, hostvars[node["name"]]))
    return out


def _before(node: Mapping[str, Any]) -> str:
    return node["loaded"] or node["installed"]


def _previous(node: Mapping[str, Any]) -> Any:
    """The driver that a rollback of an upgrade leads to: another than the loaded one where the upgrade goes on with a
    run that was never concluded."""
    return node.get("previous") or node["loaded"]


def _told(line: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    journal: Mapping[str, Any] = {}
    for register in ("__uncordon_closed", "__quarantine_journal"):
        journal = journal or (known.get(register) or {}).get("journal") or {}
    kept = {key: journal[key] for key in ("run", "steps", "outcome") if key in journal}
    moved: list[Mapping[str, Any]] = []
    for register in ("__evacuate_guests", "__evacuate_moved"):
        moved += (known.get(register) or {}).get("workloads") or ()
    back = ((known.get("__uncordon_result") or {}).get("nodes") or {}).get(line["name"]) or {}
    stays = "" if back.get("failed", True) else back["msg"]
    return {**line, "outcome": line["outcome"].replace("_", " "), "journal": kept, "moves": moved, "stays": stays}


def status_lines(
    nodes: Sequence[Mapping[str, Any]], service: Mapping[str, Any], inventories: Sequence[str] = ()
) -> list[str]:
    """Where every node stands, as a table, and below it why, what is locked, what is out of service, and what to type.

    :param nodes: what was found of each node (``gpu_node``)
    :param service: what module ``node_cordon`` said of them in check mode
    :param inventories: those that the playbook was started with
    """
    wide = max(len(str(name)) for name in ("node", *(node["name"] for node in nodes)))

    def row(name: Any, loaded: str, installed: str, library: str, gpus: Any, run: str) -> str:
        return f"{name:<{wide}}  {loaded:<12}  {installed:<12}  {library:<12}  {gpus:>4}  {run}"

    out = [row("node", "loaded", "installed", "library", "GPUs", "last run")]
    for node in nodes:
        loaded, installed, library = (node[of] or "-" for of in ("loaded", "installed", "library"))
        out.append(row(node["name"], loaded, installed, library, len(node["gpus"]), _last_run(node)))
    whys = [{"name": node["name"], "reason": (node["outcome"] or {}).get("reason")} for node in nodes]
    out += [f"why: {group['text']}" for group in grouped(whys)]
    out += [f"now: {group['text']}" for group in grouped(nodes)]
    out += _locks(node["lock"] for node in nodes if node.get("lock"))
    if "foreign_nodes" not in service:
        out.append(f"out of service: the scheduler could not be asked: {service.get('msg', 'no message')}")
    out += [f"out of service: {service['nodes'][name]['msg']}" for name in service.get("foreign_nodes", ())]
    silent = ", ".join(str(node["name"]) for node in nodes if not node["seen"])
    if silent:
        out.append(
            f"next: {silent}: mend what is said above, then ask for the status again; "
            "recover brings back what was left behind"
        )
    interrupted = [node for node in nodes if node["unfinished"] and not node["at_work"]]
    looked_at = [node for node in nodes if not node["unfinished"] and (node["outcome"] or {}).get("name") in _LOOK]
    go_on = "if no run is at work any more, run the upgrade again, which goes on with them, or bring them back"
    runs = sorted({str(node["run"]["id"]) for node in interrupted})
    settings = {"gpu_lock_takeover": runs[0]} if len(runs) == 1 else {}
    out += _bring_back(interrupted, f"{len(interrupted)} interrupted: {go_on}", inventories, settings)
    out += _bring_back(looked_at, f"{len(looked_at)} quarantined: look at them, then bring them back", inventories, {})
    return out


def _last_run(node: Mapping[str, Any]) -> str:
    run, outcome = node["run"], node["outcome"] or {}
    if not run:
        return "none" if node["seen"] else "unknown"
    which = f"{run['id']} to {run['target']}"
    if run.get("given_up"):
        which += f" (gave up {', '.join(run['given_up'])})"
    if node["at_work"]:
        return f"{which}: still at work"
    if node["unfinished"]:
        return f"{which}: interrupted " + (f"after or in {node['step']}" if node["step"] else "at the beginning")
    if outcome.get("name") == "rolled_back":
        return f"{which}: rolled back to {run.get('previous') or 'what it had'}"
    return f"{which}: {outcome['name'].replace('_', ' ')}" if outcome else which


def _locks(locks: Iterable[Mapping[str, Any]]) -> list[str]:
    locks = list(locks)
    over = {run for lock in locks for run in lock.get("ended") or ()}
    leases = {lock["lease"]["run_id"]: lock["lease"] for lock in reversed(locks) if lock.get("lease")}
    out = [
        f"locked: the fleet is run {run}'s, of {lease['holder']}; if that is no longer at work, "
        f"another may have the fleet with -e gpu_lock_takeover={run}"
        for run, lease in sorted(leases.items())
        if run not in over
    ]
    return out + [f"lock: {error}" for error in dict.fromkeys(lock["error"] for lock in locks if "error" in lock)]


def _bring_back(
    nodes: Sequence[Mapping[str, Any]], say: str, inventories: Sequence[str], settings: Mapping[str, str]
) -> list[str]:
    if not nodes:
        return []
    ways = " or ".join(dict.fromkeys(str(node["run"]["previous"]) for node in nodes if node["run"].get("previous")))
    hosts = ",".join(str(node["name"]) for node in nodes)
    command = f"ansible-playbook gpufleet.driver.recover {started_with(inventories, {'gpu_hosts': hosts, **settings})}"
    return [f"next: {say}{f', to {ways}' if ways else ''}:", f"      {command}"]


_ENDED = {
    "moved": "moved",
    "saved": "has saved itself",
    "stayed": "not saved",
    "cold_start": "started again from its own state",
    "unknown": "may run there: the node did not answer",
    "lost": "does not run",
}


def moves(nodes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What became of work that was to be saved or moved (``moves`` of each line of :func:`upgrade_lines`, as module
    ``workload_move`` tells them): ``workload``, ``origin``, ``to``, ``ending``, ``still`` (how long it stood still),
    ``size``, ``reason``, and all of it as ``text``. Work that was not running is left out."""
    out = []
    for node in nodes:
        for work in node.get("moves", ()):
            if work["how"] not in _ENDED:
                continue
            moved = work["how"] == "moved"
            last = work["reasons"][-1] if work["reasons"] and not moved else {}
            row = {
                "workload": work["workload"],
                "origin": node["name"],
                "to": work["to"] or "",
                "ending": _ENDED[work["how"]],
                "still": lasted(work["seconds"]) if moved else "",
                "size": f"{work['bytes'] / 2**20:.0f} MiB" if work["bytes"] else "",
                "reason": f"{last['reason']}: {last.get('observed', '')}" if last else "",
            }
            steps = work.get("progress") or ()
            went_on = f"progress {steps[0]:g} before, {steps[-1]:g} after" if moved and steps else ""
            about = [f"stood still for {row['still']}" if moved else "", row["size"], went_on]
            where = f"{row['origin']} to {row['to']}" if row["to"] else row["origin"]
            text = f"{row['workload']} ({where}): {row['ending']}"
            text += "".join(f", {one}" for one in about if one) + (f"; {row['reason']}" if row["reason"] else "")
            if work.get("kept"):
                text += f"; its save {work['kept']} is kept for now (next: {work['next']})"
            out.append({**row, "text": text})
    return out


def work_lines(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """What runs on nodes (``work`` of each, as module ``host_workloads`` lists it) and what becomes of it; equal work
    of several nodes is one line, and work that nobody declared comes last."""
    groups: dict[tuple[bool, str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for node in nodes:
        for work in node.get("work", ()):
            if work["state"] == "running" or work["declared"]:
                key = (not work["declared"], work["name"], work["then"])
                groups.setdefault(key, []).append((str(node["name"]), work))
    out = []
    for (undeclared, name, then), members in sorted(groups.items(), key=lambda item: item[0]):
        nodes_of = [node for node, dummy in members]
        where = nodes_of[0] if len(nodes_of) == 1 else f"{len(nodes_of)} nodes ({named(nodes_of)})"
        about = [_amounts([work for dummy, work in members])] if any(work["gpus"] for dummy, work in members) else []
        if undeclared and len(members) == 1 and members[0][1]["since"] is not None:
            about.append(f"since {datetime.fromtimestamp(members[0][1]['since'], timezone.utc):%Y-%m-%d %H:%MZ}")
        has = f" ({', '.join(about)})" if about else ""
        out.append(f"{'warning: ' if undeclared else ''}{where}: {name}{has} {then}")
    return out


def _amounts(work: Sequence[Mapping[str, Any]]) -> str:
    gpus = sum(len(one["gpus"]) for one in work)
    memory = sum(one["memory"] or 0 for one in work)
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" + (f", {memory / 2**30:.1f} GiB" if memory else "")


# -- where the time went

EVACUATE, INSTALL, REBOOT, VALIDATE, ROLL_BACK, RETURN, SERVICE = (
    "evacuate", "install", "reboot", "validate", "roll back", "return", "in service",
)  # fmt: skip

_PHASE_OF = {"stop workloads": EVACUATE, "start workloads": RETURN, "rollback": ROLL_BACK}


def phases(journal: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The run of one node, from the beginning of its journal: each phase with ``name``, ``start`` and ``end`` (Unix
    seconds), and the steps of it that ``failed``. Contiguous; empty if no run was begun. Of an upgrade that a later run
    undid, only that later run."""
    run, outcome = journal.get("run"), journal.get("outcome")
    if not run or not run.get("begun"):
        return []
    out: list[dict[str, Any]] = []
    end, now = run["begun"], EVACUATE

    def until(when: float) -> None:
        nonlocal end
        if out and out[-1]["name"] == now:
            out[-1]["end"] = max(end, when)
        elif when > end:
            out.append({"name": now, "start": end, "end": when, "failed": []})
        end = max(end, when)

    for step in journal.get("steps", ()):
        name = step["name"]
        if name == "stop workloads" and now == RETURN:
            now = SERVICE
            until(step["at"])
        elif name == "start workloads" and now in (INSTALL, REBOOT):
            now = VALIDATE
            until(step["at"])
        elif name in ("start workloads", "rollback"):
            until(step["at"])
        if name in _PHASE_OF:
            now = _PHASE_OF[name]
        elif now != ROLL_BACK:
            now = REBOOT if name == "reboot" else INSTALL
        until(step.get("ended", step["at"]))
        if step["state"] == "failed" and out:
            out[-1]["failed"].append(name)
    if outcome and outcome.get("at"):
        if now in (INSTALL, REBOOT) and outcome.get("name") == "upgraded":
            now = VALIDATE
        until(outcome["at"])
    served = [number for number, phase in enumerate(out) if phase["name"] == SERVICE]
    return out[served[-1] + 1 :] if served and run.get("earlier_ids") else out


def durations(journal: Mapping[str, Any]) -> dict[str, float]:
    """Seconds a node's last upgrade took, as a snapshot of the planner takes them: evacuate, install, validate and
    reboot, which add up to the time out of service. Empty unless it ended well."""
    outcome = journal.get("outcome") or {}
    if outcome.get("name") != "upgraded":
        return {}
    spent = dict.fromkeys(("evacuate", "install", "validate", "reboot"), 0.0)
    for phase in phases(journal):
        name = {EVACUATE: "evacuate", INSTALL: "install", REBOOT: "reboot"}.get(phase["name"], "validate")
        if phase["name"] in (ROLL_BACK, SERVICE):
            return {}
        spent[name] += phase["end"] - phase["start"]
    return {name: round(seconds, 1) for name, seconds in spent.items()}


def timeline(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The phases of all nodes that have a ``journal``, on one scale: ``start`` and ``seconds`` of the whole, and for
    each node by name its spans with ``left`` and ``width`` in per cent, ``name``, ``seconds`` and ``failed``."""
    found = {str(node["name"]): phases(node.get("journal") or {}) for node in nodes}
    found = {name: spans for name, spans in found.items() if spans}
    if not found:
        return {"start": 0.0, "seconds": 0.0, "nodes": {}}
    start = min(spans[0]["start"] for spans in found.values())
    whole = max(1.0, max(spans[-1]["end"] for spans in found.values()) - start)
    return {
        "start": start,
        "seconds": round(whole, 1),
        "nodes": {
            name: [
                {
                    "name": span["name"],
                    "left": round(100 * (span["start"] - start) / whole, 3),
                    "width": round(100 * (span["end"] - span["start"]) / whole, 3),
                    "seconds": round(span["end"] - span["start"], 1),
                    "failed": span["failed"],
                }
                for span in spans
            ]
            for name, spans in found.items()
        },
    }


def lasted(seconds: float) -> str:
    """``45 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
