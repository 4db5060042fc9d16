# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The census on made hosts: one test a field case (their ids are in docs and in the test ids)."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.host import holders
from ansible_collections.gpufleet.driver.plugins.module_utils.host.holders import Census
from ansible_collections.gpufleet.driver.plugins.module_utils.host.processes import Scan

from .made_host import MadeHost

CTL, GPU, UVM, CARD = "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm", "/dev/dri/card1"
ID = "0123456789abcdef" * 4
LOADED = """
    nvidia_uvm 1531904 {uvm} - Live 0x0 (POE)
    nvidia_modeset 1306624 0 - Live 0x0 (POE)
    nvidia 56557568 {nvidia} nvidia_uvm,nvidia_modeset, Live 0x0 (POE)
"""


@pytest.fixture
def host(tmp_path: Path) -> MadeHost:
    return MadeHost(tmp_path)


def never(pids: Sequence[int], timeout: float) -> dict[int, str]:
    raise AssertionError(f"asked the driver about {pids}")


def take(host: MadeHost, **arguments: Any) -> Census:
    return holders.take(**host.paths, probe=arguments.pop("probe", never), sleep=lambda seconds: None, **arguments)


def checks(census: Census) -> dict[str, str]:
    return {finding.check: finding.message for finding in census.findings}


def case_01(host: MadeHost) -> None:
    host.modules("""
        nvidia_uvm 1531904 0 - Live 0x0 (POE)
        nvidia_drm 77824 2 - Live 0x0 (POE)
        nvidia_modeset 1306624 1 nvidia_drm, Live 0x0 (POE)
        nvidia 56557568 2 nvidia_uvm,nvidia_modeset, Live 0x0 (POE)
        drm_kms_helper 311296 4 nvidia_drm,ast, Live 0x0
        ast 90112 0 - Live 0x0
    """)


def expect_01(census: Census) -> None:
    assert census.order == ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")
    assert census.unexplained == {"nvidia_drm": 2}
    assert "nvidia_drm has 2 references" in checks(census)["holders.unexplained"]
    assert census.reboot_required and not census.releasable


def case_02(host: MadeHost) -> None:
    host.modules("""
        gdrdrv 24576 0 - Live 0x0 (OE)
        nvidia_uvm 4632576 0 - Live 0x0 (POE)
        nvidia_modeset 1306624 0 - Live 0x0 (POE)
        nvidia 104067072 3 nvidia_uvm,gdrdrv,nvidia_modeset, Live 0x0 (POE)
    """)


def expect_02(census: Census) -> None:
    assert census.order[0] == "gdrdrv" and census.order[-1] == "nvidia"
    assert census.unexplained == {} and census.processes == ()
    assert "module gdrdrv" in [holder.title for holder in census.holders]
    assert census.releasable and not census.blocked


def case_03(host: MadeHost) -> None:
    host.modules("nvidia 19722240 15 - Live 0x0 (POE)")
    host.process(700, "nvidia-persistenced", [CTL, GPU], cgroup="0::/system.slice/nvidia-persistenced.service")


def expect_03(census: Census) -> None:
    (holder,) = census.processes
    assert (holder.name, holder.kind, holder.devices) == ("nvidia-persiste", "management", (GPU, CTL))
    assert holder.release.argv == ("systemctl", "stop", "nvidia-persistenced.service")
    assert census.unexplained == {} and census.releasable and census.blocked


def case_04(host: MadeHost) -> None:
    host.modules("""
        nvidia_drm 45056 1 - Live 0x0 (POE)
        nvidia_modeset 1306624 1 nvidia_drm, Live 0x0 (POE)
        nvidia 56557568 1 nvidia_modeset, Live 0x0 (POE)
    """)
    host.display()
    host.process(1, "systemd", [CARD], ppid=0, cgroup="0::/init.scope")
    host.process(800, "systemd-logind", [CARD], cgroup="0::/system.slice/systemd-logind.service")


def expect_04(census: Census) -> None:
    assert [(holder.name, holder.kind, holder.devices) for holder in census.processes] == [
        ("systemd", "system", (CARD,)),
        ("systemd-logind", "system", (CARD,)),
    ]
    for holder in census.processes:
        assert "isolate multi-user.target" in holder.release.advice and "kill" not in holder.release.argv
    assert census.reboot_required and census.unexplained == {}


def case_05(host: MadeHost) -> None:
    host.modules(LOADED.format(uvm=0, nvidia=6))
    host.process(910, "nomad", [CTL, GPU], cgroup="0::/system.slice/nomad.service")
    host.process(911, "siteagent", [CTL, GPU], cgroup="0::/system.slice/siteagent.service")


