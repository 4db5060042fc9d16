# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything that is true about the driver on a host, gathered without ever waiting for a driver that is wedged.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import version
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING, Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.host import boot, companions, gpus, health, nvml

SECTIONS = ("gpus", "health", "companions", "kernel", "boot", "initramfs")


@dataclass(frozen=True)
class Roots:
    """Where the kernel and the distribution keep things; a test or a chroot has them elsewhere."""

    proc: str = "/proc"
    pci: str = gpus.PCI_ROOT
    boot: str = "/boot"
    modules: str = "/lib/modules"
    etc: str = "/etc"
    run: str = "/run"
    dev: str = "/dev"
    efivars: str = "/sys/firmware/efi/efivars"
    nvml: str = nvml.LIBRARY

    @property
    def proc_nvidia(self) -> str:
        return f"{self.proc}/driver/nvidia"


# --- A wedged driver -----------------------------------------------------------------------------------------------

_DRIVER_FUNCTION = re.compile(r"^(?:nv|_nv|rm_|os_|uvm_)")
_OURS = re.compile(r"^(?:nvidia|nv-|dcgm|nvsm)")


@dataclass(frozen=True)
class Stuck:
    """A process in uninterruptible sleep inside the driver; ``where`` is the kernel function, if it can be read."""

    pid: int
    name: str
    where: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def stuck_processes(proc: str = "/proc") -> list[Stuck]:
    """Processes in state D whose kernel stack or wait channel is in an NVIDIA module, or that are NVIDIA's own."""
    found = []
    for path in Path(proc).iterdir():
        if not path.name.isdigit():
            continue
        try:
            about = (path / "stat").read_text(errors="replace")
        except OSError:
            continue
        name, state = about[about.find("(") + 1 : about.rfind(")")], about[about.rfind(")") + 2 :][:1]
        if state != "D":
            continue
        where = read(path / "wchan").strip("\0\n ")
        frame = re.search(r"(\w+)\+\S+ \[nvidia\w*\]", read(path / "stack"))
        if frame or _DRIVER_FUNCTION.match(where) or _OURS.match(name):
            found.append(Stuck(int(path.name), name, frame[1] if frame else where))
    return found


def wedged(
    proc: str = "/proc", pause: Callable[[float], None] = time.sleep, looks: int = 3, between: float = 0.5
) -> list[Stuck]:
    """Processes that are stuck in the driver at each of ``looks`` looks: a short sleep in state D is normal."""
    stuck = stuck_processes(proc)
    for dummy in range(looks - 1):
        if not stuck:
            return []
        pause(between)
        still = {item.pid for item in stuck_processes(proc)}
        stuck = [item for item in stuck if item.pid in still]
    return stuck


def wedged_finding(stuck: Iterable[Stuck], report: nvml.Report | None) -> Finding | None:
    """``driver.wedged``: processes are stuck in the driver, or the call that was tried did not come back."""
    stuck = list(stuck)
    if stuck:
        names = ", ".join(f"{item.name} ({item.pid})" for item in stuck)
        reason = f"stuck in the driver and beyond SIGKILL: {names}"
    elif report is not None and report.status == nvml.HUNG:
        reason = report.message
    else:
        return None
    return Finding(
        "driver.wedged",
        ERROR,
        f"{reason}; every further call into the driver would hang too",
        {"stuck": [item.as_dict() for item in stuck]},
        health.REBOOT,
    )


