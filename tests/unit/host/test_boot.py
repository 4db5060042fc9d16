# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernels, DKMS, compilers, Secure Boot, nouveau, initial RAM disks, space."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING
from ansible_collections.gpufleet.driver.plugins.module_utils.host import boot

GRUB_CFG = """\
set default="0"
menuentry 'Ubuntu' --class ubuntu $menuentry_id_option 'gnulinux-simple-aaaa' {
    recordfail
    if [ x = y ]; then
      insmod part_gpt
    fi
    linux    /boot/vmlinuz-5.15.0-113-generic root=UUID=aaaa ro
    initrd    /boot/initrd.img-5.15.0-113-generic
}
submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-aaaa' {
    menuentry 'Ubuntu, with Linux 5.15.0-113-generic' $menuentry_id_option 'gnulinux-5.15.0-113-generic-advanced-aaaa' {
        linux    /boot/vmlinuz-5.15.0-113-generic root=UUID=aaaa ro
    }
    menuentry 'Ubuntu, with Linux 5.15.0-25-generic' $menuentry_id_option 'gnulinux-5.15.0-25-generic-advanced-aaaa' {
        linux    /boot/vmlinuz-5.15.0-25-generic root=UUID=aaaa ro
    }
}
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {
    fwsetup
}
"""


