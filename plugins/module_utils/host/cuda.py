# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real computation on each GPU and each MIG slice: that nvidia-smi answers does not prove that CUDA works.

libcuda.so.1 is entered by ctypes, in one child per device, so a device that hangs or crashes the library is a result.
A small kernel in PTX text is compiled by the driver itself, run, and every element it wrote is checked.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import ctypes
import os
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import execution

LIBRARY = "libcuda.so.1"

# sm_50 is the oldest GPU that the branches from 535 on drive (Maxwell, e.g. Tesla M10), and the driver compiles PTX of
# an older target for any newer GPU. PTX ISA 6.0 is read by every driver since 384.
PTX = b"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry gpufleet_axpy(
    .param .u64 x,
    .param .u64 y,
    .param .u32 a,
    .param .u32 n
)
{
    .reg .pred %p1;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;

    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u32 %r1, [a];
    ld.param.u32 %r2, [n];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r2;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r6, 4;
    add.u64 %rd6, %rd3, %rd5;
    add.u64 %rd7, %rd4, %rd5;
    ld.global.u32 %r3, [%rd6];
    ld.global.u32 %r4, [%rd7];
    mad.lo.u32 %r5, %r1, %r3, %r4;
    st.global.u32 [%rd7], %r5;
DONE:
    ret;
}
"""
KERNEL = b"gpufleet_axpy"
ELEMENTS = 1_000_003
"""Not a multiple of the block, so the kernel's bound is exercised too."""
_PERIOD = 65_537
"""The data repeat after so many elements, which takes Python less time than a million different ones; a prime, so that
no two blocks of the kernel see the same."""
FACTOR = 2_654_435_761
_BLOCK = 256
_LAUNCHES = 20
_COPY_BYTES = 64 << 20
_COPIES = 10
_MASK = 0xFFFFFFFF

# What an error of the driver API means for somebody who upgrades drivers; names are those of cuda.h.
ERRORS: Mapping[int, tuple[str, str]] = {
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "the GPU's memory is taken; see who holds it"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "the driver is not initialised"),
    34: (
        "CUDA_ERROR_STUB_LIBRARY",
        "a stub libcuda is found before the real one; look at LD_LIBRARY_PATH and ldconfig",
    ),
    46: ("CUDA_ERROR_DEVICE_UNAVAILABLE", "another process holds the GPU in exclusive mode, or the GPU is unhealthy"),
    100: ("CUDA_ERROR_NO_DEVICE", "no GPU is usable: none bound to the driver, or device nodes are missing"),
    101: ("CUDA_ERROR_INVALID_DEVICE", "the device does not exist"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "the context was lost"),
    214: ("CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable memory error; the GPU needs a reset, perhaps replacement"),
    218: ("CUDA_ERROR_INVALID_PTX", "the driver rejects the test kernel"),
    221: (
        "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
        "libnvidia-ptxjitcompiler.so.1 is missing; install the compute libraries",
    ),
    222: ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the driver is too old for the test kernel"),
    304: ("CUDA_ERROR_OPERATING_SYSTEM", "a system call failed; look for missing /dev/nvidia* nodes and cgroup rules"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "the kernel met an illegal address"),
    719: ("CUDA_ERROR_LAUNCH_FAILED", "the kernel failed on the GPU; look for Xids in the kernel log"),
    802: (
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "the NVLink fabric is not set up: Fabric Manager (and nvlsm on B200) must run in the driver's version",
    ),
    803: ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "libcuda and the loaded kernel module have different versions"),
    804: ("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "a CUDA compatibility library shadows the driver's libcuda"),
    805: ("CUDA_ERROR_MPS_CONNECTION_FAILED", "the MPS server does not answer; stop MPS"),
    999: ("CUDA_ERROR_UNKNOWN", "unknown error; often nvidia-uvm is not loaded or /dev/nvidia-uvm is missing"),
}


@dataclass(frozen=True)
class Computation:
    """What one device did. ``code`` is CUDA's error (0 for success, None if it never answered).

    ``copy_gib_s`` is the best of ten host-to-device copies of 64 MiB, ``compute_us`` the best of twenty launches, from
    launch to completion. Both serve only to compare a host with itself.
    """

    device: str
    ok: bool
    message: str
    code: int | None = None
    name: str | None = None
    elements: int = 0
    copy_gib_s: float | None = None
    compute_us: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class CudaError(Exception):
    """A driver API call that returned other than 0."""

    def __init__(self, function: str, code: int) -> None:
        name, meaning = ERRORS.get(code, (f"error {code}", "see cuda.h"))
        self.code = code
        super().__init__(f"{function}: {name} ({code}): {meaning}")