def read(path: Path) -> str:
    """The text of ``path``, or nothing if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- GPUs ----------------------------------------------------------------------------------------------------------


def merge_gpus(
    pci: Iterable[gpus.PciDevice], taken: Iterable[gpus.ProcGpu], reported: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One entry a GPU, by PCI address: on the bus (``pci``), taken by the driver (``taken``), and what NVML says.

    ``seen_by`` lists which of bus, driver and nvml know it. A lost GPU has no address in NVML, but NVML counts GPUs in
    the order of their addresses, so the lost ones are those that are left over.
    """
    merged: dict[str, dict[str, Any]] = {}
    for device in pci:
        if device.kind == "gpu":
            merged[device.pci] = {
                "pci": device.pci,
                "pci_device_id": device.device_id,
                "architecture": device.architecture,
                "kernel_driver": device.driver,
                "seen_by": ["bus"],
            }
    for own in taken:
        entry = merged.setdefault(own.pci, {"pci": own.pci, "seen_by": []})
        entry.update(uuid=own.uuid, name=own.model, minor=own.minor, excluded=own.excluded)
        entry["seen_by"].append("driver")
    reported = list(reported)
    addressed = {gpu["pci"] for gpu in reported if gpu.get("pci")}
    left_over = sorted(address for address in merged if address not in addressed)
    lost = [gpu for gpu in reported if not gpu.get("pci")]
    places = left_over if len(left_over) == len(lost) else [f"unknown-{number}" for number in range(len(lost))]
    for gpu in reported:
        address = gpu.get("pci") or places[lost.index(gpu)]
        entry = merged.setdefault(address, {"pci": gpu.get("pci"), "seen_by": []})
        entry.update({key: value for key, value in gpu.items() if value is not None or key not in entry})
        entry["seen_by"].append("nvml")
    for entry in merged.values():
        device_id = entry.get("pci_device_id")
        entry.setdefault("architecture", gpus.architecture(device_id) if device_id else None)
    return [merged[address] for address in sorted(merged)]


def gpu_of_smi(gpu: Mapping[str, Any]) -> dict[str, Any]:
    """A GPU of :func:`gpus.parse_smi_xml` in the words of :mod:`nvml`, as far as nvidia-smi says."""

    def yes(name: str) -> bool | None:
        return {"Yes": True, "Enabled": True, "No": False, "Disabled": False}.get(gpu[name] or "")

    def number(name: str) -> float | None:
        found = re.match(r"\d+(?:\.\d+)?", gpu[name] or "")
        return float(found[0]) if found else None

    def pair(current: str, pending: str) -> dict[str, bool | None] | None:
        return None if yes(current) is None else {"current": yes(current), "pending": yes(pending)}

    corrected, uncorrected = number("remapped_corrected"), number("remapped_uncorrected")
    state = gpu["fabric_state"]
    return {
        "pci": gpu["pci"],
        "pci_device_id": gpu["device_id"],
        "uuid": gpu["uuid"],
        "name": gpu["name"],
        "persistence": yes("persistence"),
        "compute_mode": gpu["compute_mode"].lower() if gpu["compute_mode"] else None,
        "mig": pair("mig_current", "mig_pending"),
        "ecc": pair("ecc_current", "ecc_pending"),
        "remapped_rows": {
            "corrected": int(corrected),
            "uncorrected": int(uncorrected),
            "pending": yes("remap_pending"),
            "failure": yes("remap_failure"),
        }
        if corrected is not None and uncorrected is not None
        else None,
        "retired_pending": yes("retired_pending"),
        "power_limit": number("power_limit"),
        "power_limit_default": number("power_limit_default"),
        "recovery_action": gpu["recovery_action"],
        "fabric": {
            "state": state.lower().replace(" ", "_"),
            "status": (gpu["fabric_status"] or "").lower(),
            "cluster": gpu["fabric_cluster"],
            "clique": gpu["fabric_clique"],
        }
        if state
        else None,
        "unknown": dict(gpu["bad"]),
        "error": "GPU requires reset" if any("reset" in text for text in gpu["bad"].values()) else None,
    }