def made(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_parse_grub_config() -> None:
    entries = boot.parse_grub_config(GRUB_CFG)
    assert [(entry.position, entry.kernel) for entry in entries] == [
        ("0", "5.15.0-113-generic"),
        ("1>0", "5.15.0-113-generic"),
        ("1>1", "5.15.0-25-generic"),
    ]
    assert entries[2].title == "Advanced options for Ubuntu>Ubuntu, with Linux 5.15.0-25-generic"
    assert entries[2].id == "gnulinux-advanced-aaaa>gnulinux-5.15.0-25-generic-advanced-aaaa"


KERNELS = {"boot/vmlinuz-5.15.0-25-generic": "", "boot/vmlinuz-5.15.0-113-generic": "", "boot/vmlinuz-0-rescue-1": ""}
OLD, NEW = "5.15.0-25-generic", "5.15.0-113-generic"
BLS = {
    "boot/loader/entries/abc-5.14.0-427.el9.x86_64.conf": "title R\nversion 5.14.0-427.el9.x86_64\n"
    "linux /vmlinuz-5.14.0-427.el9.x86_64\n",
    "boot/loader/entries/abc-5.14.0-503.el9.x86_64.conf": "title R\nversion 5.14.0-503.el9.x86_64\n"
    "linux /vmlinuz-5.14.0-503.el9.x86_64\n",
    "boot/loader/entries/abc-0-rescue.conf": "linux /vmlinuz-0-rescue-abc\n",
}
NEXT: dict[str, tuple[dict[str, str], str | None]] = {
    "A-DKMS-02-newest": (KERNELS, NEW),
    "A-DKMS-02-first-entry": ({**KERNELS, "boot/grub/grub.cfg": GRUB_CFG, "etc/default/grub": "GRUB_DEFAULT=0\n"}, NEW),
    "A-DKMS-02-position": (
        {**KERNELS, "boot/grub/grub.cfg": GRUB_CFG, "etc/default/grub": 'GRUB_DEFAULT="1>1"\n'},
        OLD,
    ),
    "A-DKMS-02-title": (
        {
            **KERNELS,
            "boot/grub/grub.cfg": GRUB_CFG,
            "etc/default/grub": f'GRUB_DEFAULT="Advanced options for Ubuntu>Ubuntu, with Linux {OLD}"\n',
        },
        OLD,
    ),
    "A-DKMS-02-saved": (
        {
            **KERNELS,
            "boot/grub/grub.cfg": GRUB_CFG,
            "boot/grub/grubenv": "# GRUB Environment Block\n"
            f"saved_entry=gnulinux-advanced-aaaa>gnulinux-{OLD}-advanced-aaaa\n###",
            "etc/default/grub": "GRUB_DEFAULT=saved\n",
        },
        OLD,
    ),
    "A-DKMS-02-once": (
        {
            **KERNELS,
            "boot/grub/grub.cfg": GRUB_CFG,
            "boot/grub/grubenv": "next_entry=1>1\n",
            "etc/default/grub": "GRUB_DEFAULT=0\n",
        },
        OLD,
    ),
    "A-DKMS-02-loader-entry": (
        {
            **BLS,
            "boot/grub2/grubenv": "saved_entry=abc-5.14.0-427.el9.x86_64\n",
            "etc/default/grub": "GRUB_DEFAULT=saved\n",
        },
        "5.14.0-427.el9.x86_64",
    ),
    "A-DKMS-02-loader-entry-by-number": (
        {**BLS, "boot/grub2/grubenv": "saved_entry=0\n"},
        "5.14.0-503.el9.x86_64",
    ),
    "nothing-known": ({}, None),
}


@pytest.mark.parametrize(("files", "release"), NEXT.values(), ids=NEXT)
def test_next_kernel(tmp_path: Path, files: dict[str, str], release: str | None) -> None:
    made(tmp_path, files)
    assert boot.next_kernel(str(tmp_path / "boot"), str(tmp_path / "etc")).release == release


def test_installed_kernels_are_in_order_of_age(tmp_path: Path) -> None:
    made(tmp_path, {**KERNELS, "boot/vmlinuz-5.15.0-113-generic.old": "", "boot/initrd.img-9.9": ""})
    assert boot.installed_kernels(str(tmp_path / "boot")) == [OLD, NEW]


def test_headers(tmp_path: Path) -> None:  # A-DKMS-02, A-BOOT-03
    made(tmp_path, {"src/ok/Makefile": "", "lib/with/x": "", "lib/dangling/x": "", "lib/empty/build/README": ""})
    (tmp_path / "lib/with/build").symlink_to(tmp_path / "src/ok")
    (tmp_path / "lib/dangling/build").symlink_to(tmp_path / "src/gone")
    states = {name: boot.headers(name, str(tmp_path / "lib")) for name in ("with", "dangling", "empty", "none")}
    assert states == {"with": "present", "dangling": "dangling", "empty": "missing", "none": "missing"}


MODINFO = """\
filename:       /lib/modules/6.1.0-20-amd64/updates/dkms/nvidia.ko
firmware:       nvidia/595.58.03/gsp_tu10x.bin
version:        595.58.03
supported:      external
license:        NVIDIA
alias:          char-major-195-*
description:    NVIDIA GPU driver: all of it
sig_id:         PKCS#7
signer:         gpu-node-01 Secure Boot Module Signature key
sig_key:        3A:0F:11:22
vermagic:       6.1.0-20-amd64 SMP preempt mod_unload modversions
"""


def answer(rc: int = 0, stdout: str = "", stderr: str = "") -> Completed:
    return Completed((), rc, stdout, stderr, 0.1)


def test_modules_of_a_kernel() -> None:  # A-DKMS-04: the label of the package says 595.71.05
    def run(argv: list[str], *, timeout: float) -> Completed:
        assert argv[:3] == ["modinfo", "-k", "6.1.0-20-amd64"]
        if argv[3] == "nvidia":
            return answer(0, MODINFO)
        return answer(1, "", f"modinfo: ERROR: Module {argv[3]} not found.")

    nvidia, uvm = boot.modules_of(run, "6.1.0-20-amd64", ("nvidia", "nvidia_uvm"))
    assert (nvidia.version, nvidia.license, nvidia.sig_key) == ("595.58.03", "NVIDIA", "3A:0F:11:22")
    assert nvidia.signer == "gpu-node-01 Secure Boot Module Signature key"
    assert uvm == boot.Module("nvidia_uvm", None)


def kernel(headers: str = "present", role: str = "running", **versions: str | None) -> dict[str, Any]:
    return {"role": role, "headers": headers, "modules": versions}


ALL = {"nvidia": "550.90.07", "nvidia_uvm": "550.90.07"}
JUDGED: dict[str, tuple[dict[str, Any], str | None, list[tuple[str, str]]]] = {
    "A-BOOT-03-gates-pass": (
        {NEW: kernel(**ALL)},
        "550.90.07",
        [("kernel.headers", OK), ("kernel.modules", OK)],
    ),
    "A-DKMS-02-next-kernel-without-headers": (
        {OLD: kernel(**ALL), NEW: kernel("dangling", "next", nvidia=None, nvidia_uvm=None)},
        None,
        [("kernel.headers", OK), ("kernel.modules", OK), ("kernel.headers", ERROR), ("kernel.modules", OK)],
    ),
    "A-DKMS-05-not-built-for-this-kernel": (
        {"5.17.5-76051705-generic": kernel(nvidia=None, nvidia_uvm=None)},
        "510.68.02",
        [("kernel.headers", OK), ("kernel.module_absent", ERROR)],
    ),
    "A-DKMS-04-content-differs": (
        {NEW: kernel(nvidia="595.58.03", nvidia_uvm="595.58.03")},
        "595.71.05",
        [("kernel.headers", OK), ("kernel.module_version", ERROR)],
    ),
    "A-BOOT-03-one-module-missing": (
        {NEW: kernel(nvidia="550.90.07", nvidia_uvm=None)},
        None,
        [("kernel.headers", OK), ("kernel.module_absent", ERROR)],
    ),
    "modules-disagree": (
        {NEW: kernel(nvidia="550.90.07", nvidia_uvm="535.183.01")},
        None,
        [("kernel.headers", OK), ("kernel.module_version", ERROR)],
    ),
}


@pytest.mark.parametrize(("kernels", "version", "expected"), JUDGED.values(), ids=JUDGED)
def test_kernel_findings(kernels: dict[str, Any], version: str | None, expected: list[tuple[str, str]]) -> None:
    found = boot.kernel_findings(kernels, version)
    assert [(finding.check, finding.level) for finding in found] == expected


def test_headers_do_not_matter_for_prebuilt_modules() -> None:
    found = boot.kernel_findings({NEW: kernel("missing", **ALL)}, headers_needed=False)
    assert [finding.check for finding in found] == ["kernel.modules"]


DKMS = {
    "A.16-old": (
        "nvidia, 535.183.01, 5.15.0-113-generic, x86_64: installed",
        ("nvidia", "535.183.01", "5.15.0-113-generic", "x86_64", "installed", ()),
    ),
    "A.16-new": (
        "nvidia/535.183.01, 5.15.0-113-generic, x86_64: installed",
        ("nvidia", "535.183.01", "5.15.0-113-generic", "x86_64", "installed", ()),
    ),
    "A.16-server": (
        "nvidia-srv/535.183.01, 5.15.0-113-generic, x86_64: built",
        ("nvidia-srv", "535.183.01", "5.15.0-113-generic", "x86_64", "built", ()),
    ),
    "A-DKMS-01-added": ("nvidia/535.98: added", ("nvidia", "535.98", None, None, "added", ())),
    "A.16-old-added": ("nvidia, 535.98: added", ("nvidia", "535.98", None, None, "added", ())),
    "A-DKMS-03-original-module": (
        "nvidia/390.59, 4.16.13-300.fc28.x86_64, x86_64: installed (original_module exists)",
        ("nvidia", "390.59", "4.16.13-300.fc28.x86_64", "x86_64", "installed", ("original_module exists",)),
    ),
    "A.16-differs": (
        "nvidia/535.183.01, 5.15.0-113-generic, x86_64: installed (WARNING! Diff between built and installed module!)",
        (
            "nvidia",
            "535.183.01",
            "5.15.0-113-generic",
            "x86_64",
            "installed",
            ("WARNING! Diff between built and installed module!",),
        ),
    ),
}


@pytest.mark.parametrize(("line", "expected"), DKMS.values(), ids=DKMS)
def test_dkms_status_line(line: str, expected: tuple[Any, ...]) -> None:
    status = boot.parse_dkms_status(line + "\n")
    assert (status.entries, status.errors, status.orphans) == ([boot.DkmsEntry(*expected)], [], [])


@pytest.mark.parametrize(
    ("stdout", "stderr"),
    [
        (
            "nvidia/390.59, 4.16.13-300.fc28.x86_64, x86_64: installed (original_module exists)\n",
            "Error! Could not locate dkms.conf file.\n"
            "File: /var/lib/dkms/nvidia/390.48/source/dkms.conf does not exist.\n",
        ),
        (
            "Error! nvidia/390.48: Missing the module source directory or the symbolic link pointing to it.\n"
            "Manual intervention is required!\nnvidia/390.59, 4.16.13-300.fc28.x86_64, x86_64: installed\n",
            "",
        ),
        ("nvidia/390.48: broken\nnvidia/390.59, 4.16.13-300.fc28.x86_64, x86_64: installed\n", ""),
    ],
    ids=["A-DKMS-03-old", "A-DKMS-03-new", "A-DKMS-03-broken"],
)
def test_dkms_orphan(stdout: str, stderr: str) -> None:
    status = boot.parse_dkms_status(stdout, stderr)
    assert status.orphans == ["nvidia/390.48"]
    assert [entry.version for entry in status.entries if entry.state == "installed"] == ["390.59"]
    (finding,) = [finding for finding in boot.dkms_findings(status) if finding.check == "dkms.orphan"]
    assert (finding.level, finding.next) == (WARNING, "rm -r /var/lib/dkms/nvidia/390.48")


def test_dkms_orphans_on_disk(tmp_path: Path) -> None:  # A-DKMS-03
    made(tmp_path, {"nvidia/390.59/source/dkms.conf": "", "nvidia/390.48/build/x": "", "zfs/2.1/build/x": ""})
    (tmp_path / "nvidia/kernel-5.15-x86_64").symlink_to("390.59")
    assert boot.dkms_orphans(str(tmp_path)) == ["nvidia/390.48"]


COMPILERS = {
    "A-DKMS-01": (
        "Linux version 6.4.6-76060406-generic (buildd@x) (x86_64-linux-gnu-gcc-12 (Ubuntu 12.3.0-1) 12.3.0, "
        "GNU ld (GNU Binutils for Ubuntu) 2.38) #202307241739 SMP",
        "cc (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0\nCopyright (C) 2021\n",
        ("gcc", "12.3.0"),
        ("gcc", "11.4.0"),
        "install gcc-12",
    ),
    "same-major": (
        "Linux version 5.15.0-113-generic (buildd@x) (gcc (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0, GNU ld 2.38) #123",
        "cc (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0\n",
        ("gcc", "11.4.0"),
        ("gcc", "11.4.0"),
        None,
    ),
    "old-form": (
        "Linux version 4.18.0-553.el8_10.x86_64 (mockbuild@x) (gcc version 8.5.0 20210514 (Red Hat 8.5.0-22) (GCC)) #1",
        "cc (GCC) 8.5.0 20210514 (Red Hat 8.5.0-22)\n",
        ("gcc", "8.5.0"),
        ("gcc", "8.5.0"),
        None,
    ),
    "clang": (
        "Linux version 6.6.0 (x@y) (Android clang version 17.0.2, LLD 17.0.2) #1",
        "cc (Debian 12.2.0-14+deb12u1) 12.2.0\n",
        ("clang", "17.0.2"),
        ("gcc", "12.2.0"),
        "install clang-17",
    ),
    "no-compiler": (
        "Linux version 6.1.0 (x@y) (gcc-12 (Debian 12.2.0-14) 12.2.0, GNU ld 2.40) #1",
        "",
        ("gcc", "12.2.0"),
        None,
        "install gcc-12",
    ),
}


@pytest.mark.parametrize(("proc", "cc", "of_kernel", "default", "next_"), COMPILERS.values(), ids=COMPILERS)
def test_compilers(
    proc: str, cc: str, of_kernel: tuple[str, str], default: tuple[str, str] | None, next_: str | None
) -> None:
    assert boot.kernel_compiler(proc) == of_kernel
    assert boot.default_compiler(cc) == default
    finding = boot.compiler_finding(of_kernel, default)
    assert (finding.next if finding else None) == next_


def test_compiler_of_this_very_kernel() -> None:
    assert boot.kernel_compiler(Path("/proc/version").read_text()) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SecureBoot enabled\n", True),
        ("SecureBoot enabled\nSecureBoot validation is disabled in shim\n", False),
        ("SecureBoot disabled\nPlatform is in Setup Mode\n", False),
        ("EFI variables are not supported on this system\n", False),
        ("This system doesn't support Secure Boot\n", False),
        ("", None),
    ],
    ids=lambda value: f"A-SB-01-{value}" if isinstance(value, str) else "",
)
def test_sb_state(text: str, expected: bool | None) -> None:
    assert boot.parse_sb_state(text) is expected


