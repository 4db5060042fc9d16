# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the packages of one driver are called, by distribution, repository and branch. Pure: names in, names out.

The rule everything rests on: a node's target set is derived from what it has. Each installed driver package has a
counterpart in the target branch, and the whole set moves in one transaction; naming two packages and hoping that the
resolver finds the rest is how "held broken packages" happens.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion, of_package

OPEN, PROPRIETARY = "open", "proprietary"
FLAVOURS = (OPEN, PROPRIETARY)

META, KERNEL, COMMON, FIRMWARE, COMPUTE, UTILS, FABRIC, LIBRARY, PIN, TOOL = (
    "meta",
    "kernel",
    "common",
    "firmware",
    "compute",
    "utils",
    "fabric",
    "library",
    "pin",
    "tool",
)
NEEDED = (KERNEL, COMMON, COMPUTE, UTILS, FABRIC)
"""Roles a node cannot lose in a move; a set without a counterpart for one of them is refused."""

UNSUFFIXED_FROM = 590
"""Ubuntu packages of NVIDIA's repository lose the branch in their names from here (installation guide)."""

FABRIC_UNSUFFIXED_FROM = 580
"""Fabric Manager, IMEX and NSCQ of NVIDIA's repositories lose it here already."""

_UBUNTU = {
    "nvidia-driver": META,
    "nvidia-headless": META,
    "nvidia-headless-no-dkms": META,
    "cuda-drivers": META,
    "cuda-drivers-fabricmanager": META,
    "nvidia-open": META,
    "nvidia-dkms": KERNEL,
    "nvidia-kernel-source": LIBRARY,
    "nvidia-kernel-common": COMMON,
    "nvidia-firmware": FIRMWARE,
    "libnvidia-compute": COMPUTE,
    "nvidia-utils": UTILS,
    "nvidia-compute-utils": UTILS,
    "libnvidia-cfg1": LIBRARY,
    "libnvidia-common": LIBRARY,
    "libnvidia-decode": LIBRARY,
    "libnvidia-encode": LIBRARY,
    "libnvidia-extra": LIBRARY,
    "libnvidia-fbc1": LIBRARY,
    "libnvidia-gl": LIBRARY,
    "libnvidia-gpucomp": LIBRARY,
    "xserver-xorg-video-nvidia": LIBRARY,
    "nvidia-fabricmanager": FABRIC,
    "nvidia-fabricmanager-dev": LIBRARY,
    "nvidia-imex": FABRIC,
    "libnvidia-nscq": FABRIC,
    "libnvsdm": FABRIC,
    "nvidia-driver-pinning": PIN,
}
_FLAVOURED = ("nvidia-driver", "nvidia-headless", "nvidia-headless-no-dkms", "nvidia-dkms", "nvidia-kernel-source")
_FABRIC_RULE = ("nvidia-fabricmanager", "nvidia-fabricmanager-dev", "nvidia-imex", "libnvidia-nscq", "libnvsdm")
_NEVER_SERVER = (*_FABRIC_RULE, "cuda-drivers", "cuda-drivers-fabricmanager", "nvidia-open", "nvidia-driver-pinning")

