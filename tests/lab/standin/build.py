# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the stand-in NVIDIA driver and its Debian packages; print the folder that holds repo/, a flat apt repository.

Everything is compiled here, against the headers of the kernel in the labs' image: a lab machine needs no compiler.
The result lies in the cache, keyed by these sources, the kernel and the compiler; a finished one is only looked up.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import hashlib
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parent
VERSIONS = ("535.183.01", "550.90.07", "560.35.03")
BROKEN = {"560.35.03"}
MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm")
GDRDRV_VERSION = "2.4.1"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
# Packages a real branch has besides those the stand-in needs; they only carry the payload of --payload-mb.
PAYLOAD_ONLY = (
    "nvidia-kernel-source",
    "libnvidia-gl",
    "libnvidia-decode",
    "libnvidia-encode",
    "libnvidia-fbc1",
    "libnvidia-extra",
)
MAINTAINER = "gpufleet.driver contributors <noreply@example.invalid>"


class BuildError(Exception):
    """What went wrong, and what to do about it."""


def run(*argv: str | Path, cwd: Path | None = None, timeout: int = 900) -> str:
    """Standard output of a command that must succeed; its standard error goes into the error otherwise."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment(), check=False
        )
    except FileNotFoundError:
        raise BuildError(f"{words[0]} is missing: run tests/setup packages") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{' '.join(words)} did not end within {timeout} s") from None
    if done.returncode:
        raise BuildError(
            f"{' '.join(words)} failed with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "SOURCE_DATE_EPOCH": "1700000000"}


def say(text: str) -> None:
    print(f"standin: {text}", file=sys.stderr, flush=True)


# --- kernel headers --------------------------------------------------------------------------------------------------


def image_kernel() -> str:
    """Kernel version of the labs' image, which is made first where it is not there yet."""
    done = subprocess.run(
        [HERE.parent / "image" / "build"], stdout=subprocess.PIPE, text=True, timeout=3600, check=False
    )
    if done.returncode:
        raise BuildError(
            "the labs' image could not be made (see above), so its kernel is not known; or name one: --abi VERSION"
        )
    return (Path(done.stdout.strip().splitlines()[-1]) / "kernel").read_text().strip()


def kernel_headers(cache: Path, abi: str) -> Path:
    """Folder to give to `make -C`: the unpacked headers of that kernel, downloaded once."""
    folder = cache / f"headers-{abi}"
    headers = folder / "usr/src" / f"linux-headers-{abi}"
    if (folder / ".complete").exists():
        return headers
    say(f"fetching the headers of kernel {abi}")
    shutil.rmtree(folder, ignore_errors=True)
    downloads = folder / "downloads"
    downloads.mkdir(parents=True)
    needed = run("apt-cache", "depends", "--no-recommends", "--no-suggests", f"linux-headers-{abi}").split()
    names = [word for word in dict.fromkeys(needed) if word.startswith("linux-")]
    if not names:
        raise BuildError(
            f"the package mirror has no headers for kernel {abi}: run apt-get update; if that kernel is gone from it, "
            f"remove the labs' image from {cache} so that it is made anew"
        )
    run("apt-get", "-q", "download", *names, cwd=downloads)
    for package in sorted(downloads.glob("*.deb")):
        run("dpkg-deb", "-x", package, folder)
    shutil.rmtree(downloads)
    makefile = headers / "Makefile"  # holds the one absolute path of the headers
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{folder}/usr/src/"))
    (folder / ".complete").touch()
    return headers


# --- compiling --------------------------------------------------------------------------------------------------------


def compile_modules(headers: Path, version: str, work: Path) -> Path:
    """Folder with the stripped modules of one version."""
    folder = work / f"kernel-{version}"
    shutil.copytree(HERE / "kernel", folder)
    broken = ["NVBROKEN=1"] if version in BROKEN else []
    run("make", "-C", headers, f"M={folder}", f"NVV={version}", *broken, "modules")
    for module in folder.glob("*.ko"):
        run("strip", "--strip-debug", module)
    return folder


