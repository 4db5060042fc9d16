# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to an API server, with nothing but the standard library: what the lab and its tests look with.

Apart from the collection's own client on purpose, so that a test does not check a thing with itself.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

JSON = "application/json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


class ApiError(Exception):
    """An answer that is no success. ``status`` is the HTTP status, ``body`` the decoded Status object."""

    def __init__(self, method: str, path: str, status: int, body: Any, headers: dict[str, str]) -> None:
        message = body.get("message", "") if isinstance(body, dict) else str(body)
        super().__init__(f"{method} {path}: {status} {message}")
        self.status = status
        self.body = body
        self.headers = headers


class Api:
    """An API server; can be used from several threads, each of which keeps a connection of its own."""

    def __init__(self, server: str, token: str | None, context: ssl.SSLContext) -> None:
        parts = urlsplit(server)
        self.host, self.port = parts.hostname or "", parts.port or 443
        self._token = token
        self._context = context
        self._local = threading.local()

    @classmethod
    def of(cls, kubeconfig: Path, user: str | None = None) -> Api:
        """The cluster of a kubeconfig's current context, as its user or as another ``user`` of the file."""
        config = _decoded(kubeconfig.read_text())
        context = next(c["context"] for c in config["contexts"] if c["name"] == config["current-context"])
        cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == context["cluster"])
        who = next(u["user"] for u in config["users"] if u["name"] == (user or context["user"]))
        tls = ssl.create_default_context()
        if "certificate-authority-data" in cluster:
            tls.load_verify_locations(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        elif "certificate-authority" in cluster:
            tls.load_verify_locations(str(kubeconfig.resolve().parent / cluster["certificate-authority"]))
        if "client-certificate-data" in who:
            with tempfile.NamedTemporaryFile() as pem:
                for part in ("client-certificate-data", "client-key-data"):
                    pem.write(base64.b64decode(who[part]))
                pem.flush()
                tls.load_cert_chain(pem.name)
        return cls(cluster["server"], who.get("token"), tls)

    def raw(
        self, method: str, path: str, body: Any = None, kind: str = JSON, **query: Any
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer. A connection that went stale is replaced once."""
        target = path + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Accept": JSON, **({"Content-Type": kind} if data is not None else {}), **self._auth()}
        for last in (False, True):
            connection = getattr(self._local, "connection", None)
            fresh = connection is None
            if connection is None:
                connection = self._local.connection = self._connect(60)
            try:
                connection.request(method, target, data, headers)
                answer = connection.getresponse()
                return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
            except (http.client.HTTPException, OSError):
                self._local.connection = None
                if last or fresh:
                    raise
        raise AssertionError

    def ask(self, method: str, path: str, body: Any = None, kind: str = JSON, **query: Any) -> Any:
        """The decoded answer.

        :raises ApiError: if it is no success.
        """
        status, headers, data = self.raw(method, path, body, kind, **query)
        try:
            decoded = json.loads(data)
        except ValueError:
            decoded = data.decode(errors="replace")
        if status >= 300:
            raise ApiError(method, path, status, decoded, headers)
        return decoded

    def get(self, path: str, **query: Any) -> Any:
        return self.ask("GET", path, **query)

    def post(self, path: str, body: Any, **query: Any) -> Any:
        return self.ask("POST", path, body, **query)

    def patch(self, path: str, body: Any, kind: str = MERGE, **query: Any) -> Any:
        return self.ask("PATCH", path, body, kind, **query)

    def delete(self, path: str, **query: Any) -> Any:
        return self.ask("DELETE", path, **query)

    def find(self, path: str, **query: Any) -> Any | None:
        """The object at ``path``, or None if there is none."""
        try:
            return self.get(path, **query)
        except ApiError as exc:
            if exc.status != 404:
                raise
            return None

    def watch(self, path: str, version: str, seconds: int = 300, **query: Any) -> Iterator[dict[str, Any]]:
        """Events after ``version`` until the server ends the watch; an event of type ERROR may be among them."""
        how = {"watch": 1, "resourceVersion": version, "timeoutSeconds": seconds, "allowWatchBookmarks": "true"}
        target = f"{path}?{urlencode({**how, **query})}"
        connection = self._connect(seconds + 30)
        try:
            connection.request("GET", target, headers={"Accept": JSON, **self._auth()})
            answer = connection.getresponse()
            for line in answer:
                yield json.loads(line)
        finally:
            connection.close()

    def wait_ready(self, seconds: float) -> None:
        """Until the server says that it is ready.

        :raises TimeoutError: with what it said last.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                status, dummy, data = self.raw("GET", "/readyz")
                if status == 200:
                    return
                said = data.decode(errors="replace")
            except (OSError, http.client.HTTPException) as exc:
                said = str(exc)
            if time.monotonic() > end:
                raise TimeoutError(f"the API server is not ready after {seconds:.0f} s: {said}")
            time.sleep(0.1)

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self.host, self.port, context=self._context, timeout=timeout)

    def _auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)  # as the lab writes its own, for which no library is needed
    except ValueError:
        import yaml

        return yaml.safe_load(text)
