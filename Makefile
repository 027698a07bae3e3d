# make check   set up .venv and time zero against random KV on the embedded engine (about 2 minutes the first time)
# make test    the same .venv, every test that needs no GPU
# make lint    ruff and mypy
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without an NVIDIA GPU the CPU build of PyTorch, a tenth of the download.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "torch>=2.11,<2.15" || \
	echo "torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu")

.PHONY: check test lint clean
.DELETE_ON_ERROR:

check: $(VENV)/.installed
	$(BIN)/kvlab check tiny-dsa --engine reference --case decode=4*1@4096 --case hit=64@2048; \
	case $$? in 0|1|3) ;; *) exit 1 ;; esac  # any verdict is a result; only bad input or a crash fails

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvlab needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
