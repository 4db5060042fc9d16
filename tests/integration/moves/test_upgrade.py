# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An upgrade during which a unit and a container move instead of being stopped: away by their process images, home by
their own saves, which GnuPG encrypts for the unit."""

from __future__ import annotations

from boxes import Box, machines
from works import HOME, NODES, Work, Works

NEW = "550.90.07"


SAVE = {"encrypt": {"tool": "gpg", "recipient": "ops@example.com"}}
NEW_KEY = "gpg --batch --quiet --passphrase '' --quick-generate-key ops@example.com future-default default never"
SCRATCH = "ls -A /dev/shm/gpufleet"


def share_key(works: Works, work: Work) -> None:
    """First the node has a key that no other has; then the last one has it, too."""
    last = works.nodes[NODES[-1]]
    works.sh(HOME, f"{NEW_KEY} && gpg --batch --export-secret-keys ops@example.com >{works.share}/key")
    given = {"workloads": [work.declared()], "candidates": NODES[1:]}
    (told,) = works.nodes[HOME].run("workload_move", "--check", **given)["workloads"]
    (reason,) = told["reasons"]
    assert (told["how"], reason["reason"]) == ("stayed", "key_mismatch:encryption"), told
    assert f"ansible {NODES[1]} -b -m gpufleet.driver.checkpoint_info" in reason["next"], reason
    (closed,) = last.run("checkpoint_info", encrypt=[SAVE["encrypt"]])["cannot_decrypt"]
    assert "No public key" in closed
    last.sh(f"gpg --batch --quiet --import {works.share}/key")
    (told,) = works.nodes[HOME].run("workload_move", "--check", **given)["workloads"]
    assert (told["how"], told["to"]) == ("moved", last.name), told


def test_work_moves_during_the_upgrade_and_comes_home(works: Works) -> None:
    work = Work("one", extra={"save": SAVE})
    with machines(works.fleet) as nodes:
        works.start(work)
        share_key(works, work)
        box = Box("notebook", nodes[HOME], "--env", "CUDA_VISIBLE_DEVICES=1")
        upgrade(works, work, box)


def upgrade(works: Works, work: Work, box: Box) -> None:
    fleet = works.fleet
    fleet.vary(HOME, gpu_workloads=[work.declared(), box.declared()])
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_workload_wait=20, gpu_baseline_tolerance=100)
    assert played.rc == 0, played.output[-5000:]
    assert set(played.outcomes.values()) == {"upgraded"}
    for one in (work, box):
        assert f"work: {one.name} ({HOME} to {NODES[-1]}): moved, stood still for" in played.output
        assert f"work: {one.name} ({NODES[-1]} to {HOME}): moved, stood still for" in played.output
    box.assert_goes_on(works.nodes[HOME])
    assert works.sh(NODES[-1], "podman ps --all --quiet") == ""
    seen = works.look_at(HOME)[work.name]
    assert seen["active"]
    hosts = [host for dummy, host in seen["steps"]]
    changes = [host for index, host in enumerate(hosts) if not index or hosts[index - 1] != host]
    assert changes == [HOME, NODES[-1], HOME]
    works.assert_runs(work, HOME, works.look())
    for name in NODES:
        assert works.left_behind(name) == ""
    for name in (HOME, NODES[-1]):
        assert works.sh(name, SCRATCH) == "", "it was encrypted and decrypted here, and nothing plain is left"
    page = (fleet.state / "report.html").read_text()
    assert "<h2>Work</h2>" in page and page.count('data-head="stood still"') == 4
