# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""upgrade.yml from end to end on the hosts lab: real systemd, sshd and apt; the kernel's modules are stand-ins."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from balancer import Balancer
from fleet import Fleet

OLD, NEW, BROKEN = "535.183.01", "550.90.07", "560.35.03"
BATCHES = {"gpu_batch_size": 2, "gpu_max_unavailable": 2}
WORKLOAD = {
    "gpu_workloads": [{"name": "counter", "unit": "gpu-counter.service"}],
    "gpu_baseline_tolerance": 100,  # a stand-in GPU computes on this machine's busy cores
}
SERVICES = "systemctl is-active gpu-counter nvidia-persistenced"


def step(fleet: Fleet, node: str) -> int:
    """How far the workload of a machine has counted."""
    script = "import urllib.request as u; print(u.urlopen('http://localhost:8000/', timeout=5).read().decode())"
    return int(json.loads(fleet.sh(node, f'python3 -c "{script}"'))["step"])


def test_canary_then_batches_and_nothing_is_lost(fleet: Fleet, balancer: Balancer) -> None:
    """Of four machines one has a stopped and disabled service, one a hold, and one was out of service before."""
    held = "nvidia-driver-535-server"
    fleet.sh("gpu-1", "systemctl stop nvidia-persistenced && systemctl disable nvidia-persistenced")
    fleet.sh("gpu-3", f"apt-mark hold {held}")
    counted = step(fleet, "gpu-2")
    typed = {"gpu_reconnect_timeout": "300", "gpu_at_work_timeout": "1800", "gpu_lock_hosts": "gpu-1,gpu-2,gpu-3"}
    typed |= {"gpu_skip_unfit": "false", "gpu_elsewhere_gone": "gpu-9"}  # as -e name=value gives it
    wanted = {"gpu_driver_version": NEW, "gpu_release_holds": [held], **BATCHES, **WORKLOAD, **balancer.variables}
    wanted |= typed

    tree = "find /var/lib/gpufleet /etc /var/lib/dpkg /lib/modules -newermt @{} 2>/dev/null | sort"
    now = fleet.sh("gpu-1", "date +%s").strip()
    checked = fleet.play("upgrade", "--check", **wanted)
    assert checked.rc == 0 and "canary" in checked.output, checked.output[-5000:]
    assert fleet.sh("gpu-1", tree.format(now)) == "" and fleet.loaded("gpu-1") == OLD, "check mode changes nothing"
    refused = fleet.play("upgrade", gpu_require_approval="true", **wanted)
    assert refused.rc != 0 and fleet.sh("gpu-1", tree.format(now)) == "" and len(balancer.in_service) == 3
    plan_id = re.search(r"gpu_approved=(\w+)", refused.output).group(1)

    played = fleet.play("upgrade", gpu_require_approval=True, gpu_approved=plan_id, **wanted)
    assert played.rc == 0, played.output[-5000:]
    assert set(played.outcomes.values()) == {"upgraded"}
    assert [played.nodes[name]["batch"] for name in fleet.names].count("canary") == 1
    for name in fleet.names:
        assert fleet.loaded(name) == NEW
        packages = fleet.packages(name)
        assert not any("535" in package for package in packages), packages
        assert all(version.startswith(NEW) for version in packages.values()), packages
        assert fleet.sh(name, "systemctl is-active gpu-counter").strip() == "active"
    assert fleet.sh("gpu-1", "systemctl is-active nvidia-persistenced", check=False).strip() == "inactive"
    assert fleet.sh("gpu-1", "systemctl is-enabled nvidia-persistenced", check=False).strip() == "disabled"
    assert fleet.sh("gpu-2", "systemctl is-active nvidia-persistenced").strip() == "active"
    assert "nvidia-driver-550-server" in fleet.sh("gpu-3", "apt-mark showhold")
    assert step(fleet, "gpu-2") >= counted
    assert balancer.in_service == ["gpu-1", "gpu-2", "gpu-3"], "gpu-4 was out of service before"
    again = fleet.play("upgrade", **wanted)
    assert again.rc == 0 and set(again.outcomes.values()) == {"already"}
    assert [again.changed(name) for name in fleet.names] == [0] * len(fleet.names)