@pytest.mark.parametrize(("last", "expected"), [(b"\x01", True), (b"\x00", False)])
def test_secure_boot_variable(tmp_path: Path, last: bytes, expected: bool) -> None:
    (tmp_path / boot.SECURE_BOOT_VARIABLE).write_bytes(b"\x06\x00\x00\x00" + last)
    assert boot.secure_boot_variable(str(tmp_path)) is expected
    assert boot.secure_boot_variable(str(tmp_path / "no/efi")) is False


ENROLLED = """\
[key 1]
SHA1 Fingerprint: 76:a0:92:06:58:00:bf:37:69:01:c3:72:cd:55:a9:0e:1f:de:d2:e0
Certificate:
    Data:
        Version: 3 (0x2)
        Serial Number:
            b9:41:24:a0:18:2c:92:67
        Signature Algorithm: sha256WithRSAEncryption
        Issuer: C=GB, ST=Isle of Man, L=Douglas, O=Canonical Ltd., CN=Canonical Ltd. Master Certificate Authority
        Subject: C=GB, ST=Isle of Man, L=Douglas, O=Canonical Ltd., CN=Canonical Ltd. Master Certificate Authority
        X509v3 extensions:
            X509v3 Subject Key Identifier:
                AD:91:99:0B:C2:2A:B1:F5:17:04:8C:23:B6:65:5A:26:8E:34:5A:63

[key 2]
SHA1 Fingerprint: 00:11
Certificate:
    Data:
        Serial Number: 4660 (0x1234)
        Subject: CN = gpu-node-01 Secure Boot Module Signature key
"""


