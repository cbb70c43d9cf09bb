# Every target sets itself up in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.senmon-installed
export OMP_NUM_THREADS ?= 1
ROOMS := infra data_contracts domain_rewards sft rl serving pipelines
PYTEST_ARGS ?=

.PHONY: install demo test test-slow test-deepspeed lint format bench clean
.DEFAULT_GOAL := install

install: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make install PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements.lock
	# A GPU build of torch has dependencies that the lock does not list; a CPU build has none left to install.
	$(BIN)/python -m pip install --quiet -c requirements.lock torch
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

demo: install
	env -u OMP_NUM_THREADS $(BIN)/python -m pipelines.demo

test: install
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: install
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# Beside the environment, not in it: other libraries change their ways when they can import DeepSpeed.
DEEPSPEED := $(VENV)/deepspeed
$(DEEPSPEED)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(DEEPSPEED) \
		deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 py-cpuinfo==9.0.0
	touch $@

test-deepspeed: $(DEEPSPEED)/.installed
	PYTHONPATH=$(DEEPSPEED) $(BIN)/python -m pytest -m deepspeed $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(ROOMS)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	env -u OMP_NUM_THREADS $(BIN)/python -m tests.benchmarks

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
