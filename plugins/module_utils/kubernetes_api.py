# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to a Kubernetes API server, in plain JSON and with nothing but Python's standard library.

The official client's typed models cost several times the CPU of the JSON they are made from; a fleet's pods are many.
Requests that meet a server that is away, restarting or overloaded are sent again until it is back or ``outage``
seconds are over, so every request sent from here must bear being sent twice.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Callable, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

from ansible_collections.gpufleet.driver.plugins.module_utils import kubeconfig as kubeconfigs

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"

FIELD_MANAGER = "gpufleet"
"""Who managedFields says wrote what we wrote."""

ARGUMENTS: dict[str, Any] = {
    "kubeconfig": {"type": "path"},
    "context": {"type": "str"},
    "timeout": {"type": "int", "default": 60},
}
"""The argument spec of the doc fragment ``gpufleet.driver.kubernetes``."""

_RETRY_SECONDS = 1.0
_AWAY = (429, 500, 502, 503, 504)
"""Also 500: what a server says whose store changes its leader, or whose webhook is being restarted."""
_MANY = 16
_CONFLICTS = 8
_CHANGED_MEANWHILE = (409, 422)
_GONE_MEANWHILE = (404, 409)
_CLOSED_MEANWHILE = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)

_HINTS = {
    401: "; the token or certificate in the kubeconfig is wrong or has expired, see: kubectl auth whoami",
    403: "; give this account the rights in docs/kubernetes-rbac.yml",
}

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Answer:
    """What the server answered. ``body`` is decoded JSON; ``retry_after`` seconds, if the server named any; ``date`` is
    Unix seconds by its clock, to the second, or by ours if it does not say."""

    status: int
    body: Any
    retry_after: float | None = None
    date: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status < 300

    @property
    def message(self) -> str:
        said = self.body.get("message") if isinstance(self.body, dict) else None
        return f"{self.status} {said or self.body or 'without a word'}"

    @property
    def causes(self) -> list[str]:
        """The messages of the causes in a Status object."""
        details = self.body.get("details") if isinstance(self.body, dict) else None
        return [str(cause.get("message", "")) for cause in (details or {}).get("causes") or ()]


class ClusterError(Exception):
    """A cluster that cannot be asked, or does not answer; the text says what was seen and what to do next."""


class ApiError(ClusterError):
    """An answer that is no success and that nobody expected."""

    def __init__(self, method: str, path: str, answer: Answer) -> None:
        super().__init__(
            f"the API server answered {method} {path} with {answer.message}{_HINTS.get(answer.status, '')}"
        )
        self.answer = answer