def expect_05(census: Census) -> None:
    assert [holder.kind for holder in census.processes] == ["management", "management"]
    assert census.processes[1].release.argv == ("systemctl", "stop", "siteagent.service")


def case_06(host: MadeHost) -> None:
    host.modules(LOADED.format(uvm=2, nvidia=6))
    host.process(
        41210, "python", [CTL, GPU, UVM], cgroup=f"0::/system.slice/docker-{ID}.scope", namespaced=[17], uid=1000
    )


def expect_06(census: Census) -> None:
    (holder,) = census.processes
    assert holder.process and holder.process.pids == (41210, 17)
    assert (holder.kind, holder.process.owner.runtime, holder.process.owner.container) == ("workload", "docker", ID)
    assert holder.release.argv == ("docker", "stop", ID[:12])


def case_07(host: MadeHost) -> None:
    host.modules(LOADED.format(uvm=0, nvidia=4))
    stuck = {"stack": "[<0>] os_acquire_mutex+0x1c/0x30 [nvidia]\n[<0>] nvidia_open+0x2/0x9 [nvidia]\n", "wchan": "0"}
    host.process(300, "nvidia-persistenced", [CTL], state="D", extra=stuck)
    host.process(301, "nvidia-smi", [], state="D", extra=stuck)
    host.process(
        302, "dd", [], state="D", extra={"stack": "[<0>] rpc_wait_bit+0x1/0x2 [sunrpc]\n", "wchan": "rpc_wait"}
    )


def expect_07(census: Census) -> None:
    assert [holder.name for holder in census.processes] == ["nvidia-persiste", "nvidia-smi"]
    assert all(holder.blocked_in == "os_acquire_mutex+0x1c/0x30 [nvidia]" for holder in census.processes)
    assert all("reboot" in holder.release.advice and not holder.release.argv for holder in census.processes)
    assert census.reboot_required and "wedged" in checks(census)["holders.stuck"]
    assert not census.complete


def case_08(host: MadeHost) -> None:
    host.modules(LOADED.format(uvm=1, nvidia=4))
    host.process(900, "python", state="Z", ppid=850)
    host.process(911, "python", [GPU, UVM], ppid=1, group=900)


def expect_08(census: Census) -> None:
    (holder,) = census.processes
    assert holder.process and (holder.process.pid, holder.zombie_parent) == (911, 900)
    assert "holds nothing itself" in checks(census)["holders.zombie"]
    assert "PID 911" in checks(census)["holders.zombie"]


def case_09(host: MadeHost) -> None:
    host.modules(LOADED.format(uvm=0, nvidia=4))
    host.process(
        950,
        "dcgm-exporter",
        [CTL],
        cgroup="0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod"
        f"0a1b2c3d_0000_4000_8000_0123456789ab.slice/cri-containerd-{ID}.scope",
    )


def expect_09(census: Census) -> None:
    (holder,) = census.processes
    assert (holder.kind, holder.process and holder.process.owner.pod) == (
        "management",
        "0a1b2c3d-0000-4000-8000-0123456789ab",
    )
    assert "evict the pod" in holder.release.advice


def case_10(host: MadeHost) -> None:
    host.modules("""
        nvidia_drm 77824 0 - Live 0x0 (POE)
        nvidia_modeset 1306624 1 nvidia_drm, Live 0x0 (POE)
        nvidia 56557568 1 nvidia_modeset, Live 0x0 (POE)
    """)
    host.write("sys/module/nvidia_drm/parameters/modeset", "Y\n")


def expect_10(census: Census) -> None:
    assert census.order == ("nvidia_drm", "nvidia_modeset", "nvidia")
    assert census.modules["nvidia_drm"].parameters == {"modeset": "Y"}


def case_11(host: MadeHost) -> None:
    host.modules(LOADED.format(uvm=0, nvidia=4))
    host.process(960, "nvsm-core", [CTL, GPU], cgroup="0::/system.slice/nvsm-core.service")


def expect_11(census: Census) -> None:
    (holder,) = census.processes
    assert (holder.kind, holder.release.argv) == ("management", ("systemctl", "stop", "nvsm-core.service"))


def case_12(host: MadeHost) -> None:
    host.modules(LOADED.format(uvm=1, nvidia=4))
    host.process(970, "nvidia-cuda-mps-server", [CTL, GPU, UVM], cgroup="0::/system.slice/ssh.service")


def expect_12(census: Census) -> None:
    (holder,) = census.processes
    assert holder.kind == "management" and "echo quit | nvidia-cuda-mps-control" in holder.release.advice