def test_a_version_that_will_not_load_is_rolled_back_and_no_later_batch_starts(fleet: Fleet) -> None:
    before = {name: fleet.packages(name) for name in fleet.names}
    played = fleet.play("upgrade", gpu_driver_version=BROKEN, **BATCHES, **WORKLOAD)
    assert played.rc != 0
    canary = next(name for name in fleet.names if played.nodes[name]["batch"] == "canary")
    assert played.outcomes == {name: "rolled back" if name == canary else "not started" for name in fleet.names}
    assert "No such device" in played.nodes[canary]["reason"]
    for name in fleet.names:
        assert fleet.packages(name) == before[name]
        assert fleet.loaded(name) == OLD
        assert fleet.sh(name, SERVICES).split() == ["active", "active"]
    report = (fleet.state / "report.html").read_text()
    assert canary in report and "rolled back" in report
    assert fleet.journal(canary)["outcome"]["name"] == "rolled_back"


def test_a_node_that_vanishes_stops_batch_2_and_a_second_run_finishes(fleet: Fleet) -> None:
    """It is one of the three that keep the lock of the fleet, which keeps nobody out; nor does a silent one, which is
    left out if told so."""
    playing = fleet.begin("upgrade", gpu_driver_version=NEW, gpu_canary=["gpu-2"], **BATCHES, **WORKLOAD)
    fleet.wait_for_step("gpu-2", "packages")
    fleet.lab("kill", "gpu-2")
    played = playing.end()
    assert played.rc != 0
    assert played.outcomes == {"gpu-1": "not started", "gpu-2": "lost", "gpu-3": "not started", "gpu-4": "not started"}
    assert "recover" in played.nodes["gpu-2"]["next"]
    assert fleet.loaded("gpu-1") == OLD
    fleet.lab("start", "gpu-2")
    fleet.lab("unplug", "gpu-3")
    again = fleet.play("upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-2,gpu-3", gpu_skip_unfit=True, **WORKLOAD)
    assert again.rc != 0, "a node left behind is never a success"
    assert again.outcomes == {"gpu-2": "upgraded", "gpu-3": "skipped"}, again.output[-5000:]
    assert fleet.loaded("gpu-2") == NEW
    assert fleet.sh("gpu-2", SERVICES).split() == ["active", "active"]


ACTS = [["stop services", "unload modules", "packages"], ["load modules", "restore services"]]
"""The acts of a swap, as the journal names them, in two halves."""

STEPS = [
    "cordon : Begin the journal of the node",
    "evacuate : Stop or wait for the work on the node",
    "install : Swap the driver",
    "uncordon : Start the workloads that were running",
]


def test_the_controller_dies_in_every_step_and_the_next_run_goes_on(fleet: Fleet) -> None:
    """In one step after the other, terminated: each run goes on from where the one before died."""
    one = {"gpu_hosts": "gpu-1", "gpu_driver_version": NEW, **WORKLOAD}
    for step in STEPS:
        playing = fleet.begin("upgrade", gpu_run_id="first", **one)
        fleet.reach(playing, "gpu-1", step)
        playing.kill(signal.SIGTERM)
    refused = fleet.play("upgrade", **one)
    assert refused.rc != 0 and "gpu_lock_takeover=first" in refused.output
    end_well(fleet, gpu_lock_takeover="first")


def end_well(fleet: Fleet, **variables: Any) -> None:
    """Upgrade gpu-1 once more, with everything as it should be in the end."""
    again = fleet.play("upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1", **WORKLOAD, **variables)
    assert again.rc == 0, again.output[-5000:]
    assert again.outcomes == {"gpu-1": "upgraded"}
    assert fleet.loaded("gpu-1") == NEW
    assert all(version.startswith(NEW) for version in fleet.packages("gpu-1").values())
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]
    assert fleet.sh("gpu-1", "find /etc/systemd/system /run/systemd/system -name '*gpufleet-hold*'") == ""


@pytest.mark.parametrize("act", ["unload modules", "packages"])
def test_the_controller_is_killed_in_an_act_of_the_swap(fleet: Fleet, act: str) -> None:
    """The swap goes on without it, as status says; the next run waits for it."""
    fleet.sh("gpu-1", "mkdir -p /etc/nvidia-standin; echo 15 >/etc/nvidia-standin/dkms-seconds")
    playing = fleet.begin("upgrade", gpu_run_id="first", gpu_hosts="gpu-1", gpu_driver_version=NEW, **WORKLOAD)
    fleet.wait_for_step("gpu-1", act)
    playing.kill()
    shown = fleet.play("status", gpu_hosts="gpu-1").output
    assert f"first to {NEW}: still at work" in shown and "wait for its end" in shown and "next:" not in shown, shown
    end_well(fleet, gpu_lock_takeover="first")


