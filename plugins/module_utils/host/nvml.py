# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the driver's own library says about the GPUs, asked in a child that is not waited for past its deadline.

libnvidia-ml.so.1 is entered by ctypes: any of its calls may hang in the kernel or crash. Which functions it has
depends on the driver's branch, so one that is missing, or not supported by a GPU, makes a value unknown, not an error.
Structures and codes are those of nvml.h.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.host.gpus import bus_id

LIBRARY = "libnvidia-ml.so.1"

OK_, HUNG, CRASHED = "ok", "hung", "crashed"
STATUS = {
    0: OK_,
    6: "no_device",
    9: "driver_not_loaded",
    12: "library_not_found",
    15: "gpu_lost",
    16: "reset_required",
    18: "mismatch",
}
CODES = {
    1: "not initialised",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    7: "insufficient size",
    8: "external power missing",
    9: "driver not loaded",
    10: "time-out",
    11: "interrupt problem",
    12: "library not found",
    13: "function not in this library",
    14: "infoROM corrupted",
    15: "GPU is lost",
    16: "GPU requires reset",
    17: "denied by the operating system",
    18: "driver/library version mismatch",
    19: "in use",
    20: "out of memory",
    21: "no data",
    25: "argument version mismatch",
    26: "deprecated",
    27: "not ready",
    28: "GPU not found",
    29: "invalid state",
    999: "unknown error",
}
FUNCTION_NOT_FOUND = 13
_LOST = (15, 16, 28)
COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
_GPU_INSTANCE_PROFILES = 32
_COMPUTE_INSTANCE_PROFILES = 16
_MAX_INSTANCES = 16
_MAX_PROCESSES = 1024
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
"""NVML_VALUE_NOT_AVAILABLE"""


@dataclass(frozen=True)
class Report:
    """The library's answer. ``status`` is ok, driver_not_loaded (9), library_not_found (12), gpu_lost (15),
    reset_required (16), mismatch (18), no_device, error, or — our own words — hung and crashed.

    ``library_version`` comes from the file the loader took, because the text NVML prints is cut
    (``570.124`` for 570.124.06). ``gpus`` are dictionaries as :func:`_gpu` makes them; one that the library cannot
    reach has ``error`` and nothing else but its index.
    """

    status: str
    message: str
    library_path: str | None
    library_version: str | None
    driver_version: str | None
    cuda_version: str | None
    gpus: list[dict[str, Any]]

    @property
    def ok(self) -> bool:
        return self.status == OK_


