# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""upgrade.yml from end to end on the hosts lab: real systemd, sshd and apt; the kernel's modules are stand-ins."""

from __future__ import annotations

import json
import re
import signal
import stat
from pathlib import Path

import pytest
from fleet import Fleet, Playing

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


def test_canary_then_batches_and_nothing_is_lost(fleet: Fleet) -> None:
    held = "nvidia-driver-535-server"
    fleet.sh("gpu-1", "systemctl stop nvidia-persistenced && systemctl disable nvidia-persistenced")
    fleet.sh("gpu-3", f"apt-mark hold {held}")
    counted = step(fleet, "gpu-2")
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_release_holds=[held], **BATCHES, **WORKLOAD)
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
    again = fleet.play("upgrade", gpu_driver_version=NEW, **BATCHES, **WORKLOAD)
    assert again.rc == 0 and set(again.outcomes.values()) == {"already"}
    assert [again.changed(name) for name in fleet.names] == [0] * len(fleet.names)


def test_check_mode_plans_and_changes_nothing(fleet: Fleet) -> None:
    tree = "find /var/lib/gpufleet /etc /var/lib/dpkg /lib/modules -newermt @{} 2>/dev/null | sort"
    now = fleet.sh("gpu-1", "date +%s").strip()
    played = fleet.play("upgrade", "--check", gpu_driver_version=NEW, **BATCHES)
    assert played.rc == 0, played.output[-5000:]
    assert "canary" in played.output
    assert fleet.sh("gpu-1", tree.format(now)) == ""
    assert fleet.loaded("gpu-1") == OLD


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
    playing = fleet.begin("upgrade", gpu_driver_version=NEW, gpu_canary=["gpu-2"], **BATCHES, **WORKLOAD)
    fleet.wait_for_step("gpu-2", "packages")
    fleet.lab("kill", "gpu-2")
    played = playing.end()
    assert played.rc != 0
    assert played.outcomes == {"gpu-1": "not started", "gpu-2": "lost", "gpu-3": "not started", "gpu-4": "not started"}
    assert "recover" in played.nodes["gpu-2"]["next"]
    assert fleet.loaded("gpu-1") == OLD
    fleet.lab("start", "gpu-2")
    again = fleet.play("upgrade", gpu_driver_version=NEW, **BATCHES, **WORKLOAD)
    assert again.rc == 0, again.output[-5000:]
    assert {fleet.loaded(name) for name in fleet.names} == {NEW}
    assert fleet.sh("gpu-2", SERVICES).split() == ["active", "active"]


ACTS = ["stop services", "unload modules", "packages", "load modules", "restore services"]
"""The acts of a swap, as the journal names them."""

STEPS = [
    "cordon : Begin the journal of the node",
    "evacuate : Stop or wait for the work on the node",
    "install : Swap the driver",
    *ACTS,
    "uncordon : Start the workloads that were running",
]
DEATHS = [(signal.SIGKILL, step) for step in STEPS] + [(signal.SIGTERM, step) for step in STEPS[::3]]


def reach(playing: Playing, fleet: Fleet, step: str) -> None:
    """Until a task of a role has begun, or gpu-1 is in an act of the swap."""
    if step in ACTS:
        fleet.wait_for_step("gpu-1", step)
    else:
        playing.wait_for(f"TASK [gpufleet.driver.{step}]")


@pytest.mark.parametrize(
    ("sign", "step"), DEATHS, ids=[f"{sign.name} in {step.rpartition(' : ')[2]}" for sign, step in DEATHS]
)
def test_the_controller_dies_in_any_step_and_a_second_run_finishes(fleet: Fleet, step: str, sign: int) -> None:
    one = {"gpu_hosts": "gpu-1", "gpu_driver_version": NEW, **WORKLOAD}
    playing = fleet.begin("upgrade", gpu_run_id="first", **one)
    reach(playing, fleet, step)
    playing.kill(sign)
    refused = fleet.play("upgrade", **one)
    assert refused.rc != 0 and "gpu_lock_takeover=first" in refused.output
    again = fleet.play("upgrade", gpu_lock_takeover="first", **one)
    assert again.rc == 0, again.output[-5000:]
    assert again.outcomes == {"gpu-1": "upgraded"}
    assert fleet.loaded("gpu-1") == NEW
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]
    assert fleet.sh("gpu-1", "find /etc/systemd/system /run/systemd/system -name '*gpufleet-hold*'") == ""