_DEBIAN = {
    "nvidia-kernel-dkms": KERNEL,
    "nvidia-kernel-open-dkms": KERNEL,
    "nvidia-open-kernel-dkms": KERNEL,
    "nvidia-kernel-support": COMMON,
    "nvidia-open-kernel-support": COMMON,
    "nvidia-open-kernel-source": LIBRARY,
    "firmware-nvidia-gsp": FIRMWARE,
    "libcuda1": COMPUTE,
    "libnvidia-ml1": COMPUTE,
    "nvidia-smi": UTILS,
    "nvidia-driver-bin": LIBRARY,
    "nvidia-driver-cuda": META,
    "nvidia-driver-full": META,
    "nvidia-driver-libs": LIBRARY,
    "nvidia-alternative": LIBRARY,
    "nvidia-cuda-mps": UTILS,
    "nvidia-egl-icd": LIBRARY,
    "nvidia-opencl-icd": LIBRARY,
    "nvidia-powerd": LIBRARY,
    "nvidia-vdpau-driver": LIBRARY,
    "nvidia-vulkan-icd": LIBRARY,
    "libcudadebugger1": LIBRARY,
    "libnvcuvid1": LIBRARY,
    "libnvoptix1": LIBRARY,
    "libnvidia-allocator1": LIBRARY,
    "libnvidia-api1": LIBRARY,
    "libnvidia-eglcore": LIBRARY,
    "libnvidia-encode1": LIBRARY,
    "libnvidia-glcore": LIBRARY,
    "libnvidia-glvkspirv": LIBRARY,
    "libnvidia-ngx1": LIBRARY,
    "libnvidia-nvvm4": LIBRARY,
    "libnvidia-opticalflow1": LIBRARY,
    "libnvidia-pkcs11-openssl3": LIBRARY,
    "libnvidia-present": LIBRARY,
    "libnvidia-ptxjitcompiler1": LIBRARY,
    "libnvidia-rtcore": LIBRARY,
    "libnvidia-sandboxutils": LIBRARY,
    "libegl-nvidia0": LIBRARY,
    "libgl1-nvidia-glvnd-glx": LIBRARY,
    "libgles-nvidia1": LIBRARY,
    "libgles-nvidia2": LIBRARY,
    "libglx-nvidia0": LIBRARY,
}
_DEBIAN_FLAVOUR: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    PROPRIETARY: {
        "nvidia-kernel-open-dkms": ("nvidia-kernel-dkms",),
        "nvidia-open-kernel-dkms": ("nvidia-kernel-dkms",),
        "nvidia-open-kernel-support": ("nvidia-kernel-support",),
        "nvidia-open-kernel-source": ("nvidia-kernel-source",),
    },
    OPEN: {"nvidia-kernel-dkms": ("nvidia-open-kernel-dkms", "nvidia-kernel-open-dkms")},
}

_TOOLS = (
    "nvidia-settings",
    "nvidia-modprobe",
    "nvidia-persistenced",
    "nvidia-xconfig",
    "libxnvctrl0",
    "libxnvctrl-dev",
)
"""Move with the driver only where they carry its version; Ubuntu's and Debian's own have other versions and stay."""

_VERSION = r"\d{3}\.\d{1,3}(?:\.\d{1,3})?"
_UBUNTU_NAME = re.compile(
    rf"^(?P<stem>{'|'.join(sorted(_UBUNTU, key=len, reverse=True))})"
    rf"(?:-(?P<branch>\d{{3}})(?!\d|\.))?(?P<server>-server)?(?P<open>-open)?(?:-(?P<version>{_VERSION}))?$"
)
_UBUNTU_KERNEL = re.compile(
    r"^linux-(?P<kind>modules|objects)-nvidia-(?P<branch>\d{3})(?P<server>-server)?(?P<open>-open)?-(?P<kernel>\S+)$"
)


@dataclass(frozen=True)
class DriverPackage:
    """A name taken apart. ``branch``, ``version`` and ``kernel`` are those inside the name, if any."""

    name: str
    stem: str
    role: str
    branch: str | None = None
    server: bool = False
    open: bool = False
    version: str | None = None
    kernel: str | None = None

    @property
    def flavour(self) -> str | None:
        """open or proprietary, for a package that decides which kernel modules are installed; else None."""
        return None if self.role != KERNEL else OPEN if self.open else PROPRIETARY