class NvmlError(Exception):
    """A call that returned other than 0; ``code`` is NVML's."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(CODES.get(code, f"error {code}"))


def observe(timeout: float, library: str = LIBRARY) -> Report:
    """Ask the library everything, in a child, for at most ``timeout`` seconds. Whatever the driver does is a status."""
    outcome = execution.call(_observe, library, timeout=timeout)
    if outcome.timed_out:
        return _failed(HUNG, f"NVML did not answer within {timeout:.0f} s; the call is stuck in the driver")
    if outcome.error is not None:
        return _failed(CRASHED, f"the process that asked NVML {outcome.error}")
    return Report(**outcome.value)


@dataclass(frozen=True)
class Usage:
    """What a process has of the GPUs: their indices, and bytes of their memory (None if the driver does not say)."""

    gpus: tuple[int, ...]
    memory: int | None


def usage(timeout: float, library: str = LIBRARY) -> dict[int, Usage]:
    """Process id, as the host sees it, → what it has of the GPUs; empty if the driver cannot be asked.

    A CUDA program opens the device nodes of all GPUs it may see: only NVML knows on which of them it has a context.
    """
    outcome = execution.call(_usage, library, timeout=timeout)
    return outcome.value if outcome.ok else {}


def library_versions(timeout: float, names: tuple[str, ...] = (LIBRARY, "libcuda.so.1")) -> dict[str, str | None]:
    """Library name → path of the file that the loader takes for it, or None. The driver itself is not entered."""
    outcome = execution.call(_paths, names, timeout=timeout)
    return outcome.value if outcome.ok else dict.fromkeys(names)


def version_of_file(path: str | None) -> str | None:
    """``…/libnvidia-ml.so.550.90.07`` → ``550.90.07``; None if the file name carries no driver version."""
    found = re.search(r"\.so\.(\d{2,4}\.\d{1,3}(?:\.\d{1,3})?)$", path or "")
    return found.group(1) if found else None


def _failed(status: str, message: str, path: str | None = None) -> Report:
    return Report(status, message, path, version_of_file(path), None, None, [])


def _paths(names: tuple[str, ...]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            found[name] = None
            continue
        found[name] = mapped_file(name)
    return found


def mapped_file(name: str) -> str | None:
    """The real path of a shared library that this process has mapped, by the name it was loaded under."""
    stem = Path(name).name.split(".so")[0] + ".so"
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(stem):
            return os.path.realpath("/" + path)
    return None


class _Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Fabric(ctypes.Structure):
    _fields_ = [
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_uint),
    ]


class _FabricV2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), *_Fabric._fields_, ("health", ctypes.c_uint)]


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of the functions that end in _v2 and _v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Placement(ctypes.Structure):
    _fields_ = [("start", ctypes.c_uint), ("size", ctypes.c_uint)]


class _GpuInstanceProfile(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint),
        ("p2p", ctypes.c_uint),
        ("slices", ctypes.c_uint),
        ("instances", ctypes.c_uint),
        *[(name, ctypes.c_uint) for name in ("sm", "copy", "decoder", "encoder", "jpeg", "ofa")],
        ("memory_mb", ctypes.c_ulonglong),
    ]


class _GpuInstance(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("id", ctypes.c_uint),
        ("profile", ctypes.c_uint),
        ("placement", Placement),
    ]


class _ComputeInstanceProfile(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint),
        ("slices", ctypes.c_uint),
        ("instances", ctypes.c_uint),
        *[(name, ctypes.c_uint) for name in ("sm", "copy", "decoder", "encoder", "jpeg", "ofa")],
    ]


class _ComputeInstance(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("gpu_instance", ctypes.c_void_p),
        ("id", ctypes.c_uint),
        ("profile", ctypes.c_uint),
        ("placement", Placement),
    ]


class Driver:
    """libnvidia-ml with every call checked. Handles are void pointers."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._handle = handle

    def call(self, name: str, *args: Any) -> None:
        """:raises NvmlError: with code 13 if the library has no such function, else with what it returned."""
        try:
            function = getattr(self._handle, name)
        except AttributeError:
            raise NvmlError(FUNCTION_NOT_FOUND) from None
        code = function(*args)
        if code:
            raise NvmlError(code)

    def uints(self, name: str, *args: Any, count: int = 1) -> tuple[int, ...]:
        """Call a function that fills ``count`` unsigned ints given by reference after ``args``."""
        values = [ctypes.c_uint() for dummy in range(count)]
        self.call(name, *args, *(ctypes.byref(value) for value in values))
        return tuple(value.value for value in values)

    def uint(self, name: str, *args: Any) -> int:
        return self.uints(name, *args)[0]

    def text(self, name: str, *args: Any, size: int = 96) -> str:
        buffer = ctypes.create_string_buffer(size)
        self.call(name, *args, buffer, ctypes.c_uint(size))
        return buffer.value.decode("utf-8", "replace")

    def handle(self, name: str, *args: Any) -> ctypes.c_void_p:
        value = ctypes.c_void_p()
        self.call(name, *args, ctypes.byref(value))
        return value

    def struct(self, name: str, value: Any, *args: Any) -> Any:
        self.call(name, *args, ctypes.byref(value))
        return value


def _observe(library: str) -> dict[str, Any]:
    try:
        handle = ctypes.CDLL(library)
    except OSError as exc:
        return vars(_failed(STATUS[12], f"{library} cannot be loaded: {exc}"))
    path = mapped_file(library)
    nvml = Driver(handle)
    try:
        nvml.call("nvmlInit_v2")
    except NvmlError as exc:
        return vars(_failed(STATUS.get(exc.code, "error"), f"nvmlInit: {exc}", path))
    report = _failed(OK_, "answered", path)
    driver = _maybe(lambda: nvml.text("nvmlSystemGetDriverVersion"))
    cuda = _maybe(lambda: nvml.uint("nvmlSystemGetCudaDriverVersion_v2"))
    gpus: list[dict[str, Any]] = []
    status, message = OK_, "answered"
    for index in range(_maybe(lambda: nvml.uint("nvmlDeviceGetCount_v2")) or 0):
        gpu: dict[str, Any] = {"index": index, "error": None}
        try:
            gpu.update(_gpu(nvml, nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))))
        except NvmlError as exc:
            gpu["error"] = str(exc)
            status, message = STATUS.get(exc.code, "error"), f"GPU {index}: {exc}"
        gpus.append(gpu)
    _maybe(lambda: nvml.call("nvmlShutdown"))
    return {
        **vars(report),
        "status": status,
        "message": message,
        "driver_version": driver,
        "cuda_version": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "gpus": gpus,
    }


