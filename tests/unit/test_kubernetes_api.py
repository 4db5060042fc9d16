# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to a server that a kubeconfig describes, by the official client, and what is made of its answers."""

from __future__ import annotations

import base64
import http.server
import json
import os
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import kubernetes_api
from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import Api, ClusterError


def certificate(directory: Path, name: str) -> None:
    """A key and a certificate that vouches for itself, for the DNS name NAME and nothing else."""
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    argv += ["-keyout", str(directory / f"{name}.key"), "-out", str(directory / f"{name}.crt")]
    subprocess.run(argv, check=True, capture_output=True)


class Server:
    """An HTTPS server that says who asked, and closes connections when ``hang_up`` is set."""

    def __init__(self, directory: Path) -> None:
        self.asked: list[dict[str, Any]] = []
        self.body: bytes | None = None
        self.hang_up = False
        self.statuses: list[int] = []
        """Of the next answers; then 200."""
        self.drips = False
        """Whether an answer comes byte by byte and is never whole."""
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                said = {
                    "path": self.path,
                    "authorization": self.headers.get("Authorization"),
                    "port": self.client_address,
                }
                said["certificate"] = self.connection.getpeercert()  # type: ignore[attr-defined]
                outer.asked.append(said)
                body = b"{}" if outer.body is None else outer.body
                self.send_response(outer.statuses.pop(0) if outer.statuses else 200)
                self.send_header("Content-Length", str(10**6 if outer.drips else len(body)))
                self.end_headers()
                while outer.drips:
                    self.wfile.write(b" ")
                    time.sleep(0.05)
                self.wfile.write(body)
                self.close_connection = outer.hang_up

            def do_PATCH(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *given: Any) -> None:
                pass

        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(directory / "user.crt"))
        context.load_cert_chain(str(directory / "server.crt"), str(directory / "server.key"))
        context.verify_mode = ssl.CERT_OPTIONAL
        self.its = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.its.socket = context.wrap_socket(self.its.socket, server_side=True)
        threading.Thread(target=self.its.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.its.server_port}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    for name in ("server", "user"):
        certificate(directory, name)
    return directory


@pytest.fixture
def server(keys: Path) -> Iterator[Server]:
    its = Server(keys)
    yield its
    its.its.shutdown()
    its.its.server_close()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("KUBECONFIG", "KUBERNETES_")):
            monkeypatch.delenv(name)


