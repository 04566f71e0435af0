# make demo    set up, and perturb the bundled photograph
# make test    set up, lint, check types, and run every test
# make bench   set up, and measure (writes benchmarks/results/)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRITON := .venv-triton
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test bench lint clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml requirements-dev.txt | $(BIN)/python
	$(PIP) -c requirements-dev.txt -e '.[cli]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml requirements-dev.txt | $(BIN)/python
	$(PIP) -r requirements-dev.txt -e .
	@touch $@

# Apart from TensorFlow: in one process the two abort.
$(TRITON)/dev.stamp: pyproject.toml requirements-dev.txt requirements-triton.txt
	$(PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements-dev.txt -r requirements-triton.txt -e .
	@touch $@

# The explorer is tested in a browser. Where none can be had, these tests are skipped and say so.
$(VENV)/browser.stamp: | $(BIN)/python
	@command -v chromium > /dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } > /dev/null 2>&1 || \
		echo "no chromium, and none could be installed (apt-get install chromium): the explorer is tested without a browser"
	@touch $@

demo: $(VENV)/demo.stamp
	$(BIN)/clipaware demo

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(TRITON)/dev.stamp $(VENV)/browser.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal
	TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest -n 2 --dist worksteal tests/test_triton.py

bench: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(TRITON) .pytest_cache .mypy_cache .ruff_cache .hypothesis clipaware-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