@pytest.mark.parametrize("acts", ACTS, ids=", ".join)
def test_a_swap_that_dies_in_every_act_is_gone_on_with(fleet: Fleet, acts: list[str]) -> None:
    """The machine's power is cut, so nothing of the swap goes on behind our back; in one act after the other."""
    one = {"gpu_hosts": "gpu-1", "gpu_driver_version": NEW, "gpu_reconnect_timeout": 2, **WORKLOAD}
    for act in acts:
        playing = fleet.begin("upgrade", **one)
        fleet.wait_for_step("gpu-1", act)
        fleet.lab("kill", "gpu-1")
        assert playing.end().outcomes == {"gpu-1": "lost"}
        fleet.lab("start", "gpu-1")
    end_well(fleet)


def test_of_two_runs_the_one_that_was_taken_over_stops_at_its_next_batch(
    fleet: Fleet, balancer: Balancer, tmp_path: Path
) -> None:
    """Though they have no node in common."""
    first = {"gpu_hosts": "gpu-1,gpu-2", "gpu_canary": ["gpu-1"], "gpu_run_id": "first", **BATCHES, **WORKLOAD}
    balancer.become(f"drain.gpu-1) until [ -e '{tmp_path}/go' ]; do sleep 0.2; done; rm gpu-1;;")
    balancer.options["timeout"] = 600
    second = {"gpu_hosts": "gpu-4", "gpu_driver_version": NEW, "gpu_report_dir": str(tmp_path), **WORKLOAD}
    playing = fleet.begin("upgrade", gpu_driver_version=NEW, **first, **balancer.variables)
    fleet.reach(playing, "gpu-1", "cordon : Take the nodes out of service")
    refused = fleet.play("upgrade", **second)
    assert refused.rc != 0 and "locked by run first" in refused.output
    assert "locked: the fleet is run first's" in fleet.play("status").output
    taken = fleet.play("upgrade", gpu_lock_takeover="first", gpu_run_id="second", **second)
    assert taken.rc == 0 and taken.outcomes == {"gpu-4": "upgraded"}, taken.output[-5000:]
    (tmp_path / "go").touch()
    played = playing.end()
    assert played.rc != 0 and played.outcomes == {"gpu-1": "upgraded", "gpu-2": "not started"}, played.output[-5000:]
    assert "run first no longer has the fleet" in played.nodes["gpu-2"]["reason"]
    assert fleet.loaded("gpu-2") == OLD and fleet.journal("gpu-2") == {}


def test_recover_brings_an_interrupted_node_back(fleet: Fleet) -> None:
    before = fleet.packages("gpu-1")
    one = {"gpu_hosts": "gpu-1", **WORKLOAD}
    playing = fleet.begin("upgrade", gpu_run_id="first", gpu_driver_version=NEW, **one)
    fleet.wait_for_step("gpu-1", "load modules")
    playing.kill()
    for dummy in range(20):  # the swap comes to its end by itself
        status = fleet.play("status")
        if "still at work" not in status.output:
            break
    assert "interrupted" in status.output and "gpufleet.driver.recover" in status.output
    played = fleet.play("recover", gpu_lock_takeover="first", **one)
    assert played.rc == 0, played.output[-5000:]
    assert fleet.packages("gpu-1") == before and fleet.loaded("gpu-1") == OLD
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]


def test_rollback_undoes_a_finished_upgrade(fleet: Fleet) -> None:
    before = fleet.packages("gpu-1")
    one = {"gpu_hosts": "gpu-1", **WORKLOAD}
    assert fleet.play("upgrade", gpu_driver_version=NEW, **one).rc == 0
    checked = fleet.play("rollback", "--check", **one)
    assert checked.rc == 0 and f"gpu-1 would go back to {OLD}" in checked.output, checked.output[-5000:]
    assert checked.nodes == {} and fleet.loaded("gpu-1") == NEW, "no report is written of what was not done"
    fleet.sh(
        "gpu-1",
        "mv /var/lib/gpufleet/packages/{535.183.01,away} && sed -i 's/^deb/# deb/' /etc/apt/sources.list.d/lab.list",
    )
    fleet.sh("gpu-1", "rm -rf /var/lib/apt/lists/*")
    refused = fleet.play("rollback", **one)
    assert refused.rc != 0 and refused.outcomes == {"gpu-1": "refused"}
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"], "a node without a way back is left at work"
    fleet.sh("gpu-1", "mv /var/lib/gpufleet/packages/{away,535.183.01}")
    played = fleet.play("rollback", **one)
    assert played.rc == 0, played.output[-5000:]
    assert fleet.packages("gpu-1") == before and fleet.loaded("gpu-1") == OLD
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]
    left = {
        "run": {"id": "r", "target": OLD},
        "steps": [],
        "before": {},
        "outcome": {"name": "quarantined"},
        "schema": 1,
    }
    fleet.sh("gpu-3", f"mkdir -p /var/lib/gpufleet && echo '{json.dumps(left)}' > /var/lib/gpufleet/journal.json")
    planned = fleet.play("plan", gpu_driver_version=OLD, gpu_hosts="gpu-3")
    assert "for 1 node in 1 batch" in planned.output, "a quarantined node is out of service, whatever driver it has"
    fleet.lab("unplug", "gpu-2")
    unseen = fleet.play("recover", gpu_hosts="gpu-2")
    assert unseen.rc != 0 and "could not be looked at" in unseen.output
    for playbook in ("recover", "rollback", "status"):
        nobody = fleet.play(playbook, gpu_hosts="gpu-99")
        assert nobody.rc != 0 and "No host of 'gpu-99' is in the inventory" in nobody.output
    silent = fleet.play("status", gpu_hosts="gpu-2").output
    assert "next: gpu-2: mend what is said above" in silent
    fleet.sh("gpu-1", "mkdir -p /var/lib/gpufleet && echo '{' > /var/lib/gpufleet/journal.json")
    shown = fleet.play("status", gpu_hosts="gpu-1").output
    assert re.search(rf"gpu-1 +{OLD} +{OLD} +{OLD} +4 +unknown", shown), "its driver is as it is, whatever its journal"
    assert "mv /var/lib/gpufleet/journal.json" in shown