@pytest.mark.parametrize("act", ACTS)
def test_a_swap_that_dies_in_any_act_is_gone_on_with(fleet: Fleet, act: str) -> None:
    """The machine's power is cut, so nothing of the swap goes on behind our back."""
    one = {"gpu_hosts": "gpu-1", "gpu_driver_version": NEW, "gpu_reconnect_timeout": 2, **WORKLOAD}
    playing = fleet.begin("upgrade", gpu_run_id="first", **one)
    fleet.wait_for_step("gpu-1", act)
    fleet.lab("kill", "gpu-1")
    assert playing.end().outcomes == {"gpu-1": "lost"}
    fleet.lab("start", "gpu-1")
    again = fleet.play("upgrade", gpu_lock_takeover="first", **one)
    assert again.rc == 0, again.output[-5000:]
    assert fleet.loaded("gpu-1") == NEW
    assert all(version.startswith(NEW) for version in fleet.packages("gpu-1").values())
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]


def test_recover_brings_an_interrupted_node_back(fleet: Fleet) -> None:
    before = fleet.packages("gpu-1")
    one = {"gpu_hosts": "gpu-1", **WORKLOAD}
    playing = fleet.begin("upgrade", gpu_run_id="first", gpu_driver_version=NEW, **one)
    fleet.wait_for_step("gpu-1", "load modules")
    playing.kill()
    status = fleet.play("status")
    assert "interrupted" in status.output and "gpufleet.driver.recover" in status.output
    played = fleet.play("recover", gpu_lock_takeover="first", **one)
    assert played.rc == 0, played.output[-5000:]
    assert fleet.packages("gpu-1") == before and fleet.loaded("gpu-1") == OLD
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]


def test_rollback_undoes_a_finished_upgrade(fleet: Fleet) -> None:
    before = fleet.packages("gpu-1")
    one = {"gpu_hosts": "gpu-1", **WORKLOAD}
    playing = fleet.begin("upgrade", gpu_driver_version=NEW, gpu_run_id="first", **one)
    playing.wait_for("TASK [gpufleet.driver.install : Swap the driver]")
    second = fleet.play("upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1,gpu-2", gpu_skip_unfit=True)
    assert second.rc != 0 and "locked by run first" in second.output, "though the driver of gpu-1 is not loaded"
    assert playing.end().rc == 0
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
    assert "1 nodes in 1 batches" in planned.output, "a quarantined node is out of service, whatever driver it has"
    fleet.lab("unplug", "gpu-2")
    unseen = fleet.play("recover", gpu_hosts="gpu-2")
    assert unseen.rc != 0 and "could not be looked at" in unseen.output


def test_preflight_refuses_before_anything_is_disturbed(fleet: Fleet) -> None:
    """A held package, a version no longer to be had, a broken package and a silent node: all told at once."""
    fleet.sh("gpu-1", "apt-mark hold libnvidia-compute-535-server")
    fleet.sh("gpu-1", "mkdir -p /var/lib/gpufleet && mount -t tmpfs -o ro none /var/lib/gpufleet")
    fleet.lab("unplug", "gpu-2")
    broken = "/^Package: nvidia-utils-535-server$/,/^$/s/^Status: .*/Status: install ok half-configured/"
    fleet.sh("gpu-3", f"sed -i '{broken}' /var/lib/dpkg/status")
    fleet.sh("gpu-4", "sed -i 's/^deb/# deb/' /etc/apt/sources.list.d/lab.list")
    played = fleet.play("upgrade", gpu_driver_version=NEW, **BATCHES)
    assert played.rc != 0
    told = re.search(r"4 of 4 nodes are unfit, nothing was changed\.(.*?)go on without", played.output, re.DOTALL)[1]
    assert "libnvidia-compute-535-server" in told and "held" in told
    assert "/var/lib/gpufleet is on a read-only file system" in told
    assert "nvidia-utils-535-server" in told and "gpu-2" in told
    assert re.search(r"gpu-4: .*550\.90\.07", told), told
    assert {fleet.loaded(name) for name in ("gpu-1", "gpu-3", "gpu-4")} == {OLD}
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]


