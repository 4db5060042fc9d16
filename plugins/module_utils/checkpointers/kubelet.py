# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Have a node's kubelet save a container of a pod, and bring it back as an image where the runtime still can.

The kubelet always leaves the container running, keeps its archive on the node for ever, and says 404 for a container
that it does not know as for a checkpoint API that is off. There is no API to restore: the archive becomes an image,
whose annotation makes containerd and CRI-O restore instead of start, and whoever makes the pod names it. Sources:
kubernetes.io/docs/reference/node/kubelet-checkpoint-api, internal/cri/server of containerd, server of CRI-O.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_GONE,
    SOURCE_RUNNING,
    Capabilities,
    CheckpointError,
    Estimate,
    Reason,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import short
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.left_running import (
    Answer,
    LeftRunning,
    speak,
)

ARCHIVE = "checkpoint.tar"
CONTAINERD_MARK = "org.criu.checkpoint.container.name"
CRIO_MARK = "io.kubernetes.cri-o.annotations.checkpoint.name"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_GATE = "404: it knows no such container, or its ContainerCheckpoint feature gate is off"
_SWITCH = re.compile(r"^\s*enable_experimental_restore_via_create\s*=\s*true\b", re.MULTILINE)


def cannot_restore(runtime: str, config: str) -> str:
    """Why a container runtime does not restore from an image; empty if it does.

    ``runtime`` is its name and version as the node tells them (``containerd://2.1.9``), ``config`` its configuration.
    """
    found = re.fullmatch(r"(containerd|cri-o)://v?(\d+)\.(\d+)\.(\d+).*", runtime.strip())
    if not found:
        return f"the runtime {runtime!r} is not known to restore from an image"
    version = tuple(int(part) for part in found.groups()[1:])
    if found[1] == "cri-o":
        off = re.search(r"^\s*enable_criu_support\s*=\s*false\b", config, re.MULTILINE)
        return f"{runtime} has enable_criu_support = false" if off else ""
    if version < (2, 1, 0):
        return f"{runtime} restores no container; containerd does from 2.1 on"
    if version >= (2, 4, 0):
        return f"{runtime} restores no container: containerd 2.4 took that away"
    switched = version >= (2, 3, 4) or (2, 2, 7) <= version < (2, 3, 0)
    if switched and not _SWITCH.search(config):
        return f"{runtime} restores only with enable_experimental_restore_via_create = true"
    return ""


