# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way to a Kubernetes API server: kubeconfig files as kubectl reads them, or the service account of a pod.

The official client is not used for that. Importing it costs more CPU than most of what is asked of a server here; it
waits for ever for a program that is to give credentials; and where that fails, it goes on without any.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.gpufleet.driver.plugins.module_utils import execution

EXEC_SECONDS = 60.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0
"""How long a token from a file is used before it is read again: kubelets put a new one there."""

_UNKNOWN = ("auth-provider", "as", "as-uid", "as-groups", "as-user-extra")
_HINT = "give kubeconfig, or set KUBECONFIG"

Entry = Mapping[str, Any]


class ConfigError(Exception):
    """No way to reach a cluster; the text says what was found and what to do."""


@dataclass
class Credentials:
    """Headers that say who asks; good until ``expires`` (Unix seconds; None: for ever)."""

    headers: dict[str, str] = field(default_factory=dict)
    certificate: tuple[str, str] | None = None
    """A client's certificate and its key, in PEM."""
    expires: float | None = None


class Access:
    """One server, and how to ask it. ``tls`` is None for plain HTTP; ``proxy`` a URL, if kubeconfig names one."""

    def __init__(self, cluster: Entry, user: Entry, where: str) -> None:
        self.server = str(cluster.get("server") or "http://localhost:8080").rstrip("/")
        self.proxy = cluster.get("proxy-url")
        self.tls_name = cluster.get("tls-server-name")
        at = urlsplit(self.server)
        if at.scheme not in ("http", "https") or not at.hostname or at.port == 0:
            raise ConfigError(f"{where}: server {self.server!r} is no URL of an API server")
        self._cluster, self._user, self._where = cluster, user, where
        self._lock = threading.Lock()
        self._credentials = self._find_credentials()
        self.tls = self._context() if self.server.startswith("https://") else None

    def headers(self) -> dict[str, str]:
        with self._lock:
            expires = self._credentials.expires
            if expires is not None and time.time() >= expires:
                self._credentials = self._find_credentials()
            return self._credentials.headers

    def _context(self) -> ssl.SSLContext:
        data, file = self._cluster.get("certificate-authority-data"), self._cluster.get("certificate-authority")
        context = ssl.create_default_context(
            cafile=None if data else file, cadata=_decoded(data).decode() if data else None
        )
        # as kubectl: many clusters' authorities lack what RFC 5280 wants of them, and Python 3.13 insists on it
        context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)
        if self._cluster.get("insecure-skip-tls-verify"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self._credentials.certificate:
            # it is only taken from files
            with tempfile.TemporaryDirectory() as directory:
                paths = [Path(directory) / name for name in ("crt", "key")]
                for path, text in zip(paths, self._credentials.certificate):
                    path.touch(mode=0o600)
                    path.write_text(text)
                context.load_cert_chain(*map(str, paths))
        return context

    def _find_credentials(self) -> Credentials:
        user = self._user
        unknown = [name for name in _UNKNOWN if user.get(name)]
        if unknown:
            raise ConfigError(
                f"{self._where}: {unknown[0]} of the user is not supported; use a token, a client certificate, or exec "
                "with a credential plugin"
            )
        found = Credentials(certificate=self._certificate())
        if user.get("tokenFile"):
            found.headers = _bearer(Path(user["tokenFile"]).read_text().strip())
            found.expires = time.time() + TOKEN_SECONDS
        elif user.get("token"):
            found.headers = _bearer(user["token"])
        elif user.get("exec"):
            return self._ask_program(user["exec"])
        elif user.get("username"):
            plain = f"{user['username']}:{user.get('password') or ''}".encode()
            found.headers = {"Authorization": f"Basic {base64.b64encode(plain).decode()}"}
        return found

    def _certificate(self) -> tuple[str, str] | None:
        texts = []
        for name in ("client-certificate", "client-key"):
            data, file = self._user.get(f"{name}-data"), self._user.get(name)
            texts.append(_decoded(data).decode() if data else Path(file).read_text() if file else "")
        return (texts[0], texts[1]) if all(texts) else None

    def _ask_program(self, given: Entry) -> Credentials:
        """What a credential plugin says (client.authentication.k8s.io/v1 and v1beta1)."""
        version = given.get("apiVersion") or "client.authentication.k8s.io/v1"
        spec: dict[str, Any] = {"interactive": False}
        if given.get("provideClusterInfo"):
            spec["cluster"] = {key: value for key, value in self._cluster.items() if key != "extensions"}
        said = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
        argv = [str(given.get("command") or ""), *map(str, given.get("args") or ())]
        env = {str(each["name"]): str(each["value"]) for each in given.get("env") or ()}
        done = execution.run(argv, timeout=EXEC_SECONDS, env={**env, "KUBERNETES_EXEC_INFO": json.dumps(said)})
        hint = f"; {given['installHint'].strip()}" if given.get("installHint") else ""
        if not done.ok:
            raise ConfigError(f"{self._where}: the program for credentials failed: {done.describe()}{hint}")
        try:
            status = json.loads(done.stdout)["status"]
        except (ValueError, KeyError, TypeError):
            status = {}
        certificate = (status.get("clientCertificateData") or "", status.get("clientKeyData") or "")
        if not status.get("token") and not all(certificate):
            raise ConfigError(f"{self._where}: the program for credentials gave neither token nor certificate: {argv}")
        return Credentials(
            _bearer(status["token"]) if status.get("token") else {},
            certificate if all(certificate) else None,
            _moment(status.get("expirationTimestamp")),
        )


def find(kubeconfig: str | None, context: str | None) -> Access:
    """The cluster that ``kubeconfig`` leads to, or KUBECONFIG, the service account of this pod, ``~/.kube/config``.

    :raises ConfigError: if there is none, or it makes no sense.
    """
    alone = not kubeconfig and not context and "KUBECONFIG" not in os.environ
    in_pod = alone and "KUBERNETES_SERVICE_HOST" in os.environ
    paths = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        return Access(*(_of_this_pod() if in_pod else _of_files(paths, context)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise ConfigError(f"{SERVICE_ACCOUNT if in_pod else paths}: {type(exc).__name__}: {exc}; {_HINT}") from exc


def _of_this_pod() -> tuple[Entry, Entry, str]:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    authority = str(SERVICE_ACCOUNT / "ca.crt")
    return (
        {"server": server, "certificate-authority": authority},
        {"tokenFile": str(SERVICE_ACCOUNT / "token")},
        f"the service account of this pod ({SERVICE_ACCOUNT})",
    )


def _of_files(paths: str, context: str | None) -> tuple[Entry, Entry, str]:
    """Of several files the first that names something counts, as for kubectl."""
    there = [path for each in paths.split(os.pathsep) if each for path in [Path(each).expanduser()] if path.exists()]
    if not there:
        raise ConfigError(f"there is no file {paths}; {_HINT}")
    configs = [(path, _read(path)) for path in there]
    current = context or next((c["current-context"] for dummy, c in configs if c.get("current-context")), None)
    if not current:
        raise ConfigError(f"{paths} names no current-context; give context, or: kubectl config use-context NAME")
    chosen = _named(configs, "contexts", current, paths)
    cluster = _named(configs, "clusters", str(chosen.get("cluster")), paths)
    user = _named(configs, "users", str(chosen["user"]), paths) if chosen.get("user") else {}
    return cluster, user, f"context {current} of {paths}"


def _read(path: Path) -> Entry:
    try:
        text = path.read_text()
        found = json.loads(text) if text.startswith("{") else _yaml(text)
    except (OSError, ValueError) as exc:
        raise ConfigError(_no_kubeconfig(path, f"{type(exc).__name__}: {' '.join(str(exc).split())}")) from exc
    if not isinstance(found, dict):
        raise ConfigError(_no_kubeconfig(path, "it has no keys"))
    return found


def _yaml(text: str) -> Any:
    import yaml  # ansible-core needs it as well

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc


def _no_kubeconfig(path: Path, why: str) -> str:
    return f"{path} is no kubeconfig ({why}); look with: kubectl --kubeconfig {path} config view"


def _named(configs: list[tuple[Path, Entry]], kind: str, name: str, paths: str) -> Entry:
    """The entry of that name, its files found from where it is written."""
    for path, config in configs:
        for each in config.get(kind) or ():
            if isinstance(each, dict) and each.get("name") == name:
                entry = dict(each.get(kind[:-1]) or {})
                for key in ("certificate-authority", "client-certificate", "client-key", "tokenFile"):
                    if entry.get(key):
                        entry[key] = str(path.parent / Path(entry[key]).expanduser())
                program = entry.get("exec") or {}
                if "/" in str(program.get("command") or ""):
                    entry["exec"] = {**program, "command": str(path.parent / program["command"])}
                return entry
    known = [str(each.get("name")) for dummy, config in configs for each in config.get(kind) or ()]
    raise ConfigError(f"{paths} has no {kind[:-1]} called {name}, but {', '.join(known) or 'none at all'}")


def _bearer(token: str) -> dict[str, str]:
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("the token for the API server has characters that no token has; get a new one")
    return {"Authorization": f"Bearer {token}"}


def _decoded(data: str) -> bytes:
    return base64.b64decode("".join(data.split()), validate=True)


def _moment(text: str | None) -> float | None:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None
