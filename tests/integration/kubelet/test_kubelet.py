# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real kubelet with containerd, runc and CRIU saves a container of a pod, which goes on in a pod of another node."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[3]
LAB = TOP / "tests/lab/kubelet/lab"
SECONDS = 120
PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  vars: {{ansible_python_interpreter: "{{{{ ansible_playbook_python }}}}"}}
  tasks:
    - {module}:
        {arguments}
      register: done
      failed_when: false
    - ansible.builtin.copy:
        content: "{{{{ done }}}}"
        dest: {answer}
        mode: "0600"
"""


class Node:
    """One node of the lab, with files that both have."""

    def __init__(self, name: str, state: Path, shared: Path) -> None:
        self.name, self.state, self.shared = name, state, shared
        self.counted = shared / "data/count"

    def lab(self, command: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(LAB), command, "--state", str(self.state), *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"lab {command} {arguments}: rc {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def sh(self, script: str) -> str:
        return self.lab("exec", "--", "sh", "-c", script)

    def pod(self, image: str, pull: str) -> None:
        """Have the kubelet run the pod "counter", whose container "engine" has this image."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "counter", "namespace": "ml"},
            "spec": {
                "hostNetwork": True,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": False,
                "containers": [
                    {
                        "name": "engine",
                        "image": image,
                        "imagePullPolicy": pull,
                        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    }
                ],
                "volumes": [{"name": "data", "hostPath": {"path": str(self.counted.parent)}}],
            },
        }
        (self.shared / "pod.json").write_text(json.dumps(pod))
        self.sh(f"cp {self.shared}/pod.json /etc/kubernetes/manifests/counter.json")

    def end_pod(self) -> None:
        self.sh("rm /etc/kubernetes/manifests/counter.json")
        wait(lambda: not self.sh("ctr --namespace k8s.io tasks list --quiet").strip(), "the end of the pod")

    def module(self, module: str, state: str, **arguments: Any) -> list[dict[str, Any]]:
        """What a module of this collection, run on the node by Ansible, says of each workload."""
        answer, play = self.shared / f"{self.name}.json", self.shared / f"{self.name}.yml"
        arguments = {"state": state, "store": str(self.shared / "store"), **arguments}
        play.write_text(
            PLAY.format(
                module=f"gpufleet.driver.{module}",
                arguments=json.dumps(arguments),
                answer=answer,
            )
        )
        environment = {"ANSIBLE_COLLECTIONS_PATH": str(TOP / ".build"), "ANSIBLE_HOME": str(TOP / ".build/ansible")}
        words = [f"{name}={value}" for name, value in environment.items()]
        ansible = TOP / ".build/venv/bin/ansible-playbook"
        self.lab("exec", "--", "env", *words, str(ansible), "-i", "localhost,", str(play))
        done = json.loads(answer.read_text())
        if "workloads" not in done:
            raise AssertionError(f"{module}: {done}")
        return done["workloads"]

    def capture(self, save: dict[str, Any]) -> dict[str, Any]:
        (answer,) = self.module("workload_checkpoint", "captured", workloads=[{"name": "counter", "save": save}])
        return answer

    def save(self, **kubelet: Any) -> dict[str, Any]:
        return {"backend": "kubelet", "may_repeat": True, "kubelet": {**self.options(), **kubelet}}

    def options(self) -> dict[str, Any]:
        pki = "/var/lib/kubelet/pki/kubelet"
        version = self.sh("containerd --version").split()[2].partition("+")[0]
        return {
            **{"namespace": "ml", "pod": f"counter-{self.name}", "container": "engine"},
            **{"ca": f"{pki}.crt", "cert": f"{pki}.crt", "key": f"{pki}.key"},
            "runtime": f"containerd://{version}",
        }


def wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come in {SECONDS} s")
        time.sleep(0.1)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    built = subprocess.run([str(LAB), "build"], capture_output=True, text=True, check=False)
    if built.returncode == 3:
        pytest.skip(built.stderr.strip().splitlines()[-1])
    shared = tmp_path_factory.mktemp("shared")
    (shared / "data").mkdir()
    made = [Node(name, tmp_path_factory.mktemp(name), shared) for name in ("node-1", "node-2")]
    begun: list[Node] = []
    try:
        for node in made:
            node.lab("up", "--name", node.name)
            begun.append(node)
        yield made[0], made[1]
    finally:
        for node in begun:
            node.lab("down")


def counts(node: Node) -> list[int]:
    """The numbers that the work has written, but for one that it may be writing."""
    text = node.counted.read_text() if node.counted.exists() else ""
    return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_a_container_goes_on_in_a_pod_of_another_node(nodes: tuple[Node, Node]) -> None:
    source, target = nodes
    source.pod("127.0.0.1:5000/counter:1", "IfNotPresent")
    wait(lambda: len(counts(source)) > 20, "the counting")

    unknown = source.save(container="nobody")
    assert source.capture(unknown)["reason"]["reason"] == "unsupported_feature:kubelet"
    refused = source.capture(source.save(cert=None, key=None))["reason"]
    assert refused["reason"] == "unsupported_backend" and "HTTP 401" in refused["observed"]

    before = counts(source)[-1]
    saved = source.capture(source.save())
    after = counts(source)[-1]
    assert saved["ok"] and saved["source"] == "running" and saved["evidence"]["processes"] == 1
    assert source.sh("ls /var/lib/kubelet/checkpoints") == ""
    kept = source.shared / "store" / saved["artefact"]
    assert kept.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in kept.iterdir()} == {0o600}
    wait(lambda: counts(source)[-1] > after, "the counting after the save")

    work = {"name": "counter", "artefact": saved["artefact"], "save": source.save()}
    source.module("workload_checkpoint", "committed", target="node-2", workloads=[work])
    source.end_pod()
    ended = len(counts(source))
    (back,) = target.module("workload_restore", "restored", workloads=[{**work, "save": target.save()}])
    assert back["ok"], back
    target.pod(back["evidence"]["image"], "Never")
    wait(lambda: len(counts(target)) > ended + 20, "the counting on the other node")

    went_on = counts(target)[ended:]
    assert before < went_on[0] <= after + 1
    assert went_on == list(range(went_on[0], went_on[0] + len(went_on)))
    target.end_pod()
