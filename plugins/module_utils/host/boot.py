# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernels, what they will load at the next boot, and whether the firmware lets them.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING, Finding

MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
MIB = 1 << 20
INITRD_MARGIN = 140 * MIB
"""What the GSP firmware of a newer branch may add to one initial RAM disk (132 MiB were seen), and a little more."""


def release_key(release: str) -> tuple[tuple[int, str], ...]:
    """Sort key of kernel releases: numbers as numbers, text as text (``5.15.0-113`` after ``5.15.0-25``)."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|[A-Za-z]+", release))


# --- Which kernels there are, and which one starts next ------------------------------------------------------------


@dataclass(frozen=True)
class NextKernel:
    """The kernel that the boot loader will start; ``source`` says how that is known."""

    release: str | None
    source: str


def installed_kernels(boot: str = "/boot") -> list[str]:
    """Releases with a kernel image in ``boot``, oldest first. Images named rescue are left out."""
    releases = {
        path.name.partition("-")[2]
        for pattern in ("vmlinuz-*", "vmlinux-*", "Image-*")
        for path in Path(boot).glob(pattern)
        if "rescue" not in path.name and not path.name.endswith((".old", ".hmac", ".gz"))
    }
    return sorted((release for release in releases if release), key=release_key)


@dataclass(frozen=True)
class MenuEntry:
    """A boot menu entry: position (``1>0``), titles and ids from the outermost menu to it, and the kernel it starts."""

    position: str
    title: str
    id: str
    kernel: str


_MENU = re.compile(r"^\s*(menuentry|submenu)\s+(?:'([^']*)'|\"([^\"]*)\")(.*)$")
_MENU_ID = re.compile(r"(?:\$menuentry_id_option|--id)\s+'?([^'\s]+)'?")
_LINUX = re.compile(r"^\s*linux(?:16|efi)?\s+\S*/(?:vmlinuz|vmlinux|Image)-(\S+)")


def parse_grub_config(text: str) -> list[MenuEntry]:
    """The entries of grub.cfg that start a Linux kernel; submenus are followed as GRUB counts them."""
    entries: list[MenuEntry] = []
    menus: list[tuple[str, str, str, int]] = []  # position, title, id and depth of the menus around the line
    counters = [0]
    depth = 0
    current: tuple[str, str, str, int] | None = None
    for line in text.splitlines():
        opened = _MENU.match(line)
        if opened:
            outer_position, outer_title, outer_id, dummy = menus[-1] if menus else ("", "", "", 0)
            title = opened[2] if opened[2] is not None else opened[3]
            found = _MENU_ID.search(opened[4])
            own = (
                f"{outer_position}>{counters[-1]}" if menus else str(counters[-1]),
                f"{outer_title}>{title}" if menus else title,
                f"{outer_id}>{found[1] if found else title}" if menus else (found[1] if found else title),
                depth,
            )
            counters[-1] += 1
            depth += 1
            if opened[1] == "submenu":
                menus.append(own)
                counters.append(0)
            else:
                current = own
            continue
        linux = _LINUX.match(line)
        if linux and current:
            entries.append(MenuEntry(*current[:3], linux[1]))
        stripped = line.strip()
        if stripped == "}":
            depth -= 1
            if current and depth == current[3]:
                current = None
            elif menus and depth == menus[-1][3]:
                menus.pop()
                counters.pop()
        elif stripped.endswith("{"):
            depth += 1
    return entries


def parse_grubenv(text: str) -> dict[str, str]:
    """``grubenv``: ``key=value`` lines in a block padded with ``#``."""
    return {
        key: value
        for key, equals, value in (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
        if equals
    }


def parse_loader_entry(text: str) -> str | None:
    """The kernel release of a Boot Loader Specification entry (``/boot/loader/entries/*.conf``)."""
    version = re.search(r"^version\s+(\S+)\s*$", text, re.MULTILINE)
    linux = re.search(r"^linux\s+\S*/(?:vmlinuz|Image)-(\S+)\s*$", text, re.MULTILINE)
    found = linux or version
    return found[1] if found else None


def choose_entry(entries: Iterable[MenuEntry], wanted: str) -> str | None:
    """The kernel of the entry that GRUB takes for ``wanted``: a position, an id or a title."""
    return next((entry.kernel for entry in entries if wanted in (entry.position, entry.id, entry.title)), None)


def next_kernel(boot: str = "/boot", etc: str = "/etc") -> NextKernel:
    """The kernel of the next boot, as far as the boot loader's files tell; else the newest installed one."""
    entries, blscfg = _grub_entries(boot)
    environment = parse_grubenv(_read_first(Path(boot, "grub2/grubenv"), Path(boot, "grub/grubenv")))
    default = re.findall(r"^\s*GRUB_DEFAULT=[\"']?(.*?)[\"']?\s*$", _read(Path(etc, "default/grub")), re.MULTILINE)
    kernels = installed_kernels(boot)
    once, saved = environment.get("next_entry"), environment.get("saved_entry")
    for wanted, source in (
        (once, "grubenv next_entry"),
        (saved if not default or default[-1] == "saved" else default[-1], "GRUB_DEFAULT"),
    ):
        if not wanted:
            continue
        kernel = blscfg.get(wanted) or choose_entry(entries, wanted)
        if kernel is None and blscfg and wanted.isdigit():
            ordered = sorted(blscfg.values(), key=release_key, reverse=True)
            kernel = ordered[int(wanted)] if int(wanted) < len(ordered) else None
        if kernel:
            return NextKernel(kernel, f"{source}={wanted}")
    return NextKernel(kernels[-1] if kernels else None, "newest kernel in /boot")


def _grub_entries(boot: str) -> tuple[list[MenuEntry], dict[str, str]]:
    entries = parse_grub_config(_read_first(Path(boot, "grub/grub.cfg"), Path(boot, "grub2/grub.cfg")))
    loader = {
        path.stem: kernel
        for path in Path(boot, "loader/entries").glob("*.conf")
        if "rescue" not in path.name and (kernel := parse_loader_entry(_read(path)))
    }
    return entries, loader


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_first(*paths: Path) -> str:
    return next((text for text in map(_read, paths) if text), "")


# --- Modules and headers of a kernel -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """``modinfo`` of one module for one kernel; ``version`` None if the module is not there for that kernel."""

    name: str
    version: str | None
    filename: str | None = None
    license: str | None = None
    vermagic: str | None = None
    signer: str | None = None
    sig_key: str | None = None


def parse_modinfo(name: str, text: str) -> Module:
    """Read what ``modinfo NAME`` prints."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() and " " not in key.strip():
            fields.setdefault(key.strip(), value.strip())
    return Module(
        name, *(fields.get(key) or None for key in ("version", "filename", "license", "vermagic", "signer", "sig_key"))
    )


def modules_of(run: Runner, kernel: str, names: Iterable[str] = MODULES, timeout: float = 20) -> list[Module]:
    """What ``modinfo -k`` finds of ``names`` for ``kernel``."""
    found = []
    for name in names:
        done = run(["modinfo", "-k", kernel, name], timeout=timeout)
        found.append(parse_modinfo(name, done.stdout) if done.ok else Module(name, None))
    return found


def headers(kernel: str, modules: str = "/lib/modules") -> str:
    """The build tree of ``kernel``: ``present``, ``dangling`` (a link to nowhere) or ``missing``."""
    build = Path(modules, kernel, "build")
    if Path(build, "Makefile").exists():
        return "present"
    return "dangling" if build.is_symlink() and not build.exists() else "missing"


def kernel_findings(
    kernels: Mapping[str, Mapping[str, Any]], version: str | None = None, headers_needed: bool = True
) -> list[Finding]:
    """Judge the kernels that matter: release → ``role`` (running, next), ``headers``, ``modules`` (name → version).

    ``version`` is what the modules should be, if somebody knows; otherwise only absence and disagreement are found.
    """
    found = []
    for release, facts in kernels.items():
        if headers_needed:
            found.append(_headers_finding(release, facts))
        found.append(_modules_finding(release, facts, version))
    return found


def _headers_finding(release: str, facts: Mapping[str, Any]) -> Finding:
    evidence = {"kernel": release, "role": facts["role"], "headers": facts["headers"]}
    of_kernel = f"the headers of the {facts['role']} kernel {release} are {facts['headers']}"
    if facts["headers"] == "present":
        return Finding("kernel.headers", OK, of_kernel, evidence)
    return Finding(
        "kernel.headers",
        ERROR,
        f"{of_kernel}; no module can be built for it",
        evidence,
        f"install linux-headers-{release} (Debian, Ubuntu) or kernel-devel-{release} (RHEL family)",
    )


def _modules_finding(release: str, facts: Mapping[str, Any], version: str | None) -> Finding:
    modules: Mapping[str, str | None] = facts["modules"]
    evidence = {"kernel": release, "role": facts["role"], "modules": dict(modules)}
    versions = sorted({text for text in modules.values() if text})
    absent = sorted(name for name, text in modules.items() if text is None)
    kernel = f"the {facts['role']} kernel {release}"
    if len(versions) > 1 or (version and versions and versions != [version]):
        return Finding(
            "kernel.module_version",
            ERROR,
            f"modules on disk for {kernel} are {', '.join(versions)}, expected {version or 'one version'}",
            evidence,
            f"dkms autoinstall -k {release}, or install the modules' package for this kernel",
        )
    if absent and (versions or version):
        return Finding(
            "kernel.module_absent",
            ERROR,
            f"no module {', '.join(absent)} on disk for {kernel}: it was not built for it",
            evidence,
            f"dkms status, then dkms autoinstall -k {release}",
        )
    seen = f"modules on disk for {kernel} are {versions[0]}" if versions else f"no module on disk for {kernel}"
    return Finding("kernel.modules", OK, seen, evidence)


# --- DKMS ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DkmsEntry:
    """One line of ``dkms status``. ``state``: added, built, installed or broken; ``notes``: the bracketed remarks."""

    module: str
    version: str
    kernel: str | None
    arch: str | None
    state: str
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DkmsStatus:
    """What ``dkms status`` says: entries, error lines, and versions whose source is gone (``nvidia/390.48``)."""

    entries: list[DkmsEntry]
    errors: list[str]
    orphans: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "entries": [entry.as_dict() for entry in self.entries]}


_DKMS = re.compile(
    r"^(?P<module>[\w.+-]+)(?:/|, )(?P<version>[\w.+~:-]+)(?:, (?P<kernel>[^,:]+), (?P<arch>[^,:]+))?: "
    r"(?P<state>added|built|installed|broken)(?P<rest>.*)$"
)
_DKMS_GONE = re.compile(r"/dkms/(?P<module>[^/\s]+)/(?P<version>[^/\s]+)/source/dkms\.conf")
_DKMS_BROKEN = re.compile(r"^(?:Error! )?(?P<module>[\w.+-]+)/(?P<version>[\w.+~-]+): Missing the module source")


def parse_dkms_status(stdout: str, stderr: str = "") -> DkmsStatus:
    """Read ``dkms status`` of any release, whatever its exit status was."""
    entries, problems, orphans = [], [], []
    for line in (*stdout.splitlines(), *stderr.splitlines()):
        line = line.strip()
        found = _DKMS.match(line)
        if found:
            notes = tuple(note.strip() for note in re.findall(r"\(([^()]*)\)", found["rest"]))
            entries.append(
                DkmsEntry(found["module"], found["version"], found["kernel"], found["arch"], found["state"], notes)
            )
            if found["state"] == "broken":
                orphans.append(f"{found['module']}/{found['version']}")
            continue
        gone = _DKMS_GONE.search(line) or _DKMS_BROKEN.match(line)
        if gone:
            orphans.append(f"{gone['module']}/{gone['version']}")
        if line.startswith(("Error!", "File:", "Deprecated", "Warning")) or gone:
            problems.append(line)
    return DkmsStatus(entries, problems, list(dict.fromkeys(orphans)))


def dkms_orphans(tree: str = "/var/lib/dkms") -> list[str]:
    """NVIDIA versions in the DKMS tree whose source has no dkms.conf, as ``nvidia/390.48``."""
    return [
        f"{version.parent.name}/{version.name}"
        for version in sorted(Path(tree).glob("nvidia*/*"))
        if version.is_dir()
        and not version.is_symlink()
        and version.name not in ("original_module", "kernel")
        and not Path(version, "source", "dkms.conf").exists()
    ]


def dkms_findings(status: DkmsStatus) -> list[Finding]:
    found = [
        Finding(
            "dkms.orphan",
            WARNING,
            f"the DKMS tree holds {orphan} without its source; every dkms call complains about it",
            {"orphan": orphan, "errors": status.errors},
            f"rm -r /var/lib/dkms/{orphan}",
        )
        for orphan in status.orphans
    ]
    for entry in status.entries:
        if any(note.startswith("WARNING! Diff") for note in entry.notes):
            found.append(
                Finding(
                    "dkms.differs",
                    WARNING,
                    f"{entry.module}/{entry.version} on disk for {entry.kernel} is not what DKMS built",
                    entry.as_dict(),
                    f"dkms install --force {entry.module}/{entry.version} -k {entry.kernel}",
                )
            )
    return found


def kernel_compiler(proc_version: str) -> tuple[str, str] | None:
    """The compiler in ``/proc/version``: (``gcc``, ``12.3.0``) or (``clang``, …); None if it is not recognised."""
    clang = re.search(r"clang version (\d+[\d.]*)", proc_version)
    if clang:
        return "clang", clang[1]
    gcc = re.search(r"gcc version (\d+\.[\d.]*\d)", proc_version) or re.search(
        r"gcc[\w.-]* \([^()]*(?:\([^()]*\)[^()]*)*\) (\d+\.[\d.]*\d)", proc_version
    )
    return ("gcc", gcc[1]) if gcc else None


def default_compiler(cc_version: str) -> tuple[str, str] | None:
    """The compiler from the first line of ``cc --version``."""
    first = cc_version.partition("\n")[0]
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)(?:\s+\d{8}.*|\s*\(.*|[^\d.]*)$", first)
    return ("clang" if "clang" in first else "gcc", found[1]) if found else None


def compiler_finding(kernel: tuple[str, str] | None, default: tuple[str, str] | None) -> Finding | None:
    """A finding if modules would be built by another compiler, or another major release, than the kernel was."""
    if kernel is None:
        return None
    name, version = kernel
    major = version.split(".")[0]
    evidence = {"kernel": " ".join(kernel), "default": " ".join(default) if default else None}
    if default and (default[0], default[1].split(".")[0]) == (name, major):
        return None
    seen = f"cc is {default[0]} {default[1]}" if default else "no C compiler is installed"
    return Finding(
        "kernel.compiler",
        WARNING,
        f"the kernel was built by {name} {version} and {seen}; a module may not build",
        evidence,
        f"install {name}-{major}",
    )


# --- Secure Boot ---------------------------------------------------------------------------------------------------

SECURE_BOOT_VARIABLE = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
SIGNING_KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der", "/etc/pki/akmods/certs/public_key.der")


def parse_sb_state(text: str) -> bool | None:
    """``mokutil --sb-state``: True if Secure Boot is enforced, None if the text does not say."""
    if re.search(r"SecureBoot enabled", text):
        return not re.search(r"validation is disabled", text, re.IGNORECASE)
    if re.search(r"SecureBoot disabled|doesn't support Secure Boot|not supported", text):
        return False
    return None


def secure_boot_variable(efivars: str = "/sys/firmware/efi/efivars") -> bool | None:
    """Secure Boot from the firmware's variable (four bytes of attributes, one of value); False without EFI."""
    if not Path(efivars).parent.is_dir():
        return False
    try:
        data = Path(efivars, SECURE_BOOT_VARIABLE).read_bytes()
    except FileNotFoundError:
        return False if Path(efivars).is_dir() and any(Path(efivars).iterdir()) else None
    except OSError:
        return None
    return len(data) == 5 and data[4] == 1


@dataclass(frozen=True)
class Certificate:
    """An enrolled key: the common name of its subject; serial number and key id as upper-case hex without colons."""

    name: str | None
    serial: str | None
    key_id: str | None


def _hex(text: str) -> str:
    return re.sub(r"[^0-9A-F]", "", text.upper())


def parse_enrolled(text: str) -> list[Certificate]:
    """Read ``mokutil --list-enrolled``."""
    certificates = []
    for block in re.split(r"^\[key \d+\]\s*$", text, flags=re.MULTILINE):
        subject = re.search(r"^\s*Subject:.*?CN\s*=\s*([^\n]+?)\s*$", block, re.MULTILINE)
        serial = re.search(r"Serial Number:\s*(?:\d+ \(0x([0-9a-fA-F]+)\)|((?:[0-9a-fA-F]{2}:)+[0-9a-fA-F]{2}))", block)
        key_id = re.search(r"Subject Key Identifier:\s*\n?\s*((?:[0-9A-Fa-f]{2}:)+[0-9A-Fa-f]{2})", block)
        if subject or serial or key_id:
            certificates.append(
                Certificate(
                    subject[1] if subject else None,
                    _hex(serial[1] or serial[2]) if serial else None,
                    _hex(key_id[1]) if key_id else None,
                )
            )
    return certificates


def parse_keyring(text: str) -> list[str]:
    """Descriptions of the X.509 keys in ``/proc/keys``: what the kernel trusts (and some it only knows)."""
    return re.findall(r" asymmetri (.*): [0-9a-f.]+: X509", text)


def parse_test_key(text: str) -> bool | None:
    """``mokutil --test-key FILE``: True if the key is enrolled, False if it is not, None if it does not say."""
    if re.search(r"is already enrolled|is already in (?:the )?(?:db|keyring|built)", text, re.IGNORECASE):
        return True
    return False if re.search(r"is not enrolled", text) else None


def signature_finding(
    enabled: bool | None,
    module: Module | None,
    enrolled: Iterable[Certificate],
    keyring: Iterable[str],
    signing_keys: Mapping[str, bool | None],
) -> Finding:
    """Whether the kernel will take the module under Secure Boot: a finding ``secure_boot.key``.

    ``signing_keys`` are the certificates that DKMS would sign with: file → enrolled or not.
    """
    evidence = {
        "enabled": enabled,
        "signer": module.signer if module else None,
        "sig_key": module.sig_key if module else None,
        "signing_keys": dict(signing_keys),
    }
    if not enabled:
        state = "off" if enabled is False else "unknown"
        return Finding("secure_boot.key", OK, f"Secure Boot is {state}", evidence)
    enrolled = list(enrolled)
    names = {certificate.name for certificate in enrolled if certificate.name}
    ids = {value for certificate in enrolled for value in (certificate.serial, certificate.key_id) if value}
    if module and module.version:
        signed = _hex(module.sig_key or "")
        trusted = any(signed and signed.lstrip("0") == known.lstrip("0") for known in ids)
        trusted = trusted or (module.signer is not None and (module.signer in names or module.signer in set(keyring)))
        if trusted:
            return Finding("secure_boot.key", OK, f"the module is signed by {module.signer}, a trusted key", evidence)
        by = f"signed by {module.signer!r}, a key that is not enrolled" if module.signer else "not signed"
        return Finding(
            "secure_boot.key",
            ERROR,
            f"Secure Boot is on and the {module.name} module on disk is {by}; the kernel will refuse it",
            evidence,
            "mokutil --import the signing key and confirm it at the console, or use the distribution's signed modules",
        )
    refused = sorted(path for path, known in signing_keys.items() if known is False)
    if refused:
        return Finding(
            "secure_boot.key",
            ERROR,
            f"Secure Boot is on and {refused[0]}, the key that DKMS signs with, is not enrolled",
            evidence,
            f"mokutil --import {refused[0]} and confirm it at the console, or use the distribution's signed modules",
        )
    return Finding("secure_boot.key", OK, "Secure Boot is on; no module that it would refuse was found", evidence)


# --- nouveau and initial RAM disks ---------------------------------------------------------------------------------

MODPROBE_DIRS = ("/etc/modprobe.d", "/lib/modprobe.d")
SESSION_DIRS = ("/run/modprobe.d",)


@dataclass(frozen=True)
class Nouveau:
    """``blocked_by``: files and kernel options that keep nouveau out; ``persistent`` if one of them survives a boot."""

    loaded: bool
    blocked_by: tuple[str, ...]
    persistent: bool
    console: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_BLOCKS_NOUVEAU = re.compile(r"^\s*(?:blacklist\s+nouveau|install\s+nouveau\s+\S*/(?:true|false))\b", re.MULTILINE)


def nouveau(
    proc: str = "/proc", lasting: Iterable[str] = MODPROBE_DIRS, session: Iterable[str] = SESSION_DIRS
) -> Nouveau:
    """Whether nouveau is loaded, drives the console, and is kept out of the next boot."""
    loaded = any(line.startswith("nouveau ") for line in _read(Path(proc, "modules")).splitlines())
    blocked, persistent = [], False
    for directory, lasts in (*((place, True) for place in lasting), *((place, False) for place in session)):
        for path in sorted(Path(directory).glob("*.conf")):
            if _BLOCKS_NOUVEAU.search(_read(path)):
                blocked.append(str(path))
                persistent = persistent or lasts
    for option in _read(Path(proc, "cmdline")).split():
        key, dummy, value = option.partition("=")
        if key in ("modprobe.blacklist", "rd.driver.blacklist", "module_blacklist") and "nouveau" in value.split(","):
            blocked.append(option)
            persistent = persistent or key != "rd.driver.blacklist"
    console = "nouveau" in _read(Path(proc, "fb"))
    return Nouveau(loaded, tuple(dict.fromkeys(blocked)), persistent, console)


def nouveau_finding(found: Nouveau) -> Finding:
    if found.loaded:
        console = " and drives the console, so unloading it can crash the kernel" if found.console else ""
        return Finding(
            "boot.nouveau",
            ERROR,
            f"nouveau is loaded{console}; the driver cannot take the GPUs",
            found.as_dict(),
            "block it in /etc/modprobe.d, rebuild the initial RAM disk and reboot"
            if not found.persistent
            else "it is blocked for the next boot already: rebuild the initial RAM disk and reboot",
        )
    if not found.persistent:
        return Finding(
            "boot.nouveau",
            WARNING,
            "nouveau is not loaded, but nothing that survives a reboot keeps it out",
            found.as_dict(),
            "write 'blacklist nouveau' to a file in /etc/modprobe.d and rebuild the initial RAM disk",
        )
    return Finding("boot.nouveau", OK, "nouveau is kept out", found.as_dict())


_INITRD_MODULE = re.compile(
    r"(?:^|\s)/?(?P<path>(?:usr/)?lib/modules/(?P<kernel>[^/\s]+)/\S*?/(?P<name>nvidia[\w-]*)\.ko(?:\.(?:xz|gz|zst))?)$"
)


def initrd_modules(listing: str) -> dict[str, str]:
    """NVIDIA modules in what ``lsinitramfs`` or ``lsinitrd`` prints: module name → path in the image."""
    found = {}
    for line in listing.splitlines():
        entry = _INITRD_MODULE.search(line.rstrip())
        if entry:
            found[entry["name"].replace("-", "_")] = entry["path"]
    return found


def initrd_image(kernel: str, boot: str = "/boot") -> str | None:
    """The initial RAM disk of ``kernel``, or None."""
    names = (f"initrd.img-{kernel}", f"initramfs-{kernel}.img", f"initrd-{kernel}")
    return next((str(Path(boot, name)) for name in names if Path(boot, name).exists()), None)


def list_initrd(run: Runner, image: str, timeout: float = 60) -> dict[str, str] | None:
    """NVIDIA modules inside ``image``, or None if no program here can list it."""
    for program in ("lsinitramfs", "lsinitrd"):
        done = run([program, image], timeout=timeout)
        if done.ok:
            return initrd_modules(done.stdout)
    return None


def initrd_finding(kernel: str, image: str, inside: Mapping[str, str], module: Module) -> Finding | None:
    """A finding if ``image`` carries an NVIDIA module that is older than the one on disk, or that is gone from disk.

    The image is written after the modules it carries, so one older than the module on disk carries another module.
    """
    if not inside:
        return None
    evidence = {"kernel": kernel, "image": image, "modules": dict(inside), "module_on_disk": module.version}
    stale = module.filename is None
    if module.filename is not None:
        try:
            stale = os.stat(image).st_mtime < os.stat(module.filename).st_mtime  # noqa: PTH116
        except OSError:
            return None
    if not stale:
        return None
    return Finding(
        "boot.initrd",
        ERROR,
        f"{image} carries an NVIDIA module from before {module.version or 'the modules were removed'} "
        f"was installed; the next boot loads the old one",
        evidence,
        f"update-initramfs -u -k {kernel} (Debian, Ubuntu) or dracut --force --kver {kernel}",
    )


# --- Reboot, boot id, space ----------------------------------------------------------------------------------------


def host_name(proc: str = "/proc") -> str:
    """The name the kernel has for this machine."""
    return _read(Path(proc, "sys/kernel/hostname")).strip()


def boot_id(proc: str = "/proc") -> str | None:
    """The kernel's random id of this boot: it changes with a reboot and with nothing else."""
    return _read(Path(proc, "sys/kernel/random/boot_id")).strip() or None


def boot_time(proc: str = "/proc") -> float | None:
    """When the kernel started, in Unix seconds."""
    found = re.search(r"^btime (\d+)$", _read(Path(proc, "stat")), re.MULTILINE)
    return float(found[1]) if found else None


def reboot_reasons(run: Runner, root: str = "/run", timeout: float = 60) -> list[str]:
    """Why the distribution wants a reboot: Debian's mark with its packages, dnf's or zypper's own answer."""
    reasons = []
    if Path(root, "reboot-required").exists():
        packages = sorted(set(_read(Path(root, "reboot-required.pkgs")).split()))
        reasons.append("reboot-required" + (f": {', '.join(packages)}" if packages else ""))
    for argv, meaning in ((["needs-restarting", "-r"], 1), (["zypper", "--non-interactive", "needs-rebooting"], 102)):
        done = run(argv, timeout=timeout)
        if done.rc == meaning and not done.timed_out:
            changed = re.findall(r"^\s+\* (\S+)", done.stdout, re.MULTILINE)
            reasons.append(argv[0] + (f": {', '.join(changed)}" if changed else ""))
    return reasons


@dataclass(frozen=True)
class Space:
    """Free bytes for root on the file system that holds ``path``, and what an upgrade may need there."""

    path: str
    device: int
    free: int
    needed: int


SPACE_PATHS = ("/", "/boot", "/var", "/var/lib/dkms", "/lib/modules")
WRITTEN_PATHS = ("/usr", "/var", "/lib/modules")
STATE_NEEDED = 16 * MIB
_NEEDED = {"/": 2048, "/var": 2048, "/var/lib/dkms": 512, "/lib/modules": 512}


def space(boot: str = "/boot", paths: Iterable[str] = SPACE_PATHS) -> list[Space]:
    """Free space where a driver installation writes.

    /boot needs one initial RAM disk that is written beside the old one and may be larger; the other figures are room
    for packages of about 0.5 GiB, unpacked, and one build.
    """
    images = [path for pattern in ("initrd*", "initramfs*") for path in Path(boot).glob(pattern) if path.is_file()]
    largest = max((path.stat().st_size for path in images), default=0)
    needs = {boot: largest + INITRD_MARGIN}
    found = []
    for path in paths:
        existing = _existing(path)
        about = os.statvfs(existing)
        needed = needs.get(path, _NEEDED.get(path, 0) * MIB)
        found.append(Space(path, existing.stat().st_dev, about.f_bavail * about.f_frsize, needed))
    return found


def state_space(state_dir: str) -> Space:
    """Free space for the journal and the lock of the node, without which nothing may be touched."""
    existing = _existing(state_dir)
    about = os.statvfs(existing)
    return Space(state_dir, existing.stat().st_dev, about.f_bavail * about.f_frsize, STATE_NEEDED)


def _existing(path: str) -> Path:
    existing = Path(path)
    while not existing.exists():
        existing = existing.parent
    return existing


def read_only_findings(paths: Iterable[str]) -> list[Finding]:
    """One error per file system that is mounted read-only, as the kernel does with one that it finds damaged."""
    found: dict[int, Finding] = {}
    for path in paths:
        existing = _existing(path)
        if os.statvfs(existing).f_flag & os.ST_RDONLY:
            found.setdefault(
                existing.stat().st_dev,
                Finding(
                    "boot.read_only",
                    ERROR,
                    f"{path} is read-only, an upgrade writes there",
                    {"path": path},
                    f"findmnt --target {path}; journalctl -k -b | grep -i -e remount -e 'I/O error'",
                ),
            )
    return list(found.values())


def space_findings(spaces: Iterable[Space]) -> list[Finding]:
    """One error per file system that has less than is needed for any one of its paths."""
    found: dict[int, Finding] = {}
    for item in spaces:
        if item.free >= item.needed or item.device in found:
            continue
        found[item.device] = Finding(
            "boot.space",
            ERROR,
            f"{item.path} has {item.free // MIB} MiB free, an upgrade may need {item.needed // MIB} MiB there",
            {"path": item.path, "free": item.free, "needed": item.needed},
            "remove old kernels (apt-get autoremove --purge, dnf remove --oldinstallonly)"
            if item.path == "/boot"
            else f"make room on the file system of {item.path}",
        )
    return list(found.values())
