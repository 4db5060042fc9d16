# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.host import (
    holders,
    identity,
    kernel_modules,
    module_state,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.host.kernel_modules import (
    KernelModules,
    family,
    parse_modules,
    refusal,
    unload_order,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal

from .made_host import MadeHost

USES = {
    "nvidia_uvm": ["nvidia"],
    "nvidia_drm": ["nvidia_modeset", "drm_kms_helper"],
    "nvidia_modeset": ["nvidia"],
    "gdrdrv": ["nvidia"],
    "nvidia": [],
    "drm_kms_helper": [],
}
"""Module → the modules it uses."""


class MadeKernel:
    """Answers rmmod, modprobe and the rest as a kernel would, on a made /proc and /sys."""

    def __init__(self, root: Path, loaded: Sequence[str]) -> None:
        self.host = MadeHost(root)
        self.loaded = list(loaded)
        self.busy: set[str] = set()
        """Modules with a reference of their own."""
        self.broken: dict[str, tuple[str, str]] = {}
        """Module → what modprobe says and what the kernel logs when it is loaded."""
        self.hanging: set[str] = set()
        self.parameters: dict[str, dict[str, str]] = {}
        self.returning: list[str] = []
        """Modules that something loads again as soon as nvidia has gone."""
        self.ran: list[str] = []
        self.log: list[str] = ["[1.0] booted"]
        self.show()

    def show(self) -> None:
        shutil.rmtree(self.host.root / "sys/module")
        (self.host.root / "sys/module").mkdir()
        rows = []
        for name in self.loaded:
            users = [user for user in self.loaded if name in USES[user]]
            count = len(users) + (2 if name in self.busy else 0)
            rows.append(f"{name} 4096 {count} {','.join([*users, '']) or '-'} Live 0x0 (OE)")
            for key, value in self.parameters.get(name, {}).items():
                self.host.write(f"sys/module/{name}/parameters/{key}", f"{value}\n")
        self.host.modules("\n".join(rows) or " ")
        for name in self.loaded:
            self.host.write(f"sys/module/{name}/version", "535.183.01\n")

    def __call__(self, argv: Sequence[str], *, timeout: float, **dummy: Any) -> Completed:
        program, *words = argv
        self.ran.append(" ".join(argv))
        if program == "dmesg":
            return self.answer(argv, 0, "\n".join(self.log))
        if program not in ("rmmod", "modprobe"):
            return self.answer(argv, 127, "", f"{program}: not found")
        name = words[0]
        if name in self.hanging:
            return Completed(tuple(argv), 124, "", "", timeout, timed_out=True)
        failed = self.rmmod(name) if program == "rmmod" else self.modprobe(name, words[1:])
        self.show()
        return self.answer(argv, 1 if failed else 0, "", failed)

    @staticmethod
    def answer(argv: Sequence[str], rc: int, stdout: str = "", stderr: str = "") -> Completed:
        return Completed(tuple(argv), rc, stdout, stderr, 0.1)

    def rmmod(self, name: str) -> str:
        if name not in self.loaded:
            return f"rmmod: ERROR: Module {name} is not currently loaded"
        if name in self.busy or any(name in USES[user] for user in self.loaded):
            return f"rmmod: ERROR: Module {name} is in use"
        self.loaded.remove(name)
        self.parameters.pop(name, None)
        if name == "nvidia":
            self.loaded = [*self.returning, *self.loaded]
        return ""

    def modprobe(self, name: str, options: Sequence[str]) -> str:
        if name in self.broken:
            said, logged = self.broken[name]
            self.log.append(logged)
            return said
        for other in USES[name]:
            if failed := other not in self.loaded and self.modprobe(other, ()):
                return failed
        if name not in self.loaded:
            self.loaded.insert(0, name)
            self.parameters[name] = {"modeset": "N"} if name == "nvidia_drm" else {}
            self.parameters[name].update(dict(option.split("=") for option in options))
        return ""


ALL = ["nvidia_uvm", "gdrdrv", "nvidia_drm", "nvidia_modeset", "nvidia", "drm_kms_helper"]


@pytest.fixture
def made(tmp_path: Path) -> MadeKernel:
    return MadeKernel(tmp_path, ALL)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.open(str(tmp_path / "state"))


def kernel(made: MadeKernel) -> KernelModules:
    return KernelModules(made, timeout=5, **made.host.paths)


def unloaded(made: MadeKernel, journal: Journal, **arguments: Any) -> module_state.Result:
    arguments.setdefault("wait", 0)
    return module_state.unloaded(
        kernel(made), journal, lambda: holders.take(**made.host.paths), now=lambda: 1000.0, **arguments
    )


def loaded(made: MadeKernel, journal: Journal, **arguments: Any) -> module_state.Result:
    return module_state.loaded(kernel(made), journal, now=lambda: 2000.0, **arguments)


def changes(made: MadeKernel) -> list[str]:
    return [line for line in made.ran if line != "dmesg"]


@pytest.mark.parametrize(
    ("row", "count", "users", "permanent"),
    [
        (
            "nvidia 56557568 2 nvidia_uvm,nvidia_modeset, Live 0xffffffffc0350000 (POE)",
            2,
            ("nvidia_uvm", "nvidia_modeset"),
            0,
        ),
        ("nvidia 56557568 0 - Live 0x0000000000000000 (POE)", 0, (), 0),
        ("nvidia 56557568 0 - Live 0x0", 0, (), 0),
        ("nvidia 56557568 -1 - Unloading 0x0 (POE-)", -1, (), 0),
        ("nvidia 56557568 - - Live 0x0", None, (), 0),
        ("nvidia 56557568 3 [permanent],nvidia_uvm, Live 0x0", 3, ("nvidia_uvm",), 1),
        ("nvidia 104067072 3 nvidia_uvm,gdrdrv,nvidia_modeset", 3, ("nvidia_uvm", "gdrdrv", "nvidia_modeset"), 0),
        ("nvidia              19722240  15", 15, (), 0),
        ("nvidia 19722240 262", 262, (), 0),
    ],
    ids=["users", "none", "no flags", "going", "uncounted", "permanent", "lsmod", "lsmod without users", "large"],
)
def test_rows_of_modules(row: str, count: int | None, users: tuple[str, ...], permanent: int) -> None:
    module = parse_modules(f"Module                  Size  Used by\n{row}\n")[row.split()[0]]
    assert (module.references, module.used_by, module.permanent) == (count, users, bool(permanent))


def test_the_family_is_what_uses_nvidia_and_nothing_else() -> None:
    modules = parse_modules(
        "drm_kms_helper 1 4 nvidia_drm,ast, Live 0x0\n"
        "nvidia_wmi_ec_backlight 1 0 - Live 0x0\n"
        "vendor_rdma 1 0 - Live 0x0\n"
        "nvidia_peermem 1 1 vendor_rdma, Live 0x0\n"
        "nvidia 1 1 nvidia_peermem, Live 0x0\n"
    )
    assert list(family(modules)) == ["vendor_rdma", "nvidia_peermem", "nvidia"]
    assert unload_order(family(modules)) == ["vendor_rdma", "nvidia_peermem", "nvidia"]


def test_sysfs_supplies_what_proc_modules_hides(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.modules("nvidia_uvm 1 0 - Live 0x0\nnvidia 1 1 nvidia_uvm, Live 0x0")
    host.write("proc/modules", "")
    found = kernel_modules.read_modules(host.paths["proc"], host.paths["sys"])
    assert {name: (module.references, module.used_by) for name, module in found.items()} == {
        "nvidia": (1, ("nvidia_uvm",)),
        "nvidia_uvm": (0, ()),
    }


def test_unload_takes_dependants_first_and_only_the_family(made: MadeKernel, journal: Journal) -> None:
    result = unloaded(made, journal)
    assert result.error is None and result.changed and result.after == {}
    assert changes(made)[-1] == "rmmod nvidia" and set(changes(made)) == {f"rmmod {name}" for name in ALL[:-1]}
    assert made.loaded == ["drm_kms_helper"]
    assert journal.before("modules")[0]["name"] == "nvidia"
    assert result.as_dict()["diff"]["after"] == ""


def test_unload_again_changes_nothing(made: MadeKernel, journal: Journal) -> None:
    unloaded(made, journal)
    made.ran.clear()
    assert not unloaded(made, journal).changed and made.ran == []


def test_check_mode_only_tells(made: MadeKernel, journal: Journal) -> None:
    result = unloaded(made, journal, check=True)
    assert result.changed and [action.module for action in result.actions][-1] == "nvidia" and result.after == {}
    assert made.ran == [] and made.loaded == ALL and journal.before("modules") is None


def test_check_mode_names_who_would_keep_the_driver_once_its_clients_are_stopped() -> None:
    def holder(pid: int, name: str, unit: str | None) -> holders.Holder:
        release = holders.Release(f"stop {unit or name}", ("systemctl", "stop", unit) if unit else ())
        person = identity.Identity(pid, (pid,), 1, pid, pid, name, name, "S", "root", None, identity.Owner(unit=unit))
        return holders.Holder(holders.WORKLOAD, name, ("/dev/nvidia0",), (), release, process=person)

    census = holders.Census(
        {},
        (),
        (
            holder(40, "gpu-counter", "gpu-counter.service"),
            holder(41, "nv-hostengine", "nvidia-dcgm.service"),
            holder(42, "nvidia-cuda-mps-server", None),
            holder(43, "python", None),
        ),
    )
    found = module_state.foreseen(census, {"nvidia-dcgm.service"})
    assert [(finding.level, finding.evidence["pid"], finding.next) for finding in found] == [
        ("warning", 40, "systemctl stop gpu-counter.service"),
        ("warning", 43, "stop python"),
    ]
    assert found[0].message.startswith("PID 40 gpu-counter (gpu-counter.service) has /dev/nvidia0 open; unless it has")


def test_a_holder_stops_it_before_anything_is_touched(made: MadeKernel, journal: Journal) -> None:
    made.host.process(700, "python", ["/dev/nvidia0", "/dev/nvidia-uvm"], cgroup="0::/system.slice/train.service")
    made.busy = {"nvidia", "nvidia_uvm"}
    made.show()
    result = unloaded(made, journal)
    assert result.error and "PID 700 python (train.service)" in result.error
    assert "systemctl stop train.service" in result.error
    assert (result.changed, result.reboot_required, made.ran) == (False, False, [])
    assert [holder.name for holder in result.blocked_by] == ["python"]


def test_a_holder_that_is_just_ending_is_waited_for(made: MadeKernel, journal: Journal) -> None:
    made.host.process(700, "python", ["/dev/nvidia0"])

    def sleep(seconds: float) -> None:
        shutil.rmtree(made.host.root / "proc/700")

    assert unloaded(made, journal, wait=5, sleep=sleep).error is None


def test_an_unexplained_reference_needs_a_reboot(made: MadeKernel, journal: Journal) -> None:
    made.busy = {"nvidia"}
    made.show()
    result = unloaded(made, journal)
    assert result.reboot_required and made.ran == []
    assert result.error and "module nvidia has 2 references" in result.error


def test_a_refusal_on_the_way_puts_everything_back(made: MadeKernel, journal: Journal) -> None:
    made.parameters = {"nvidia_drm": {"modeset": "Y"}}
    made.show()

    def census_then_somebody_opens() -> holders.Census:
        census = holders.take(**made.host.paths)
        made.busy = {"nvidia"}
        return census

    result = module_state.unloaded(kernel(made), journal, census_then_somebody_opens, wait=0, now=lambda: 1000.0)
    assert result.error and "refused to unload nvidia" in result.error and result.changed
    assert sorted(made.loaded) == sorted(ALL)
    assert made.parameters["nvidia_drm"] == {"modeset": "Y"}
    assert "modprobe nvidia_drm modeset=Y" in made.ran and not any("-f" in line for line in made.ran)
    last = journal.last("unload modules")
    assert last and last["state"] == "failed"


def test_rmmod_that_hangs_is_a_wedged_driver(made: MadeKernel, journal: Journal) -> None:
    made.hanging = {"nvidia"}
    result = unloaded(made, journal)
    assert result.reboot_required and result.error and "wedged" in result.error
    assert not any(line.startswith("modprobe") for line in made.ran), "nothing more is asked of a wedged driver"


def test_a_driver_that_comes_back_by_itself_is_said(made: MadeKernel, journal: Journal) -> None:
    made.returning = ["nvidia"]
    result = unloaded(made, journal)
    assert result.error and "came back" in result.error and sorted(made.loaded) == sorted(ALL)


def test_load_brings_back_what_was_there(made: MadeKernel, journal: Journal) -> None:
    unloaded(made, journal)
    result = loaded(made, journal)
    assert result.error is None and result.changed and sorted(made.loaded) == sorted(ALL)
    assert journal.before("modules") is None, "outside a run there is nothing more to go back to"
    assert not loaded(made, journal).changed


def test_within_a_run_the_set_is_kept_for_a_roll_back(made: MadeKernel, journal: Journal) -> None:
    journal.begin("run-1", "550.90.07", "535.183.01", 1.0)
    unloaded(made, journal)
    loaded(made, journal)
    assert len(journal.before("modules")) == 5


def test_load_after_a_crash_half_way(made: MadeKernel, journal: Journal) -> None:
    """Some modules were out when the controller vanished; the journal still knows the whole set."""
    unloaded(made, journal)
    kernel(made).load(["nvidia"])
    result = loaded(made, journal)
    assert result.error is None and sorted(made.loaded) == sorted(ALL)


def test_load_on_a_node_that_had_nothing_loaded(tmp_path: Path, journal: Journal) -> None:
    made = MadeKernel(tmp_path / "host", [])
    assert loaded(made, journal).error is None
    assert sorted(made.loaded) == ["nvidia", "nvidia_uvm"]


def test_an_addition_that_does_not_load_is_a_warning(made: MadeKernel, journal: Journal) -> None:
    unloaded(made, journal)
    made.broken = {
        "gdrdrv": ("could not insert 'gdrdrv': Invalid argument", "gdrdrv: disagrees about version of symbol x")
    }
    result = loaded(made, journal)
    assert result.error is None and result.changed and "gdrdrv" not in made.loaded
    (finding,) = result.findings
    assert (finding.level, finding.evidence["reason"]) == ("warning", "version_magic")


def test_nvidia_that_does_not_load_is_an_error_with_the_kernels_words(made: MadeKernel, journal: Journal) -> None:
    unloaded(made, journal)
    made.broken = {"nvidia": ("modprobe: ERROR: could not insert 'nvidia': No such device", "[9] NVRM: no GPU found")}
    result = loaded(made, journal)
    assert result.error and "no device that it supports" in result.error and "NVRM: no GPU found" in result.error
    assert "booted" not in result.error, "only what was logged meanwhile"


@pytest.mark.parametrize(
    ("said", "logged", "reason"),
    [
        ("modprobe: FATAL: Module nvidia not found in directory /lib/modules/5.17.5-76051705-generic", "", "not_built"),
        ("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service", "", "signature"),
        ("modprobe: ERROR: could not insert 'nvidia': Required key not available", "", "signature"),
        (
            "could not insert 'nvidia': Operation not permitted",
            "Lockdown: modprobe: unsigned module loading is restricted",
            "signature",
        ),
        (
            "could not insert 'nvidia': Exec format error",
            "nvidia: version magic '5.4.0' should be '5.15.0'",
            "version_magic",
        ),
        (
            "could not insert 'nvidia_uvm': Invalid argument",
            "nvidia_uvm: disagrees about version of symbol x",
            "version_magic",
        ),
        ("could not insert 'nvidia': Unknown symbol in module, or unknown parameter", "", "unknown_symbol"),
        (
            "could not insert 'nvidia': No such device",
            "NVRM: None of the NVIDIA devices were initialized.",
            "no_device",
        ),
        ("could not insert 'nvidia': No such device", "", "no_device"),
        ("modprobe: ERROR: Error running install command '/bin/false' for module nvidia: retcode 1", "", "blocked"),
        ("could not insert 'nvidia': Operation not permitted", "", "blocked"),
        ("could not insert 'nvidia': Cannot allocate memory", "", "other"),
    ],
)
def test_why_a_module_did_not_load(said: str, logged: str, reason: str) -> None:
    assert refusal(said, logged) == reason


def test_modprobe_that_hangs(made: MadeKernel, journal: Journal) -> None:
    unloaded(made, journal)
    made.hanging = {"nvidia"}
    result = loaded(made, journal)
    assert result.reboot_required and result.findings[0].evidence["reason"] == "timed_out"


DEVICES = "Character devices:\n  1 nvidia\n  1 nvidiactl\n{uvm} nvidia-uvm\n\nBlock devices:\n  7 loop\n"


def test_stale_and_missing_nodes_are_found(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.write("proc/devices", DEVICES.format(uvm=510))
    host.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: x\nDevice Minor: \t 7\n")
    host.write("proc/driver/nvidia/gpus/0000:02:00.0/information", "Model: x\nDevice Minor: \t 5\n")
    (tmp_path / "dev/nvidia7").symlink_to("/dev/full")
    problems = kernel_modules.node_problems(host.paths["proc"], host.paths["dev"])
    assert problems == {
        "/dev/nvidiactl": "has the numbers 1:9, but the loaded driver has 1:255",
        "/dev/nvidia5": "is missing",
        "/dev/nvidia-uvm": "has the numbers 1:5, but the loaded driver has 510:0",
    }


def test_nodes_are_made_by_nvidias_own_tool(made: MadeKernel, journal: Journal) -> None:
    made.host.write("proc/devices", DEVICES.format(uvm=510))
    result = loaded(made, journal, names=["nvidia", "nvidia_uvm"])
    assert "nvidia-modprobe -u -c=0" in made.ran
    assert result.error and "nvidia-modprobe is not installed" in result.error


def test_nothing_is_said_of_nodes_when_the_kernel_does_not_name_the_driver(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    assert kernel_modules.node_problems(host.paths["proc"], host.paths["dev"]) == {}