def _maybe(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except NvmlError:
        return None


def _gpu(nvml: Driver, device: ctypes.c_void_p) -> dict[str, Any]:
    """Everything about one GPU; units: bytes, watts, MHz. ``unknown`` maps each value not had to the reason.

    :raises NvmlError: if the GPU is lost or needs a reset; nothing it says is then worth having.
    """
    unknown: dict[str, str] = {}

    def get(field: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except NvmlError as exc:
            if exc.code in _LOST:
                raise
            unknown[field] = str(exc)
            return None

    def ecc(kind: int, counter: int) -> int:
        value = ctypes.c_ulonglong()
        nvml.call("nvmlDeviceGetTotalEccErrors", device, ctypes.c_int(kind), ctypes.c_int(counter), ctypes.byref(value))
        return value.value

    pci = get("pci", lambda: nvml.struct("nvmlDeviceGetPciInfo_v3", _Pci(), device))
    memory = get("memory", lambda: nvml.struct("nvmlDeviceGetMemoryInfo", _Memory(), device))
    mig = get("mig", lambda: nvml.uints("nvmlDeviceGetMigMode", device, count=2))
    ecc_mode = get("ecc", lambda: nvml.uints("nvmlDeviceGetEccMode", device, count=2))
    remapped = get("remapped_rows", lambda: nvml.uints("nvmlDeviceGetRemappedRows", device, count=4))
    limit = get("power_limit", lambda: nvml.uint("nvmlDeviceGetPowerManagementLimit", device))
    default = get("power_limit_default", lambda: nvml.uint("nvmlDeviceGetPowerManagementDefaultLimit", device))
    mode = get("compute_mode", lambda: nvml.uint("nvmlDeviceGetComputeMode", device))
    persistence = get("persistence", lambda: nvml.uint("nvmlDeviceGetPersistenceMode", device))
    retired = get("retired_pending", lambda: nvml.uint("nvmlDeviceGetRetiredPagesPendingStatus", device))
    layout = get("mig_layout", lambda: mig_layout(nvml, device)) if mig and mig[0] else []
    return {
        "uuid": get("uuid", lambda: nvml.text("nvmlDeviceGetUUID", device)),
        "name": get("name", lambda: nvml.text("nvmlDeviceGetName", device)),
        "minor": get("minor", lambda: nvml.uint("nvmlDeviceGetMinorNumber", device)),
        "pci": bus_id(pci.bus_id.decode("ascii", "replace")) if pci else None,
        "pci_device_id": f"{pci.pci_device_id >> 16:04x}" if pci else None,
        "memory": {"total": memory.total, "used": memory.used} if memory else None,
        "persistence": bool(persistence) if persistence is not None else None,
        "compute_mode": COMPUTE_MODES.get(mode, str(mode)) if mode is not None else None,
        "mig": {"current": bool(mig[0]), "pending": bool(mig[1])} if mig else None,
        "mig_layout": layout,
        "mig_devices": get("mig_devices", lambda: _mig_devices(nvml, device)) if mig and mig[0] else [],
        "ecc": {"current": bool(ecc_mode[0]), "pending": bool(ecc_mode[1])} if ecc_mode else None,
        "ecc_uncorrected": {
            "volatile": get("ecc_volatile", lambda: ecc(1, 0)),
            "aggregate": get("ecc_aggregate", lambda: ecc(1, 1)),
        },
        "remapped_rows": dict(
            zip(("corrected", "uncorrected", "pending", "failure"), (*remapped[:2], *map(bool, remapped[2:])))
        )
        if remapped
        else None,
        "retired_pending": bool(retired) if retired is not None else None,
        "power_limit": limit / 1000 if limit is not None else None,
        "power_limit_default": default / 1000 if default is not None else None,
        "application_clocks": get(
            "application_clocks", lambda: _clocks(nvml, device, "nvmlDeviceGetApplicationsClock")
        ),
        "application_clocks_default": get(
            "application_clocks_default", lambda: _clocks(nvml, device, "nvmlDeviceGetDefaultApplicationsClock")
        ),
        "fabric": get("fabric", lambda: _fabric(nvml, device)),
        "unknown": unknown,
    }


def _clocks(nvml: Driver, device: ctypes.c_void_p, function: str) -> dict[str, int]:
    graphics, memory = (nvml.uint(function, device, ctypes.c_int(kind)) for kind in (0, 2))
    return {"graphics": graphics, "memory": memory}


def _fabric(nvml: Driver, device: ctypes.c_void_p) -> dict[str, Any]:
    try:
        wanted = _FabricV2(version=ctypes.sizeof(_FabricV2) | 2 << 24)
        info = nvml.struct("nvmlDeviceGetGpuFabricInfoV", wanted, device)
    except NvmlError as exc:
        if exc.code not in (FUNCTION_NOT_FOUND, 25):
            raise
        info = nvml.struct("nvmlDeviceGetGpuFabricInfo", _Fabric(), device)
    cluster = bytes(info.cluster).hex()
    return {
        "state": FABRIC_STATES.get(info.state, str(info.state)),
        "status": "success" if info.status == 0 else CODES.get(info.status, f"error {info.status}"),
        "cluster": "-".join((cluster[:8], cluster[8:12], cluster[12:16], cluster[16:20], cluster[20:])),
        "clique": info.clique,
    }


def _mig_devices(nvml: Driver, device: ctypes.c_void_p) -> list[dict[str, Any]]:
    """The MIG devices that programs can use: uuid, GPU instance id, compute instance id."""
    devices = []
    for index in range(nvml.uint("nvmlDeviceGetMaxMigDeviceCount", device)):
        try:
            mig = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", device, ctypes.c_uint(index))
        except NvmlError as exc:
            if exc.code == 6:
                continue
            raise
        devices.append(
            {
                "uuid": nvml.text("nvmlDeviceGetUUID", mig),
                "gpu_instance": nvml.uint("nvmlDeviceGetGpuInstanceId", mig),
                "compute_instance": nvml.uint("nvmlDeviceGetComputeInstanceId", mig),
            }
        )
    return devices


def mig_layout(nvml: Driver, device: ctypes.c_void_p) -> list[dict[str, Any]]:
    """GPU instances by placement: id, profile (the number ``nvidia-smi mig -cgi`` takes), slices, memory_mb, start,
    size, and compute instances (id, profile, start, size)."""
    found = []
    for number in range(_GPU_INSTANCE_PROFILES):
        profile = _GpuInstanceProfile()
        try:
            nvml.call("nvmlDeviceGetGpuInstanceProfileInfo", device, ctypes.c_uint(number), ctypes.byref(profile))
        except NvmlError as exc:
            if exc.code in (2, 3, 6):
                continue
            raise
        for handle in _instances(nvml, "nvmlDeviceGetGpuInstances", device, profile.id):
            info = nvml.struct("nvmlGpuInstanceGetInfo", _GpuInstance(), handle)
            found.append(
                {
                    "id": info.id,
                    "profile": info.profile,
                    "slices": profile.slices,
                    "memory_mb": profile.memory_mb,
                    "start": info.placement.start,
                    "size": info.placement.size,
                    "compute_instances": _compute_instances(nvml, handle),
                }
            )
    return sorted(found, key=lambda instance: instance["start"])


def _compute_instances(nvml: Driver, gpu_instance: ctypes.c_void_p) -> list[dict[str, Any]]:
    found = []
    for number in range(_COMPUTE_INSTANCE_PROFILES):
        profile = _ComputeInstanceProfile()
        try:
            nvml.call(
                "nvmlGpuInstanceGetComputeInstanceProfileInfo",
                gpu_instance,
                ctypes.c_uint(number),
                ctypes.c_uint(0),
                ctypes.byref(profile),
            )
        except NvmlError as exc:
            if exc.code in (2, 3, 6):
                continue
            raise
        for handle in _instances(nvml, "nvmlGpuInstanceGetComputeInstances", gpu_instance, profile.id):
            info = nvml.struct("nvmlComputeInstanceGetInfo_v2", _ComputeInstance(), handle)
            found.append(
                {"id": info.id, "profile": info.profile, "start": info.placement.start, "size": info.placement.size}
            )
    return sorted(found, key=lambda instance: (instance["start"], instance["id"]))


def _instances(nvml: Driver, function: str, parent: ctypes.c_void_p, profile: int) -> list[ctypes.c_void_p]:
    handles = (ctypes.c_void_p * _MAX_INSTANCES)()
    count = ctypes.c_uint(_MAX_INSTANCES)
    nvml.call(function, parent, ctypes.c_uint(profile), handles, ctypes.byref(count))
    return [ctypes.c_void_p(handles[number]) for number in range(count.value)]


def _usage(library: str) -> dict[int, Usage]:
    """:raises OSError: without the library; NvmlError if it cannot be used."""
    nvml = Driver(ctypes.CDLL(library))
    nvml.call("nvmlInit_v2")
    found: dict[int, Usage] = {}
    for index in range(nvml.uint("nvmlDeviceGetCount_v2")):
        try:
            device = nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
        except NvmlError:
            continue  # a lost GPU: nothing computes there
        seen = {process.pid: process.memory for process in _processes(nvml, device)}
        for pid, memory in seen.items():
            before = found.get(pid, Usage((), 0))
            known = memory != _NOT_AVAILABLE and before.memory is not None
            found[pid] = Usage((*before.gpus, index), (before.memory or 0) + memory if known else None)
    return found


def _processes(nvml: Driver, device: ctypes.c_void_p) -> list[_Process]:
    found = []
    for kind in ("Compute", "MPSCompute", "Graphics"):
        for version in ("_v3", "_v2"):
            room = (_Process * _MAX_PROCESSES)()
            count = ctypes.c_uint(_MAX_PROCESSES)
            try:
                nvml.call(f"nvmlDeviceGet{kind}RunningProcesses{version}", device, ctypes.byref(count), room)
            except NvmlError:
                continue
            found += [room[number] for number in range(count.value)]
            break
    return found
