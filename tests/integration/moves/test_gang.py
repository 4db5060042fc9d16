# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work on two machines is saved whole or goes on whole: each machine over its own connection, in one task."""

from __future__ import annotations

from typing import Any

from works import CRIU, FIRST, HOME, Work, Works


def save(works: Works, members: dict[str, Work], *flags: str) -> dict[str, Any]:
    given = [{"node": node, "workload": work.declared()} for node, work in members.items()]
    told = works.nodes[HOME].run("gang_checkpoint", *flags, members=given, criu=CRIU, lock_timeout=2)
    assert "workloads" in told, told
    return told


def test_a_gang_on_two_machines_is_saved_whole_or_goes_on_whole(works: Works) -> None:
    members = {HOME: Work("left"), FIRST: Work("right", pair=True)}
    for node, work in members.items():
        works.start(work, on=node)

    looked = save(works, members, "--check")
    assert not looked["failed"] and [one["ok"] for one in looked["workloads"]] == [True, True], looked
    since = works.look()
    for node, work in members.items():
        works.assert_runs(work, node, since)

    works.trouble(FIRST, criu=[f"{members[FIRST].pids[0]} fail"])
    failed = save(works, members)
    assert failed["failed"] and "right" in failed["msg"], failed
    told = {one["workload"]: one for one in failed["workloads"]}
    assert told["right"]["reason"]["reason"] == "dump_failed" and not told["left"]["ok"], told
    assert {one["source"] for one in told.values()} == {"running"}, told
    since = works.look()
    for node, work in members.items():
        works.assert_runs(work, node, since)

    works.sh(FIRST, ": >/run/criu-faults")
    saved = save(works, members)
    assert not saved["failed"], saved
    assert [(one["node"], one["source"]) for one in saved["workloads"]] == [(HOME, "frozen"), (FIRST, "frozen")], saved
    still = works.look()
    again = save(works, members)
    assert not again["failed"] and not again["changed"], again
    for node, work in members.items():
        assert works.look()[node][work.name] == still[node][work.name], "it stands still until somebody decides"
        given = {"workloads": [work.declared()], "criu": CRIU}
        assert not works.nodes[node].run("workload_checkpoint", state="aborted", **given)["failed"]
        works.assert_runs(work, node, still)
        assert works.left_behind(node) == ""
