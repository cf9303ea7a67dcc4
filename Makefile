# Two commands do everything: `make train` and `make test`. Both make .venv first.
PHALANX := .venv/bin/phalanx
PY := .venv/bin/python
CODE := src lab tests scripts benchmarks

.PHONY: help env lock train lab-packages test test-all test-processors durations lint format verify size bench docs clean

help:           ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

.venv/.made: pyproject.toml lab/pyproject.toml constraints.txt requirements/dev.txt requirements/cuda.txt scripts/make-env.sh
	sh scripts/make-env.sh
	@touch $@

env: .venv/.made  ## make .venv of what requirements/ locks

lock:           ## lock exact versions and hashes anew, after a change of pyproject.toml or constraints.txt
	sh scripts/lock.sh

train: env      ## train a small MoE model on the Python sources of this machine, 4 local ranks, about 5 minutes
	$(PHALANX) train recipes/laptop.toml

lab-packages:   ## install a browser, SLURM and Prometheus for the tests that use them (needs root and apt)
	sh scripts/system-packages.sh lab

test: env       ## run the tests that every change must pass
	sh scripts/system-packages.sh
	-sh scripts/etcd.sh
	sh scripts/tests.sh $(TIER)

test-all:       ## run every test with every case, once
	$(MAKE) test TIER=all

durations: env  ## measure what each test costs (tests/durations.json) and name the expensive ones
	.venv/bin/python -m pytest -q --store-durations -m "not alone"

test-processors: env  ## the tests of numbers on the paths that two other kinds of processors take
	sh scripts/processors.sh $(PROCESSORS)

lint: env       ## ruff and mypy
	.venv/bin/ruff format --check -q $(CODE)
	.venv/bin/ruff check -q $(CODE)
	.venv/bin/mypy

format: env     ## format the code
	.venv/bin/ruff format -q $(CODE)
	.venv/bin/ruff check -q --fix $(CODE)

verify: env     ## every legal mapping of 4 and 8 ranks against one rank, in float64
	$(PHALANX) verify --ranks 4
	$(PHALANX) verify --ranks 8

size: env       ## print lines, files, rooms and faces of the source
	$(PY) -m phalanx_lab.house

bench: env      ## one rank against transformers, interleaved
	$(PHALANX) bench train

docs: env       ## build the pages of docs/ into site/
	sh scripts/make-env.sh docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict -q

clean:          ## remove what the build made, not the runs
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info lab/*.egg-info