def test_an_unfit_node_may_be_left_out(fleet: Fleet) -> None:
    fleet.lab("unplug", "gpu-2")
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_skip_unfit=True, **BATCHES, **WORKLOAD)
    assert played.rc != 0, "a node left behind is never a success"
    assert played.outcomes == {"gpu-1": "upgraded", "gpu-2": "skipped", "gpu-3": "upgraded", "gpu-4": "upgraded"}


def test_a_process_nobody_declared_is_named_and_nothing_is_killed(fleet: Fleet) -> None:
    one = {"gpu_driver_version": NEW, "gpu_hosts": "gpu-1"}
    refused = fleet.play("upgrade", gpu_undeclared="refuse", **one)
    assert refused.rc != 0 and re.search("unfit.*GPU work that nobody declared.*gpu-counter.service", refused.output)
    assert "Take the lock of the fleet" not in refused.output
    played = fleet.play("upgrade", gpu_workload_wait=8, **one)
    assert played.rc != 0
    assert re.search(
        r"^gpu-1: waiting for undeclared GPU work to end: PID \d+ gpu-counter", played.output, re.MULTILINE
    )
    assert "gpu-counter.service" in played.nodes["gpu-1"]["reason"]
    assert fleet.loaded("gpu-1") == OLD
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]


def test_only_what_we_took_out_of_service_comes_back(fleet: Fleet, tmp_path: Path) -> None:
    service = tmp_path / "in-service"
    service.mkdir()
    for name in ("gpu-1", "gpu-2"):
        (service / name).touch()
    script = tmp_path / "lb"
    script.write_text(
        f'#!/bin/sh\ncd {service}; case $1 in drain) rm "$2";; enable) touch "$2";; state) test -e "$2";; esac\n'
    )
    script.chmod(stat.S_IRWXU)
    played = fleet.play(
        "upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1,gpu-3", gpu_batch_size=2, gpu_canary=1, **WORKLOAD,
        gpu_scheduler_options={
            "cordon_command": [str(script), "drain", "{node}"],
            "uncordon_command": [str(script), "enable", "{node}"],
            "state_command": [str(script), "state", "{node}"],
        },
    )  # fmt: skip
    assert played.rc == 0, played.output[-5000:]
    assert sorted(path.name for path in service.iterdir()) == ["gpu-1", "gpu-2"]


def test_an_upgrade_needs_the_approval_it_asks_for(fleet: Fleet) -> None:
    approve = {"gpu_driver_version": NEW, "gpu_hosts": "gpu-1", "gpu_require_approval": True, **WORKLOAD}
    refused = fleet.play("upgrade", **approve)
    assert refused.rc != 0 and fleet.loaded("gpu-1") == OLD
    plan_id = re.search(r"gpu_approved=(\w+)", refused.output).group(1)
    assert fleet.play("upgrade", gpu_approved=plan_id, **approve).rc == 0


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
    assert {fleet.loaded(name) for name in fleet.names} == {OLD}


def test_a_build_failure_is_rolled_back_with_its_cause(fleet: Fleet) -> None:
    before = fleet.packages("gpu-1")
    fleet.sh("gpu-1", "mkdir -p /etc/nvidia-standin && touch /etc/nvidia-standin/dkms-fail")
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1", **WORKLOAD)
    assert played.rc != 0
    fleet.sh("gpu-1", "rm /etc/nvidia-standin/dkms-fail")
    if played.outcomes["gpu-1"] == "quarantined":
        assert fleet.play("recover", gpu_hosts="gpu-1", **WORKLOAD).rc == 0
    assert fleet.packages("gpu-1") == before and fleet.loaded("gpu-1") == OLD
    assert fleet.sh("gpu-1", "dpkg --audit") == ""


