# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node that only answers: commands by their first words, files under a temporary root."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import NOT_FOUND_RC, Completed


class Answers:
    """A runner that knows what some commands print; the longest matching beginning wins, others are not found."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, ...], tuple[int, str, str]] = {}
        self.asked: list[tuple[str, ...]] = []

    def set(self, *argv: str, out: str = "", rc: int = 0, err: str = "") -> None:
        self.known[argv] = (rc, out, err)

    def __call__(self, argv, *, timeout, env=None, stdin=None):
        argv = tuple(argv)
        self.asked.append(argv)
        fitting = [known for known in self.known if argv[: len(known)] == known]
        if not fitting:
            return Completed(argv, NOT_FOUND_RC, "", f"{argv[0]}: not found", 0.0)
        rc, out, err = self.known[max(fitting, key=len)]
        return Completed(argv, rc, out, err, 0.0)


@pytest.fixture
def answers() -> Answers:
    return Answers()


class Debian:
    """A Debian-like node: ``dpkg`` rows are (name, version, status abbreviation)."""

    def __init__(self, root: Path, answers: Answers) -> None:
        self.root, self.answers = root, answers
        for file in ("var/lib/dpkg/status", "usr/bin/apt-get"):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text("")
        answers.set("dpkg", "--print-architecture", out="amd64\n")
        answers.set("apt-cache", "policy")
        answers.set("apt-cache", "show")
        answers.set("apt-get")

    def dpkg(self, *rows: tuple[str, str, str]) -> None:
        lines = [f"{name}\tamd64\t{version}\t{status}\n" for name, version, status in rows]
        self.answers.set("dpkg-query", out="".join(lines))

    def offers(self, offered: dict[str, list[str]], installed: dict[str, str] | None = None) -> None:
        """What ``apt-cache policy`` says: package → versions in the repository, highest first."""
        installed = installed or {}
        text = ""
        for name in sorted({*offered, *installed}):
            versions = offered.get(name, [])
            known = dict.fromkeys([*versions, *([installed[name]] if name in installed else [])])
            text += f"{name}:\n  Installed: {installed.get(name, '(none)')}\n"
            text += f"  Candidate: {next(iter(known), '(none)')}\n  Version table:\n"
            for version in known:
                text += f" {'***' if installed.get(name) == version else '   '} {version} 500\n"
                text += "        500 http://repo.example/ubuntu x/main amd64 Packages\n" if version in versions else ""
                text += "        100 /var/lib/dpkg/status\n" if installed.get(name) == version else ""
        self.answers.set("apt-cache", "policy", out=text)


@pytest.fixture
def debian(tmp_path: Path, answers: Answers) -> Debian:
    return Debian(tmp_path, answers)