def test_enrolled_keys() -> None:
    first, second = boot.parse_enrolled(ENROLLED)
    assert first == boot.Certificate(
        "Canonical Ltd. Master Certificate Authority", "B94124A0182C9267", "AD91990BC22AB1F517048C23B6655A268E345A63"
    )
    assert second == boot.Certificate("gpu-node-01 Secure Boot Module Signature key", "1234", None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/var/lib/dkms/mok.pub is already enrolled\n", True),
        ("/var/lib/dkms/mok.pub is not enrolled\n", False),
        ("Failed to open /var/lib/dkms/mok.pub\n", None),
    ],
)
def test_test_key(text: str, expected: bool | None) -> None:
    assert boot.parse_test_key(text) is expected


KEYRING = (
    "1c5e5a8f I------     1 perm 1f030000     0     0 asymmetri Canonical Ltd. Kernel Module Signing: "
    "88f752e560a1e0737e31163a466ad7b70a850c19: X509.rsa 0a850c19 []\n"
    "2d0e5a8f I------     1 perm 1f030000     0     0 keyring   .builtin_trusted_keys: 2\n"
)


def module(signer: str | None, sig_key: str | None = None) -> boot.Module:
    return boot.Module("nvidia", "550.90.07", signer=signer, sig_key=sig_key)