def test_reboot_always(fleet: Fleet) -> None:
    boot = fleet.sh("gpu-1", "cat /proc/sys/kernel/random/boot_id")
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1", gpu_driver_reboot="always", **WORKLOAD)
    assert played.rc == 0, played.output[-5000:]
    assert fleet.sh("gpu-1", "cat /proc/sys/kernel/random/boot_id") != boot
    assert fleet.loaded("gpu-1") == NEW
    assert fleet.sh("gpu-1", SERVICES).split() == ["active", "active"]


def test_a_canary_slower_than_its_baseline_is_rolled_back(fleet: Fleet) -> None:
    measure = "/usr/local/bin/measure"
    script = "#!/bin/sh\\ncase $(cat /sys/module/nvidia/version) in 535*) echo 100;; *) echo 60;; esac\\n"
    fleet.sh("gpu-1", f"printf '{script}' > {measure}; chmod 755 {measure}")
    one = {"gpu_hosts": "gpu-1", **WORKLOAD, "gpu_baseline_tolerance": 0.3}
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_benchmark_command=[measure], **one)
    assert played.rc != 0 and played.outcomes == {"gpu-1": "rolled back"}
    assert "worse by 40%" in played.nodes["gpu-1"]["reason"]
    assert fleet.loaded("gpu-1") == OLD


@pytest.mark.parametrize(
    ("failed", "outcome", "loaded", "work"),
    [("rollback", "rolled back", OLD, "active"), ("quarantine", "quarantined", NEW, "inactive")],
)
def test_a_canary_that_fails_its_soak_does_not_stay_in_service(
    fleet: Fleet, tmp_path: Path, failed: str, outcome: str, loaded: str, work: str
) -> None:
    service = tmp_path / "in-service"
    service.mkdir()
    (service / "gpu-1").touch()
    script = tmp_path / "lb"
    script.write_text(f'#!/bin/sh\ncd {service}; case $1 in drain) rm "$2";; enable) touch "$2";; esac\n')
    script.chmod(stat.S_IRWXU)
    balancer = {
        f"{act}_command": [str(script), verb, "{node}"] for act, verb in (("cordon", "drain"), ("uncordon", "enable"))
    }
    once = "/usr/local/bin/once"  # the first judgement passes, the one after the soak does not
    fleet.sh("gpu-1", f"printf '#!/bin/sh\\nmkdir /run/judged\\n' > {once}; chmod 755 {once}")
    played = fleet.play(
        "upgrade", gpu_driver_version=NEW, gpu_hosts="gpu-1,gpu-2", gpu_canary=["gpu-1"], **WORKLOAD,
        gpu_validate_command=[once], gpu_canary_soak=1, gpu_soak_failed=failed,
        gpu_scheduler_options=balancer,
    )  # fmt: skip
    assert played.rc != 0
    assert played.outcomes == {"gpu-1": outcome, "gpu-2": "not started"}, "the gate counts it"
    assert "after 1 s of soak" in played.nodes["gpu-1"]["reason"]
    journal = fleet.journal("gpu-1")["outcome"]
    assert journal["name"] == outcome.replace(" ", "_") and "after 1 s of soak" in journal["reason"]
    assert fleet.loaded("gpu-1") == loaded
    assert fleet.sh("gpu-1", "systemctl is-active gpu-counter", check=False).strip() == work
    assert (service / "gpu-1").exists() == (failed == "rollback")
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
    pid = fleet.sh("gpu-1", "systemctl show -p MainPID --value gpu-counter")
    batch = fleet.play("upgrade", **{**one, "gpu_hosts": "gpu-1,gpu-2", "gpu_canary": 2, "gpu_max_unavailable": 2})
    assert batch.rc != 0 and "counter was to be started on gpu-2, which is upgraded at the same time" in batch.output
    assert fleet.sh("gpu-1", "systemctl show -p MainPID --value gpu-counter") == pid, "nothing was stopped"
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