def write(directory: Path, to: Server | None = None, user: dict[str, Any] | None = None, **cluster: Any) -> str:
    """A kubeconfig beside copies of the keys; ``cluster`` is added to what leads to the server."""
    its = {"certificate-authority": "server.crt", "tls-server-name": "server"}
    its["server"] = f"https://{to.address}" if to else "https://api.example.org"
    its |= {key.replace("_", "-"): value for key, value in cluster.items()}
    config = {
        "clusters": [{"name": "c", "cluster": {key: value for key, value in its.items() if value}}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "here",
    }
    path = directory / "kubeconfig"
    path.write_text(json.dumps(config))
    return str(path)


def in_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.fixture
def place(tmp_path: Path, keys: Path) -> Path:
    for file in keys.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_files_are_found_from_where_they_are_named_and_data_counts_more(server: Server, place: Path) -> None:
    (place / "token").write_text("abc")
    Api(write(place, server, {"tokenFile": "token"})).get("/version")
    data = in_base64(place / "server.crt")
    wrong = str(place / "user.crt")
    Api(write(place, server, {"token": "def"}, certificate_authority_data=data, certificate_authority=wrong)).get("/x")
    assert [each["authorization"] for each in server.asked] == ["Bearer abc", "Bearer def"]


@pytest.mark.parametrize("form", ["files", "data"])
def test_a_client_may_have_a_certificate(server: Server, place: Path, form: str) -> None:
    user = {"client-certificate": "user.crt", "client-key": "user.key"}
    if form == "data":
        user = {f"{key}-data": in_base64(place / file) for key, file in user.items()}
    Api(write(place, server, user)).get("/version")
    assert server.asked[0]["certificate"]["subject"] == ((("commonName", "user"),),)


def test_a_name_and_a_password(server: Server, place: Path) -> None:
    Api(write(place, server, {"username": "u", "password": "p"})).get("/version")
    assert server.asked[0]["authorization"] == f"Basic {base64.b64encode(b'u:p').decode()}"


def test_a_server_of_another_name_is_refused_unless_it_may_be_any(server: Server, place: Path) -> None:
    with pytest.raises(ClusterError, match="is not the API server that the kubeconfig speaks of"):
        Api(write(place, server, tls_server_name=None)).get("/version")
    Api(write(place, server, tls_server_name=None, insecure_skip_tls_verify=True)).get("/version")
    assert len(server.asked) == 1


def test_a_server_may_be_below_a_path_and_connections_are_used_again(server: Server, place: Path) -> None:
    api = Api(write(place, server, server=f"https://{server.address}/k8s/clusters/c-1/"))
    for hang_up in (False, True, False, False):  # one that was closed is opened anew
        server.hang_up = hang_up
        api.get("/version", limit=1)
    assert {each["path"] for each in server.asked} == {"/k8s/clusters/c-1/version?limit=1"}
    ports = [each["port"] for each in server.asked]
    assert ports[0] == ports[1] != ports[2] == ports[3]


@pytest.mark.parametrize("method", ["GET", "PATCH"])
def test_a_server_that_is_away_is_asked_again(
    server: Server, place: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(kubernetes_api, "_RETRY_SECONDS", 0.01)
    server.statuses = [429, 500, 502, 503, 504]
    api = Api(write(place, server), outage=5)
    assert api.request(method, "/x", {} if method == "PATCH" else None).ok and len(server.asked) == 6
    server.statuses = [500]
    assert api.request("PATCH", "/x", {}, final=(500,)).status == 500
    server.statuses = [503] * 100
    with pytest.raises(ClusterError, match=r"gave no answer to PATCH /x for 0 s: 503 .*kubectl get --raw /readyz"):
        api.request("PATCH", "/x", {}, outage=0)


def test_an_answer_that_is_never_whole_is_given_up(server: Server, place: Path) -> None:
    server.drips = True
    with pytest.raises(ClusterError, match=r"gave no answer to GET /x for 0 s: not over after 0.5 s"):
        Api(write(place, server), timeout=0.5, outage=0).get("/x")
    server.drips = False


def test_what_is_no_json_is_told(server: Server, place: Path) -> None:
    server.body = b"<html>Please log in</html>"
    with pytest.raises(ClusterError, match="answered GET /version with something that is no JSON: '<html>Please"):
        Api(write(place, server)).get("/version")


def with_program(directory: Path, script: str) -> dict[str, Any]:
    file = directory / "program"
    file.write_text(script)
    file.chmod(0o755)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(file), "interactiveMode": "Never"}}


def test_a_program_gives_a_token(server: Server, place: Path) -> None:
    status = {"token": "t", "expirationTimestamp": "2100-01-01T00:00:00Z"}
    said = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    Api(write(place, server, with_program(place, f"#!/bin/sh\necho '{json.dumps(said)}'\n"))).get("/version")
    assert server.asked[0]["authorization"] == "Bearer t"


def test_a_program_that_does_not_end_is_not_waited_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "_CONFIG_SECONDS", 0.2)
    with pytest.raises(ClusterError, match="the program that gives credentials did not end"):
        Api(write(place, user=with_program(place, "#!/bin/sh\nexec sleep 5\n")))


def test_no_time_for_a_request_is_refused(place: Path) -> None:
    with pytest.raises(ClusterError, match="timeout is 0"):
        Api(write(place), timeout=0)