MOK = "gpu-node-01 Secure Boot Module Signature key"
SIGNATURES: dict[str, tuple[bool | None, boot.Module | None, dict[str, bool | None], str]] = {
    "A-SB-01-off": (False, module(None), {}, OK),
    "A-SB-01-signed-by-enrolled-name": (True, module(MOK), {}, OK),
    "A-SB-01-signed-by-enrolled-serial": (True, module("other name", "12:34"), {}, OK),
    "A-SB-01-another-key": (True, module("old key", "3A:0F"), {"/var/lib/dkms/mok.pub": False}, ERROR),
    "A-SB-01-unsigned": (True, module(None), {}, ERROR),
    "A-SB-02-signed-by-distribution": (True, module("Canonical Ltd. Kernel Module Signing"), {}, OK),
    "A-SB-01-dkms-key-not-enrolled": (True, None, {"/var/lib/dkms/mok.pub": False}, ERROR),
    "A-SB-01-dkms-key-enrolled": (True, None, {"/var/lib/shim-signed/mok/MOK.der": True}, OK),
    "unknown-state": (None, module(None), {}, OK),
}


@pytest.mark.parametrize(("enabled", "of", "keys", "level"), SIGNATURES.values(), ids=SIGNATURES)
def test_signature(enabled: bool | None, of: boot.Module | None, keys: dict[str, bool | None], level: str) -> None:
    found = boot.signature_finding(enabled, of, boot.parse_enrolled(ENROLLED), boot.parse_keyring(KEYRING), keys)
    assert (found.check, found.level) == ("secure_boot.key", level)
    assert (found.next is None) == (level == OK)