def parse_deb(name: str) -> DriverPackage | None:
    """Take a Debian package name apart; None if it is not a driver package.

    ``nvidia-dkms-550-server-open`` → stem nvidia-dkms, branch 550, server, open.
    """
    found = _UBUNTU_KERNEL.match(name)
    if found:
        return DriverPackage(
            name,
            f"linux-{found['kind']}-nvidia",
            KERNEL if found["kind"] == "modules" else LIBRARY,
            found["branch"],
            bool(found["server"]),
            bool(found["open"]),
            kernel=found["kernel"],
        )
    if name in _DEBIAN:
        return DriverPackage(name, name, _DEBIAN[name], open="open" in name)
    if name in _TOOLS:
        return DriverPackage(name, name, TOOL)
    found = _UBUNTU_NAME.match(name)
    if found is None:
        return None
    stem = found["stem"]
    is_open = bool(found["open"]) or stem == "nvidia-open"
    return DriverPackage(name, stem, _UBUNTU[stem], found["branch"], bool(found["server"]), is_open, found["version"])


def deb_origin(version: str) -> str:
    """Who packaged a .deb, from the tail of its version: archive (Ubuntu), ppa, nvidia or debian.

    ``-0ubuntu0.22.04.1`` archive; ``-0ubuntu0~gpu22.04.1`` ppa; ``-0ubuntu1``, ``-1ubuntu1`` nvidia; ``-2`` debian,
    or NVIDIA's Fabric Manager and its repository for Debian.
    """
    revision = version.rpartition("-")[2]
    if "~gpu" in revision:
        return "ppa"
    if re.match(r"0ubuntu0\.\d\d\.\d\d", revision):
        return "archive"
    return "nvidia" if "ubuntu" in revision else "debian"


def deb_counterparts(package: DriverPackage, target: DriverVersion, flavour: str, origin: str) -> tuple[str, ...]:
    """What ``package`` may be called at ``target`` with ``flavour`` kernel modules, likeliest first.

    ``origin`` is :func:`deb_origin` of the installed version. Which of the names exists at the target version is for
    the repository to say; an empty tuple never happens.
    """
    if package.stem.startswith("linux-"):
        return (_ubuntu_kernel(package, target, flavour),)
    if package.name in _DEBIAN or package.role == TOOL:
        return _DEBIAN_FLAVOUR[flavour].get(package.name, (package.name,))
    if package.role == PIN:
        tail = target.text if package.version else target.branch
        return (f"{package.stem}-{tail}",)
    if package.stem in ("cuda-drivers", "nvidia-open"):
        return _vendor_metas(package, target, flavour)
    flag = "-open" if package.stem in _FLAVOURED and flavour == OPEN else ""
    server = "-server" if package.server and package.stem not in _NEVER_SERVER else ""
    plain = f"{package.stem}{flag}"
    suffixed = f"{package.stem}-{target.branch}{server}{flag}"
    if package.stem == "nvidia-firmware":
        return (f"{suffixed}-{target.text}", suffixed, plain)
    if server:
        return (suffixed,)
    limit = FABRIC_UNSUFFIXED_FROM if package.stem in _FABRIC_RULE else UNSUFFIXED_FROM
    vendor_plain = int(target.branch) >= limit and origin != "archive"
    if package.branch is None and origin == "debian" and package.stem not in _FABRIC_RULE:
        vendor_plain = True
    return (plain, suffixed) if vendor_plain else (suffixed, plain)


def _ubuntu_kernel(package: DriverPackage, target: DriverVersion, flavour: str) -> str:
    server = "-server" if package.server else ""
    flag = "-open" if flavour == OPEN and package.stem == "linux-modules-nvidia" else ""
    return f"{package.stem}-{target.branch}{server}{flag}-{package.kernel}"


def _vendor_metas(package: DriverPackage, target: DriverVersion, flavour: str) -> tuple[str, ...]:
    stem = "nvidia-open" if flavour == OPEN else "cuda-drivers"
    suffixed = f"{stem}-{target.branch}"
    return (stem,) if int(target.branch) >= UNSUFFIXED_FROM or package.branch is None else (suffixed, stem)