def _ask_library(run: Runner, library: str, timeout: float) -> tuple[nvml.Report, list[str]]:
    """NVML's report; where the library cannot be entered but nvidia-smi is there, nvidia-smi's answer in its place."""
    report = nvml.observe(timeout, library)
    if report.status not in ("library_not_found", nvml.CRASHED):
        return report, []
    done = run(["nvidia-smi", "-q", "-x"], timeout=timeout)
    status, meaning = gpus.smi_status(done.rc)
    if status == "hung":
        return nvml.Report(nvml.HUNG, f"nvidia-smi {meaning}", None, None, None, None, []), []
    if status != "ok":
        return report, []
    try:
        smi = gpus.parse_smi_xml(done.stdout)
    except ValueError as exc:
        return report, [str(exc)]
    answer = nvml.Report(
        nvml.OK_,
        f"answered by nvidia-smi, since {report.message}",
        report.library_path,
        report.library_version,
        smi.driver_version,
        smi.cuda_version,
        [{"index": index, **gpu_of_smi(gpu)} for index, gpu in enumerate(smi.gpus)],
    )
    return answer, smi.notes


def domain(found: Iterable[Mapping[str, Any]]) -> str | None:
    """The NVLink domain that the host's GPUs are part of, as ``cluster/clique``, or None.

    Hosts of one domain must run one driver version.
    """
    for gpu in found:
        fabric = gpu.get("fabric") or {}
        cluster = fabric.get("cluster") or ""
        if fabric.get("state") == "completed" and re.search(r"[1-9a-f]", cluster):
            return f"{cluster}/{fabric.get('clique')}"
    return None


def gpu_findings(
    found: Iterable[Mapping[str, Any]], loaded: gpus.LoadedDriver | None, mps: bool, vgpu_host: bool
) -> list[Finding]:
    """Judge the merged GPUs: lost, ignored, not supported, memory trouble, left-over modes."""
    result: list[Finding] = []
    for gpu in found:
        where = gpu.get("uuid") or gpu.get("pci") or f"GPU {gpu.get('index')}"
        result.extend(_gpu_presence(gpu, where, loaded))
        device_id = gpu.get("pci_device_id")
        if loaded and device_id:
            branch = loaded.version.split(".")[0]
            judged = gpus.supports(device_id, branch, loaded.flavour, vgpu_host)
            if judged.level != OK:
                result.append(judged)
        result.extend(_gpu_memory(gpu, where))
        result.extend(_gpu_modes(gpu, where, mps))
    return result


def _gpu_presence(gpu: Mapping[str, Any], where: str, loaded: gpus.LoadedDriver | None) -> list[Finding]:
    if gpu.get("error"):
        return [
            Finding(
                "gpu.lost",
                ERROR,
                f"{where}: {gpu['error']}",
                {"pci": gpu.get("pci"), "error": gpu["error"]},
                "reboot the host; if the GPU is still gone, have the hardware looked at",
            )
        ]
    if loaded and "driver" not in gpu["seen_by"] and "nvml" not in gpu["seen_by"]:
        holder = gpu.get("kernel_driver")
        return [
            Finding(
                "gpu.not_driven",
                ERROR,
                f"{where} is on the PCI bus, bound to {holder or 'no driver'}, but not driven by {loaded.version}",
                {"pci": gpu.get("pci"), "kernel_driver": holder},
                "journalctl -k -b | grep -e NVRM -e nvidia",
            )
        ]
    return []


def _gpu_memory(gpu: Mapping[str, Any], where: str) -> list[Finding]:
    rows = gpu.get("remapped_rows") or {}
    evidence = {"remapped_rows": dict(rows), "retired_pending": gpu.get("retired_pending")}
    if rows.get("failure"):
        return [
            Finding(
                "gpu.remap_failure",
                ERROR,
                f"{where}: remapping of a faulty memory row failed; the GPU must not take work",
                evidence,
                "quarantine the host and have the GPU replaced",
            )
        ]
    if rows.get("pending") or gpu.get("retired_pending"):
        what = "row remapping" if rows.get("pending") else "page retirement"
        return [
            Finding(
                "gpu.remap_pending",
                WARNING,
                f"{where}: a {what} is pending; it takes effect at a reset",
                evidence,
                "reboot rather than reload",
            )
        ]
    return []


