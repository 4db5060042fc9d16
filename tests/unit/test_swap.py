# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The order of a swap's acts: what comes after what, where it stops, and that it goes on from wherever it was cut off.

The node is a model of what the real acts leave behind, with a journal that outlives the process; it objects when
an act comes at the wrong moment. The acts themselves are tested beside their own code.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import swap

OLD, NEW = "535.183.01", "550.90.07"


class Killed(Exception):
    """The process ended here."""


@dataclass
class Node:
    """``journal`` is what is remembered; ``dies_at`` counts down the moments until the process ends."""

    packages: str = OLD
    half_moved: bool = False
    loaded: str | None = OLD
    clients_up: bool = True
    settings_set: bool = True
    journal: dict = field(default_factory=dict)
    stuck: bool = False
    held: bool = False
    broken: str | None = None
    dies_at: int | None = None
    disturbed: int = 0

    def moment(self) -> None:
        if self.dies_at is not None:
            self.dies_at -= 1
            if self.dies_at < 0:
                raise Killed

    def reboot(self) -> None:
        assert not self.half_moved
        self.loaded, self.stuck, self.settings_set = self.packages, False, False

    def as_found(self) -> tuple:
        return self.packages, self.half_moved, self.loaded, self.clients_up, self.settings_set


def acts(node: Node, target: str | None, check: bool = False) -> swap.Acts:
    """What driver_swap binds: towards ``target``, or back to what the journal remembers where that is None."""
    to = target or node.journal.get("packages", "")

    def act(function):
        def doing(*arguments):
            node.moment()
            done = function(*arguments)
            node.moment()
            return done

        return doing

    def prepare() -> swap.Prepared:
        moves = bool(to) and (node.packages != to or node.half_moved)
        return swap.Prepared(to=to, moves=moves)

    def save() -> swap.Done:
        if target is None or "settings" in node.journal:
            return swap.Done()
        assert node.settings_set, "settings are saved after they were lost"
        node.journal["settings"] = True
        return swap.Done(True)

    def stop() -> swap.Done:
        node.journal.setdefault("clients_up", node.clients_up)
        node.moment()
        changed, node.clients_up = node.clients_up, False
        node.disturbed += changed
        return swap.Done(changed)

    def unload() -> swap.Done:
        if node.loaded is None:
            return swap.Done()
        if check:
            return swap.Done(True)
        assert not node.clients_up, "unloaded under its clients"
        if node.held or node.stuck:
            return swap.Done(error="cannot be unloaded", reboot_required=node.stuck)
        node.loaded, node.settings_set = None, False
        return swap.Done(True)

    def packages(loaded_allowed: bool) -> swap.Done:
        if node.packages == to and not node.half_moved:
            return swap.Done()
        assert node.loaded in (None, to) or loaded_allowed, "packages moved under a driver at work"
        if check:
            return swap.Done(True)
        node.journal.setdefault("packages", node.packages)
        node.half_moved = True
        node.moment()
        node.packages, node.half_moved = to, False
        return swap.Done(True)

    def load() -> swap.Done:
        if node.packages == node.broken:
            return swap.Done(error="No such device")
        assert not node.half_moved, "loaded from half-moved packages"
        changed, node.loaded = node.loaded is None, node.loaded or node.packages
        return swap.Done(changed)

    def restore() -> swap.Done:
        if "settings" not in node.journal or check:
            return swap.Done()
        changed, node.settings_set = not node.settings_set, True
        return swap.Done(changed)

    def start() -> swap.Done:
        if "clients_up" not in node.journal:
            return swap.Done()
        assert node.loaded == node.packages, "clients started on a driver that is not there"
        changed, node.clients_up = not node.clients_up, node.journal["clients_up"]
        node.moment()
        del node.journal["clients_up"]
        return swap.Done(changed)

    bound = {"prepare": prepare, "save": save, "stop": stop, "unload": unload, "packages": packages}
    bound |= {"load": load, "restore": restore, "start": start}
    if check:
        bound |= {"save": swap.Done, "stop": lambda: swap.Done(node.clients_up)}
        bound |= {"load": swap.Done, "start": swap.Done}
    return swap.Acts(**{name: act(function) for name, function in bound.items()}, loaded=lambda: node.loaded)


def swapped(node: Node, target: str | None = NEW, reboot: str = swap.AUTO) -> list[str]:
    """As the role does it: the swap, a reboot if it asks for one, the rest. The acts that were done."""
    first = swap.Swap(acts(node, target), reboot)
    done = []
    if first.run():
        assert reboot != swap.NEVER
        node.reboot()
        second = swap.Swap(acts(node, target), swap.NEVER)
        assert not second.run(), "a second reboot is asked for"
        done = [line["act"] for line in second.as_dict()["acts"]]
    return [line["act"] for line in first.as_dict()["acts"]] + done


CHANGE = [swap.SAVE, swap.STOP, swap.UNLOAD, swap.PACKAGES]
REST = [swap.LOAD, swap.RESTORE, swap.START]
GOOD = (NEW, False, NEW, True, True)
AS_BEFORE = Node().as_found()


