# SPDX-License-Identifier: GPL-3.0-or-later
# make help lists the targets. Everything is set up on first use and cached under ~/.cache/gpufleet.
.DEFAULT_GOAL := help
.PHONY: help setup demo test unit oldest lint sanity molecule slurm kubernetes kubelet integration moves hosts metal bench lab-hosts lab-metal lab-slurm lab-kubernetes lab-stop clean

LAB ?= .build/lab
SLURM_LAB ?= /tmp/gpufleet-slurm
NODES ?= 3
try = printf 'lab: %s\n' 'try it with: ANSIBLE_COLLECTIONS_PATH=.build .build/venv/bin/ansible-playbook gpufleet.driver.status -i $(LAB)/$(1)/inventory.yml' 'stop it with: make lab-stop'

help: ## Show this help
	@awk -F':.*## ' '/^[a-z -]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what the tests and labs need (done by every other target)
	@tests/setup

demo: setup ## Upgrade a small lab fleet while it works, and write report.html
	@tests/demo

test: ## Everything: unit tests, labs, Molecule, sanity, lint
	@tests/run

unit oldest lint sanity molecule slurm kubernetes kubelet integration moves hosts metal: ## One part of the tests
	@tests/run $@

bench: setup ## Run all benchmarks, or one with NAME=holders_vs_lsof
	@tests/bench/run $(NAME)

lab-hosts: setup ## Start a lab of containers (NODES=3) and print its inventory
	@tests/lab/hosts/lab up --nodes $(NODES) --state $(LAB)/hosts --workload
	@mkdir -p $(LAB)/hosts/group_vars && cp tests/lab/hosts/gpu_nodes.yml $(LAB)/hosts/group_vars/ && $(call try,hosts)

lab-metal: setup ## Start a lab of virtual machines (NODES=3) and print its inventory
	@tests/lab/metal/lab up --nodes $(NODES) --state $(LAB)/metal && $(call try,metal)

lab-slurm: setup ## Start a Slurm cluster on this machine (NODES=3)
	@tests/lab/slurm/lab up --nodes $(NODES) --state $(SLURM_LAB)

lab-kubernetes: setup ## Start a Kubernetes control plane with simulated nodes (NODES=3)
	@tests/lab/kubernetes/lab up --nodes $(NODES) --state $(LAB)/kubernetes

lab-stop: ## Stop the labs
	@[ ! -d $(SLURM_LAB) ] || tests/lab/slurm/lab down --state $(SLURM_LAB)
	@for lab in hosts metal kubernetes; do [ ! -d $(LAB)/$$lab ] || tests/lab/$$lab/lab down --state $(LAB)/$$lab; done

clean: lab-stop ## Remove what was built in this checkout (the cache stays)
	@rm -rf .build .mypy_cache .pytest_cache .ruff_cache .hypothesis
