# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way to an API server that a kubeconfig describes, and what is made of what answers there."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import kubeconfig, kubernetes_api
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
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
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
    (place / "token").write_text("abc\n")
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


def test_what_is_no_json_is_told(server: Server, place: Path) -> None:
    server.body = b"<html>Please log in</html>"
    with pytest.raises(ClusterError, match="answered GET /version with something that is no JSON: '<html>Please"):
        Api(write(place, server)).get("/version")


PLUGIN = """#!/bin/sh
date +%s%N >>"$0.calls"
grep -q '"kind": "ExecCredential"' <<END || exit 1
$KUBERNETES_EXEC_INFO
END
printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": %s}' "$STATUS"
"""


def plugin(directory: Path, status: Any, script: str = PLUGIN) -> dict[str, Any]:
    file = directory / "plugin"
    file.write_text(script)
    file.chmod(0o755)
    return {"exec": {"command": "./plugin", "env": [{"name": "STATUS", "value": json.dumps(status)}]}}


def test_a_program_gives_a_token_and_is_asked_again_when_it_has_expired(server: Server, place: Path) -> None:
    calls = place / "plugin.calls"
    for expires, often in (("2100-01-01T00:00:00Z", 1), ("2001-01-01T00:00:00Z", 3)):
        calls.unlink(missing_ok=True)
        api = Api(write(place, server, plugin(place, {"token": "t", "expirationTimestamp": expires})))
        api.get("/version"), api.get("/version")
        assert len(calls.read_text().split()) == often
    assert {each["authorization"] for each in server.asked} == {"Bearer t"}


def test_a_program_gives_a_certificate(server: Server, place: Path) -> None:
    status = {
        "clientCertificateData": (place / "user.crt").read_text(),
        "clientKeyData": (place / "user.key").read_text(),
    }
    Api(write(place, server, plugin(place, status))).get("/version")
    assert server.asked[0]["certificate"]["subject"] == ((("commonName", "user"),),)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/sh\necho 'no login' >&2; exit 3\n", "plugin: rc 3: no login; get it from example.org"),
        ("#!/bin/sh\nsleep 60\n", "plugin: no answer within"),
        ("#!/bin/sh\necho '[]'\n", "gave neither token nor certificate"),
        ("#!/bin/sh\necho '{\"status\": {}}'\n", "gave neither token nor certificate"),
    ],
)
def test_a_program_that_gives_nothing_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setattr(kubeconfig, "EXEC_SECONDS", 0.5)
    user = plugin(place, {}, script)
    user["exec"]["installHint"] = "get it from example.org"
    with pytest.raises(ClusterError, match=f"no way to reach a cluster: context here .*{words}"):
        Api(write(place, user=user))


@pytest.mark.parametrize(
    ("user", "cluster", "words"),
    [
        ({"auth-provider": {"name": "oidc"}}, {}, "auth-provider of the user is not supported; use"),
        ({"as": "root"}, {}, "as of the user is not supported"),
        ({"token": "a\nX-Remote-User: root"}, {}, "characters that no token has"),
        ({"tokenFile": "nowhere"}, {}, "FileNotFoundError: .*nowhere"),
        ({"client-certificate": "user.crt", "client-key": "server.key"}, {}, "SSLError: .*KEY_VALUES_MISMATCH"),
        ({"exec": "plugin"}, {}, "AttributeError"),
        ({}, {"server": "api.example.org:6443"}, "server 'api.example.org:6443' is no URL"),
        ({}, {"server": "https://api.example.org:port"}, "ValueError: Port could not be cast"),
        ({}, {"certificate_authority": "user.key"}, "SSLError"),
        ({}, {"certificate_authority_data": "!"}, "Error: .*"),
        ({}, {"proxy_url": "socks5://proxy"}, "is not spoken to by http://"),
    ],
)
def test_a_kubeconfig_that_leads_nowhere(
    place: Path, user: dict[str, Any], cluster: dict[str, Any], words: str
) -> None:
    with pytest.raises(ClusterError, match=words):
        Api(write(place, user=user, **cluster))


def test_of_several_files_the_first_counts(place: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = place / "first"
    first.write_text("current-context: there\ncontexts: [{name: there, context: {cluster: c, user: mine}}]\n"
                     "users: [{name: mine, user: {token: first}}]\n")  # fmt: skip
    second = write(place, server, {"token": "second"})
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(first), str(place / "none"), second]))
    Api().get("/version")
    Api(context="here").get("/version")
    assert [each["authorization"] for each in server.asked] == ["Bearer first", "Bearer second"]
    with pytest.raises(ClusterError, match="has no context called nowhere, but there, here"):
        Api(context="nowhere")


def test_in_a_pod_its_service_account_leads_there(place: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "token").write_text("pod")
    (place / "ca.crt").write_bytes((place / "server.crt").read_bytes())
    monkeypatch.setattr(kubeconfig, "SERVICE_ACCOUNT", place)
    monkeypatch.setattr(kubeconfig, "TOKEN_SECONDS", 0)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.address.rpartition(":")[2])
    api = Api()
    api._access.tls_name = "server"
    api.get("/version")
    (place / "token").write_text("renewed")
    api.get("/version")
    assert [each["authorization"] for each in server.asked] == ["Bearer pod", "Bearer renewed"]


class Proxy:
    """A proxy for one connection at a time, that notes what it was asked to connect to."""

    def __init__(self) -> None:
        self.said = b""
        self.socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        near = self.socket.accept()[0]
        self.said = near.recv(4096)
        host, dummy, port = self.said.split()[1].decode().rpartition(":")
        far = socket.create_connection((host, int(port)))
        near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")

        def copy(source: socket.socket, to: socket.socket) -> None:
            with contextlib.suppress(OSError):  # whoever hangs up first
                while data := source.recv(4096):
                    to.sendall(data)
                to.shutdown(socket.SHUT_WR)

        threading.Thread(target=copy, args=(near, far), daemon=True).start()
        copy(far, near)


@pytest.mark.parametrize("named_by", ["kubeconfig", "environment"])
def test_a_proxy_is_gone_through(place: Path, server: Server, monkeypatch: pytest.MonkeyPatch, named_by: str) -> None:
    proxy = Proxy()
    url = f"http://me:s%40crt@127.0.0.1:{proxy.socket.getsockname()[1]}"
    if named_by == "environment":
        monkeypatch.setenv("HTTPS_PROXY", url)
    Api(write(place, server, proxy_url=url if named_by == "kubeconfig" else None)).get("/version")
    assert proxy.said.startswith(f"CONNECT {server.address} HTTP/1.".encode())
    assert f"Basic {base64.b64encode(b'me:s@crt').decode()}".encode() in proxy.said and len(server.asked) == 1
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if named_by == "environment":
        Api(write(place, server)).get("/version")
        assert len(server.asked) == 2