class Api:
    """An API server. ``timeout`` seconds for one request, ``outage`` seconds for a server that is away to come back.

    :raises ClusterError: if no way to it is configured.
    """

    def __init__(
        self,
        kubeconfig: str | None = None,
        context: str | None = None,
        timeout: float = 60.0,
        outage: float = 120.0,
        workers: int = _MANY,
    ) -> None:
        if timeout <= 0:
            raise ClusterError(f"timeout is {timeout:g}; give a request some seconds")
        try:
            self._access = kubeconfigs.find(kubeconfig, context)
        except kubeconfigs.ConfigError as exc:
            raise ClusterError(f"no way to reach a cluster: {exc}") from exc
        self.server = self._access.server
        self._connections = _Connections(self._access, timeout)
        self._outage = outage
        self._workers = workers

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = JSON,
        final: Iterable[int] = (),
        outage: float | None = None,
        **query: Any,
    ) -> Answer:
        """One answer, also if it is an error.

        :param final: statuses that are an answer here, not a server that is away.
        :param outage: seconds for the server to be back, if not those of all requests.
        :raises ClusterError: if it is not back by then.
        """
        away = set(_AWAY) - set(final)
        target = path + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        outage = self._outage if outage is None else outage
        end = time.monotonic() + outage
        while True:
            wait = _RETRY_SECONDS
            try:
                answer = self._connections.ask(method, target, data, kind)
                if answer.status not in away:
                    return self._sane(answer, method, path)
                said, wait = answer.message, answer.retry_after or _RETRY_SECONDS
            except kubeconfigs.ConfigError as exc:
                raise ClusterError(f"no longer a way to reach {self.server}: {exc}") from exc
            except ssl.SSLCertVerificationError as exc:
                raise ClusterError(
                    f"{self.server} is not the API server that the kubeconfig speaks of: {exc}; "
                    "see certificate-authority-data in it"
                ) from exc
            except (OSError, http.client.HTTPException) as exc:
                said = str(exc) or type(exc).__name__
            if time.monotonic() + wait > end:
                raise ClusterError(
                    f"the API server {self.server} gave no answer to {method} {path} for {outage:.0f} s: {said}; "
                    "look with: kubectl get --raw /readyz"
                )
            time.sleep(wait)

    def _sane(self, answer: Answer, method: str, path: str) -> Answer:
        if answer.ok and not isinstance(answer.body, dict):
            raise ClusterError(
                f"{self.server} answered {method} {path} with something that is no JSON: {str(answer.body)[:100]!r}; "
                "is it an API server, or the login page of something before it?"
            )
        return answer

    def ask(self, method: str, path: str, body: Any = None, kind: str = JSON, **query: Any) -> Any:
        """The decoded body of a success.

        :raises ApiError: for any other answer.
        """
        answer = self.request(method, path, body, kind, **query)
        if not answer.ok:
            raise ApiError(method, path, answer)
        return answer.body

    def get(self, path: str, **query: Any) -> Any:
        return self.ask("GET", path, **query)

    def find(self, path: str, **query: Any) -> Any | None:
        """The object at ``path``; None if there is no such object or no such resource."""
        answer = self.request("GET", path, **query)
        if answer.status == 404:
            return None
        if not answer.ok:
            raise ApiError("GET", path, answer)
        return answer.body

    def items(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """Every object of a list, in one answer (cheaper than pages for the server too); none if there is no such
        resource."""
        found = self.find(path, **query)
        return (found["items"] or []) if found else []

    def delete(self, path: str, **options: Any) -> None:
        """Delete an object. One that is gone is as good as deleted, and so is one that by its ``preconditions`` is
        another by now.

        :raises ApiError: if the server refuses.
        """
        answer = self.request("DELETE", path, options or None)
        if not answer.ok and answer.status not in _GONE_MEANWHILE:
            raise ApiError("DELETE", path, answer)

    def each(self, function: Callable[[Given], Made], given: Iterable[Given]) -> list[Made]:
        """``function`` of each, many at a time, in the order given."""
        these = list(given)
        if len(these) < 2:
            return [function(one) for one in these]
        with ThreadPoolExecutor(max_workers=min(self._workers, len(these))) as pool:
            return list(pool.map(function, these))


class _Connections:
    """Connections to one server that are kept open, each for one request at a time."""

    def __init__(self, access: kubeconfigs.Access, timeout: float) -> None:
        at = urlsplit(access.server)
        self._access = access
        self._timeout = timeout
        self._host, self._base = at.hostname or "", at.path
        self._port = at.port or (443 if access.tls else 80)
        self._idle: list[http.client.HTTPConnection] = []
        self._proxy = urlsplit(access.proxy or _proxy_for(self._host, at.scheme))
        if self._proxy.scheme not in ("", "http"):
            raise ClusterError(f"the proxy {self._proxy.geturl()} to {access.server} is not spoken to by http://")

    def ask(self, method: str, target: str, data: bytes | None, kind: str) -> Answer:
        """:raises OSError, http.client.HTTPException: if there is no answer."""
        headers = {"Accept": JSON, "User-Agent": "gpufleet.driver", **self._access.headers()}
        if data is not None:
            headers["Content-Type"] = kind
        while True:
            connection, used = (self._idle.pop(), True) if self._idle else (self._new(), False)
            try:
                connection.request(method, self._base + target, data, headers)
                response = connection.getresponse()
                answer = _answer(response, response.read())
            except BaseException as exc:
                connection.close()
                if used and isinstance(exc, _CLOSED_MEANWHILE):
                    continue
                raise
            self._idle.append(connection)  # which opens itself anew where the server has closed it
            return answer

    def _new(self) -> http.client.HTTPConnection:
        host, port, tls = self._host, self._port, self._access.tls
        if self._proxy.hostname:
            host, port = self._proxy.hostname, self._proxy.port or 80
        connection: http.client.HTTPConnection
        if tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout)
        else:
            connection = _TlsConnection(host, port, self._timeout, tls, self._access.tls_name or self._host)
        if self._proxy.hostname:
            connection.set_tunnel(self._host, self._port, _proxy_headers(self._proxy.username, self._proxy.password))
        return connection