def is_transitional(name: str, version: str, description: str) -> bool:
    """Whether a package only leads to another one: it says so, or its version is of another branch than its name."""
    package, inside = parse_deb(name), of_package(version)
    other = package is not None and package.branch is not None and inside is not None and package.kernel is None
    return "transitional" in description.lower() or bool(
        other and package and inside and inside.branch != package.branch
    )


# RPM distributions: Enterprise Linux and SUSE

_EL = {
    "nvidia-driver": META,
    "nvidia-driver-libs": LIBRARY,
    "nvidia-driver-cuda": UTILS,
    "nvidia-driver-cuda-libs": COMPUTE,
    "nvidia-driver-devel": LIBRARY,
    "nvidia-driver-NVML": COMPUTE,
    "nvidia-driver-NvFBCOpenGL": LIBRARY,
    "nvidia-kmod-common": COMMON,
    "kmod-nvidia-latest-dkms": KERNEL,
    "kmod-nvidia-open-dkms": KERNEL,
    "dkms-nvidia": KERNEL,
    "libnvidia-cfg": LIBRARY,
    "libnvidia-fbc": LIBRARY,
    "libnvidia-gpucomp": LIBRARY,
    "libnvidia-ml": COMPUTE,
    "nvidia-libXNVCtrl": LIBRARY,
    "nvidia-libXNVCtrl-devel": LIBRARY,
    "xorg-x11-nvidia": LIBRARY,
    "nvidia-modprobe": UTILS,
    "nvidia-persistenced": UTILS,
    "nvidia-settings": LIBRARY,
    "nvidia-xconfig": LIBRARY,
    "cuda-drivers": META,
    "cuda-drivers-fabricmanager": META,
    "nvidia-open": META,
    "nvidia-fabric-manager": FABRIC,
    "nvidia-fabric-manager-devel": LIBRARY,
    "nvidia-fabricmanager": FABRIC,
    "nvidia-fabricmanager-devel": LIBRARY,
    "nvidia-imex": FABRIC,
    "libnvidia-nscq": FABRIC,
    "libnvsdm": FABRIC,
}
_EL_FABRIC = re.compile(r"^(?P<stem>nvidia-fabricmanager|nvidia-imex|libnvidia-nscq|cuda-drivers)-(?P<branch>\d{3})$")
_EL_KMOD = re.compile(rf"^kmod-nvidia(?P<open>-open)?-(?P<version>{_VERSION})-(?P<kernel>\d\S+)$")
_SUSE_KMP = re.compile(r"^nvidia-(?P<open>open-)?driver-G0\d(?P<signed>-signed)?(?:-cuda)?-kmp-\S+$")
_SUSE = re.compile(r"^(?:nvidia-\S+-G0\d\S*|lib(?:nvidia|OpenCL)\S*-G0\d\S*|x11-video-nvidia\S*)$")
_STREAM = re.compile(r"^(?:(?P<branch>latest|\d{3})(?P<open>-open)?(?P<dkms>-dkms)?|(?P<newest>open)-dkms)$")
_KERNEL_TAIL = re.compile(r"_k[^-]*")


def parse_rpm(name: str) -> DriverPackage | None:
    """Take an RPM package name apart; None if it is not a driver package.

    ``kmod-nvidia-535.183.06-4.18.0-553.22.1`` → stem kmod-nvidia, version 535.183.06, kernel 4.18.0-553.22.1.
    """
    if name in _EL:
        return DriverPackage(name, name, _EL[name], open="open" in name)
    found = _EL_KMOD.match(name)
    if found:
        return DriverPackage(
            name,
            "kmod-nvidia",
            KERNEL,
            found["version"].split(".")[0],
            open=bool(found["open"]),
            version=found["version"],
            kernel=found["kernel"],
        )
    found = _EL_FABRIC.match(name)
    if found:
        return DriverPackage(name, found["stem"], _EL[found["stem"]], found["branch"])
    found = _SUSE_KMP.match(name)
    if found:
        return DriverPackage(name, "kmp", KERNEL, open=bool(found["open"]))
    if _SUSE.match(name):
        role = COMPUTE if name.startswith("nvidia-compute-G0") else UTILS if "utils" in name else LIBRARY
        return DriverPackage(name, name, role, open="-open-" in name)
    return None


