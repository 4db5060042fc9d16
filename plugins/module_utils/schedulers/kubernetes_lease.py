# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One upgrade at a time in a cluster whose nodes nobody logs in to: a Lease (``coordination.k8s.io/v1``) of a run.

Every write is onto the Lease as it was read, so of two runs one gets it. It is timed by the API server's clock, which
all controllers have in common.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import (
    FIELD_MANAGER,
    Answer,
    Api,
    ApiError,
    object_path,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects

NAME = "gpufleet-upgrade"
HOLDER = objects.PREFIX + "holder"
"""Annotation of the Lease: who runs the upgrade, for whoever finds the cluster locked."""

_GROUP, _RESOURCE = "coordination.k8s.io/v1", "leases"
_ATTEMPTS = 8

RIGHTS = (("coordination.k8s.io", "leases", ("create", "delete", "get", "update")),)
"""Group, resource and verbs of every request sent from here; ``docs/kubernetes-rbac.yml`` is made of them."""

Object = Mapping[str, Any]


class LeaseError(Exception):
    """Another run has the cluster; the text says which, and how to take over. ``held`` is its lease."""

    def __init__(self, message: str, held: Held | None) -> None:
        super().__init__(message)
        self.held = held


@dataclass(frozen=True)
class Held:
    """Who has the cluster. Times are Unix seconds of the API server's clock: taken, last renewed, when it runs out."""

    run_id: str
    holder: str
    since: float
    renewed: float
    expires: float

    def describe(self) -> str:
        return f"run {self.run_id} by {self.holder} since {_written(self.since)}, valid until {_written(self.expires)}"


@dataclass(frozen=True)
class Change:
    before: Held | None
    after: Held | None
    warning: str = ""

    @property
    def changed(self) -> bool:
        return self.before != self.after


class ClusterLease:
    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._all = object_path(_GROUP, _RESOURCE, namespace=namespace)
        self._path = object_path(_GROUP, _RESOURCE, NAME, namespace)

    def hold(self, run_id: str, holder: str | None, ttl: int, takeover: str | None, check: bool = False) -> Change:
        """Have the cluster for ``ttl`` seconds from now on.

        :raises LeaseError: if another run has it that has neither run out nor is taken over by its id.
        :raises ClusterError: if the cluster cannot be asked.
        """
        for dummy in range(_ATTEMPTS):
            found, now = self._look()
            before = held(found)
            ours = before is not None and before.run_id == run_id
            warning = ""
            if before is not None and not ours:
                if takeover == before.run_id:
                    warning = f"took the cluster over from {before.describe()}"
                elif before.expires <= now:
                    warning = f"the cluster's lock had run out: it was held by {before.describe()}"
                else:
                    named = f"gpu_lock_takeover names {takeover}, but the cluster" if takeover else "the cluster"
                    raise LeaseError(
                        f"{named} is locked by {before.describe()}. Let it finish, or, if you are sure that it no "
                        f"longer runs, take over with: -e gpu_lock_takeover={before.run_id}",
                        before,
                    )
            known = before.holder if before and ours else "unknown"
            after = Held(run_id, holder or known, before.since if before and ours else now, now, now + ttl)
            if check or self._write(found, after, ttl):
                return Change(before, after, warning)
        raise LeaseError(f"{self._path} changes all the time; see who writes it: kubectl get lease -A", before)

    def renew(self, run_id: str, ttl: int, check: bool = False) -> Change:
        """Have it for longer, also if it had run out meanwhile.

        :raises LeaseError: if this run does not have it: somebody took over.
        """
        before = held(self._look()[0])
        if before is None or before.run_id != run_id:
            now = f"it is locked by {before.describe()}" if before else "it is free"
            raise LeaseError(f"run {run_id} no longer has the cluster: {now}", before)
        return self.hold(run_id, None, ttl, None, check)

    def release(self, run_id: str, check: bool = False) -> Change:
        """Give it back; the lease of another run is left alone."""
        found = self._look()[0]
        before = held(found)
        if before is None or found is None:
            return Change(None, None)
        if before.run_id != run_id:
            return Change(before, before, f"not released: the cluster is locked by {before.describe()}")
        if not check:
            meta = found["metadata"]
            as_found = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
            self._api.delete(self._path, preconditions=as_found)
        return Change(before, None)

    def _look(self) -> tuple[Object | None, float]:
        """The Lease, if there is one, and the time by the server's clock."""
        answer = self._api.request("GET", self._path)
        if not answer.ok and answer.status != 404:
            raise ApiError("GET", self._path, answer)
        return (answer.body if answer.ok else None), answer.date

    def _write(self, found: Object | None, wanted: Held, ttl: int) -> bool:
        """False if somebody else was quicker."""
        spec = {
            "holderIdentity": wanted.run_id,
            "leaseDurationSeconds": ttl,
            "acquireTime": _micro(wanted.since),
            "renewTime": _micro(wanted.renewed),
        }
        meta = {"name": NAME, "annotations": {HOLDER: wanted.holder}}
        lease = {"apiVersion": _GROUP, "kind": "Lease", "metadata": meta, "spec": spec}
        method, path = ("POST", self._all) if found is None else ("PUT", self._path)
        if found is not None:
            meta["resourceVersion"] = found["metadata"]["resourceVersion"]
        answer: Answer = self._api.request(method, path, lease, fieldManager=FIELD_MANAGER)
        meanwhile = (409,) if found is None else (404, 409)  # a namespace that is not there is 404 as well
        if not answer.ok and answer.status not in meanwhile:
            raise ApiError(method, path, answer)
        return answer.ok


def held(lease: Object | None) -> Held | None:
    """Who holds a Lease; None if nobody does. What somebody has written by hand into it is taken as it is: a time that
    is none has run out."""
    if lease is None:
        return None
    spec = lease.get("spec") or {}
    if not spec.get("holderIdentity"):
        return None
    renewed = objects.moment(spec.get("renewTime")) or 0.0
    return Held(
        run_id=str(spec["holderIdentity"]),
        holder=str((lease["metadata"].get("annotations") or {}).get(HOLDER, "unknown")),
        since=objects.moment(spec.get("acquireTime")) or renewed,
        renewed=renewed,
        expires=renewed + float(spec.get("leaseDurationSeconds") or 0),
    )


def _written(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


def _micro(moment: float) -> str:
    """A time as a Lease has it, in microseconds."""
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