NOUVEAU = "nouveau 2433024 1 - Live 0x0\n"
BLOCKED = "# made by hand\nblacklist nouveau\noptions nouveau modeset=0\n"
NOUVEAU_CASES = {
    "A-NOU-01-loaded": ({"proc/modules": NOUVEAU, "proc/fb": ""}, ERROR, "block it in /etc/modprobe.d"),
    "A-NOU-01-drives-the-console": ({"proc/modules": NOUVEAU, "proc/fb": "0 nouveaudrmfb\n"}, ERROR, "block it"),
    "A-NOU-01-blocked-for-this-session-only": (
        {"run/modprobe.d/x.conf": BLOCKED},
        WARNING,
        "write 'blacklist nouveau'",
    ),
    "A-NOU-01-blocked": ({"etc/modprobe.d/blacklist-nouveau.conf": BLOCKED}, OK, None),
    "A-NOU-01-blocked-but-still-loaded": (
        {"proc/modules": NOUVEAU, "etc/modprobe.d/b.conf": BLOCKED},
        ERROR,
        "rebuild the initial RAM disk",
    ),
    "A-NOU-01-kernel-option": ({"proc/cmdline": "ro modprobe.blacklist=nouveau,nova_core quiet"}, OK, None),
    "comment-is-no-block": ({"etc/modprobe.d/b.conf": "# blacklist nouveau\n"}, WARNING, "write"),
}


@pytest.mark.parametrize(("files", "level", "next_"), NOUVEAU_CASES.values(), ids=NOUVEAU_CASES)
def test_nouveau(tmp_path: Path, files: dict[str, str], level: str, next_: str | None) -> None:
    made(tmp_path, files)
    lasting, session = str(tmp_path / "etc/modprobe.d"), str(tmp_path / "run/modprobe.d")
    found = boot.nouveau(str(tmp_path / "proc"), (lasting,), (session,))
    judged = boot.nouveau_finding(found)
    assert judged.level == level
    assert (next_ or "") in (judged.next or "")
    assert ("console" in judged.message) == (files.get("proc/fb") == "0 nouveaudrmfb\n")


LISTINGS = {
    "A-BOOT-02-lsinitrd": (
        "-rw-r--r--   1 root  root  9437184 May  1 10:00 usr/lib/modules/6.4.0-150600.21-default/updates/nvidia.ko\n"
        "-rw-r--r--   1 root  root    94371 May  1 10:00 "
        "usr/lib/modules/6.4.0-150600.21-default/updates/nvidia-uvm.ko.xz\n"
        "-rw-r--r--   1 root  root     4371 May  1 10:00 usr/lib/firmware/nvidia/550.90.07/gsp_ga10x.bin\n",
        {
            "nvidia": "usr/lib/modules/6.4.0-150600.21-default/updates/nvidia.ko",
            "nvidia_uvm": "usr/lib/modules/6.4.0-150600.21-default/updates/nvidia-uvm.ko.xz",
        },
    ),
    "A-BOOT-02-lsinitramfs": (
        "usr/lib/modules/5.15.0-113-generic/updates/dkms/nvidia-drm.ko.zst\nusr/bin/true\n",
        {"nvidia_drm": "usr/lib/modules/5.15.0-113-generic/updates/dkms/nvidia-drm.ko.zst"},
    ),
    "none": ("usr/lib/modules/5.15.0-113-generic/kernel/drivers/platform/nvidia-wmi-ec-backlight.txt\n", {}),
}


@pytest.mark.parametrize(("text", "expected"), LISTINGS.values(), ids=LISTINGS)
def test_initrd_modules(text: str, expected: dict[str, str]) -> None:
    assert boot.initrd_modules(text) == expected


@pytest.mark.parametrize(
    ("image_age", "level"), [(200, ERROR), (50, None)], ids=["A-BOOT-02-older-than-module", "newer-than-module"]
)
def test_initrd_that_carries_an_old_module(tmp_path: Path, image_age: int, level: str | None) -> None:
    made(tmp_path, {"initrd.img-6.1": "", "nvidia.ko": ""})
    os.utime(tmp_path / "initrd.img-6.1", (10_000 - image_age, 10_000 - image_age))
    os.utime(tmp_path / "nvidia.ko", (10_000 - 100, 10_000 - 100))
    image = boot.initrd_image("6.1", str(tmp_path))
    assert image == str(tmp_path / "initrd.img-6.1")
    found = boot.initrd_finding(
        "6.1", image, {"nvidia": "lib/nvidia.ko"}, boot.Module("nvidia", "390.25", str(tmp_path / "nvidia.ko"))
    )
    assert (found.level if found else None) == level
    assert boot.initrd_finding("6.1", image, {}, boot.Module("nvidia", "390.25", None)) is None


