# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to a Kubernetes API server: the official client's configuration and connections, but plain JSON.

The official client's typed models cost several times the CPU of the JSON they are made from; a fleet's pods are many.
Requests that meet a server that is away, restarting or overloaded are sent again until it is back or ``outage``
seconds are over, so every request sent from here must bear being sent twice.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Callable, TypeVar
from urllib.parse import quote, urlencode

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
_CONFIG_SECONDS = 60.0
"""How long a program that gives credentials may take."""

_HINTS = {
    401: "; the token or certificate in the kubeconfig is wrong or has expired, see: kubectl auth whoami",
}
_RIGHTS_HINT = "; give this account the rights in docs/kubernetes-rbac.yml"
_LACKS_RIGHT = re.compile(r"cannot \w+ resource ")
"""What the API server says of a right that is missing; rules of admission refuse with the same status."""

_SHOWN = 500

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
        return f"{self.status} {shown(str(said or self.body or 'without a word'))}"

    @property
    def lacks_right(self) -> bool:
        """Whether the account may not do it; a refusal by a rule of admission is another thing."""
        return self.status == 401 or (self.status == 403 and _LACKS_RIGHT.search(self.message) is not None)

    @property
    def causes(self) -> list[str]:
        """The messages of the causes in a Status object."""
        details = self.body.get("details") if isinstance(self.body, dict) else None
        return [shown(str(cause.get("message", ""))) for cause in (details or {}).get("causes") or ()]


class ClusterError(Exception):
    """A cluster that cannot be asked, or does not answer; the text says what was seen and what to do next."""


class ApiError(ClusterError):
    """An answer that is no success and that nobody expected."""

    def __init__(self, method: str, path: str, answer: Answer) -> None:
        super().__init__(
            f"the API server answered {method} {path} with {answer.message}"
            + (_HINTS.get(answer.status, _RIGHTS_HINT) if answer.lacks_right else "")
        )
        self.answer = answer


class Api:
    """An API server. ``timeout`` seconds for one request, ``outage`` seconds for a server that is away to come back.

    :raises ClusterError: if the official client is missing or finds no configuration.
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
        client = _official_client(kubeconfig, context, workers)
        self.server = str(client.configuration.host).rstrip("/")
        self._client = client
        self._timeout = timeout
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
        import urllib3.exceptions

        away = set(_AWAY) - set(final)
        url = self.server + path + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body)
        outage = self._outage if outage is None else outage
        end = time.monotonic() + outage
        while True:
            pause = _RETRY_SECONDS
            try:
                answer = _answer(_in_time(lambda: self._send(method, url, data, kind), self._timeout))
                if answer.status not in away:
                    return self._sane(answer, method, path)
                said, pause = answer.message, answer.retry_after or _RETRY_SECONDS
            except urllib3.exceptions.SSLError as exc:
                if "CERTIFICATE_VERIFY_FAILED" in str(exc):
                    raise ClusterError(
                        f"{self.server} is not the API server that the kubeconfig speaks of: {exc}; "
                        "see certificate-authority-data in it"
                    ) from exc
                said = str(exc)
            except (urllib3.exceptions.HTTPError, TimeoutError) as exc:
                said = str(exc)
            if time.monotonic() + pause > end:
                raise ClusterError(
                    f"the API server {self.server} gave no answer to {method} {path} for {outage:.0f} s: {said}; "
                    "look with: kubectl get --raw /readyz"
                )
            time.sleep(pause)

    def _send(self, method: str, url: str, data: str | None, kind: str) -> Any:
        """``timeout`` is here for each wait for the connection or a part of the answer."""
        return self._client.rest_client.pool_manager.request(
            method,
            url,
            body=data,
            headers=self._headers(kind if data else None),
            timeout=self._timeout,
            retries=False,
        )

    def _headers(self, kind: str | None) -> dict[str, str]:
        configuration = self._client.configuration
        headers = {**self._client.default_headers, "Accept": JSON, "User-Agent": "gpufleet.driver"}
        for setting in configuration.auth_settings().values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        if kind:
            headers["Content-Type"] = kind
        return headers

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


def shown(text: str) -> str:
    """What others have written in a cluster, on one line and of a length fit to be shown."""
    line = "".join(each if each.isprintable() else "?" for each in text[: _SHOWN + 1])
    return line if len(text) <= _SHOWN else f"{line[:_SHOWN]}…"


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


def _answer(response: Any) -> Answer:
    data = response.data
    try:
        body = json.loads(data)
    except ValueError:
        body = data.decode("utf-8", "replace")[:500]
    said = response.headers.get("Retry-After", "")
    return Answer(response.status, body, float(said) if said.isdigit() else None, _date(response.headers.get("Date")))


def _date(text: str | None) -> float:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except (TypeError, ValueError):  # the former before Python 3.10
        return time.time()


def _official_client(kubeconfig: str | None, context: str | None, connections: int) -> Any:
    try:
        from kubernetes import client, config
    except ImportError as exc:
        raise ClusterError(
            f"the Python package kubernetes is missing where this module runs ({exc}); "
            "install it there: pip install kubernetes"
        ) from exc
    import yaml  # the official client's own need

    configuration = client.Configuration()
    if kubeconfig and not any(Path(each).expanduser().exists() for each in kubeconfig.split(os.pathsep)):
        why = f"there is no file {kubeconfig}"
        raise ClusterError(f"no way to reach a cluster: {why}; give kubeconfig, or set KUBECONFIG")
    try:
        if kubeconfig or context or not _in_cluster():
            _in_time(
                lambda: config.load_kube_config(kubeconfig, context=context, client_configuration=configuration),
                _CONFIG_SECONDS,
            )
        else:
            config.load_incluster_config(client_configuration=configuration)
    except TimeoutError as exc:
        raise ClusterError(
            "no way to reach a cluster: the program that gives credentials did not end within "
            f"{_CONFIG_SECONDS:.0f} s; run it by hand: kubectl auth whoami"
        ) from exc
    except (config.ConfigException, OSError) as exc:
        raise ClusterError(f"no way to reach a cluster: {exc}; give kubeconfig, or set KUBECONFIG") from exc
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as exc:
        path = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise ClusterError(
            f"no way to reach a cluster: {path} is no kubeconfig ({type(exc).__name__}: {' '.join(str(exc).split())}); "
            f"look with: kubectl --kubeconfig {path} config view"
        ) from exc
    configuration.connection_pool_maxsize = connections
    return client.ApiClient(configuration)


def _in_time(act: Callable[[], Made], seconds: float) -> Made:
    """What ``act`` returns or raises; it is left behind where it hangs, also if that is in the middle of an answer.

    :raises TimeoutError: if it takes longer.
    """
    outcome: Future[Made] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as exc:
            outcome.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], seconds).done:
        raise TimeoutError(f"not over after {seconds:g} s")
    return outcome.result()


def _in_cluster() -> bool:
    """In a pod, and nobody said otherwise."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
