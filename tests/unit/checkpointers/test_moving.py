# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The order of a move, played with nodes that remember what the real ones remember: whatever happens after whichever
call, work is never running twice and never neither running nor saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import moving
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.moving import (
    ABSENT,
    COLD,
    LOST,
    MOVED,
    SAVED,
    STAYED,
    UNKNOWN,
    Move,
    NodeLost,
    Terms,
)


class Crash(BaseException):
    """The controller ends here."""


@dataclass
class Node:
    """What a node knows: work that runs, saves in its store, records of both sides."""

    facts: dict[str, str] = field(default_factory=lambda: {"driver": "580.95.05"})
    lacks: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ("GPU-a",)
    running: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    store: set[str] = field(default_factory=set)
    saved: dict[str, dict[str, Any]] = field(default_factory=dict)
    came: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost: bool = False
    key: bool = True
    """Whether it can decrypt what is encrypted."""


class World:
    """Nodes, and what goes wrong on them: ``trouble`` maps (node, state asked for) to a reason."""

    def __init__(self, **nodes: Node) -> None:
        self.nodes = nodes
        self.trouble: dict[tuple[str, str], str] = {}
        self.dies_in: dict[tuple[str, str], bool] = {}
        """(node, state asked for) → the node stops answering then; True: after having done it."""
        self.calls: list[tuple[str, str]] = []
        self.crash_after: int | None = None
        self.steps_done_twice = 0
        self.clock = 0.0

    def check(self) -> None:
        """The two promises, at this moment."""
        for work in ("one", "two"):
            places = [name for name, node in self.nodes.items() if work in node.running]
            if len(places) > 1:
                raise AssertionError(f"{work} runs on {places}")
            known = any(work in node.running | node.frozen for node in self.nodes.values())
            saved = any(f"save-{work}" in node.store for node in self.nodes.values())
            if not known and not saved:
                raise AssertionError(f"{work} is neither running nor saved")

    def call(self, name: str, module: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        node = self.nodes[name]
        state = str(options.get("state", module))
        if node.lost:
            raise NodeLost("no route to host")
        self.calls.append((name, state))
        dies = self.dies_in.pop((name, state), None)
        if dies is False:
            node.lost = True
            raise NodeLost("connection reset")
        told = self.do(node, module, state, options)
        self.check()
        if dies:
            node.lost = True
            raise NodeLost("connection reset")
        if self.crash_after == len(self.calls):
            raise Crash
        return told

    def do(self, node: Node, module: str, state: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        name = next(name for name, one in self.nodes.items() if one is node)
        if module == "checkpoint_info":
            return {
                "cannot_decrypt": ["" if node.key else "No secret key" for dummy in options.get("encrypt", ())],
                "facts": node.facts,
                "gpus": [{"uuid": uuid} for uuid in node.gpus],
                "backends": {"cuda_criu": {"lacks": [{"observed": lack} for lack in node.lacks]}},
                "stopped": [{"workload": work, **record} for work, record in node.saved.items()],
                "restored": [{"workload": work, **record} for work, record in node.came.items()],
            }
        if module == "checkpoint_fetch":
            if (name, "fetch") in self.trouble:
                return {"failed": True, "msg": self.trouble[name, "fetch"]}
            source = self.nodes[str(options["source"])]
            if source.lost:
                raise NodeLost("source")
            node.store.add(str(options["artefact"]))
            return {"changed": True}
        results = [self.one(name, node, state, options, work) for work in options["workloads"]]
        if options.get("gang") and not all(one["ok"] for one in results):
            for one in results:
                if one["ok"]:
                    self.ungang(node, state, str(one["workload"]))
                    one.update(ok=False, source="running", reason=None, msg="its gang failed")
        return {"workloads": results}

    def ungang(self, node: Node, state: str, work: str) -> None:
        if state == "captured":
            self.thaw(node, work)
        elif state == "restored":
            node.running.discard(work)
            node.came[work] = {"state": "failed", "ran": True}

    def thaw(self, node: Node, work: str) -> None:
        if work in node.frozen:
            node.frozen.discard(work)
            node.running.add(work)
        node.saved[work] = {"state": "aborted"}
        node.store.discard(f"save-{work}")

    def one(self, name: str, node: Node, state: str, options: Mapping[str, Any], given: Any) -> dict[str, Any]:
        work, save = given["name"], f"save-{given['name']}"
        told: dict[str, Any] = {"workload": work, "ok": True, "reason": None}
        record, came = node.saved.get(work, {}), node.came.get(work, {})
        if (name, state) in self.trouble:
            reason = self.trouble[name, state]
            source = "frozen" if work in node.frozen else "running" if work in node.running else "gone"
            if state == "restored":
                node.came[work] = {"state": "failed", "ran": reason == "verify_failed"}
            detail = {"reason": reason, "step": state, "observed": "o", "expected": "e", "next": "n", "source": source}
            return {"workload": work, "ok": False, "source": source, "reason": detail, "msg": reason}
        if state == "captured":
            if given["save"].get("backend") == "hook":
                return {**told, "source": "running", "artefact": "/save", "bytes": 1, "seconds": 1, "evidence": {}}
            if record.get("state") == "committed":
                return {
                    **told,
                    "source": "gone",
                    "artefact": save,
                    "bytes": 1,
                    "seconds": 1,
                    "target": record["target"],
                }
            if work not in node.running | node.frozen:
                detail = {"reason": "lost_source", "step": "membership", "source": "gone"}
                return {**told, "ok": False, "source": "gone", "reason": detail, "msg": "not running"}
            node.running.discard(work)
            node.frozen.add(work)
            node.store.add(save)
            node.saved[work] = {"state": "published"}
            return {**told, "source": "frozen", "artefact": save, "bytes": 1, "seconds": 1.0, "still": 60.0}
        if state == "committed":
            if record.get("state") == "committed" and record["target"] != options["target"]:
                raise AssertionError("given to two")
            node.frozen.discard(work)
            node.saved[work] = {"state": "committed", "target": options["target"]}
            return {**told, "source": "gone"}
        if state == "reassigned":
            node.saved[work] = {"state": "committed", "target": options["target"]}
            return {**told, "source": "gone"}
        if state == "aborted":
            self.thaw(node, work)
            return {**told, "source": "running"}
        if state == "returned":
            if any(work in other.running for other in self.nodes.values() if other is not node):
                raise AssertionError(f"{work} is started again while it runs elsewhere")
            node.running.add(work)
            node.saved[work] = {"state": "returned"}
            if came.get("state") == "left":
                node.came[work]["state"] = "running"
            elif name == "home":
                node.came.pop(work, None)
            return {**told, "source": "running"}
        if state == "prepared":
            assert save in node.store
            if came.get("state") != "running":
                node.came[work] = {"state": "prepared"}
            return told
        if state == "restored":
            if came.get("state") == "running":
                return told
            assert save in node.store
            assert came.get("state") == "prepared", came
            node.running.add(work)
            declared = {"save": {}, "unit": work}
            node.came[work] = {"state": "running", "home": "home", "own": name == "home", "declared": declared}
            return told
        if state == "absent":
            if came.get("state") == "prepared":
                node.came[work] = {"state": "failed", "ran": False}
            return {
                **told,
                "runs": work in node.running,
                "ran": bool(came.get("ran")) or came.get("state") == "running",
            }
        if state == "left":
            node.running.discard(work)
            node.store.add(save)
            node.came[work]["state"] = "left"
            return {**told, "artefact": save, "source": "gone"}
        if state == "home":
            assert save in node.store
            node.running.add(work)
            return told
        assert state == "discarded"
        node.store.discard(given["artefact"] or save)
        if record.get("state") in ("committed", "aborted", "returned"):
            node.saved.pop(work)
        if came.get("state") in ("failed", "prepared", "left") or came.get("own"):
            node.came.pop(work)
        return told


def work(name: str, **save: Any) -> dict[str, Any]:
    return {"name": name, "unit": f"{name}.service", "save": save, "artefact": ""}


def move(world: World, **terms: Any) -> Move:
    def differences(own: Mapping[str, Any], offer: Mapping[str, Any]) -> list[str]:
        return [f"key_mismatch:{key} {own[key]} {offer[key]}" for key in own if own[key] != offer[key]]

    def sleep(seconds: float) -> None:
        world.clock += seconds

    def say(dummy: str) -> None:
        return None

    return Move("home", world.call, Terms(**terms), differences, say, now=lambda: world.clock, sleep=sleep)


def three(**changes: Node) -> World:
    nodes = {"home": Node(running={"one", "two"}), "a": Node(), "b": Node(), **changes}
    return World(**nodes)


def three_on_one_store() -> World:
    world = three()
    for node in world.nodes.values():
        node.store = world.nodes["home"].store
    return world


def how(outcomes: list[moving.Outcome]) -> list[tuple[str, str | None]]:
    return [(one.how, one.to) for one in outcomes]


BOTH = [work("one"), work("two")]


def test_all_move_to_the_first_that_takes_them() -> None:
    world = three()
    outcomes = move(world).away(BOTH, ["a", "b"])
    assert how(outcomes) == [(MOVED, "a"), (MOVED, "a")]
    assert {one.seconds for one in outcomes} == {60.0}, "it stood still also while others were saved"
    assert world.nodes["a"].running == {"one", "two"}
    order = [state for name, state in world.calls if name in ("home", "a")]
    assert order.index("prepared") < order.index("committed") < order.index("restored") < order.index("discarded")
    assert world.nodes["home"].store == world.nodes["a"].store == set()


ENDINGS: dict[str, tuple[dict[tuple[str, str], str], list[tuple[str, str | None]], str]] = {
    "lock-times-out": ({("home", "captured"): "lock_timeout"}, [(STAYED, None)] * 2, "lock_timeout"),
    "no-space-for-the-save": ({("home", "captured"): "insufficient_space"}, [(STAYED, None)] * 2, "insufficient_space"),
    "a-flipped-byte-at-the-first": ({("a", "prepared"): "hash_mismatch"}, [(MOVED, "b")] * 2, "hash_mismatch"),
    "the-key-differs-at-the-first": (
        {("a", "prepared"): "key_mismatch:kernel"},
        [(MOVED, "b")] * 2,
        "key_mismatch:kernel",
    ),
    "the-copy-fails-everywhere": (
        {("a", "fetch"): "full", ("b", "fetch"): "full"},
        [(STAYED, None)] * 2,
        "publish_failed",
    ),
    "no-place-at-any": (
        {("a", "prepared"): "insufficient_gpu_memory", ("b", "prepared"): "insufficient_gpu_memory"},
        [(STAYED, None)] * 2,
        "insufficient_gpu_memory",
    ),
    "the-timer-let-it-go-on-meanwhile": ({("home", "committed"): "policy"}, [(STAYED, None)] * 2, "policy"),
    "restore-fails-at-the-first": ({("a", "restored"): "restore_failed"}, [(MOVED, "b")] * 2, "restore_failed"),
    "restore-fails-everywhere": (
        {("a", "restored"): "restore_failed", ("b", "restored"): "restore_timeout"},
        [(STAYED, None)] * 2,
        "restore_failed",
    ),
    "restore-fails-everywhere-and-at-home": (
        {("a", "restored"): "restore_failed", ("b", "restored"): "key", ("home", "restored"): "restore_failed"},
        [(COLD, None)] * 2,
        "restore_failed",
    ),
    "restore-fails-everywhere-and-home-has-changed": (
        {("a", "restored"): "restore_failed", ("b", "restored"): "key", ("home", "prepared"): "key_mismatch:driver"},
        [(COLD, None)] * 2,
        "restore_failed",
    ),
    "it-ran-a-little-and-then-died": ({("a", "restored"): "verify_failed"}, [(COLD, None)] * 2, "verify_failed"),
}


@pytest.mark.parametrize(("trouble", "ending", "reason"), ENDINGS.values(), ids=ENDINGS)
def test_every_failure_has_its_ending(
    trouble: dict[tuple[str, str], str], ending: list[tuple[str, str | None]], reason: str
) -> None:
    world = three()
    world.trouble = trouble
    outcomes = move(world).away(BOTH, ["a", "b"])
    assert how(outcomes) == ending
    assert all(one.reasons[0]["reason"] == reason for one in outcomes), outcomes
    where = "b" if ending[0] == (MOVED, "b") else "home"
    assert world.nodes[where].running == {"one", "two"}
    assert not any(node.frozen for node in world.nodes.values())
    for one in outcomes:  # a save from which the work did not go on stays, and is told of
        kept = f"save-{one.workload}" if one.how == COLD else ""
        assert one.kept == kept and one.kept in one.next
        assert [name for name, node in world.nodes.items() if f"save-{one.workload}" in node.store] == ["home"] * bool(
            kept
        )
    assert not world.nodes["home"].came


def test_nothing_is_touched_that_has_nowhere_to_go() -> None:
    world = three(a=Node(facts={"driver": "590.44.01"}), b=Node(lacks=("criu is not installed",)))
    outcomes = move(world).away(BOTH, ["a", "b"])
    assert how(outcomes) == [(STAYED, None)] * 2
    assert outcomes[0].reasons[0]["reason"] == "no_target"
    assert "590.44.01" in outcomes[0].reasons[0]["observed"]
    assert "criu is not installed" in outcomes[0].reasons[0]["observed"]
    assert {state for dummy, state in world.calls} == {"checkpoint_info"}


def sealed(name: str) -> dict[str, Any]:
    return work(name, encrypt={"tool": "gpg", "recipient": "ops@example.com"})


KEYLESS: dict[str, tuple[set[str], list[tuple[str, str | None]], str]] = {
    "the-first": ({"a"}, [(MOVED, "b"), (MOVED, "a")], ""),
    "all-targets": ({"a", "b"}, [(STAYED, None), (MOVED, "a")], "a cannot decrypt its save: No secret key"),
    "the-node-it-comes-home-to": ({"home"}, [(STAYED, None), (MOVED, "a")], "home cannot decrypt its save"),
}


@pytest.mark.parametrize(("keyless", "ending", "observed"), KEYLESS.values(), ids=KEYLESS)
def test_who_cannot_decrypt_is_found_before_anything_is_touched(
    keyless: set[str], ending: list[tuple[str, str | None]], observed: str
) -> None:
    world = three()
    for name in keyless:
        world.nodes[name].key = False
    outcomes = move(world).away([sealed("one"), work("two")], ["a", "b"])
    assert how(outcomes) == ending
    reasons = [(one["reason"], one["observed"], one["next"]) for one in outcomes[0].reasons]
    if not observed:
        assert reasons == []
        return
    ((reason, seen, command),) = reasons
    assert reason == "key_mismatch:encryption" and seen.startswith(observed)
    node = seen.split()[0]
    assert command.startswith(f"ansible {node} -b -m gpufleet.driver.checkpoint_info -a ") and "ops@example" in command
    assert "one" not in world.nodes["home"].saved, "it was not stopped"


def test_other_gpus_need_a_driver_that_restores_to_them() -> None:
    for driver, expected in (("570.86.10", (STAYED, None)), ("580.95.05", (MOVED, "a"))):
        world = three(a=Node(gpus=("GPU-x",)))
        for node in world.nodes.values():
            node.facts = {"driver": driver}
        (outcome,) = move(world).away([work("one")], ["a"])
        assert (outcome.how, outcome.to) == expected
        assert "GPU-a is not there" in str(outcome.reasons) or expected[1]


def test_a_copy_that_arrives_wrong_is_made_once_more() -> None:
    world = three()
    copies = []
    real = world.call

    def call(name: str, module: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if module == "checkpoint_fetch":
            copies.append(name)
            if len(copies) == 1:
                return {"failed": True, "msg": "piece 0 arrived wrong"}
        return real(name, module, options)

    world.call = call  # type: ignore[method-assign]
    assert how(move(world).away([work("one")], ["a"])) == [(MOVED, "a")]
    assert copies == ["a", "a"]


def test_work_that_its_driver_broke_starts_again() -> None:
    world = three()
    real = world.one

    def one(name: str, node: Node, state: str, options: Mapping[str, Any], given: Any) -> dict[str, Any]:
        if state != "captured":
            return real(name, node, state, options, given)
        reason = {"reason": "checkpoint_failed", "source": "lost"}
        return {"workload": given["name"], "ok": False, "source": "lost", "reason": reason, "msg": "state failed"}

    world.one = one  # type: ignore[method-assign]
    (outcome,) = move(world).away([work("one")], ["a"])
    assert (outcome.how, outcome.reasons[0]["reason"]) == (COLD, "checkpoint_failed")
    assert ("home", "returned") in world.calls


def test_a_forecast_touches_nothing_and_says_what_would_be() -> None:
    world = three(a=Node(facts={"driver": "590.44.01"}))
    world.nodes["home"].running.discard("gone")
    real = world.one

    def look(name: str, node: Node, state: str, options: Mapping[str, Any], given: Any) -> dict[str, Any]:
        assert (name, state) == ("home", "captured"), "in check mode, nothing else is asked for"
        if given["name"] not in node.running:
            return real(name, node, state, options, given)
        refused = given["save"].get("refused")
        reason = {"reason": refused, "source": "running"} if refused else None
        told = {"workload": given["name"], "source": "running", "reason": reason, "msg": "refused", "bytes": 7}
        return {**told, "ok": not refused}

    world.one = look  # type: ignore[method-assign]
    rows = [work("one"), work("two", refused="unsupported_feature:mps"), work("gone")]
    before = str(world.nodes)
    outcomes = move(world).foretell(rows, ["a", "b"])
    assert how(outcomes) == [(MOVED, "b"), (STAYED, None), (ABSENT, None)]
    assert outcomes[1].reasons[0]["reason"] == "unsupported_feature:mps" and outcomes[0].bytes == 7
    assert str(world.nodes) == before
    assert how(move(world).foretell([work("one")], ["a"])) == [(STAYED, None)], "no node has an equal key"
    assert how(move(world).foretell([work("one", backend="hook")], [])) == [(SAVED, None)]
    world.one = real  # type: ignore[method-assign]
    world.dies_in = {("a", "restored"): False}
    for node in world.nodes.values():
        node.facts = {"driver": "580.95.05"}
    move(world, patience=0).away([work("one")], ["a"])
    world.nodes["a"].lost = False
    assert how(move(world).foretell([work("one")], ["a", "b"])) == [(MOVED, "a")], "what an interrupted run began"


def test_work_that_does_not_end_is_lost_and_goes_to_nobody() -> None:
    """Its node is given up; the next run ends it, and brings its save on."""
    world = three()
    world.trouble = {("home", "committed"): "lost_source"}
    real = world.one

    def one(name: str, node: Node, state: str, options: Mapping[str, Any], given: Any) -> dict[str, Any]:
        told = real(name, node, state, options, given)
        if state == "committed" and not told["ok"]:
            told.update(source="lost", reason={**told["reason"], "step": "commit", "source": "lost"})
            node.saved[given["name"]] = {"state": "committing", "target": "a", "artefact": f"save-{given['name']}"}
        return told

    world.one = one  # type: ignore[method-assign]
    (outcome,) = move(world).away([work("one")], ["a", "b"])
    assert (outcome.how, outcome.kept, outcome.reasons[0]["reason"]) == ("lost", "save-one", "lost_source")
    assert ("home", "aborted") not in world.calls and ("home", "returned") not in world.calls
    assert not any(name == "b" and state != "checkpoint_info" for name, state in world.calls)
    assert "save-one" in world.nodes["home"].store


def test_two_of_one_name_are_not_touched() -> None:
    world = World(home=Node(running={"one"}), b=Node())
    move = Move("home", world.call, Terms(), lambda own, offer: [], lambda text: None)
    given = {"name": "one", "save": {"backend": "cuda_criu"}}
    outcomes = move.away([given, given], ["b"])
    assert [(one.how, one.reasons[0]["reason"]) for one in outcomes] == [(STAYED, "policy")] * 2
    assert world.nodes["home"].running == {"one"}
    assert not [state for dummy, state in world.calls if state == "captured"]


def test_a_candidate_that_is_gone_is_passed_over() -> None:
    world = three(a=Node(lost=True))
    assert how(move(world).away(BOTH, ["a", "b"])) == [(MOVED, "b")] * 2


def test_a_source_that_dies_before_it_was_saved() -> None:
    world = three()
    world.nodes["home"].running.discard("one")
    world.nodes["home"].store.add("save-one")  # for the promise; there is nothing left to keep
    assert how(move(world).away(BOTH, ["a"])) == [(ABSENT, None), (MOVED, "a")]


@pytest.mark.parametrize("done", [False, True], ids=["before-it-was-done", "after-it-was-done"])
@pytest.mark.parametrize("state", ["prepared", "restored", "discarded"])
def test_a_target_that_vanishes(state: str, done: bool) -> None:
    """While it prepares, the next is tried. While work comes back there, nobody else may have it."""
    world = three()
    world.dies_in = {("a", state): done}
    outcomes = move(world, patience=60).away([work("one")], ["a", "b"])
    expected = {"prepared": (MOVED, "b"), "restored": (UNKNOWN, "a"), "discarded": (MOVED, "a")}[state]
    assert how(outcomes) == [expected]
    if state == "restored":
        assert outcomes[0].reasons[-1]["reason"] == "restore_timeout"
        world.nodes["a"].lost = False  # it comes back, and the next run finishes what this one began
        assert how(move(world).away([work("one")], ["b"])) == [(MOVED, "a")]
    assert [name for name, node in world.nodes.items() if "one" in node.running] == [
        "b" if state == "prepared" else "a"
    ]


def test_a_shared_save_is_kept_for_a_target_that_vanished() -> None:
    """Also from those who refused it before: they have no copy of their own to give back."""
    world = three_on_one_store()
    world.trouble = {("a", "prepared"): "hash_mismatch"}
    world.dies_in = {("b", "restored"): False}
    assert how(move(world, shared=True, patience=60).away([work("one")], ["a", "b"])) == [(UNKNOWN, "b")]
    world.nodes["b"].lost = False
    assert how(move(world, shared=True).away([work("one")], ["b"])) == [(MOVED, "b")]


def test_a_target_that_comes_back_in_time_is_asked_again() -> None:
    world = three()
    world.dies_in = {("a", "restored"): True}
    conducted = move(world, patience=100)

    def sleep(seconds: float) -> None:
        world.clock += seconds
        world.nodes["a"].lost = False

    conducted._sleep = sleep
    assert how(conducted.away([work("one")], ["a", "b"])) == [(MOVED, "a")]


TERMS = {"plain": {}, "gang": {"gang": True}, "shared": {"shared": True}}
TROUBLES: dict[str, dict[tuple[str, str], str]] = {
    "nothing-fails": {},
    "first-refuses": {("a", "prepared"): "hash_mismatch"},
    "first-fails": {("a", "restored"): "restore_failed"},
    "all-fail": {("a", "restored"): "restore_failed", ("b", "restored"): "restore_failed"},
    "all-fail-also-at-home": {(name, "restored"): "restore_failed" for name in ("a", "b", "home")},
    "it-ran-on-the-last": {("a", "restored"): "restore_failed", ("b", "restored"): "verify_failed"},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_the_controller_may_die_after_any_call(terms: dict[str, Any], trouble: dict[tuple[str, str], str]) -> None:
    """Run again to the end after each: no promise is broken on the way, and nobody is left standing still."""
    calls = 0
    while True:
        calls += 1
        world = three_on_one_store() if terms.get("shared") else three()
        world.trouble = trouble
        world.crash_after = calls
        try:
            move(world, **terms).away(BOTH, ["a", "b"])
            break
        except Crash:
            pass
        world.crash_after = None
        move(world, **terms).away(BOTH, ["a", "b"])
        running = [name for name, node in world.nodes.items() for name in node.running]
        assert sorted(running) == ["one", "two"], calls
        assert not any(node.frozen for node in world.nodes.values()), calls
    assert calls > 5


def test_a_gang_moves_together_or_not_at_all() -> None:
    world = three()
    world.nodes["home"].running.discard("two")
    world.nodes["home"].store.add("save-two")
    assert how(move(world, gang=True).away(BOTH, ["a"])) == [(STAYED, None), (ABSENT, None)]
    assert world.nodes["home"].running == {"one"}


def test_an_application_that_saved_itself_runs_on() -> None:
    world = three()
    outcomes = move(world).away([work("one", backend="hook"), work("two")], ["a"])
    assert how(outcomes) == [(SAVED, None), (MOVED, "a")]
    assert world.nodes["home"].running == {"one"}


def guest() -> World:
    world = three(home=Node(), a=Node(running={"one"}))
    world.nodes["b"].running.add("two")
    record = {"state": "running", "home": "home", "declared": {"save": {}, "unit": "one"}}
    world.nodes["a"].came["one"] = record
    return world


def back(world: World) -> list[moving.Outcome]:
    move_back = Move("a", world.call, Terms(patience=0), lambda own, offer: [], lambda text: None, lambda: 0.0)
    records = [{"workload": name, **record} for name, record in world.nodes["a"].came.items()]
    return move_back.back([one for one in records if one["state"] in ("running", "left")])


STANDS = {
    # what cannot be done, and what is said of the work when it is to be let go on → how it ends, and where
    "its-timer-cannot-be-set": ("captured", "running", (STAYED, None)),
    "it-cannot-be-ended": ("committed", "running", (STAYED, None)),
    "nor-let-go-on": ("committed", "unknown", (UNKNOWN, "home")),
    "it-broke": ("committed", "lost", (COLD, None)),
    "somebody-has-it": ("committed", "gone", (UNKNOWN, "home")),
}


@pytest.mark.parametrize(("fails", "source", "ending"), STANDS.values(), ids=STANDS)
def test_work_that_stands_is_never_said_to_run(
    monkeypatch: pytest.MonkeyPatch, fails: str, source: str, ending: tuple[str, str | None]
) -> None:
    world = three(home=Node(frozen={"one"}, running={"two"}))
    world.trouble = {("home", fails): "policy"}
    real = world.one

    def one(name: str, node: Node, state: str, options: Mapping[str, Any], work: Any) -> dict[str, Any]:
        told = real(name, node, state, options, work)
        return {**told, "source": source} if state == "aborted" else told

    monkeypatch.setattr(world, "one", one)
    assert how(move(world).away([work("one")], ["a", "b"])) == [ending]


def test_the_way_home() -> None:
    world = guest()
    assert how(back(world)) == [(MOVED, "home")]
    assert world.nodes["home"].running == {"one"}
    assert world.nodes["a"].came == {}


HOMELESS = {"its-files-do-not-arrive": ("home", "fetch"), "it-does-not-start": ("home", "home")}


@pytest.mark.parametrize("where", HOMELESS.values(), ids=HOMELESS)
def test_a_guest_stays_if_it_cannot_go_home(where: tuple[str, str]) -> None:
    world = guest()
    world.trouble = {where: "verify_failed"}
    (outcome,) = back(world)
    assert outcome.how == COLD
    assert world.nodes["a"].running == {"one"}
    assert world.nodes["a"].came["one"]["state"] == "running"
    assert not any(node.store for node in world.nodes.values()), "what it left with is out of date"


@pytest.mark.parametrize(
    ("source", "ending"),
    [("running", (STAYED, None)), ("lost", (LOST, None)), ("unknown", (UNKNOWN, "a"))],
)
def test_a_guest_that_does_not_leave_is_said_to_be_what_it_is(
    monkeypatch: pytest.MonkeyPatch, source: str, ending: tuple[str, str | None]
) -> None:
    world = guest()
    world.trouble = {("a", "left"): "publish_failed"}
    real = world.one
    monkeypatch.setattr(world, "one", lambda *args: {**real(*args), "source": source})
    assert how(back(world)) == [ending]


def test_a_guest_that_may_run_at_home_is_not_started_here() -> None:
    world = guest()
    world.trouble = {("home", "home"): "verify_failed", ("home", "absent"): "restore_failed"}
    (outcome,) = back(world)
    assert (outcome.how, outcome.to) == (UNKNOWN, "home")
    assert world.nodes["a"].running == set() and ("a", "returned") not in world.calls
    assert world.nodes["home"].store == {"save-one"}, "somebody may want it"


def test_what_goes_home_is_what_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the hash of its manifest tells, which whoever can write to the store cannot change."""
    world = guest()
    real, given = world.one, []

    def one(name: str, node: Node, state: str, options: Mapping[str, Any], work: Any) -> dict[str, Any]:
        given.extend([work["digest"]] if state == "home" else [])
        return {**real(name, node, state, options, work), **({"digest": "d1g35t"} if state == "left" else {})}

    monkeypatch.setattr(world, "one", one)
    assert how(back(world)) == [(MOVED, "home")]
    assert given == ["d1g35t"]


@pytest.mark.parametrize(("trouble", "reason"), [("key", "key_mismatch:encryption"), ("lost", "no_target")])
def test_a_guest_is_not_stopped_for_a_home_that_cannot_have_it(trouble: str, reason: str) -> None:
    world = guest()
    world.nodes["a"].came["one"]["declared"] = sealed("one")
    setattr(world.nodes["home"], trouble, trouble == "lost")
    (outcome,) = back(world)
    assert (outcome.how, outcome.reasons[0]["reason"]) == (STAYED, reason)
    assert "left" not in [state for dummy, state in world.calls]
    assert world.nodes["a"].running == {"one"}


def test_on_the_way_home_the_controller_may_die_after_any_call() -> None:
    calls = 0
    while True:
        calls += 1
        world = guest()
        world.crash_after = calls
        try:
            back(world)
            break
        except Crash:
            pass
        world.crash_after = None
        back(world)
        assert [name for name, node in world.nodes.items() if "one" in node.running] == ["home"], calls
    assert calls > 3