def test_a_process_nobody_declared_is_named_and_nothing_is_killed(fleet: Fleet) -> None:
    refused = fleet.play("upgrade", gpu_undeclared="refuse", gpu_driver_version=NEW, gpu_hosts="gpu-1")
    assert refused.rc != 0 and re.search("unfit.*GPU work that nobody declared.*gpu-counter.service", refused.output)
    assert "Take the lock of the fleet" not in refused.output
    assert fleet.loaded("gpu-1") == OLD
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]


def test_stop_file_window_and_limit(fleet: Fleet, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    stop.touch()
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_stop_file=str(stop), gpu_not_after=1, **BATCHES)
    assert played.rc != 0 and set(played.outcomes.values()) == {"not started"}
    assert str(stop) in played.output and "maintenance window" in played.output
    limited = fleet.play("upgrade", "--limit", "gpu-1", gpu_driver_version=NEW)
    assert limited.rc != 0 and "-e gpu_hosts=gpu-1" in limited.output
    typing = {
        "gpu_service_timeout": "",
        "gpu_unload_timeout": -1,
        "gpu_workloads": [{"name": "x", "unti": "x.service"}],
    }
    for name, value in typing.items():
        refused = fleet.play("upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1", **{name: value})
        assert refused.rc != 0 and re.search(f"nothing was changed.*{name}", refused.output, re.DOTALL)
    for playbook in ("upgrade", "rollback"):
        meant = fleet.play(playbook, gpu_driver_version=NEW, gpu_host="gpu-1")
        assert (
            meant.rc != 0
            and "nothing was changed: there is no setting gpu_host (did you mean gpu_hosts?)" in meant.output
        )
    address = re.findall(r"ansible_host: (\S+)", fleet.inventory.read_text())[0]
    fleet.vary("gpu-2", ansible_host=address)
    doubled = fleet.play("upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1,gpu-2")
    assert doubled.rc != 0 and "gpu-1 and gpu-2: names of one machine each. Nothing was changed" in doubled.output
    assert {fleet.loaded(name) for name in fleet.names} == {OLD}


def test_reboot_always(fleet: Fleet) -> None:
    boot = fleet.sh("gpu-1", "cat /proc/sys/kernel/random/boot_id")
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1", gpu_driver_reboot="always", **WORKLOAD)
    assert played.rc == 0, played.output[-5000:]
    assert fleet.sh("gpu-1", "cat /proc/sys/kernel/random/boot_id") != boot
    assert fleet.loaded("gpu-1") == NEW
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]