def _gpu_modes(gpu: Mapping[str, Any], where: str, mps: bool) -> list[Finding]:
    result = []
    mode = gpu.get("compute_mode")
    if mode in ("exclusive_process", "exclusive_thread") and not mps:
        result.append(
            Finding(
                "gpu.compute_mode",
                WARNING,
                f"{where} is in compute mode {mode} and no MPS server runs; a second process would be refused",
                {"compute_mode": mode},
                f"nvidia-smi -i {where} -c 0, unless it is meant so",
            )
        )
    for name, label in (("mig", "MIG"), ("ecc", "ECC")):
        value = gpu.get(name)
        if value and value["pending"] is not None and value["current"] != value["pending"]:
            result.append(
                Finding(
                    f"gpu.{name}_pending",
                    WARNING,
                    f"{where}: {label} mode is {_on(value['current'])} and becomes {_on(value['pending'])} at a reset",
                    dict(value),
                    "unload nvidia_drm and reset the GPU, or reboot",
                )
            )
    if (gpu.get("mig") or {}).get("current") and gpu.get("mig_layout") == []:
        result.append(
            Finding(
                "gpu.mig_empty",
                WARNING,
                f"{where}: MIG mode is on and there is no GPU instance; nothing can run there",
                {"mig": gpu["mig"]},
                "restore the layout (nvidia-smi mig -cgi …)",
            )
        )
    return result


def _on(value: bool | None) -> str:
    return "on" if value else "off"


# --- Three versions ------------------------------------------------------------------------------------------------


def version_findings(
    loaded: str | None,
    libraries: Mapping[str, str | None],
    on_disk: str | None,
    installed: str | None = None,
    present: bool = True,
) -> list[Finding]:
    """Compare the loaded driver with the libraries, the module on disk and the packages: four facts, never one.

    ``libraries`` maps a library's name to the version in its file name; ``present`` says that there are GPUs.
    """
    evidence = {"loaded": loaded, "libraries": dict(libraries), "on_disk": on_disk, "installed": installed}
    if loaded is None:
        if not present:
            return [Finding("driver.loaded", OK, "no GPU and no driver", evidence)]
        on = f"; {on_disk} is on disk" if on_disk else ""
        return [
            Finding(
                "driver.loaded", ERROR, f"no NVIDIA driver is loaded{on}", evidence, "modprobe nvidia; journalctl -k"
            )
        ]
    found = []
    kernel = version.DriverVersion.parse(loaded)
    others = {f"library {name}": text for name, text in libraries.items()}
    others.update({"module on disk": on_disk, "packages": installed})
    different = {name: text for name, text in others.items() if text and version.find(text) != kernel}
    user = {text for name, text in different.items() if name.startswith("library")}
    if different:
        says = ", ".join(f"{name} {text}" for name, text in different.items())
        reload_cures = on_disk is not None and all(text == on_disk for text in different.values())
        found.append(
            Finding(
                "driver.versions",
                ERROR if user else WARNING,
                f"the kernel runs {loaded}, but {says}",
                {**evidence, "reload_cures": reload_cures},
                "reload the kernel modules (no reboot needed once nothing holds them)"
                if reload_cures
                else "bring packages, libraries and modules to one version, then reload",
            )
        )
    elif any(text is None for text in libraries.values()):
        gone = ", ".join(name for name, text in libraries.items() if text is None)
        found.append(
            Finding(
                "driver.library",
                ERROR,
                f"{gone} is not installed or carries no version",
                evidence,
                "install the compute libraries",
            )
        )
    return found or [Finding("driver.versions", OK, f"loaded, libraries and module on disk are {loaded}", evidence)]


# --- Everything ----------------------------------------------------------------------------------------------------