def compile_userland(version: str, work: Path) -> Path:
    """Folder with libcuda.so, libnvidia-ml.so, libnvidia-cfg.so and the tools of one version."""
    folder = work / f"userland-{version}"
    folder.mkdir()
    sources = HERE / "userland"
    common = ("gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f'-DSTANDIN_VERSION="{version}"')
    shared = (*common, "-fPIC", "-shared", "-Wl,-Bsymbolic", "-s")
    for name, code in (("cuda", "cuda.c"), ("nvidia-ml", "nvml.c")):
        run(
            *shared,
            f"-Wl,-soname,lib{name}.so.1",
            "-o",
            folder / f"lib{name}.so",
            sources / code,
            sources / "standin.c",
        )
    run(*shared, "-Wl,-soname,libnvidia-cfg.so.1", "-o", folder / "libnvidia-cfg.so", sources / "standin.c")
    run(*common, "-s", "-o", folder / "nvidia-smi", sources / "smi.c")
    for name, flags in (("nvidia-persistenced", ()), ("nv-fabricmanager", ("-DFABRIC",))):
        run(*common, *flags, "-s", "-o", folder / name, sources / "daemon.c", sources / "standin.c")
    shutil.copy(sources / "nvidia-modprobe", folder / "nvidia-modprobe")
    return folder


# --- packages ---------------------------------------------------------------------------------------------------------


@dataclass
class Package:
    """One binary package: control fields, files by path in it, maintainer scripts from packages/<scripts>/."""

    name: str
    version: str
    description: str
    depends: list[str] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path | str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    scripts: str | None = None
    control: dict[str, str] = field(default_factory=dict)


def one_of(virtual: str, *also: str) -> dict[str, str]:
    """Fields by which only one branch's package of a kind can be installed, as NVIDIA's packages in Ubuntu do it."""
    return {"Provides": ", ".join((virtual, *also)), "Conflicts": virtual, "Replaces": virtual}


def driver_packages(version: str, abi: str, modules: Path, userland: Path) -> list[Package]:
    branch = version.split(".")[0]
    full = f"{version}-0ubuntu0.22.04.1"
    files = HERE / "packages"

    def named(stem: str) -> str:
        return f"{stem}-{branch}-server"

    def exactly(*stems: str) -> list[str]:
        return [f"{named(stem)} (= {full})" for stem in stems]

    compute = Package(named("libnvidia-compute"), full, "NVIDIA libcompute package (stand-in)")
    compute.fields = one_of("libnvidia-compute", "libcuda1", "libcuda.so.1", "libnvidia-ml1", "libnvidia-ml.so.1")
    compute.control = {"triggers": "activate-noawait ldconfig\n"}
    cfg = Package(named("libnvidia-cfg1"), full, "NVIDIA binary OpenGL/GLX configuration library (stand-in)")
    cfg.fields = one_of("libnvidia-cfg1-any", "libnvidia-cfg.so.1")
    cfg.control = dict(compute.control)
    for package, libraries in ((compute, ("libcuda", "libnvidia-ml")), (cfg, ("libnvidia-cfg",))):
        for library in libraries:
            package.files[f"{LIBRARIES}/{library}.so.{version}"] = userland / f"{library}.so"
            package.links[f"{LIBRARIES}/{library}.so.1"] = f"{library}.so.{version}"

    utils = Package(
        named("nvidia-utils"), full, "NVIDIA driver support binaries (stand-in)", exactly("libnvidia-compute")
    )
    utils.fields = one_of("nvidia-utils", "nvidia-smi")
    for tool in ("nvidia-smi", "nvidia-modprobe"):
        utils.files[f"usr/bin/{tool}"] = userland / tool

    compute_utils = Package(named("nvidia-compute-utils"), full, "NVIDIA compute utilities (stand-in)")
    compute_utils.depends = exactly("libnvidia-cfg1", "nvidia-utils")
    compute_utils.fields = one_of("nvidia-compute-utils", "nvidia-persistenced")
    compute_utils.scripts = "nvidia-compute-utils"
    compute_utils.files = {
        "usr/bin/nvidia-persistenced": userland / "nvidia-persistenced",
        "usr/lib/systemd/system/nvidia-persistenced.service": files
        / "nvidia-compute-utils/nvidia-persistenced.service",
    }

    common = Package(named("nvidia-kernel-common"), full, "Shared files used with the kernel module (stand-in)")
    common.fields = one_of("nvidia-kernel-common")
    common.files = {
        "usr/lib/udev/rules.d/71-nvidia.rules": files / "nvidia-kernel-common/71-nvidia.rules",
        "usr/lib/modules-load.d/nvidia-standin.conf": files / "nvidia-kernel-common/modules-load.conf",
        "usr/lib/modprobe.d/nvidia-graphics-drivers.conf": files / "nvidia-kernel-common/modprobe.conf",
        f"usr/lib/firmware/nvidia/{version}/gsp_ga10x.bin": f"stand-in for the GSP firmware of {version}\n",
    }

    dkms = Package(named("nvidia-dkms"), full, "NVIDIA DKMS package (stand-in: ships built modules)")
    dkms.depends = [*exactly("nvidia-kernel-common"), "kmod"]
    dkms.fields = one_of("nvidia-dkms-kernel")
    dkms.scripts = "nvidia-dkms"
    dkms.files = {f"usr/lib/nvidia-standin/{version}/{abi}/{name}.ko": modules / f"{name}.ko" for name in MODULES}

    driver = Package(named("nvidia-driver"), full, "NVIDIA Server Driver metapackage (stand-in)")
    driver.depends = exactly(
        "nvidia-dkms",
        "nvidia-kernel-common",
        "libnvidia-compute",
        "libnvidia-cfg1",
        "nvidia-utils",
        "nvidia-compute-utils",
    )
    driver.fields = one_of("nvidia-driver-binary", "nvidia-driver")

    fabric = Package(
        f"nvidia-fabricmanager-{branch}", f"{version}-1", "Fabric Manager for NVSwitch based systems (stand-in)"
    )
    fabric.fields = one_of("nvidia-fabricmanager")
    fabric.scripts = "nvidia-fabricmanager"
    fabric.files = {
        "usr/bin/nv-fabricmanager": userland / "nv-fabricmanager",
        "usr/lib/systemd/system/nvidia-fabricmanager.service": files
        / "nvidia-fabricmanager/nvidia-fabricmanager.service",
        "usr/share/nvidia/nvswitch/fabricmanager.cfg": "LOG_LEVEL=4\nDAEMONIZE=1\nFABRIC_MODE=0\n",
    }
    return [driver, dkms, common, compute, cfg, utils, compute_utils, fabric]


def gdrdrv_package(abi: str, modules: Path) -> Package:
    package = Package(
        "gdrdrv-dkms", f"{GDRDRV_VERSION}-1", "GDRCopy kernel module (stand-in)", ["kmod"], scripts="gdrdrv-dkms"
    )
    package.files = {f"usr/lib/nvidia-standin/gdrdrv/{abi}/gdrdrv.ko": modules / "gdrdrv.ko"}
    return package


def add_payload(packages: list[Package], megabytes: int, work: Path) -> None:
    """Spread incompressible bytes over one branch's packages (and the further ones a real branch has)."""
    driver = packages[0]
    branch = driver.name.split("-")[2]
    for stem in PAYLOAD_ONLY:
        name = f"{stem}-{branch}-server"
        packages.append(Package(name, driver.version, f"{stem} (stand-in: payload only)", fields=one_of(f"{stem}-any")))
        driver.depends.append(f"{name} (= {driver.version})")
    carriers = [package for package in packages if package is not driver and "fabricmanager" not in package.name]
    for package in carriers:
        blob = work / f"{package.name}.bin"
        source = random.Random(package.name)
        with blob.open("wb") as out:
            left = megabytes * 1_000_000 // len(carriers)
            while left > 0:
                piece = min(left, 1 << 22)
                out.write(source.randbytes(piece))
                left -= piece
        package.files[f"usr/lib/nvidia-standin/payload/{package.name}.bin"] = blob


def write_package(package: Package, abi: str, work: Path, repo: Path) -> None:
    """Lay the package out and pack it."""
    root = work / f"{package.name}_{package.version}"
    meta = root / "DEBIAN"
    meta.mkdir(parents=True)
    for name, content in package.files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            target.write_text(content)
        target.chmod(0o755 if name.startswith("usr/bin/") else 0o644)
    for name, points_to in package.links.items():
        (root / name).symlink_to(points_to)
    values = {"VERSION": package.version.split("-")[0], "ABI": abi}
    for script in ("preinst", "postinst", "prerm", "postrm"):
        source = HERE / "packages" / str(package.scripts) / script
        if source.exists():
            (meta / script).write_text(At(source.read_text()).substitute(values))
            (meta / script).chmod(0o755)
    for name, text in package.control.items():
        (meta / name).write_text(text)
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": "amd64",
        "Section": "restricted/kernel",
        "Priority": "optional",
        "Maintainer": MAINTAINER,
        **({"Depends": ", ".join(package.depends)} if package.depends else {}),
        **package.fields,
        "Description": package.description,
    }
    (meta / "control").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    run("dpkg-deb", "--root-owner-group", "-Zzstd", "-z1", "--build", root, repo)
    shutil.rmtree(root)