class _TlsConnection(http.client.HTTPConnection):
    """HTTPS to a server that may have a certificate of another name than it is reached by."""

    default_port = http.client.HTTPS_PORT

    def __init__(self, host: str, port: int, timeout: float, tls: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port, timeout=timeout)
        self._tls, self._name = tls, name

    def connect(self) -> None:
        super().connect()
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


def _proxy_for(host: str, scheme: str) -> str:
    """The proxy that the environment names for a host, if any."""
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return ""
    from urllib.request import getproxies, proxy_bypass

    return "" if proxy_bypass(host) else getproxies().get(scheme, "")


def _proxy_headers(user: str | None, password: str | None) -> dict[str, str]:
    if user is None:
        return {}
    plain = f"{unquote(user)}:{unquote(password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(plain).decode()}"}


def object_path(group: str, resource: str, name: str = "", namespace: str = "", sub: str = "") -> str:
    """The path of a resource. ``group`` is ``v1`` or ``group/version``; names come from a cluster, so they are quoted.

    >>> object_path("policy/v1", "poddisruptionbudgets", namespace="ml")
    '/apis/policy/v1/namespaces/ml/poddisruptionbudgets'
    """
    parts = ["apis" if "/" in group else "api", *group.split("/")]
    if namespace:
        parts += ["namespaces", namespace]
    parts += [part for part in (resource, name, sub) if part]
    return "/" + "/".join(quote(part, safe="") for part in parts)


def name_path(item: Mapping[str, Any], group: str, resource: str, sub: str = "") -> str:
    """The path of an object that was read."""
    meta = item["metadata"]
    return object_path(group, resource, meta["name"], meta.get("namespace", ""), sub)


def change_node(api: Api, name: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> Any:
    """Write the parts of a node that ``change`` returns by path, onto the node as it was given and no other; again
    from the start if it changed meanwhile. Nothing is written for None. Returns the node as it is then.

    :raises ApiError: if there is no such node, or the server refuses.
    """
    path = object_path("v1", "nodes", name)
    for dummy in range(_CONFLICTS):
        node = api.get(path)
        wanted = change(node)
        if wanted is None:
            return node
        patch = [{"op": "test", "path": "/metadata/resourceVersion", "value": node["metadata"]["resourceVersion"]}]
        patch += [{"op": "add", "path": where, "value": value} for where, value in wanted.items()]
        answer = api.request("PATCH", path, patch, JSON_PATCH, fieldManager=FIELD_MANAGER)
        if answer.ok:
            return answer.body
        if answer.status not in _CHANGED_MEANWHILE:
            break
    raise ApiError("PATCH", path, answer)


def _answer(response: http.client.HTTPResponse, data: bytes) -> Answer:
    try:
        body = json.loads(data)
    except ValueError:
        body = data.decode("utf-8", "replace")[:500]
    said = response.headers.get("Retry-After", "")
    return Answer(response.status, body, float(said) if said.isdigit() else None, _date(response.headers.get("Date")))


def _date(text: str | None) -> float:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except (ValueError, TypeError):
        return time.time()