def rpm_counterparts(
    package: DriverPackage, target: DriverVersion, flavour: str, kernel: str | None = None
) -> tuple[str, ...]:
    """What ``package`` may be called at ``target``, likeliest first; ``kernel`` (no architecture, no dist tag) names
    the kernel that a precompiled module is for, by default the one in the name."""
    if package.stem == "kmod-nvidia":
        flag = "-open" if flavour == OPEN else ""
        return (f"kmod-nvidia{flag}-{target.text}-{kernel or package.kernel}",)
    if package.role == KERNEL and package.name.startswith("kmod-nvidia-"):
        return ("kmod-nvidia-open-dkms" if flavour == OPEN else "kmod-nvidia-latest-dkms",)
    if package.stem in ("nvidia-fabric-manager", "nvidia-fabricmanager"):
        return (_el_fabric_manager(target),)
    if package.stem in ("nvidia-fabric-manager-devel", "nvidia-fabricmanager-devel"):
        return (f"{_el_fabric_manager(target)}-devel",)
    if package.stem in ("nvidia-imex", "libnvidia-nscq"):
        suffixed = f"{package.stem}-{target.branch}"
        plain = int(target.branch) >= FABRIC_UNSUFFIXED_FROM or package.branch is None
        return (package.stem, suffixed) if plain else (suffixed, package.stem)
    if package.stem in ("cuda-drivers", "nvidia-open"):
        return ("nvidia-open" if flavour == OPEN else "cuda-drivers",)
    return (package.name,)


def _el_fabric_manager(target: DriverVersion) -> str:
    return "nvidia-fabricmanager" if int(target.branch) >= FABRIC_UNSUFFIXED_FROM else "nvidia-fabric-manager"


def kernel_release(kernel: str) -> str:
    """``uname -r`` as precompiled kmod names carry it: ``4.18.0-553.22.1.el8_10.x86_64`` → ``4.18.0-553.22.1``."""
    return re.sub(r"\.el\d\S*$", "", kernel)


def strip_kernel(version: str) -> str:
    """A SUSE kmp's version without the kernel: ``580.105.08_k6.12.0_160000.5-1.1`` → ``580.105.08-1.1``."""
    return _KERNEL_TAIL.sub("", version, count=1)


@dataclass(frozen=True)
class Stream:
    """A stream of the module ``nvidia-driver``; ``branch`` is a number or latest."""

    text: str
    branch: str
    open: bool
    dkms: bool

    @classmethod
    def parse(cls, text: str) -> Stream:
        """:raises ValueError: if ``text`` is not ``<branch|latest>[-open][-dkms]`` or ``open-dkms``."""
        found = _STREAM.match(text)
        if found is None:
            hint = f"; {text.split('.')[0]}-dkms or {text.split('.')[0]}-open may be meant" if "." in text else ""
            raise ValueError(
                f"{text!r} is not a stream of nvidia-driver: expected <branch>, <branch>-dkms, <branch>-open, "
                f"latest, latest-dkms or open-dkms, never a full version{hint}"
            )
        if found["newest"]:
            return cls(text, "latest", True, True)
        return cls(text, found["branch"], bool(found["open"]), bool(found["dkms"]) or bool(found["open"]))


def stream_for(current: Stream, target: DriverVersion, flavour: str) -> str:
    """The stream that holds ``target``, of the same kind (precompiled or DKMS) as ``current``.

    An open stream builds with DKMS unless ``current`` is precompiled, where ``<branch>-open`` holds both.
    """
    if flavour == OPEN:
        return f"{target.branch}-open"
    return f"{target.branch}-dkms" if current.dkms else target.branch