def case_13(host: MadeHost) -> None:
    host.modules(LOADED.format(uvm=0, nvidia=4))
    for pid in (1001, 1002, 1003):
        host.process(pid, "dcgmi", state="D", extra={"wchan": "nvidia_dev_put_uuid"})


def expect_13(census: Census) -> None:
    assert len(census.processes) == 3 and census.reboot_required
    assert {holder.blocked_in for holder in census.processes} == {"nvidia_dev_put_uuid"}


def case_14(host: MadeHost) -> None:
    host.modules("""
        nvidia_uvm 1343488 2 - Live 0x0 (POE)
        nvidia 56557568 1 nvidia_uvm, Live 0x0 (POE)
    """)
    host.process(
        980,
        "nvidia-device-plugin",
        [UVM],
        cgroup=f"0::/kubepods/pod0a1b2c3d-0000-4000-8000-0123456789ab/{ID}",
    )


def expect_14(census: Census) -> None:
    (holder,) = census.processes
    assert (holder.name, holder.modules, holder.kind) == ("nvidia-device-p", ("nvidia_uvm",), "management")
    assert census.blocked


def case_15(host: MadeHost) -> None:
    host.modules(LOADED.format(uvm=0, nvidia=4))
    host.process(990, "nvidia-powerd", [CTL, GPU], cgroup="0::/system.slice/nvidia-powerd.service")


def expect_15(census: Census) -> None:
    (holder,) = census.processes
    assert (holder.kind, holder.release.argv) == ("management", ("systemctl", "stop", "nvidia-powerd.service"))


FIELD_CASES = [
    pytest.param(globals()[f"case_{n:02}"], globals()[f"expect_{n:02}"], id=f"A-MOD-{n:02}") for n in range(1, 16)
]


@pytest.mark.parametrize(("build", "expect"), FIELD_CASES)
def test_field_case(host: MadeHost, build: Callable[[MadeHost], None], expect: Callable[[Census], None]) -> None:
    build(host)
    expect(take(host))


def test_nothing_is_held_when_no_module_is_loaded(host: MadeHost) -> None:
    """Nodes outlive their module, and their number may then be another driver's."""
    host.modules("e1000 1 0 - Live 0x0")
    host.process(500, "cat", [GPU])
    census = take(host)
    assert (census.holders, census.order, census.blocked) == ((), (), False)


def test_a_node_that_outlived_its_module_counts_for_nothing(host: MadeHost) -> None:
    host.modules("nvidia 1 0 - Live 0x0 (POE)")
    host.process(500, "cat", [UVM])
    assert take(host).processes == ()


def test_majors_by_name_cover_minors_without_a_node(host: MadeHost) -> None:
    host.write("proc/devices", "Character devices:\n  1 nvidia-frontend\n195 nvidia\n\nBlock devices:\n259 blkext\n")
    host.modules("nvidia 1 2 - Live 0x0 (POE)")
    host.process(500, "python", ["/dev/null"])
    (holder,) = take(host).processes
    assert holder.devices == ("/dev/nvidia3",)  # 1:3


def test_a_mapping_without_a_descriptor_holds(host: MadeHost) -> None:
    row = "7f00-7f01 rw-s 00000000 00:05 321                        /dev/nvidia0\n"
    host.modules("nvidia 1 1 - Live 0x0 (POE)")
    host.process(500, "python", maps=row)
    (holder,) = take(host).processes
    assert (holder.opened, holder.mapped, holder.devices) == (0, 1, (GPU,))


def test_a_zombie_leader_with_a_living_thread_holds(host: MadeHost) -> None:
    host.modules("nvidia 1 1 - Live 0x0 (POE)")
    host.process(500, "python", state="Z", threads={501: [GPU]})
    (holder,) = take(host).processes
    assert holder.process and holder.process.pid == 500


def test_zombies_alone_with_an_unexplained_reference_are_named(host: MadeHost) -> None:
    host.modules("nvidia 1 1 - Live 0x0 (POE)")
    host.process(500, "python", state="Z", ppid=77)
    census = take(host)
    assert census.unexplained == {"nvidia": 1} and census.reboot_required
    assert any(finding.next == "its parent, PID 77, must reap it" for finding in census.findings)


def test_inside_a_pid_namespace_the_census_says_it_is_incomplete(host: MadeHost) -> None:
    host.modules("nvidia 1 0 - Live 0x0 (POE)")
    host.set_pid_namespace(4026532999)
    census = take(host)
    assert not census.complete and "holders.pid_namespace" in checks(census)