def kernel_log(run: Runner, proc: str, since: float | None, timeout: float) -> tuple[list[health.Event], str | None]:
    """Events of this boot and the program they come from; (empty, None) if no log can be read."""
    window = [f"--since=@{int(since)}"] if since is not None else []
    done = run(["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-unix", *window], timeout=timeout)
    if done.ok and done.stdout.strip():
        return health.parse(done.stdout, since=since), "journalctl"
    done = run(["dmesg"], timeout=timeout)
    if done.ok:
        return health.parse(done.stdout, boot.boot_time(proc), since), "dmesg"
    return [], None


def observe(
    run: Runner,
    *,
    sections: Iterable[str] = SECTIONS,
    timeout: float = 30,
    since: float | None = None,
    installed: str | None = None,
    roots: Roots | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Gather ``sections``. Each probe has ``timeout`` seconds; a driver that hangs is a finding ``driver.wedged``,
    after which nothing that enters the driver is tried.

    ``installed`` is the version of the installed packages, if the caller knows it.

    Returns plain data: loaded, library, modules, pci_gpus, nvswitches and wedged always; gpus and domain, health,
    kernel and secure_boot, boot, initramfs, companions if asked for; and findings.
    """
    roots = roots or Roots()
    wanted = set(sections)
    loaded = gpus.read_loaded(roots.proc_nvidia)
    bus = gpus.scan_pci(roots.pci)
    stuck = wedged(roots.proc, pause)
    paths = nvml.library_versions(timeout, (roots.nvml, "libcuda.so.1"))
    libraries = {name: nvml.version_of_file(path) for name, path in paths.items()}
    findings: list[Finding] = []
    result: dict[str, Any] = {
        "loaded": {**loaded.as_dict(), "parameters": gpus.read_params(roots.proc_nvidia)} if loaded else None,
        "library": {"version": libraries[roots.nvml], "paths": paths, "versions": libraries, "status": None},
        "pci_gpus": sum(device.kind == "gpu" for device in bus),
        "nvswitches": sum(device.kind == "nvswitch" for device in bus),
        "modules": loaded_modules(roots.proc),
    }

    log: list[health.Event] = []
    if "health" in wanted:
        log, source = kernel_log(run, roots.proc, since, timeout)
        result["health"] = {
            "source": source,
            "events": [event.as_dict() for event in log],
            "reboot_needed": health.reboot_needed(log),
        }
        findings += log_findings(log, source)

    report: nvml.Report | None = None
    if "gpus" in wanted:
        if not stuck and not any(event.kind == "wedged" for event in log):
            report, notes = _ask_library(run, roots.nvml, timeout)
            result["library"].update(
                status=report.status, message=report.message, cuda_version=report.cuda_version, notes=notes
            )
        result["gpus"] = merge_gpus(bus, gpus.read_proc_gpus(roots.proc_nvidia), report.gpus if report else [])
        result["domain"] = domain(result["gpus"])
        mps = any(name.startswith("nvidia-cuda-mps") for name in process_names(roots.proc))
        vgpu_host = "nvidia_vgpu_vfio" in result["modules"]
        findings += gpu_findings(result["gpus"], loaded, mps, vgpu_host)
        if report and report.status in (nvml.CRASHED, "error"):
            findings.append(Finding("driver.nvml", ERROR, report.message, {}, "nvidia-smi; journalctl -k"))
    hung = wedged_finding(stuck, report)
    result["wedged"] = hung is not None or any(event.kind == "wedged" for event in log)
    findings += [hung] if hung else []

    on_disk = None
    if "kernel" in wanted:
        result["kernel"], of_kernel = _kernel(run, roots, timeout)
        findings += of_kernel
        on_disk = result["kernel"]["kernels"][result["kernel"]["running"]]["modules"]["nvidia"]
        result["secure_boot"], signature = _secure_boot(run, roots, timeout, result["kernel"]["running"])
        findings.append(signature)
    findings += version_findings(
        loaded.version if loaded else None, libraries, on_disk, installed, bool(result.get("gpus") or bus)
    )
    if "boot" in wanted:
        result["boot"], of_boot = _boot(run, roots, timeout)
        findings += of_boot
    if "initramfs" in wanted:
        result["initramfs"], of_initrd = _initramfs(run, roots, timeout)
        findings += of_initrd
    if "companions" in wanted:
        facts = companions.Facts(
            companions=companions.observe(run, timeout),
            cdi=tuple(companions.read_cdi((f"{roots.etc}/cdi", f"{roots.run}/cdi"))),
            pci=tuple(device.device_id for device in bus if device.kind == "gpu"),
            nvswitches=result["nvswitches"],
            fabric=tuple(gpu["fabric"]["state"] for gpu in result.get("gpus", ()) if gpu.get("fabric")),
        )
        result["companions"] = facts.as_dict()
        findings += _companion_findings(facts, loaded, roots)
    result["findings"] = [finding.as_dict() for finding in findings]
    return result


def log_findings(events: Iterable[health.Event], source: str | None) -> list[Finding]:
    """:func:`health.findings`, or a warning if no log could be read."""
    if source is None:
        return [Finding("health.kernel_log", WARNING, "the kernel log cannot be read", {}, "journalctl -k; dmesg")]
    return health.findings(events)


def loaded_modules(proc: str = "/proc") -> list[str]:
    """Loaded kernel modules that belong to the driver or build on it, by name."""
    names = [line.split(" ", 1)[0] for line in read(Path(proc, "modules")).splitlines()]
    return sorted(name for name in names if name.startswith("nvidia") or name in ("gdrdrv", "nv_peer_mem", "nouveau"))


def running_kernel(proc: str = "/proc") -> str:
    """The release of the running kernel, as ``uname -r`` prints it."""
    return read(Path(proc, "sys/kernel/osrelease")).strip() or os.uname().release


def process_names(proc: str = "/proc") -> set[str]:
    return {read(path / "comm").strip() for path in Path(proc).iterdir() if path.name.isdigit()}


def _kernel(run: Runner, roots: Roots, timeout: float) -> tuple[dict[str, Any], list[Finding]]:
    running = running_kernel(roots.proc)
    following = boot.next_kernel(roots.boot, roots.etc)
    status = run(["dkms", "status"], timeout=timeout)
    dkms = boot.parse_dkms_status(status.stdout, status.stderr if status.rc != 127 else "")
    orphans = tuple(dict.fromkeys((*dkms.orphans, *boot.dkms_orphans())))
    dkms = boot.DkmsStatus(dkms.entries, dkms.errors, list(orphans))
    ours = [entry for entry in dkms.entries if entry.module.startswith("nvidia")]
    roles = {running: "running and next" if following.release in (running, None) else "running"}
    if following.release and following.release != running:
        roles[following.release] = "next"
    kernels: dict[str, dict[str, Any]] = {}
    for release, role in roles.items():
        modules = boot.modules_of(run, release, timeout=timeout)
        nvidia = modules[0]
        kernels[release] = {
            "role": role,
            "headers": boot.headers(release, roots.modules),
            "modules": {module.name: module.version for module in modules},
            "flavour": gpus.flavour_of_license(nvidia.license or ""),
            "signer": nvidia.signer,
            "filename": nvidia.filename,
        }
    compiler = boot.kernel_compiler(read(Path(roots.proc, "version")))
    findings = boot.kernel_findings(kernels, headers_needed=bool(ours)) + boot.dkms_findings(dkms)
    if ours:
        default = boot.default_compiler(run(["cc", "--version"], timeout=timeout).stdout)
        judged = boot.compiler_finding(compiler, default)
        findings += [judged] if judged else []
    images = boot.installed_kernels(roots.boot)
    facts = {
        "running": running,
        "next": following.release,
        "next_source": following.source,
        "installed": images,
        "kernels": kernels,
        "dkms": dkms.as_dict(),
        "compiler": " ".join(compiler) if compiler else None,
    }
    if len(images) == 1:
        findings.append(
            Finding(
                "kernel.fallback",
                WARNING,
                f"{images[0]} is the only kernel installed; there is no other to boot if it fails",
                {"installed": images},
            )
        )
    return facts, findings


def _secure_boot(run: Runner, roots: Roots, timeout: float, kernel: str) -> tuple[dict[str, Any], Finding]:
    state = run(["mokutil", "--sb-state"], timeout=timeout)
    enabled = boot.parse_sb_state(state.stdout + state.stderr)
    enabled = boot.secure_boot_variable(roots.efivars) if enabled is None else enabled
    enrolled: list[boot.Certificate] = []
    keys: dict[str, bool | None] = {}
    module = None
    if enabled:
        module = boot.modules_of(run, kernel, ("nvidia",), timeout)[0]
        enrolled = boot.parse_enrolled(run(["mokutil", "--list-enrolled"], timeout=timeout).stdout)
        for path in boot.SIGNING_KEYS:
            if Path(path).exists():
                tested = run(["mokutil", "--test-key", path], timeout=timeout)
                keys[path] = boot.parse_test_key(tested.stdout + tested.stderr)
    keyring = boot.parse_keyring(read(Path(roots.proc, "keys")))
    facts = {"enabled": enabled, "enrolled": [asdict(key) for key in enrolled], "signing_keys": keys}
    return facts, boot.signature_finding(enabled, module, enrolled, keyring, keys)


def _boot(run: Runner, roots: Roots, timeout: float) -> tuple[dict[str, Any], list[Finding]]:
    spaces = boot.space(roots.boot)
    other = boot.nouveau(roots.proc)
    reasons = boot.reboot_reasons(run, roots.run, timeout)
    findings = [*boot.space_findings(spaces), boot.nouveau_finding(other)]
    if reasons:
        findings.append(
            Finding(
                "boot.reboot_pending",
                WARNING,
                f"a reboot is pending: {'; '.join(reasons)}",
                {"reasons": reasons},
                "reboot",
            )
        )
    facts = {
        "id": boot.boot_id(roots.proc),
        "host": boot.host_name(roots.proc),
        "time": boot.boot_time(roots.proc),
        "reboot_pending": reasons,
        "space": [asdict(item) for item in spaces],
        "nouveau": other.as_dict(),
    }
    return facts, findings


def _initramfs(run: Runner, roots: Roots, timeout: float) -> tuple[dict[str, Any], list[Finding]]:
    following = boot.next_kernel(roots.boot, roots.etc)
    kernel = following.release or running_kernel(roots.proc)
    image = boot.initrd_image(kernel, roots.boot)
    inside = boot.list_initrd(run, image, timeout) if image else None
    facts = {"kernel": kernel, "image": image, "modules": inside}
    if image is None or not inside:
        return facts, []
    judged = boot.initrd_finding(kernel, image, inside, boot.modules_of(run, kernel, ("nvidia",), timeout)[0])
    return facts, [judged] if judged else []


def _companion_findings(facts: companions.Facts, loaded: gpus.LoadedDriver | None, roots: Roots) -> list[Finding]:
    found = companions.pairs(loaded.version, facts) if loaded else []
    daemon = facts.companions.get("persistenced")
    if daemon and daemon.unit and daemon.unit.enabled == "masked":
        found.append(
            Finding(
                "companion.persistenced",
                WARNING,
                "nvidia-persistenced.service is masked; persistence mode is lost at every reload",
                daemon.unit.as_dict(),
                "systemctl unmask nvidia-persistenced",
            )
        )
    if "container_toolkit" in facts.companions and loaded:
        numbers = [
            (os.major(about.st_rdev), os.minor(about.st_rdev))
            for about in (path.stat() for path in sorted(Path(roots.dev).glob("nvidia[0-9c]*")))
            if about.st_rdev
        ]
        judged = companions.dev_char_finding(numbers, roots.dev)
        found += [judged] if judged else []
    return found