@pytest.mark.parametrize(
    ("failed", "outcome", "loaded", "work"),
    [("rollback", "rolled back", OLD, "active"), ("quarantine", "quarantined", NEW, "inactive")],
)
def test_a_canary_that_fails_its_soak_does_not_stay_in_service(
    fleet: Fleet, balancer: Balancer, failed: str, outcome: str, loaded: str, work: str
) -> None:
    del balancer.options["state_command"]
    once = "/usr/local/bin/once"  # the first judgement passes, the one after the soak does not
    fleet.sh("gpu-1", f"printf '#!/bin/sh\\nmkdir /run/judged\\n' > {once}; chmod 755 {once}")
    played = fleet.play(
        "upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1,gpu-2", gpu_canary=["gpu-1"], **WORKLOAD,
        gpu_validate_command=[once], gpu_canary_soak=1, gpu_soak_failed=failed,
        **balancer.variables,
    )  # fmt: skip
    assert played.rc != 0
    assert played.outcomes == {"gpu-1": outcome, "gpu-2": "not started"}, "the gate counts it"
    assert "after 1 s of soak" in played.nodes["gpu-1"]["reason"]
    journal = fleet.journal("gpu-1")["outcome"]
    assert journal["name"] == outcome.replace(" ", "_") and "after 1 s of soak" in journal["reason"]
    assert fleet.loaded("gpu-1") == loaded
    assert fleet.sh("gpu-1", "systemctl is-active gpu-counter", check=False).strip() == work
    assert ("gpu-1" in balancer.in_service) == (failed == "rollback")
    recovered = fleet.play("recover", gpu_hosts="gpu-1", **WORKLOAD)
    assert recovered.rc == 0, recovered.output[-5000:]
    assert fleet.loaded("gpu-1") == OLD and fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]


def test_work_runs_elsewhere_while_its_node_is_upgraded(fleet: Fleet) -> None:
    def counters() -> dict[str, str]:
        return {
            name: fleet.sh(name, "systemctl is-active gpu-counter", check=False).strip() for name in fleet.names[:2]
        }

    work = [{"name": "counter", "unit": "gpu-counter.service", "elsewhere": "gpu-2", "ready": ["true"]}]
    one = {"gpu_driver_version": NEW, "gpu_hosts": "gpu-1", "gpu_workloads": work, "gpu_baseline_tolerance": 100}
    refused = fleet.play("upgrade", **one)
    assert refused.rc != 0 and refused.outcomes == {"gpu-1": "rolled back"}
    assert "it runs here already, and not for gpu-1" in refused.nodes["gpu-1"]["reason"]
    fleet.sh("gpu-2", "systemctl stop gpu-counter")
    both = fleet.play("plan", **{**one, "gpu_hosts": "gpu-1,gpu-2", "gpu_canary": 2, "gpu_max_unavailable": 2})
    assert both.rc == 0, both.output[-5000:]
    plan = json.loads((fleet.state / "gpu-upgrade-plan.json").read_text())
    assert plan["serial"] == [1, 1], "its node and the other are not upgraded at the same time"
    fates = {work["workload"]: work["fate"] for batch in plan["batches"] for work in batch["workloads"]}
    assert fates == {"gpu-1/counter": "cold_start"}
    playing = fleet.begin("upgrade", gpu_run_id="first", **one)
    playing.wait_for("TASK [gpufleet.driver.install : Swap the")
    assert counters() == {"gpu-1": "inactive", "gpu-2": "active"}
    playing.kill()
    again = fleet.play("upgrade", gpu_lock_takeover="first", **one)
    assert again.rc == 0, again.output[-5000:]
    assert fleet.loaded("gpu-1") == NEW and fleet.loaded("gpu-2") == OLD
    assert counters() == {"gpu-1": "active", "gpu-2": "inactive"}
    stays = [{**work[0], "come_back": False}]
    assert fleet.play("rollback", **{**one, "gpu_workloads": stays}).rc == 0
    assert fleet.loaded("gpu-1") == OLD and counters() == {"gpu-1": "inactive", "gpu-2": "active"}


def test_a_workflow_of_jobs_with_approvals_between(fleet: Fleet) -> None:
    """The jobs of docs/awx.md one after another; each gets the id of the plan before it, as AWX hands it on."""
    job = {"gpu_driver_version": NEW, "gpu_hosts": "gpu-1,gpu-2", "gpu_require_approval": True, **WORKLOAD}

    def planned(**more: int) -> str:
        assert fleet.play("plan", **{**job, "gpu_require_approval": False, **more}).rc == 0
        return json.loads((fleet.state / "gpu-upgrade-plan.json").read_text())["id"]

    first = planned()
    canary = fleet.play("upgrade", gpu_approved=first, gpu_only_canary=True, gpu_canary_soak=1, **job)
    assert canary.rc == 0, canary.output[-5000:]
    assert canary.outcomes == {"gpu-1": "upgraded", "gpu-2": "left for later"}
    assert "go on with the other 1" in canary.output
    stale = fleet.play("upgrade", gpu_approved=first, gpu_canary=0, **job)
    assert stale.rc != 0 and "is not approved" in stale.output
    rest = fleet.play("upgrade", gpu_approved=planned(gpu_canary=0), gpu_canary=0, **job)
    assert rest.rc == 0 and rest.outcomes == {"gpu-1": "already", "gpu-2": "upgraded"}