@pytest.mark.parametrize(
    ("node", "reboot", "expected"),
    [
        pytest.param(Node(), swap.AUTO, [swap.PREPARE, *CHANGE, *REST], id="unloads"),
        pytest.param(Node(), swap.NEVER, [swap.PREPARE, *CHANGE, *REST], id="unloads, a reboot is not allowed"),
        pytest.param(
            Node(stuck=True), swap.AUTO, [swap.PREPARE, *CHANGE, swap.PREPARE, *REST], id="only a reboot unloads"
        ),
        pytest.param(
            Node(),
            swap.ALWAYS,
            [swap.PREPARE, swap.SAVE, swap.STOP, swap.PACKAGES, swap.PREPARE, *REST],
            id="always reboots",
        ),
        pytest.param(Node(loaded=None), swap.AUTO, [swap.PREPARE, *CHANGE, *REST], id="nothing is loaded"),
        pytest.param(
            Node(packages=NEW), swap.AUTO, [swap.PREPARE, *CHANGE, *REST], id="installed, the old one is loaded"
        ),
        pytest.param(Node(packages=NEW, loaded=NEW), swap.AUTO, [swap.PREPARE, *REST], id="there already"),
        pytest.param(
            Node(packages=NEW, loaded=NEW), swap.ALWAYS, [swap.PREPARE, *REST], id="there already: no reboot either"
        ),
    ],
)
def test_the_acts_and_their_order(node, reboot, expected):
    assert swapped(node, reboot=reboot) == expected
    assert node.as_found() == GOOD
    assert swapped(node, reboot=reboot) == [swap.PREPARE, *REST]


STARTS = {"plain": Node(), "stuck": Node(stuck=True), "client down": Node(clients_up=False)}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("reboot", [swap.AUTO, swap.ALWAYS])
@pytest.mark.parametrize("target", [NEW, None], ids=["goes on", "goes back"])
def test_killed_at_any_moment_a_second_run_ends_well(start, reboot, target):
    """Goes on to the new driver, or back to the old one, from every moment at which the process can end."""
    after = {NEW: (NEW, False, NEW), None: (OLD, False, OLD)}[target]
    for moment in itertools.count():
        node = copy.deepcopy(STARTS[start])
        clients = node.clients_up
        node.dies_at = moment
        try:
            swapped(node, reboot=reboot)
            break
        except Killed:
            node.dies_at = None
        swapped(node, target)
        assert node.as_found() == (*after, clients, True), f"after moment {moment}"
        assert "clients_up" not in node.journal
    assert moment > 15, "the node was to be killed in every act"


@pytest.mark.parametrize(
    ("node", "reboot", "act", "reboot_helps"),
    [
        (Node(held=True), swap.AUTO, swap.UNLOAD, False),
        (Node(stuck=True), swap.NEVER, swap.UNLOAD, True),
        (Node(broken=NEW), swap.AUTO, swap.LOAD, False),
    ],
    ids=["held", "stuck and no reboot", "a driver that does not load"],
)
def test_an_act_that_fails_ends_the_swap_and_the_way_back_is_open(node, reboot, act, reboot_helps):
    one = swap.Swap(acts(node, NEW), reboot)
    with pytest.raises(swap.Failed) as failed:
        one.run()
    assert one.act == act and failed.value.done.reboot_required is reboot_helps
    assert act not in [line["act"] for line in one.as_dict()["acts"]]
    assert node.packages == (NEW if act == swap.LOAD else OLD)
    if act == swap.UNLOAD:
        assert node.as_found() == AS_BEFORE, "the driver stays, and so does what uses it"
    swapped(node, None)
    assert node.as_found() == AS_BEFORE


def test_what_is_refused_disturbs_nothing():
    node = Node()
    refusing = swap.Acts(**{**vars(acts(node, NEW)), "prepare": lambda: swap.Prepared(error="held packages")})
    one = swap.Swap(refusing, swap.AUTO)
    with pytest.raises(swap.Failed, match="held packages"):
        one.run()
    assert one.act == swap.PREPARE and not one.as_dict()["changed"]
    assert node.as_found() == AS_BEFORE and node.disturbed == 0 and not node.journal


@pytest.mark.parametrize("reboot", [swap.AUTO, swap.ALWAYS])
def test_check_mode_foretells_the_acts(reboot):
    node = Node()
    one = swap.Swap(acts(node, NEW, check=True), reboot, check=True)
    assert one.run() is (reboot == swap.ALWAYS)
    changed = [line["act"] for line in one.as_dict()["acts"] if line["changed"]]
    assert changed == [
        act for act in (swap.STOP, swap.UNLOAD, swap.PACKAGES) if (act, reboot) != (swap.UNLOAD, "always")
    ]
    assert node.as_found() == AS_BEFORE and not node.journal


def test_the_report_has_findings_times_and_differences():
    ticks = itertools.count()
    done = swap.Done(True, {"findings": [{"check": "settings.ecc"}], "diff": {"before": "a", "after": "b"}})
    node = Node(packages=NEW, loaded=NEW)
    one = swap.Swap(
        swap.Acts(**{**vars(acts(node, NEW)), "restore": lambda: done}), swap.AUTO, clock=lambda: float(next(ticks))
    )
    one.run()
    told = one.as_dict()
    assert told["changed"] and told["version"] == NEW
    assert told["findings"] == [{"check": "settings.ecc"}]
    assert told["diff"] == [
        {"before_header": swap.RESTORE, "after_header": swap.RESTORE, "before": "a", "after": "b"},
    ]
    assert [line["seconds"] for line in told["acts"]] == [1.0] * 4
    assert all("diff" not in line["result"] for line in told["acts"])