def test_a_text_console_on_the_gpu_is_named(host: MadeHost) -> None:
    host.modules("""
        nvidia_drm 45056 1 - Live 0x0 (POE)
        nvidia 56557568 1 nvidia_drm, Live 0x0 (POE)
    """)
    host.display()
    (host.root / "sys/class/graphics").mkdir()
    host.write("sys/devices/pci0/gpu/graphics/fb0/dev", "29:0\n")
    (host.root / "sys/class/graphics/fb0").symlink_to(host.root / "sys/devices/pci0/gpu/graphics/fb0")
    host.write("sys/class/vtconsole/vtcon1/name", "(M) frame buffer device\n")
    host.write("sys/class/vtconsole/vtcon1/bind", "1\n")
    assert "vtcon1" in checks(take(host))["holders.unexplained"]


def test_a_module_that_looks_symbols_up_at_run_time_is_suspected(host: MadeHost) -> None:
    host.modules("""
        nvidia_fs 307200 0 - Live 0x0 (OE)
        nvidia 56557568 1 - Live 0x0 (POE)
    """)
    census = take(host)
    assert census.order == ("nvidia",)
    assert "nvidia_fs" in checks(census)["holders.unexplained"]


def test_permanent_and_going_modules_need_a_reboot(host: MadeHost) -> None:
    host.modules("""
        vendor_x 4096 0 [permanent], Live 0x0 (OE)
        nvidia 56557568 1 vendor_x, Live 0x0 (POE)
    """)
    census = take(host)
    assert census.reboot_required and "holders.permanent" in checks(census)


CUDA_MAP = "7f00-7f01 rw-p 00000000 08:01 77                         /usr/lib/libcuda.so.550.90.07\n"


@pytest.mark.parametrize(
    ("state", "at_stake", "level"),
    [
        pytest.param("checkpointed", True, "error", id="checkpointed"),
        pytest.param("locked", True, "error", id="locked"),
        pytest.param("running", False, None, id="running"),
        pytest.param("unknown", False, "warning", id="unknown"),
        pytest.param("none", False, None, id="no CUDA process"),
    ],
)
def test_suspended_by_a_cuda_checkpoint(host: MadeHost, state: str, at_stake: bool, level: str | None) -> None:
    host.modules("nvidia 1 0 - Live 0x0 (POE)")
    host.process(500, "python", maps=CUDA_MAP)
    host.process(501, "python", [GPU, CTL], maps=CUDA_MAP)
    asked: list[int] = []

    def probe(pids: Sequence[int], timeout: float) -> dict[int, str]:
        asked.extend(pids)
        return dict.fromkeys(pids, state)

    census = take(host, probe=probe)
    assert asked == [500], "only a process that maps libcuda and has no device open is a candidate"
    assert bool(census.suspended_at_stake) is at_stake and census.releasable is not at_stake
    levels = [finding.level for finding in census.findings if finding.check == "holders.suspended"]
    assert levels == ([level] if level else [])


def test_a_stopped_process_that_the_driver_cannot_ask_is_at_stake(host: MadeHost) -> None:
    """As work is while its checkpoint waits to be moved: SIGSTOP keeps the question from being answered."""
    host.modules("nvidia 1 0 - Live 0x0 (POE)")
    host.process(500, "python", maps=CUDA_MAP, state="T")
    census = take(host, probe=lambda pids, timeout: dict.fromkeys(pids, "unknown"))
    assert [one.state for one in census.suspended_at_stake] == ["stopped"]
    assert census.blocked
    (finding,) = [one for one in census.findings if one.check == "holders.suspended"]
    assert finding.next
    assert finding.next.startswith("kill -CONT 500, then cuda-checkpoint")


def test_a_wedged_driver_is_asked_nothing(host: MadeHost) -> None:
    host.modules("nvidia 1 1 - Live 0x0 (POE)")
    host.process(400, "nvidia-smi", [CTL], state="D", extra={"wchan": "nv_open"})
    host.process(500, "python", maps=CUDA_MAP)
    census = take(host, probe=never)
    assert [one.state for one in census.suspended] == ["unknown"]


def test_a_process_that_comes_out_of_its_sleep_is_no_wedge(host: MadeHost) -> None:
    host.modules("nvidia 1 1 - Live 0x0 (POE)")
    host.process(400, "python", [CTL], state="D", extra={"wchan": "nv_open"})
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        stat = host.root / "proc/400/stat"
        stat.write_text(stat.read_text().replace(") D ", ") S "))

    census = holders.take(**host.paths, probe=never, sleep=sleep)
    assert len(slept) == 1 and not census.reboot_required
    assert [holder.name for holder in census.processes] == ["python"]