def image_of(archive: Path, container: str, reference: str, to: Path) -> None:
    """Write an OCI image (one tar file) whose only layer is a checkpoint archive, named ``reference``.

    :raises OSError: if it cannot be written.
    """
    digest = _digest(archive)
    size = archive.stat().st_size
    marks = {CONTAINERD_MARK: container, CRIO_MARK: container}
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    config = _encoded(
        {"architecture": machine, "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": [digest]}}
    )
    kind = "application/vnd.oci.image"
    manifest = _encoded(
        {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": {"mediaType": f"{kind}.config.v1+json", **_about(config)},
            "layers": [{"mediaType": f"{kind}.layer.v1.tar", "digest": digest, "size": size}],
            "annotations": marks,
        }
    )
    named = {**marks, "io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference}
    index = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.index.v1+json",
        "manifests": [{"mediaType": f"{kind}.manifest.v1+json", **_about(manifest), "annotations": named}],
        "annotations": marks,
    }
    with tarfile.open(to, "w") as image:
        _add(image, "oci-layout", _encoded({"imageLayoutVersion": "1.0.0"}))
        _add(image, "index.json", _encoded(index))
        for blob in (config, manifest):
            _add(image, f"blobs/sha256/{_about(blob)['digest'][7:]}", blob)
        entry = tarfile.TarInfo(f"blobs/sha256/{digest[7:]}")
        entry.size = size
        with archive.open("rb") as stream:
            image.addfile(entry, stream)
    to.chmod(0o600)


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _about(data: bytes) -> dict[str, Any]:
    return {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _add(image: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    image.addfile(entry, io.BytesIO(data))


class Kubelet(LeftRunning):
    """``save.kubelet``: ``namespace``, ``pod``, ``container``; the kubelet's ``url``, ``ca``, and ``token_file`` or
    ``cert`` and ``key``; ``folder``, its archives; ``runtime`` and ``runtime_config``, for a restore."""

    name = "kubelet"
    format = "kubelet/1"
    capabilities = Capabilities(
        keeps_source_frozen=False,
        moves_nodes=True,
        survives_driver_change=False,
        multi_process=True,
        multi_gpu=False,
        needs_launch_time_setup=False,
    )
    answer: Answer = staticmethod(speak)
    comes_later = True

    def probe(self) -> list[Reason]:
        """Whether a kubelet saves is known only when it is asked to: it has no call that tells."""
        return []

    def check(self, work: Work) -> Sequence[Reason]:
        options = self._options(work)
        wrong = [
            name for name in ("namespace", "pod", "container") if not _NAME.fullmatch(str(options.get(name) or ""))
        ]
        if wrong or not str(options.get("url") or "").startswith("https://"):
            observed = f"{', '.join(wrong) or 'url'} {options.get(wrong[0]) if wrong else options.get('url')!r}"
            expected = "namespace, pod and container, and the kubelet's https url"
            return [self._failed(work, "policy", "check", observed, expected, "see docs/checkpoint.md").reason]
        return super().check(work)

    def estimate(self, work: Work) -> Estimate:
        """The kubelet tells no sizes."""
        return Estimate(0, 0, 0.0)

    def _save(self, work: Work, staged: Path) -> Mapping[str, Any]:
        options = self._options(work)
        seconds = int(work.save.get("deadline") or 300)
        path = "/".join(("/checkpoint", options["namespace"], options["pod"], options["container"]))
        url = f"{str(options['url']).rstrip('/')}{path}?timeout={seconds}"
        credentials = {name: options.get(name) for name in ("token_file", "ca", "cert", "key")}
        try:
            status, text = self.answer("POST", url, None, timeout=seconds + 30.0, **credentials)
        except OSError as exc:
            raise self._wrong(work, "dump_failed", str(exc), "an answer of the kubelet") from exc
        if status in (401, 403):
            observed = f"HTTP {status}: {text[:200]}"
            raise self._wrong(work, "unsupported_backend", observed, "leave for nodes/checkpoint (RBAC)")
        if status == 404:
            raise self._wrong(work, "unsupported_feature:kubelet", _GATE, "HTTP 200")
        if status != 200:
            raise self._wrong(work, "dump_failed", f"HTTP {status}: {text[:300]}", "HTTP 200")
        archive = self._archive(work, text, Path(options.get("folder") or "/var/lib/kubelet/checkpoints"))
        shutil.move(str(archive), staged / ARCHIVE)  # nobody else ever removes it
        images = self._images(work, staged / ARCHIVE)
        return {
            "namespace": options["namespace"],
            "pod": options["pod"],
            "container": options["container"],
            "processes": images,
        }

    def _archive(self, work: Work, text: str, folder: Path) -> Path:
        """The one archive that an answer names; it must lie where the kubelet keeps them."""
        try:
            (name,) = json.loads(text)["items"]
            found = Path(str(name))
        except (ValueError, KeyError, TypeError) as exc:
            raise self._wrong(work, "dump_failed", f"the answer {text[:200]!r}", 'one path as "items"') from exc
        if found.parent != folder or found.is_symlink() or not found.is_file():
            raise self._wrong(
                work, "dump_failed", f"{found}, which is no file in {folder}", "an archive", f"ls {folder}"
            )
        return found

    def _images(self, work: Work, archive: Path) -> int:
        """How many processes an archive holds; :raises CheckpointError: if none, or if it is cut off."""
        try:
            with tarfile.open(archive) as content:
                cores = [name for name in content.getnames() if re.search(r"checkpoint/core-\d+\.img$", name)]
        except (OSError, tarfile.TarError) as exc:
            raise self._wrong(work, "dump_failed", f"{archive.name}: {exc}", "a whole archive") from exc
        if not cores:
            raise self._wrong(work, "dump_failed", f"{archive.name} holds no process", "images of CRIU")
        return len(cores)

    def _bring_back(self, work: Work, manifest: Mapping[str, Any], place: Path) -> Mapping[str, Any]:
        """The image, in containerd's or podman's store on this node, for the pod that whoever makes it names it in."""
        options, saved = self._options(work), manifest["saved"]
        runtime = str(options.get("runtime") or "")
        try:
            config = Path(options.get("runtime_config") or "/etc/containerd/config.toml").read_text(errors="replace")
        except OSError:
            config = ""
        trouble = cannot_restore(runtime, config)
        if trouble:
            look = "kubectl get node -o jsonpath={.status.nodeInfo.containerRuntimeVersion}"
            raise self._failed(
                work, "unsupported_feature:restore", "restore", trouble, "a runtime that restores", look, SOURCE_GONE
            )
        reference = f"localhost/gpufleet/{manifest['id'].lower()}:restore"
        image = place.with_name(f".image-{manifest['id']}")
        try:
            image_of(place / ARCHIVE, saved["container"], reference, image)
            argv = ["ctr", "--namespace", "k8s.io", "images", "import", str(image)]
            if runtime.startswith("cri-o"):
                argv = ["podman", "load", "--input", str(image)]
            done = self._run(argv, timeout=self._limits.by_size(manifest["total"]))
        except OSError as exc:
            raise self._failed(
                work, "restore_failed", "image", str(exc), "an image", f"df -h {place.parent}", SOURCE_GONE
            ) from exc
        finally:
            image.unlink(missing_ok=True)
        if not done.ok:
            raise self._failed(work, "restore_failed", "image", short(done), "rc 0", argv[0], SOURCE_GONE)
        return {"image": reference}

    def _forget(self, work: Work, manifest: Mapping[str, Any]) -> None:
        """The archive was moved into the save, so it goes with that."""

    def _wrong(self, work: Work, reason: str, observed: str, expected: str, look: str = "") -> CheckpointError:
        look = look or f"journalctl -u kubelet; kubectl describe pod {self._options(work).get('pod')}"
        return self._failed(work, reason, "dump", observed, expected, look, SOURCE_RUNNING)
