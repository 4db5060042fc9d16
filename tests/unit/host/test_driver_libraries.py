# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVML and CUDA through ctypes: over the stand-in driver's libraries, and over libraries that hang or crash."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING, Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.host import cuda, facts, nvml, settings, validation
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal

SOURCES = Path(__file__).parents[2] / "lab" / "standin" / "userland"
VERSION = "535.183.01"
UUIDS = [f"GPU-5ca1ab1e-0000-4000-8000-00000000000{index}" for index in range(2)]

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is needed to build the libraries under test")


def compiled(folder: Path, name: str, *sources: str | Path, text: str = "", version: str = VERSION) -> str:
    """Build ``name``.so.VERSION with its .so.1 link; the path of the link."""
    library = folder / f"{name}.so.{version}"
    if text:
        (folder / f"{name}.c").write_text(text)
        sources = (folder / f"{name}.c",)
    subprocess.run(
        ["gcc", "-std=gnu11", "-fPIC", "-shared", "-Wl,-Bsymbolic", f"-Wl,-soname,{name}.so.1",
         f'-DSTANDIN_VERSION="{version}"', "-o", library, *sources],
        check=True, timeout=120,
    )  # fmt: skip
    link = folder / f"{name}.so.1"
    link.symlink_to(library.name)
    return str(link)


@dataclass
class Host:
    """A made tree with a loaded stand-in driver, and the knobs of its libraries."""

    root: Path
    nvml: str
    cuda: str

    def knobs(self, *lines: str) -> None:
        (self.root / "run/nvidia-standin/state").write_text("".join(f"{line}\n" for line in lines))

    def reload(self) -> None:
        """As after rmmod and modprobe: what was set through NVML is gone."""
        (self.root / "run/nvidia-standin/loaded").unlink(missing_ok=True)

    def load(self, version: str, gpus: int = 2) -> None:
        proc = self.root / "proc/driver/nvidia"
        shutil.rmtree(proc, ignore_errors=True)
        for index in range(gpus):
            place = proc / f"gpus/0000:0{index + 1}:00.0"
            place.mkdir(parents=True)
            place.joinpath("information").write_text(
                f"Model: \t\t NVIDIA Stand-in GPU\nGPU UUID: \t {UUIDS[index]}\nBus Location: \t "
                f"0000:0{index + 1}:00.0\nDevice Minor: \t {index}\nGPU Excluded:\t No\n"
            )
        proc.joinpath("version").write_text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (standin)\n"
        )

    @property
    def roots(self) -> facts.Roots:
        places = {name: str(self.root / name) for name in ("proc", "pci", "boot", "modules", "etc", "run", "dev")}
        return facts.Roots(**places, nvml=self.nvml)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("standin")
    common = SOURCES / "standin.c"
    return (
        compiled(folder, "libnvidia-ml", SOURCES / "nvml.c", common),
        compiled(folder, "libcuda", SOURCES / "cuda.c", common),
    )