def test_names_of_containers_are_asked_of_their_runtime(host: MadeHost) -> None:
    from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed

    case_06(host)
    census = take(host, run=lambda argv, timeout: Completed(tuple(argv), 0, f"{ID} trainer\n", "", 0.1))
    (holder,) = census.processes
    assert (holder.container_name, holder.release.argv) == ("trainer", ("docker", "stop", "trainer"))
    assert holder.title == "PID 41210 python (container trainer)"


def test_somebody_elses_unit_is_not_to_be_stopped(host: MadeHost) -> None:
    host.modules("nvidia 1 1 - Live 0x0 (POE)")
    host.process(500, "python", [GPU], cgroup="0::/system.slice/ssh.service")
    (holder,) = take(host).processes
    assert holder.release.argv == ("kill", "-TERM", "500")


def test_every_key_of_the_result_is_plain_data(host: MadeHost) -> None:
    import json

    case_06(host)
    told = json.loads(json.dumps(take(host).as_dict()))
    assert {"modules", "order", "holders", "suspended", "unexplained", "findings", "releasable", "complete"} <= set(
        told
    )


def test_a_walk_that_hangs_on_maps_is_done_again_without_them(host: MadeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.modules("nvidia 1 1 - Live 0x0 (POE)")
    host.process(500, "python", [GPU])
    walk = holders._walk

    def hang_on_maps(devices: holders.Devices, proc: str, read_maps: bool) -> Any:
        if read_maps:
            time.sleep(60)
        return walk(devices, proc, read_maps)

    monkeypatch.setattr(holders, "_walk", hang_on_maps)
    census = take(host, scan_seconds=1.0)
    assert [holder.name for holder in census.processes] == ["python"]
    assert not census.complete and census.reboot_required and "open files only" in checks(census)["holders.scan"]


def test_without_root_an_unexplained_reference_is_no_reason_to_reboot(
    host: MadeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.modules("nvidia 1 1 - Live 0x0 (POE)")
    monkeypatch.setattr(holders, "_scan", lambda devices, proc, seconds: (Scan(denied=[1, 2], processes=9), []))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    census = take(host)
    assert census.unexplained == {"nvidia": 1} and not census.reboot_required and not census.complete
    assert {finding.next for finding in census.findings} == {"run it as root", "run it as root (become: true)"}


@pytest.mark.parametrize(
    ("script", "state"),
    [
        pytest.param("echo checkpointed", "checkpointed", id="checkpointed"),
        pytest.param("echo running", "running", id="running"),
        pytest.param("echo something new", "unknown", id="a word not known"),
        pytest.param("echo initialization error; exit 1", "none", id="no CUDA process"),
        pytest.param("exec sleep 60", "unknown", id="hangs"),
    ],
)
def test_the_checkpoint_state_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, state: str
) -> None:
    tool = tmp_path / "cuda-checkpoint"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert holders.checkpoint_states([4242], 1.0, library="/no/libcuda.so.1") == {4242: state}


LIBCUDA = """
#include <unistd.h>
static int ready;
int cuInit(unsigned flags) { ready = 1; return 0; }
int cuCheckpointProcessGetState(int pid, int *state)
{
    if (!ready) return 3;
    if (pid == 9) sleep(60);
    if (pid == 8) return 1;
    *state = pid;
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="a libcuda is compiled here: install gcc")
@pytest.mark.parametrize(
    ("pid", "state"),
    [(0, "running"), (1, "locked"), (2, "checkpointed"), (3, "failed"), (5, "locked"), (8, "none"), (9, "unknown")],
)
def test_the_checkpoint_state_by_the_library(tmp_path: Path, pid: int, state: str) -> None:
    """State 5 (restoring) came with CUDA 13.4 and is as much at stake as locked."""
    (tmp_path / "libcuda.c").write_text(LIBCUDA)
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "libcuda.c")], check=True)
    assert holders.checkpoint_states([pid], 2.0, library=library) == {pid: state}


@pytest.mark.skipif(shutil.which("cc") is None, reason="a libcuda is compiled here: install gcc")
def test_one_process_that_hangs_the_question_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "libcuda.c").write_text(LIBCUDA)
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "libcuda.c")], check=True)
    states = holders.checkpoint_states([2, 9, 1], 4.0, library=library)
    assert states == {2: "checkpointed", 9: "unknown", 1: "locked"}


def test_stale_class_devices_of_other_drivers_are_left_out(host: MadeHost) -> None:
    host.modules("nvidia_drm 1 1 - Live 0x0\nnvidia 1 1 nvidia_drm, Live 0x0")
    host.display(driver="ast")
    host.process(1, "systemd", [CARD])
    census = take(host)
    assert census.processes == () and census.unexplained == {"nvidia_drm": 1}
