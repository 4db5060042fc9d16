# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Saves for one recipient, by the real age and the real GnuPG."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import CheckpointError, Work
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cuda_criu import CudaCriu
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.sealed import Seal, SealError

MISSING = [tool for tool in ("age", "age-keygen", "gpg") if not shutil.which(tool)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: run tests/setup packages")

SECRET = b"hunter2" * 1000


def command(*argv: str, **environment: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """``save.encrypt`` by tool; the secret keys are this user's."""
    folder = tmp_path_factory.mktemp("keys")
    public = command("age-keygen", "--output", str(folder / "key")).split()[-1]
    home = folder / "gnupg"
    home.mkdir(mode=0o700)
    os.environ["GNUPGHOME"] = str(home)
    command("gpg", "--batch", "--passphrase", "", "--quick-generate-key", "ops@example.com", "default", "default", "0")
    yield {
        "age": {"tool": "age", "recipient": public, "identity": str(folder / "key")},
        "gpg": {"tool": "gpg", "recipient": "ops@example.com"},
    }
    command("gpgconf", "--kill", "all")  # the daemons that gpg has started for this folder
    del os.environ["GNUPGHOME"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    plain = tmp_path / "scratch/gpufleet/save-1"
    plain.parent.mkdir(mode=0o700, parents=True)
    (plain / "images").mkdir(parents=True)
    (plain / "images/pages-1.img").write_bytes(SECRET)
    (plain / "images/empty.img").touch()
    return plain


def seal(tmp_path: Path, options: dict[str, str], run: execution.Runner = execution.run) -> Seal:
    return Seal(run, {**options, "scratch": str(tmp_path / "scratch")})


TOOLS = pytest.mark.parametrize("tool", ["age", "gpg"])


@TOOLS
def test_what_goes_in_comes_out_and_is_plain_nowhere_else(
    tmp_path: Path, keys: dict[str, dict[str, str]], files: Path, tool: str
) -> None:
    one = seal(tmp_path, keys[tool])
    assert one.trouble() == one.trouble_opening() == ""
    store = tmp_path / "store"
    one.close(files, store, 30)
    names = artefact.contents(store)
    assert names == [f"images/empty.img.{tool}", f"images/pages-1.img.{tool}"]
    assert [path for path in files.rglob("*") if path.is_file()] == []
    assert all(b"hunter2" not in (store / name).read_bytes() for name in names)
    one.open(store, names, one.fresh("save-1"), 30)
    assert (files / "images/pages-1.img").read_bytes() == SECRET
    assert (files / "images/empty.img").read_bytes() == b""
    assert {path.stat().st_mode & 0o777 for path in files.rglob("*") if path.is_file()} == {0o600}


@TOOLS
@pytest.mark.parametrize("recipient", ["", "-o/etc/passwd", "nobody@example.com", "age1qqqq", "a\nb"])
def test_a_recipient_that_is_none_is_found_first(
    tmp_path: Path, keys: dict[str, dict[str, str]], tool: str, recipient: str
) -> None:
    one = seal(tmp_path, {**keys[tool], "recipient": recipient})
    assert one.trouble() and one.trouble_opening()


def test_what_is_wrong_is_told_in_the_tools_words(tmp_path: Path, keys: dict[str, dict[str, str]], files: Path) -> None:
    """age says last where to report errors; and GnuPG would look for an unknown recipient in the network first."""
    stranger = seal(tmp_path, {**keys["gpg"], "recipient": "nobody@example.com"})
    assert "No public key" in stranger.trouble()
    seal(tmp_path, keys["age"]).close(files, tmp_path / "store", 30)
    command("age-keygen", "--output", str(tmp_path / "another"))
    other = seal(tmp_path, {**keys["age"], "identity": str(tmp_path / "another")})
    assert "no identity matched" in other.can_open(tmp_path / "store/images/empty.img.age", 30)


def test_a_tool_that_is_not_installed_is_named(tmp_path: Path) -> None:
    def none(argv: Sequence[str], **dummy: Any) -> execution.Completed:
        return execution.run(["/nonexistent/age"], timeout=5)

    one = seal(tmp_path, {"tool": "age", "recipient": "age1x"}, none)
    assert "not found" in one.trouble() and "not found" in one.trouble_opening()


@TOOLS
def test_damage_and_another_key_open_nothing(
    tmp_path: Path, keys: dict[str, dict[str, str]], files: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = seal(tmp_path, keys[tool])
    store = tmp_path / "store"
    one.close(files, store, 30)
    damaged = store / f"images/pages-1.img.{tool}"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.raises(SealError):
        one.open(store, [f"images/pages-1.img.{tool}"], one.fresh("save-1"), 30)
    (tmp_path / "other").mkdir(mode=0o700)
    monkeypatch.setenv("GNUPGHOME", str(tmp_path / "other"))
    stranger = seal(tmp_path, {**keys[tool], "identity": "/nonexistent"})
    assert stranger.can_open(store / f"images/empty.img.{tool}", 30)
    assert stranger.trouble_opening()


@pytest.fixture
def target(tmp_path: Path) -> CudaCriu:
    return CudaCriu(execution.run, str(tmp_path / "state"), str(tmp_path / "store"))


def published(tmp_path: Path, files: Path, options: dict[str, str]) -> dict[str, Any]:
    one = seal(tmp_path, options)
    staged = artefact.stage(tmp_path / "store", "save-1")
    one.close(files, staged, 30)
    return artefact.publish(staged, "save-1", {"sealed": one.describe()})


def test_a_target_without_the_key_refuses_before_the_source_ends(
    tmp_path: Path, keys: dict[str, dict[str, str]], files: Path, target: CudaCriu
) -> None:
    manifest = published(tmp_path, files, keys["age"])
    assert artefact.verify(tmp_path / "store", "save-1") == []
    scratch = {"scratch": str(tmp_path / "scratch")}
    for options, said in (
        ({}, "does not name here"),
        ({"encrypt": {**keys["gpg"], **scratch}}, "does not name here"),
        ({"encrypt": {**keys["age"], **scratch, "identity": "/nonexistent"}}, "/nonexistent"),
    ):
        assert said in target._unreadable(Work("w", save=options), manifest)
    assert target._unreadable(Work("w", save={"encrypt": {**keys["age"], **scratch}}), manifest) == ""


@pytest.mark.parametrize("made", ["open", "link", "file", "foreign"])
def test_plain_files_lie_in_a_directory_of_our_own(tmp_path: Path, keys: dict[str, dict[str, str]], made: str) -> None:
    """Everybody may make directories in /dev/shm."""
    place = tmp_path / "scratch/gpufleet"
    place.parent.mkdir()
    if made == "link":
        place.symlink_to(tmp_path)
    elif made == "file":
        place.touch(mode=0o600)
    else:
        place.mkdir(mode=0o755 if made == "open" else 0o700)
    if made == "foreign":
        os.chown(place, 65534, -1)
    with pytest.raises(OSError, match=r"File exists|is not a directory of our own"):
        seal(tmp_path, keys["age"]).fresh("save-1")
    assert list(tmp_path.rglob("save-1")) == []


def test_what_was_opened_is_dropped(
    tmp_path: Path, keys: dict[str, dict[str, str]], files: Path, target: CudaCriu
) -> None:
    manifest = published(tmp_path, files, keys["age"])
    work = Work("w", save={"encrypt": {**keys["age"], "scratch": str(tmp_path / "scratch")}})
    path = tmp_path / "record.json"
    record: dict[str, Any] = {}
    plain = target._open(work, path, record, manifest)
    assert (plain / "images/pages-1.img").read_bytes() == SECRET
    assert suspend.read_record(path)["plain"] == str(plain)  # so whoever goes on after a crash finds it
    target._drop_plain(record)
    assert not plain.exists()


def test_an_opening_that_fails_says_whose_key_it_takes(
    tmp_path: Path, keys: dict[str, dict[str, str]], files: Path, target: CudaCriu
) -> None:
    manifest = published(tmp_path, files, keys["age"])
    options = {**keys["age"], "scratch": str(tmp_path / "scratch"), "identity": "/nonexistent"}
    with pytest.raises(CheckpointError, match="key_mismatch:encryption") as caught:
        target._open(Work("w", save={"encrypt": options}), tmp_path / "record.json", {}, manifest)
    assert caught.value.reason.source == "gone"