def compute_on(devices: Iterable[str], timeout: float, library: str = LIBRARY) -> list[Computation]:
    """Compute on one device (``GPU-…`` or ``MIG-…`` uuid) after another, at most ``timeout`` seconds each.

    After a device that does not come back, no further one is tried: the driver may be wedged.
    """
    results: list[Computation] = []
    stuck: str | None = None
    for device in devices:
        if stuck:
            results.append(Computation(device, False, f"not tried, since {stuck} did not come back"))
            continue
        outcome = execution.call(_compute, device, library, timeout=timeout)
        if outcome.timed_out:
            stuck = device
            results.append(Computation(device, False, f"did not come back within {timeout:.0f} s"))
        elif outcome.error is not None:
            results.append(Computation(device, False, f"the process that computed {outcome.error}"))
        else:
            results.append(outcome.value)
    return results


def _compute(device: str, library: str) -> Computation:
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    try:
        handle = ctypes.CDLL(library)
    except OSError as exc:
        return Computation(device, False, f"{library} cannot be loaded: {exc}")
    try:
        return _Device(handle, device).compute()
    except CudaError as exc:
        return Computation(device, False, str(exc), exc.code)


def _repeated(values: Iterable[int]) -> array[int]:
    """``ELEMENTS`` numbers from ``_PERIOD`` of them."""
    return (array("I", values) * (ELEMENTS // _PERIOD + 1))[:ELEMENTS]


class _Device:
    def __init__(self, handle: ctypes.CDLL, device: str) -> None:
        self._handle = handle
        self._device = device

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._handle, name)(*args)
        if code:
            raise CudaError(name, code)

    def compute(self) -> Computation:
        """:raises CudaError: naming the call that failed."""
        self._call("cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if count.value != 1:
            return Computation(self._device, False, f"CUDA sees {count.value} devices under this uuid, expected 1", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, ctypes.c_int(128), device)
        context = ctypes.c_void_p()
        self._call("cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), device)
        try:
            wrong, seconds = self._axpy()
            bandwidth = self._copy()
        finally:
            self._handle.cuCtxDestroy_v2(context)
        model = name.value.decode("utf-8", "replace")
        if wrong:
            message = f"computed {wrong} of {ELEMENTS} elements wrong; the GPU returns false results"
            return Computation(self._device, False, message, 0, model, ELEMENTS)
        return Computation(
            self._device, True, f"computed {ELEMENTS} elements right", 0, model, ELEMENTS, bandwidth, seconds * 1e6
        )

    def _allocate(self, size: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def _upload(self, pointer: ctypes.c_uint64, data: Any, size: int) -> None:
        self._call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(size))

    def _axpy(self) -> tuple[int, float]:
        """Launch y = a·x + y repeatedly; how many elements are wrong in the end, and the fastest launch in seconds."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(KERNEL))
        size = ELEMENTS * 4
        host = (ctypes.c_uint32 * ELEMENTS).from_buffer(_repeated(range(_PERIOD)))
        x, y = self._allocate(size), self._allocate(size)
        self._upload(x, host, size)
        self._upload(y, host, size)
        factor, count = ctypes.c_uint32(FACTOR), ctypes.c_uint32(ELEMENTS)
        arguments = (ctypes.c_void_p * 4)(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in (x, y, factor, count))
        )
        blocks = (ELEMENTS + _BLOCK - 1) // _BLOCK
        grid = [ctypes.c_uint(value) for value in (blocks, 1, 1, _BLOCK, 1, 1, 0)]
        best = float("inf")
        for dummy in range(_LAUNCHES):
            started = time.perf_counter()
            self._call("cuLaunchKernel", function, *grid, None, arguments, None)
            self._call("cuCtxSynchronize")
            best = min(best, time.perf_counter() - started)
        got = array("I", bytes(size))
        back = (ctypes.c_uint32 * ELEMENTS).from_buffer(got)
        self._call("cuMemcpyDtoH_v2", back, y, ctypes.c_size_t(size))
        for pointer in (x, y):
            self._call("cuMemFree_v2", pointer)
        step = (FACTOR * _LAUNCHES + 1) & _MASK
        expected = _repeated(value & _MASK for value in range(0, step * _PERIOD, step))
        if got == expected:
            return 0, best
        return sum(one != other for one, other in zip(got, expected)), best

    def _copy(self) -> float:
        """The best host-to-device bandwidth in GiB/s, from pinned memory where there is any."""
        pinned = ctypes.c_void_p()
        allocate = getattr(self._handle, "cuMemAllocHost_v2", None)
        if allocate is None or allocate(ctypes.byref(pinned), ctypes.c_size_t(_COPY_BYTES)):
            host: Any = ctypes.create_string_buffer(_COPY_BYTES)
        else:
            host = pinned
        pointer = self._allocate(_COPY_BYTES)
        best = float("inf")
        for dummy in range(_COPIES):
            started = time.perf_counter()
            self._upload(pointer, host, _COPY_BYTES)
            self._call("cuCtxSynchronize")
            best = min(best, time.perf_counter() - started)
        self._call("cuMemFree_v2", pointer)
        if host is pinned:
            self._call("cuMemFreeHost", pinned)
        return _COPY_BYTES / best / (1 << 30)
