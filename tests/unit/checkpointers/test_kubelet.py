# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kubelet's checkpoint API by contract, over real HTTPS with a certificate that is checked; the kubelet and the
runtime are stood in for."""

from __future__ import annotations

import hashlib
import io
import json
import ssl
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, left_running, suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import CheckpointError, Work
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.kubelet import (
    Kubelet,
    cannot_restore,
    image_of,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.host import nvml

KEY = {"gpu_model": "NVIDIA A100", "driver": "550.90.07"}
"""What the node says of itself; there is none here."""


class Server:
    """POST /checkpoint/NAMESPACE/POD/CONTAINER, as kubernetes.io documents it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoints"
        self.folder.mkdir()
        self.ca = folder / "ca.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=node1",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", self.ca],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        self.asked: list[str] = []
        self.status, self.answer = 200, ""
        self.content = {"checkpoint/core-1.img": b"core", "checkpoint/pages-1.img": b"m" * 1000, "config.dump": b"{}"}
        self.cut = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.asked.append(f"{self.path} {self.headers.get('Authorization')}")
                body = (server.answer or server.save()).encode()
                self.send_response(server.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *dummy: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca, folder / "key.pem")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def save(self) -> str:
        path = self.folder / f"checkpoint-llama_ml-engine-{len(self.asked)}.tar"
        with tarfile.open(path, "w") as archive:
            for name, data in self.content.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        if self.cut:
            path.write_bytes(path.read_bytes()[: self.cut])
        return json.dumps({"items": [str(path)]})


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("kubelet"))
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def kubelet(https: Server) -> Server:
    https.status, https.answer, https.cut = 200, "", 0
    https.asked.clear()
    return https


