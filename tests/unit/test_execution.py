# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import execution


def test_output_and_status() -> None:
    done = execution.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout=10)
    assert (done.rc, done.stdout, done.stderr, done.timed_out) == (3, "out\n", "err\n", False)
    assert not done.ok
    assert done.describe() == "sh -c echo out; echo err >&2; exit 3: rc 3: err"


def test_a_message_has_the_cause_and_not_a_screen_of_package_names() -> None:
    errors = "W: old\nE: Write error - write (28: No space left on device)\nE: The package lists could not be opened.\n"
    done = execution.Completed(("apt-cache", "policy", *["libnvidia-compute-535-server"] * 9), 100, "", errors, 0.1)
    said = done.describe()
    assert "No space left on device); E: The package lists" in said and "W: old" not in said
    assert said.startswith("apt-cache policy libnvidia") and "…: rc 100: " in said and len(said) < 250


def test_missing_program_is_a_result_not_an_exception() -> None:
    done = execution.run(["no-such-program"], timeout=1)
    assert done.rc == execution.NOT_FOUND_RC and "not found" in done.stderr


def test_program_that_may_not_be_run(tmp_path: Path) -> None:
    program = tmp_path / "data"
    program.write_text("x")
    assert execution.run([str(program)], timeout=1).rc == 126


def test_locale_and_stdin() -> None:
    done = execution.run(["sh", "-c", "cat; echo $LC_ALL"], timeout=10, stdin="given ", env={"LC_ALL": "C.UTF-8"})
    assert done.stdout == "given C.UTF-8\n"


def test_a_name_with_shell_characters_stays_one_argument() -> None:
    name = "$(touch /tmp/no); `x` 'y'"
    assert execution.run(["printf", "%s", name], timeout=10).stdout == name


def test_past_the_deadline_the_whole_group_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    done = execution.run(["sh", "-c", f"sleep 300 & echo $! > {pid_file}; wait"], timeout=0.5)
    assert done.timed_out and done.rc == execution.DEADLINE_RC
    assert "no answer within" in done.describe()
    child = int(pid_file.read_text())
    stat = Path(f"/proc/{child}/stat")
    for dummy in range(100):
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("a grandchild outlived the deadline")


def test_a_daemon_that_keeps_the_output_open_does_not_block(tmp_path: Path) -> None:
    done = execution.run(["sh", "-c", "sleep 30 & echo $!"], timeout=10)
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.ok


def test_call_returns_values_and_errors() -> None:
    assert execution.call(lambda a, b: {"sum": a + b}, 2, 3, timeout=10).value == {"sum": 5}
    failed = execution.call(int, "x", timeout=10)
    assert not failed.ok and failed.error is not None and failed.error.startswith("ValueError")


def test_call_survives_a_hang_and_a_crash() -> None:
    hung = execution.call(time.sleep, 300, timeout=0.3)
    assert hung.timed_out and not hung.ok
    crashed = execution.call(_segfault, timeout=10)
    assert crashed.error == f"ended with signal {int(signal.SIGKILL)}"


def _segfault() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_call_takes_a_large_result() -> None:
    assert len(execution.call(bytes, 5_000_000, timeout=30).value) == 5_000_000


def test_administrators_commands_are_found_whatever_the_path_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = execution.run(["/bin/sh", "-c", "echo $PATH"], timeout=10).stdout.strip().split(":")
    assert shown[0] == str(tmp_path) and "/usr/sbin" in shown
