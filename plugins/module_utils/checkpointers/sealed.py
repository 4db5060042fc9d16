# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Saves that only one recipient can read: each file is encrypted on its way into the store, by age or GnuPG.

What CRIU writes and reads is plain, and lies meanwhile in a directory of the node's memory, never in the store. The
store's hashes are those of the encrypted files, so a save is proven whole by whoever cannot read it too. The manifest
is not encrypted.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.artefact import own_directory
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed, Runner

TOOLS = ("age", "gpg")
SCRATCH = "/dev/shm"  # noqa: S108 - in a directory of root's own below it
_QUERY = 30.0
_AT_ONCE = 2


class SealError(Exception):
    """A file that could not be encrypted or decrypted; the text says which, and what the tool said."""


class Seal:
    """One recipient. ``options`` are ``save.encrypt``: ``tool``, ``recipient``, ``identity`` (age's file with the key
    that decrypts; GnuPG has its own), ``scratch``."""

    def __init__(self, run: Runner, options: Mapping[str, Any]) -> None:
        self._run = run
        self.tool = str(options["tool"])
        self.recipient = str(options["recipient"])
        self._identity = str(options.get("identity") or "")
        self.scratch = Path(options.get("scratch") or SCRATCH)

    @property
    def suffix(self) -> str:
        return f".{self.tool}"

    def describe(self) -> dict[str, str]:
        """What a manifest says of it."""
        return {"tool": self.tool, "recipient": self.recipient}

    def trouble(self) -> str:
        """Why this node could not encrypt for the recipient; empty if it can."""
        if not self.recipient or self.recipient.startswith("-") or not self.recipient.isprintable():
            return f"{self.recipient!r} is not a recipient"
        done = self._encrypt("/dev/null", "/dev/null", _QUERY)
        return "" if done.ok else _why(done)

    def trouble_opening(self) -> str:
        """Why this node could not decrypt what is encrypted for the recipient; empty if it can."""
        with tempfile.TemporaryDirectory(prefix="gpufleet-") as place:
            sealed = Path(place, f"nothing{self.suffix}")
            done = self._encrypt("/dev/null", str(sealed), _QUERY)
            return self.can_open(sealed, _QUERY) if done.ok else _why(done)

    def plain(self, artefact: str) -> Path:
        """Where the plain files of a save are while they are needed."""
        return self.scratch / "gpufleet" / artefact

    def fresh(self, artefact: str) -> Path:
        """An empty directory for them; :raises OSError: if it cannot be made, or is not ours alone."""
        place = self.plain(artefact)
        own_directory(place.parent)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700)
        return place

    def close(self, plain: Path, staged: Path, seconds: float) -> None:
        """Encrypt all files below ``plain`` into ``staged``, each gone from the former as soon as it is in the latter.

        :raises SealError: if one cannot be.
        """

        def one(path: Path) -> None:
            sealed = staged / path.relative_to(plain).with_name(path.name + self.suffix)
            sealed.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._done(self._encrypt(str(path), str(sealed), seconds), sealed)
            path.unlink()

        self._each(one, [path for path in sorted(plain.rglob("*")) if path.is_file()])

    def open(self, sealed: Path, names: Iterable[str], plain: Path, seconds: float) -> None:
        """Decrypt files by their names below ``sealed`` into ``plain``; :raises SealError: if one cannot be."""

        def one(path: Path) -> None:
            opened = plain / path.relative_to(sealed).with_name(path.name[: -len(self.suffix)])
            opened.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened.touch(mode=0o600)  # age makes no file of an empty one
            self._done(self._decrypt(str(path), str(opened), seconds), opened)

        self._each(one, [sealed / name for name in names])

    def can_open(self, path: Path, seconds: float) -> str:
        """Why this node cannot decrypt a file; empty if it can."""
        done = self._decrypt(str(path), "/dev/null", seconds)
        return "" if done.ok else _why(done)

    def _each(self, act: Any, paths: list[Path]) -> None:
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            for dummy in pool.map(act, paths):
                pass

    def _done(self, done: Completed, made: Path) -> None:
        if not done.ok:
            raise SealError(_why(done))
        if not made.is_file():
            raise SealError(f"{' '.join(done.argv)} succeeded and made no {made}")
        made.chmod(0o600)

    def _encrypt(self, source: str, to: str, seconds: float) -> Completed:
        if self.tool == "age":
            return self._run(
                ["age", "--encrypt", "--recipient", self.recipient, "--output", to, source], timeout=seconds
            )
        gpg = ["gpg", "--batch", "--yes", "--quiet", "--no-auto-key-locate", "--trust-model", "always"]
        gpg += ["--compress-algo", "none"]
        return self._run([*gpg, "--recipient", self.recipient, "--output", to, "--encrypt", source], timeout=seconds)

    def _decrypt(self, source: str, to: str, seconds: float) -> Completed:
        if self.tool == "age":
            identity = ["--identity", self._identity] if self._identity else []
            return self._run(["age", "--decrypt", *identity, "--output", to, source], timeout=seconds)
        return self._run(["gpg", "--batch", "--yes", "--quiet", "--output", to, "--decrypt", source], timeout=seconds)


def _why(done: Completed) -> str:
    """What the tool said; age's last words are where to report errors."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("age: report ")]
    return replace(done, stderr="\n".join(lines)).describe()