def test_a_token_goes_to_no_other_server(tmp_path: Path) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{server.server_port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *dummy: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    (tmp_path / "token").write_text("t0ken\n")
    try:
        url = f"http://127.0.0.1:{server.server_port}/first"
        status, dummy = left_running.speak("GET", url, token_file=str(tmp_path / "token"))
    finally:
        server.shutdown()
        server.server_close()
    assert (status, asked) == (302, ["/first"])


class Node:
    def __init__(self, tmp_path: Path, kubelet: Server) -> None:
        (tmp_path / "token").write_text("t0ken\n")
        self.folder = tmp_path
        self.commands: list[list[str]] = []
        self.imported: dict[str, bytes] = {}
        self.rc = 0
        options = {
            "namespace": "ml", "pod": "llama", "container": "engine", "url": kubelet.url, "ca": str(kubelet.ca),
            "token_file": str(tmp_path / "token"), "folder": str(kubelet.folder), "runtime": "containerd://2.1.9",
        }  # fmt: skip
        self.work = Work("llama", save={"kubelet": options, "may_repeat": True, "deadline": 60, "key": KEY})

    def but(self, **options: Any) -> Work:
        return replace(self.work, save={**self.work.save, "kubelet": {**self.work.save["kubelet"], **options}})

    def run(self, argv: Sequence[str], **dummy: Any) -> Completed:
        self.commands.append(list(argv))
        if argv[0] in ("ctr", "podman"):
            with tarfile.open(argv[-1]) as image:
                self.imported = {one.name: image.extractfile(one).read() for one in image}  # type: ignore[union-attr]
        return Completed(tuple(argv), self.rc, "", "no space" if self.rc else "", 0.1)

    def backend(self) -> Kubelet:
        return Kubelet(
            self.run,
            str(self.folder / "state"),
            str(self.folder / "store"),
            node="node1",
            limits=Limits(settle=0),
            observe=lambda: nvml.Report("ok", "", None, None, None, None, []),
        )

    @property
    def saves(self) -> list[str]:
        return [path.name for path in (self.folder / "store").iterdir()]


@pytest.fixture
def node(tmp_path: Path, kubelet: Server) -> Node:
    return Node(tmp_path, kubelet)


def test_a_container_is_saved_and_its_image_made(node: Node, kubelet: Server) -> None:
    captured = node.backend().capture(node.work)
    assert kubelet.asked == ["/checkpoint/ml/llama/engine?timeout=60 Bearer t0ken"]
    assert captured.source == "running"
    assert list(kubelet.folder.iterdir()) == []  # the kubelet itself never removes one
    assert artefact.verify(node.folder / "store", captured.artefact) == []
    evidence = node.backend().restore(node.work, captured.artefact)
    assert evidence["image"].startswith("localhost/gpufleet/llama-")
    assert node.commands[-1][:5] == ["ctr", "--namespace", "k8s.io", "images", "import"]
    index = json.loads(node.imported["index.json"])
    (about,) = index["manifests"]
    assert about["annotations"]["io.containerd.image.name"] == evidence["image"]
    assert about["annotations"]["org.criu.checkpoint.container.name"] == "engine"
    manifest = json.loads(node.imported[f"blobs/sha256/{about['digest'][7:]}"])
    (layer,) = manifest["layers"]
    data = node.imported[f"blobs/sha256/{layer['digest'][7:]}"]
    assert hashlib.sha256(data).hexdigest() == layer["digest"][7:]
    with tarfile.open(fileobj=io.BytesIO(data)) as content:
        assert content.getnames()[0] == "checkpoint/core-1.img"
    for name, blob in node.imported.items():
        if name.startswith("blobs/"):
            assert hashlib.sha256(blob).hexdigest() == name.rpartition("/")[2]
    assert sorted(node.saves) == [captured.artefact]  # the image is no longer there
    assert node.backend().verify(node.work) == {"progress": []}
    assert node.backend().discard(node.work, captured.artefact)
    assert node.saves == []


ANSWERS: dict[str, tuple[int, str, str]] = {
    "not-allowed": (
        403,
        "Forbidden (user=x, verb=create, resource=nodes, subresource=checkpoint)",
        "unsupported_backend",
    ),
    "not-logged-in": (401, "Unauthorized", "unsupported_backend"),
    "unknown-or-off": (404, "404 page not found", "unsupported_feature:kubelet"),
    "runtime-says-no": (500, "checkpointing of ml/llama/engine failed (CRIU binary not found)", "dump_failed"),
    "no-json": (200, "ok", "dump_failed"),
    "no-items": (200, "{}", "dump_failed"),
    "two-items": (200, '{"items": ["/a", "/b"]}', "dump_failed"),
    "a-file-from-elsewhere": (200, '{"items": ["/etc/passwd"]}', "dump_failed"),
    "a-file-that-is-not-there": (200, '{"items": ["/nonexistent/checkpoint.tar"]}', "dump_failed"),
}


@pytest.mark.parametrize(("status", "answer", "reason"), ANSWERS.values(), ids=ANSWERS)
def test_what_is_no_save_is_not_taken_for_one(
    node: Node, kubelet: Server, status: int, answer: str, reason: str
) -> None:
    kubelet.status, kubelet.answer = status, answer
    with pytest.raises(CheckpointError) as caught:
        node.backend().capture(node.work)
    assert (caught.value.reason.reason, caught.value.reason.source) == (reason, "running")
    assert caught.value.reason.next
    assert node.saves == []
    assert suspend.read_record(node.backend().record_path("llama")) == {}


@pytest.mark.parametrize("cut", [100, 700])
def test_an_archive_that_is_cut_off_is_no_save(node: Node, kubelet: Server, cut: int) -> None:
    kubelet.cut = cut
    with pytest.raises(CheckpointError, match="dump_failed"):
        node.backend().capture(node.work)


def test_a_kubelet_whose_certificate_is_not_trusted_is_told_nothing(node: Node, kubelet: Server) -> None:
    with pytest.raises(CheckpointError, match=r"(?i)certificate"):
        node.backend().capture(node.but(ca=None))
    assert kubelet.asked == []


@pytest.mark.parametrize("wrong", [{"pod": "../x"}, {"container": ""}, {"namespace": "A B"}, {"url": "http://x"}])
def test_a_name_that_is_none_never_reaches_the_kubelet(node: Node, kubelet: Server, wrong: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="policy"):
        node.backend().capture(node.but(**wrong))
    assert kubelet.asked == []


def test_an_import_that_fails_leaves_no_image(node: Node, kubelet: Server) -> None:
    captured = node.backend().capture(node.work)
    node.rc = 1
    with pytest.raises(CheckpointError, match="no space"):
        node.backend().restore(node.work, captured.artefact)
    assert node.saves == [captured.artefact]
    node.rc = 0
    assert node.backend().restore(node.work, captured.artefact)["image"]


ON = "enable_experimental_restore_via_create = true\n"
RUNTIMES = {
    "containerd-1.7": ("containerd://1.7.20", "", "from 2.1 on"),
    "containerd-2.0": ("containerd://2.0.5", "", "from 2.1 on"),
    "containerd-2.1": ("containerd://2.1.9", "", ""),
    "containerd-2.2.6": ("containerd://2.2.6", "", ""),
    "containerd-2.2.7-off": ("containerd://2.2.7", "", "enable_experimental_restore_via_create"),
    "containerd-2.2.7-on": ("containerd://2.2.7", f"  {ON}", ""),
    "containerd-2.2.7-commented-out": ("containerd://2.2.7", f"# {ON}", "enable_experimental_restore_via_create"),
    "containerd-2.3.3": ("containerd://v2.3.3", "", ""),
    "containerd-2.3.4-off": ("containerd://2.3.4", "", "enable_experimental_restore_via_create"),
    "containerd-2.4": ("containerd://2.4.0", ON, "took that away"),
    "cri-o": ("cri-o://1.34.1", "", ""),
    "cri-o-off": ("cri-o://1.34.1", "enable_criu_support = false\n", "enable_criu_support"),
    "docker": ("docker://27.0.1", "", "not known"),
    "nothing": ("", "", "not known"),
}


@pytest.mark.parametrize(("runtime", "config", "said"), RUNTIMES.values(), ids=RUNTIMES)
def test_a_runtime_that_cannot_is_refused_by_name(runtime: str, config: str, said: str) -> None:
    found = cannot_restore(runtime, config)
    assert said in found if said else not found


def test_such_a_runtime_is_refused_before_anything_is_made(node: Node, kubelet: Server) -> None:
    captured = node.backend().capture(node.work)
    with pytest.raises(CheckpointError, match="unsupported_feature:restore"):
        node.backend().restore(node.but(runtime="containerd://2.4.1"), captured.artefact)
    assert node.imported == {}


def test_an_image_holds_an_archive_of_any_size(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(b"x" * 3_000_001)
    image_of(archive, "engine", "localhost/x:restore", tmp_path / "image")
    with tarfile.open(tmp_path / "image") as image:
        sizes = {entry.name: entry.size for entry in image}
    assert sizes[f"blobs/sha256/{hashlib.sha256(archive.read_bytes()).hexdigest()}"] == 3_000_001
    assert (tmp_path / "image").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("unknown", ["gpu_model", "driver"])
def test_what_no_other_node_could_be_compared_with_is_not_saved(node: Node, kubelet: Server, unknown: str) -> None:
    work = replace(node.work, save={**node.work.save, "key": {**KEY, unknown: None}})
    with pytest.raises(CheckpointError, match=f"key_mismatch:{unknown}.*{unknown} of this node cannot be had"):
        node.backend().capture(work)
    assert kubelet.asked == []