class At(Template):
    """Text with @NAME@ to fill in; a shell script's own $ signs stay."""

    pattern = r"(?P<escaped>@@)|@(?P<named>[A-Z]+)@|(?P<braced>(?!))|(?P<invalid>(?!))"


def write_index(repo: Path) -> None:
    """Packages (every version listed), Packages.gz and an unsigned Release: `deb [trusted=yes] http://... ./`."""
    packages = run("dpkg-scanpackages", "--multiversion", ".", cwd=repo).encode()
    contents = {"Packages": packages, "Packages.gz": gzip.compress(packages, mtime=0)}
    lines = ["Origin: gpufleet-standin", "Label: gpufleet-standin", "Suite: lab", "Architectures: amd64", "SHA256:"]
    for name, data in contents.items():
        (repo / name).write_bytes(data)
        lines.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}")
    (repo / "Release").write_text("\n".join(lines) + "\n")


# --- the whole --------------------------------------------------------------------------------------------------------


def recipe_key(abi: str, payload: int) -> str:
    digest = hashlib.sha256(f"{abi} {payload} {run('gcc', '--version').splitlines()[0]}".encode())
    for path in sorted(HERE.rglob("*")):
        if path.is_file() and path.suffix != ".md" and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(HERE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def build(abi: str, payload: int) -> Path:
    """The finished folder for that kernel and payload (MB a branch, 0 for none)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpufleet"
    cache.mkdir(parents=True, exist_ok=True)
    finished = cache / f"standin-{recipe_key(abi, payload)}"
    if (finished / "repo/Packages").exists():
        os.utime(finished)
        return finished
    with (cache / "standin.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (finished / "repo/Packages").exists():
            return finished
        headers = kernel_headers(cache, abi)
        partial = cache / f"{finished.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        repo, work = partial / "repo", partial / "work"
        repo.mkdir(parents=True)
        work.mkdir()
        for version in VERSIONS:
            say(f"building {version} for kernel {abi}")
            modules = compile_modules(headers, version, work)
            packages = driver_packages(version, abi, modules, compile_userland(version, work))
            if version == VERSIONS[0]:
                packages.append(gdrdrv_package(abi, modules))
            if payload:
                add_payload(packages, payload, work)
            for package in packages:
                write_package(package, abi, work, repo)
        shutil.rmtree(work)
        (partial / "abi").write_text(f"{abi}\n")
        write_index(repo)
        partial.rename(finished)
        os.utime(finished)
        subprocess.run([HERE.parent / "prune", "standin"], timeout=300, check=True)
    return finished


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/lab/standin/build", description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "--abi", help="kernel to build the modules for, e.g. 6.1.0-57-cloud-amd64 (default: the labs' image's)"
    )
    parser.add_argument(
        "--payload-mb",
        type=int,
        default=0,
        metavar="M",
        help="make each branch's packages about M MB in all, incompressible",
    )
    options = parser.parse_args()
    os.umask(0o022)
    try:
        print(build(options.abi or image_kernel(), options.payload_mb))
    except BuildError as error:
        print(f"standin: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