def test_initrd_that_carries_a_module_gone_from_disk(tmp_path: Path) -> None:  # A-BOOT-02
    found = boot.initrd_finding("6.1", "/boot/initrd.img-6.1", {"nvidia": "x"}, boot.Module("nvidia", None))
    assert found is not None
    assert found.next == "update-initramfs -u -k 6.1 (Debian, Ubuntu) or dracut --force --kver 6.1"


def test_list_initrd_falls_back_to_the_other_program() -> None:
    def run(argv: list[str], *, timeout: float) -> Completed:
        return answer(127) if argv[0] == "lsinitramfs" else answer(0, LISTINGS["A-BOOT-02-lsinitrd"][0])

    assert boot.list_initrd(run, "/boot/i") == LISTINGS["A-BOOT-02-lsinitrd"][1]
    assert boot.list_initrd(lambda argv, timeout: answer(127), "/boot/i") is None


def test_boot_id_and_time_of_this_machine() -> None:
    assert boot.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (boot.boot_time() or 0) > 1_600_000_000


REBOOTS: dict[str, tuple[dict[str, str], dict[str, tuple[int, str]], list[str]]] = {
    "Debian": (
        {"reboot-required": "", "reboot-required.pkgs": "linux-base\nlinux-base\nlibc6\n"},
        {},
        ["reboot-required: libc6, linux-base"],
    ),
    "dnf": (
        {},
        {"needs-restarting": (1, "Core libraries or services have been updated:\n  * kernel\n")},
        ["needs-restarting: kernel"],
    ),
    "zypper": ({}, {"zypper": (102, "Reboot is suggested")}, ["zypper"]),
    "none": ({}, {"needs-restarting": (0, "No core libraries"), "zypper": (0, "")}, []),
    "no-program": ({}, {}, []),
}


@pytest.mark.parametrize(("files", "answers", "expected"), REBOOTS.values(), ids=REBOOTS)
def test_reboot_reasons(
    tmp_path: Path, files: dict[str, str], answers: dict[str, tuple[int, str]], expected: list[str]
) -> None:
    made(tmp_path, files)

    def run(argv: list[str], *, timeout: float) -> Completed:
        return answer(*answers.get(argv[0], (127, "")))

    assert boot.reboot_reasons(run, str(tmp_path)) == expected


def test_space_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "initrd.img-1").write_bytes(b"x" * 1000)
    found = {item.path: item for item in boot.space(str(tmp_path), ("/", str(tmp_path), "/no/such/path"))}
    about = os.statvfs("/")
    assert abs(found["/"].free - about.f_bavail * about.f_frsize) < 1 << 30
    assert found[str(tmp_path)].needed == 1000 + boot.INITRD_MARGIN
    assert found["/no/such/path"].device == found["/"].device


def test_boot_that_is_full() -> None:  # A-BOOT-01
    found = boot.space_findings(
        [
            boot.Space("/", 1, 50 << 30, 2 << 30),
            boot.Space("/boot", 2, 0, 272 << 20),
            boot.Space("/var", 1, 50 << 30, 2 << 30),
        ]
    )
    assert [(finding.check, finding.level, finding.evidence["path"]) for finding in found] == [
        ("boot.space", ERROR, "/boot")
    ]
    assert "0 MiB free, an upgrade may need 272 MiB" in found[0].message


def test_a_file_system_that_is_full_or_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = os.statvfs(tmp_path)
    flags = {str(tmp_path): os.ST_RDONLY}

    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=1, f_frsize=4096, f_flag=flags.get(str(path), about.f_flag & ~os.ST_RDONLY))

    monkeypatch.setattr(boot.os, "statvfs", statvfs)
    missing = str(tmp_path / "not/yet")
    found = boot.read_only_findings(["/", missing, str(tmp_path)])
    assert [(each.check, each.level, each.evidence["path"]) for each in found] == [("boot.read_only", ERROR, missing)]
    space = boot.state_space(missing)
    assert space.free == 4096 and space.needed == boot.STATE_NEEDED
    assert "has 0 MiB free, an upgrade may need 16 MiB" in boot.space_findings([space])[0].message