@pytest.fixture
def host(tmp_path: Path, libraries: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(tmp_path, *libraries)
    for name in ("run/nvidia-standin", "var/lib/nvidia-standin", "dev", "etc", "pci", "boot", "modules"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm", "nvidia-uvm-tools"):
        (tmp_path / "dev" / name).touch()
    made.load(VERSION)
    (tmp_path / "proc/modules").write_text("nvidia_uvm 1 0 - Live 0x0\nnvidia 1 1 nvidia_uvm, Live 0x0\n")
    monkeypatch.setenv("NVIDIA_STANDIN_ROOT", str(tmp_path))
    yield made


# --- NVML ----------------------------------------------------------------------------------------------------------


def test_nvml_usage(host: Host) -> None:
    host.knobs("proc_used_mib=100")
    with (host.root / "dev/nvidia1").open(), (host.root / "dev/nvidia0").open():
        both = nvml.usage(20, host.nvml)[os.getpid()]
    with (host.root / "dev/nvidia1").open():
        one = nvml.usage(20, host.nvml)[os.getpid()]
    assert both == nvml.Usage((0, 1), 200 << 20) and one == nvml.Usage((1,), 100 << 20)
    assert nvml.usage(20, "libno-such.so.1") == {}


def test_nvml_report(host: Host) -> None:
    host.knobs("ecc_uncorrected.1=3", "remap_pending.1=1", "remapped_uncorrectable.1=1", "power_limit_mw=350000")
    report = nvml.observe(20, host.nvml)
    assert (report.status, report.driver_version, report.library_version) == ("ok", VERSION, VERSION)
    assert report.cuda_version == "12.2"
    first, second = report.gpus
    assert [gpu["uuid"] for gpu in report.gpus] == UUIDS
    assert (first["pci"], first["pci_device_id"], first["minor"]) == ("0000:01:00.0", "20b2", 0)
    assert first["memory"] == {"total": 81920 << 20, "used": 4 << 20}
    assert (first["persistence"], first["compute_mode"], first["power_limit"]) == (False, "default", 350.0)
    assert first["mig"] == {"current": False, "pending": False}
    assert first["fabric"]["state"] == "not_supported"
    assert first["remapped_rows"] == {"corrected": 0, "uncorrected": 0, "pending": False, "failure": False}
    assert second["remapped_rows"] == {"corrected": 0, "uncorrected": 1, "pending": True, "failure": False}
    assert second["ecc_uncorrected"]["volatile"] == 3
    assert second["error"] is None


STATUS = {
    "A-NVML-01-mismatch-18": ("550.90.07", (), "mismatch"),
    "A.16-driver-not-loaded-9": (None, (), "driver_not_loaded"),
    "A.16-gpu-lost-15": (VERSION, ("lost.1=1",), "gpu_lost"),
    "reset-required-16": (VERSION, ("nvml_error.nvmlDeviceGetHandleByIndex.1=16",), "reset_required"),
    "A-NVML-unknown-error": (VERSION, ("nvml_error.nvmlInit=999",), "error"),
}


@pytest.mark.parametrize(("loaded", "knobs", "status"), STATUS.values(), ids=STATUS)
def test_nvml_status(host: Host, loaded: str | None, knobs: tuple[str, ...], status: str) -> None:
    host.knobs(*knobs)
    if loaded is None:
        shutil.rmtree(host.root / "proc/driver")
    else:
        host.load(loaded)
    report = nvml.observe(20, host.nvml)
    assert report.status == status
    assert report.library_version == VERSION
    if status in ("gpu_lost", "reset_required"):
        assert [gpu["error"] is None for gpu in report.gpus] == [True, False]


def test_nvml_library_not_found(host: Host) -> None:  # A.16, rc 12
    report = nvml.observe(20, "libnvidia-ml-that-is-not-there.so.1")
    assert (report.status, report.library_path) == ("library_not_found", None)


def test_what_a_library_lacks_is_unknown(host: Host, tmp_path: Path) -> None:
    old = """
    #include <string.h>
    int nvmlInit_v2(void) { return 0; }
    int nvmlShutdown(void) { return 0; }
    int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
    int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = d; return 0; }
    int nvmlDeviceGetUUID(void *d, char *o, unsigned n) { strcpy(o, "GPU-old"); return 0; }
    int nvmlDeviceGetMigMode(void *d, unsigned *c, unsigned *p) { return 3; }
    """
    (gpu,) = nvml.observe(20, compiled(tmp_path, "libnvidia-ml", text=old)).gpus
    assert (gpu["uuid"], gpu["fabric"], gpu["remapped_rows"], gpu["mig"]) == ("GPU-old", None, None, None)
    assert gpu["unknown"]["fabric"] == "function not in this library"
    assert gpu["unknown"]["mig"] == "not supported"


HANG = (
    "#include <unistd.h>\nint nvmlInit_v2(void) { for (;;) pause(); }\nint cuInit(unsigned f) { for (;;) pause(); }\n"
)
CRASH = (
    "#include <signal.h>\n#include <unistd.h>\n"
    "int nvmlInit_v2(void) { return kill(getpid(), SIGKILL); }\n"
    "int cuInit(unsigned f) { return kill(getpid(), SIGKILL); }\n"
)


@pytest.mark.parametrize(("text", "status"), [(HANG, "hung"), (CRASH, "crashed")], ids=["A-MOD-13-hung", "crashed"])
def test_nvml_that_does_not_come_back(tmp_path: Path, text: str, status: str) -> None:
    report = nvml.observe(1, compiled(tmp_path, "libnvidia-ml", text=text))
    assert report.status == status
    assert report.gpus == []


def test_library_versions(host: Host) -> None:  # A-NVML-03: the file name, not what NVML prints
    paths = nvml.library_versions(20, (host.nvml, host.cuda, "no-such.so.1"))
    assert [nvml.version_of_file(path) for path in paths.values()] == [VERSION, VERSION, None]


# --- CUDA ----------------------------------------------------------------------------------------------------------


def test_every_gpu_computes(host: Host) -> None:
    results = cuda.compute_on(UUIDS, 60, host.cuda)
    assert [(result.ok, result.code, result.elements) for result in results] == [(True, 0, cuda.ELEMENTS)] * 2
    assert all((result.copy_gib_s or 0) > 0 and (result.compute_us or 0) > 0 for result in results)


CUDA = {
    "one-wrong-element": (("cuda_wrong.1=1",), 0, "1 of 1000003 elements wrong"),
    "A-FAB-03-802": (("cuda_init=802",), 802, "Fabric Manager"),
    "A-NVML-01-803": (("cuda_init=803",), 803, "different versions"),
    "no-device-100": (("cuda_init=100",), 100, "device nodes are missing"),
    "A-VAL-02-unknown-999": (("cuda_init=999",), 999, "nvidia-uvm"),
    "A-MOD-12-exclusive-46": (("cuda_error.cuCtxCreate.1=46",), 46, "exclusive mode"),
    "launch-719": (("cuda_error.cuLaunchKernel.1=719",), 719, "Xids"),
    "A-XID-02-lost": (("lost.1=1",), 100, "CUDA_ERROR_NO_DEVICE"),
}


@pytest.mark.parametrize(("knobs", "code", "words"), CUDA.values(), ids=CUDA)
def test_a_gpu_that_does_not_compute(host: Host, knobs: tuple[str, ...], code: int, words: str) -> None:
    host.knobs(*knobs)
    (result,) = cuda.compute_on([UUIDS[1]], 60, host.cuda)
    assert (result.ok, result.code) == (False, code)
    assert words in result.message


def test_a_gpu_that_hangs_ends_the_computations(host: Host) -> None:  # A-MOD-13
    host.knobs("cuda_hang.cuCtxSynchronize.0=1")
    first, second = cuda.compute_on(UUIDS, 3, host.cuda)
    assert (first.ok, first.message) == (False, "did not come back within 3 s")
    assert second.message == f"not tried, since {UUIDS[0]} did not come back"


def test_a_library_that_crashes(tmp_path: Path) -> None:
    (result,) = cuda.compute_on(["GPU-1"], 20, compiled(tmp_path, "libcuda", text=CRASH))
    assert not result.ok
    assert "ended with signal" in result.message


def test_no_libcuda() -> None:
    (result,) = cuda.compute_on(["GPU-1"], 20, "libcuda-that-is-not-there.so.1")
    assert "cannot be loaded" in result.message


# --- Facts ---------------------------------------------------------------------------------------------------------


def nothing(argv: list[str], *, timeout: float) -> Completed:
    return Completed(tuple(argv), 127, "", f"{argv[0]}: not found", 0.0)


def levels(found: list[dict[str, object]]) -> dict[str, str]:
    return {str(item["check"]): str(item["level"]) for item in found}


def observe(host: Host, **options: object) -> dict[str, object]:
    return facts.observe(
        nothing, sections=("gpus",), timeout=20, roots=host.roots, pause=lambda seconds: None, **options
    )  # type: ignore[arg-type]


def test_facts_of_a_good_host(host: Host) -> None:
    seen = observe(host)
    assert seen["loaded"]["version"] == seen["library"]["version"] == VERSION  # type: ignore[index]
    assert [gpu["seen_by"] for gpu in seen["gpus"]] == [["driver", "nvml"]] * 2  # type: ignore[attr-defined]
    assert seen["wedged"] is False


def test_library_moved_and_module_did_not(host: Host) -> None:  # A-NVML-01
    host.load("550.90.07")
    seen = observe(host)
    assert seen["library"]["status"] == "mismatch"  # type: ignore[index]
    assert levels(seen["findings"])["driver.versions"] == ERROR  # type: ignore[arg-type]


def test_a_hung_probe_is_a_finding_and_the_last_one(host: Host) -> None:  # A-MOD-13
    host.knobs("nvml_hang.nvmlInit=1")
    asked: list[str] = []

    def run(argv: list[str], *, timeout: float) -> Completed:
        asked.append(argv[0])
        return nothing(argv, timeout=timeout)

    seen = facts.observe(run, sections=("gpus",), timeout=2, roots=host.roots, pause=lambda seconds: None)
    assert seen["wedged"] is True
    assert levels(seen["findings"])["driver.wedged"] == ERROR
    assert "nvidia-smi" not in asked


def test_stuck_processes_keep_us_out_of_the_driver(host: Host) -> None:  # A-MOD-07, A-MOD-13
    host.knobs("nvml_error.nvmlInit=999")  # asking NVML would show
    stuck = host.root / "proc/4242"
    stuck.mkdir()
    stuck.joinpath("stat").write_text("4242 (nvidia-smi) D 1 4242 4242 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 9")
    stuck.joinpath("wchan").write_text("nvidia_dev_put_uuid")
    seen = observe(host)
    assert seen["wedged"] is True
    assert seen["library"]["status"] is None  # type: ignore[index]
    assert levels(seen["findings"])["driver.wedged"] == ERROR  # type: ignore[arg-type]


def test_nvidia_smi_answers_where_the_library_crashes(host: Host, tmp_path: Path) -> None:
    xml = (
        '<nvidia_smi_log><driver_version>535.183.01</driver_version><gpu id="00000000:01:00.0"><uuid>GPU-x</uuid>'
        "<persistence_mode>Enabled</persistence_mode></gpu></nvidia_smi_log>"
    )

    def run(argv: list[str], *, timeout: float) -> Completed:
        return Completed(tuple(argv), 0, xml, "", 0.1) if argv[0] == "nvidia-smi" else nothing(argv, timeout=timeout)

    roots = facts.Roots(**{**vars(host.roots), "nvml": compiled(tmp_path, "libcrash", text=CRASH)})
    seen = facts.observe(run, sections=("gpus",), timeout=20, roots=roots, pause=lambda seconds: None)
    assert seen["library"]["message"].startswith("answered by nvidia-smi")
    assert (seen["gpus"][0]["uuid"], seen["gpus"][0]["persistence"]) == ("GPU-x", True)


# --- Settings ------------------------------------------------------------------------------------------------------


def smi(host: Host, *changes: settings.Change) -> None:
    assert settings.apply(changes, 20, host.nvml) == {}


def change(uuid: str, setting: str, after: object) -> settings.Change:
    return settings.Change(uuid, setting, None, after, "")


LAYOUT = [
    {"id": 1, "profile": 9, "start": 4, "size": 4, "parts": [{"id": 0, "profile": 2, "start": 0, "size": 3}]},
    {"id": 2, "profile": 14, "start": 0, "size": 2, "parts": [{"id": 0, "profile": 0, "start": 0, "size": 1}]},
]


def make_mig(host: Host) -> None:
    smi(host, change(UUIDS[0], "mig", True))
    for item in LAYOUT:
        arguments = {"instance": item, "existing_id": None, "parts": item["parts"]}
        smi(host, settings.Change(UUIDS[0], "mig_layout", None, "", "", arguments))


def layout_of(report: nvml.Report) -> list[tuple[int, int, list[tuple[int, int]]]]:
    return [
        (item["profile"], item["start"], [(part["profile"], part["start"]) for part in item["compute_instances"]])
        for item in report.gpus[0]["mig_layout"]
    ]


def test_settings_are_put_back(host: Host) -> None:  # A-PM-01, A-MIG-01, A-MOD-12
    make_mig(host)
    smi(
        host,
        change(UUIDS[0], "persistence", True),
        change(UUIDS[1], "compute_mode", "exclusive_process"),
        change(UUIDS[1], "power_limit", 300.0),
        change(UUIDS[1], "application_clocks", {"memory": 1593, "graphics": 1095}),
    )
    before = nvml.observe(20, host.nvml)
    assert layout_of(before) == [(14, 0, [(0, 0)]), (9, 4, [(2, 0)])]
    journal = Journal.open(str(host.root / "state"))
    saved = settings.save(journal, 20, 100.0, host.roots)
    assert saved.changed
    assert [gpu["uuid"] for gpu in journal.before("gpus")] == UUIDS

    host.reload()
    after = nvml.observe(20, host.nvml)
    assert (after.gpus[0]["persistence"], layout_of(after)) == (False, [])
    assert not settings.save(journal, 20, 150.0, host.roots).changed, "the first write wins"

    foretold = settings.restore(journal, 20, 200.0, check=True, roots=host.roots)
    restored = settings.restore(journal, 20, 200.0, roots=host.roots)
    assert [item.setting for item in foretold.changes] == [item.setting for item in restored.changes]
    wanted = {"persistence", "mig", "mig_layout", "compute_mode", "power_limit", "application_clocks"}
    assert {item.setting for item in restored.changes} <= wanted
    assert {"persistence", "mig_layout", "compute_mode", "power_limit", "application_clocks"} <= {
        item.setting for item in restored.changes
    }
    assert [finding for finding in restored.findings if finding.level == ERROR] == []
    now = nvml.observe(20, host.nvml)
    assert layout_of(now) == layout_of(before)
    for field in ("persistence", "compute_mode", "power_limit", "application_clocks"):
        assert [gpu[field] for gpu in now.gpus] == [gpu[field] for gpu in before.gpus], field

    again = settings.restore(journal, 20, 300.0, roots=host.roots)
    assert (again.changed, again.changes) == (False, [])


def test_a_setting_that_is_refused_is_an_error(host: Host) -> None:
    smi(host, change(UUIDS[0], "power_limit", 300.0))
    journal = Journal.open(str(host.root / "state"))
    settings.save(journal, 20, 100.0, host.roots)
    host.reload()
    host.knobs("nvml_error.nvmlDeviceSetPowerManagementLimit=4")
    restored = settings.restore(journal, 20, 200.0, roots=host.roots)
    (finding,) = restored.findings
    assert (restored.changed, finding.check, finding.level) == (False, "settings.power_limit", ERROR)
    assert "no permission" in finding.message
    assert finding.next == f"nvidia-smi -i {UUIDS[0]} -pl 300"
    assert (journal.last(settings.STEP_RESTORE) or {})["state"] == "failed"


def test_foreign_instances_are_left_alone(host: Host) -> None:  # A-MIG-01
    make_mig(host)
    journal = Journal.open(str(host.root / "state"))
    settings.save(journal, 20, 100.0, host.roots)
    host.reload()
    smi(host, change(UUIDS[0], "mig", True))
    other = {"id": 0, "profile": 0, "start": 0, "size": 8, "parts": []}
    smi(
        host,
        settings.Change(UUIDS[0], "mig_layout", None, "", "", {"instance": other, "existing_id": None, "parts": []}),
    )
    restored = settings.restore(journal, 20, 200.0, roots=host.roots)
    assert [finding.check for finding in restored.findings] == ["settings.mig_layout"]
    assert layout_of(nvml.observe(20, host.nvml)) == [(0, 0, [])]


def test_saved_without_nvml_remembers_the_gpus(host: Host) -> None:
    host.load("550.90.07")
    journal = Journal.open(str(host.root / "state"))
    saved = settings.save(journal, 20, 100.0, host.roots)
    assert [(finding.check, finding.level) for finding in saved.findings] == [("settings.unknown", WARNING)]
    assert [gpu["uuid"] for gpu in journal.before("gpus")] == UUIDS
    assert settings.restore(journal, 20, 200.0, roots=host.roots).changes == []


def test_settings_of_a_wedged_driver(host: Host) -> None:  # A-MOD-13
    host.knobs("nvml_hang.nvmlInit=1")
    journal = Journal.open(str(host.root / "state"))
    with pytest.raises(settings.SettingsError, match="reboot the host"):
        settings.save(journal, 2, 100.0, host.roots)
    assert journal.before("settings") is None


# --- Validation ----------------------------------------------------------------------------------------------------


def judge(host: Host, run: execution.Runner = nothing, **wanted: object) -> validation.Verdict:
    checks = ("versions", "gpus", "memory", "fabric", "settings", "modules", "compute", "performance")
    options = validation.Wanted(**{"checks": checks, "timeout": 20, **wanted})  # type: ignore[arg-type]
    ticks = iter(range(0, 10_000, 15))
    return validation.validate(
        run, options, host.roots, host.cuda, pause=lambda seconds: None, clock=lambda: float(next(ticks))
    )


def failed(verdict: validation.Verdict) -> list[str]:
    return [finding.check for finding in verdict.checks if finding.level == ERROR]


def remembered(host: Host) -> list[dict[str, object]]:
    merged = facts.merge_gpus([], facts.gpus.read_proc_gpus(host.roots.proc_nvidia), nvml.observe(20, host.nvml).gpus)  # type: ignore[attr-defined]
    return settings.inventory(merged)


def test_a_good_host_is_returned(host: Host) -> None:
    verdict = judge(host, version=VERSION, gpus=remembered(host))
    assert (verdict.ok, verdict.act, failed(verdict)) == (True, "return", [])
    assert list(verdict.measurements["devices"]) == UUIDS


VERDICTS = {
    "wrong-version": ((), {"version": "550.90.07"}, ["validate.versions"], "rollback"),
    "A-XID-02-gpu-lost": (("lost.1=1",), {}, ["gpu.lost"], "quarantine"),
    "A-XID-03-remap-failure": (("remap_failure.0=1",), {}, ["gpu.remap_failure"], "quarantine"),
    "A-XID-03-new-ecc-error": (("ecc_uncorrected_aggregate.0=2",), {}, ["gpu.ecc"], "quarantine"),
    "A-FAB-04-fabric-in-progress": (("fabric_state=2",), {}, ["validate.fabric"], "rollback"),
    "A-FAB-03-802": (("cuda_init=802",), {}, ["validate.compute", "validate.compute"], "rollback"),
    "false-results": (("cuda_wrong.0=1",), {}, ["validate.compute"], "rollback"),
    "A-MOD-13-hung": (("nvml_hang.nvmlInit=1",), {"timeout": 2}, ["driver.wedged"], "quarantine"),
    "A-PEER-01-uvm-gone": ((), {"settings": {"gpus": {}, "modules": ["nvidia", "nvidia_drm"]}}, [], "return"),
    "no-baseline": ((), {"compare": True}, ["performance.baseline"], "rollback"),
    "slower-than-baseline": (
        (),
        {"compare": True, "baseline": {"devices": {UUIDS[0]: {"copy_gib_s": 1e9, "compute_us": 1e9}}}},
        ["performance.worse"],
        "rollback",
    ),
}


@pytest.mark.parametrize(("knobs", "wanted", "checks", "act"), VERDICTS.values(), ids=VERDICTS)
def test_verdicts(host: Host, knobs: tuple[str, ...], wanted: dict[str, object], checks: list[str], act: str) -> None:
    before = remembered(host)
    host.knobs(*knobs)
    verdict = judge(host, gpus=before, **wanted)
    assert (failed(verdict), verdict.act) == (checks, act)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo \'{"DCGM Diagnostic": {"tests": [{"name": "pcie", "status": "Pass"}]}}\'', None),
        ('echo \'{"DCGM Diagnostic": {"tests": [{"name": "pcie", "status": "Fail"}]}}\'; exit 226', "failures: pcie"),
        ('echo \'{"DCGM Diagnostic": {"runtime_error": "no group"}}\'; exit 1', "rc 1"),
        (
            "echo 'Error: unable to establish a connection to the specified host: localhost' >&2; exit 1",
            "unable to establish",
        ),
        ('rm "$0"; exit 127', "rc 127"),
    ],
    ids=["passes", "fails", "is not run", "no host engine", "no dcgmi"],
)
def test_dcgmi_is_run_at_the_level_asked_for(
    host: Host, monkeypatch: pytest.MonkeyPatch, script: str, message: str | None
) -> None:
    program = host.root / "programs/dcgmi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$*" = "diag -r 2 -j" ] || exit 99\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    def run(argv: list[str], *, timeout: float) -> Completed:
        return (execution.run if argv[0] == "dcgmi" else nothing)(argv, timeout=timeout)

    verdict = judge(host, run, checks=("dcgm",), dcgm_level=2)
    (finding,) = [finding for finding in verdict.checks if finding.check == "validate.dcgm"]
    assert finding.level == (ERROR if message else OK) and (message or "passed") in finding.message
    assert verdict.ok == (message is None)


def test_fewer_gpus_than_before(host: Host) -> None:  # A-OPEN-02
    before = remembered(host)
    host.load(VERSION, gpus=1)
    verdict = judge(host, gpus=before)
    assert (failed(verdict), verdict.act) == (["validate.gpus"], "rollback")


def test_settings_that_are_not_as_before(host: Host) -> None:  # A-PM-01
    smi(host, change(UUIDS[0], "persistence", True))
    kept = settings.snapshot(nvml.observe(20, host.nvml), ["nvidia", "nvidia_uvm"], str(host.root / "etc"))
    assert failed(judge(host, settings=kept)) == []
    host.reload()
    assert failed(judge(host, settings=kept)) == ["settings.persistence"]


def test_the_fabric_is_waited_for(host: Host) -> None:  # A-FAB-04
    host.knobs("fabric_state=2")
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        host.knobs("fabric_state=3")

    options = validation.Wanted(checks=("fabric",), timeout=20)
    clock = iter(range(100))
    verdict = validation.validate(nothing, options, host.roots, host.cuda, pause, lambda: float(next(clock)))
    assert waited == [5.0]
    (finding,) = verdict.checks
    assert isinstance(finding, Finding)
    assert (finding.check, finding.level) == ("validate.fabric", OK)
