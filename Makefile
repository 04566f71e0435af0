# make demo        set up, and perturb the bundled photograph
# make test        set up, lint, check types, run what every promise needs on every backend, and the doctests
# make test-all    what make test leaves out: long tests, the documentation with its gallery
# make test-cpus   the numeric tests as other CPUs compute them, and with 1, 2 and 7 threads: CPUS='haswell'
# make times       run make test's tests, and say how long each took (writes .cache/times.csv)
# make test-extra  run the tests with one extra only: EXTRA=jax (or none), PYTHON=python3.13
# make docs        the documentation, in docs/_build/html: no warnings, doctests, links and anchors
# make linkcheck   links to other sites: needs a network
# make dist        wheel and sdist in dist/, checked, installed and tested in a fresh environment
# make bench       set up, and measure (writes benchmarks/results/)
# make torture     set up, and try hostile inputs: MINUTES=10, SEED=0, BACKENDS=numpy,torch (all that are installed)
# make load        64 threads for five minutes, then a million small calls of each framework
# make fuzz        damaged files for five minutes: SEED=0
# make audit       known vulnerabilities of what is pinned: needs a network
# make mutants     set up, and see whether the tests find deliberate faults (writes mutants/report.csv): FAULTS='triton'
# make versions    try the oldest and newest versions that the extras allow (writes docs/versions.csv): ENVIRONMENTS='jax'

PYTHON ?= python3
EXTRA ?= none
MINUTES ?= 10
SEED ?= 0
BACKENDS ?=
CPUS ?=
VENV := .venv
BIN := $(VENV)/bin
TRITON := .venv-triton
ALONE := .venv-$(EXTRA)
FRESH := .venv-dist
# What is never imported need not be compiled to bytecode.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(INSTALL)
SPHINX := $(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/doctrees
# Of the suite, what dist runs. All of it: make dist DIST_TESTS='tests --pyargs clipaware'
DIST_TESTS ?= tests/test_package.py tests/test_project.py tests/test_errors.py tests/test_targets.py tests/test_images.py tests/test_explorer.py

.PHONY: demo setup test interpreted doctests test-all test-cpus times test-extra docs linkcheck dist bench torture load fuzz audit mutants versions lint clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml requirements-dev.txt | $(BIN)/python
	$(PIP) -c requirements-dev.txt -e '.[cli]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml requirements-dev.txt | $(BIN)/python
	$(PIP) -r requirements-dev.txt -e .
	@touch $@

$(VENV)/docs.stamp: $(VENV)/dev.stamp requirements-docs.txt
	$(PIP) -c requirements-dev.txt -r requirements-docs.txt
	@touch $@

# Apart from TensorFlow: in one process the two abort.
$(TRITON)/dev.stamp: pyproject.toml requirements-dev.txt requirements-triton.txt
	$(PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/python $(INSTALL) -c requirements-dev.txt -r requirements-triton.txt -e .
	@touch $@

# The explorer is tested in a browser. Where none can be had, these tests are skipped and say so.
$(VENV)/browser.stamp: | $(BIN)/python
	@command -v chromium > /dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } > /dev/null 2>&1; \
		if command -v chromium > /dev/null; then touch $@; else \
		echo "no chromium, and none could be installed (apt-get install chromium): the explorer is tested without a browser"; fi

demo: $(VENV)/demo.stamp
	$(BIN)/clipaware demo

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers, on two cores. Those of Triton's interpreter need an environment of their own.
PYTEST := -m pytest -n 2 --dist worksteal
TESTS := $(BIN)/python $(PYTEST)
INTERPRETED := TRITON_INTERPRET=1 $(TRITON)/bin/python $(PYTEST) tests/test_triton.py tests/test_torture.py -k triton

# Two at a time: pip and mypy take one core each.
setup:
	$(MAKE) -j 2 $(VENV)/dev.stamp $(TRITON)/dev.stamp
	$(MAKE) -j 2 lint $(VENV)/docs.stamp $(VENV)/browser.stamp

test: setup
	$(TESTS) -m 'not long'
	$(MAKE) -j 2 interpreted doctests

interpreted: $(TRITON)/dev.stamp
	$(INTERPRETED) -m 'not long'

# Of the documentation, without drawing its gallery.
doctests: $(VENV)/docs.stamp
	$(SPHINX) -D plot_gallery=0 -D suppress_warnings=image.not_readable -b doctest docs docs/_build/doctest

test-all: $(VENV)/dev.stamp $(TRITON)/dev.stamp $(VENV)/browser.stamp
	$(TESTS) -m long
	$(INTERPRETED) -m long
	$(MAKE) docs

test-cpus: $(VENV)/dev.stamp
	$(BIN)/python cpus.py $(CPUS)

times: $(VENV)/dev.stamp $(VENV)/browser.stamp
	$(TESTS) -m 'not long' --times=.cache/times.csv

# What needs another extra is skipped, with its reason.
test-extra:
	$(PYTHON) -m venv $(ALONE)
	$(ALONE)/bin/python $(INSTALL) -c requirements-dev.txt -r requirements-test.txt -e '.$(if $(filter none,$(EXTRA)),,[$(EXTRA)])'
	$(ALONE)/bin/python -m pytest -n 2 --dist worksteal

docs: $(VENV)/docs.stamp
	$(SPHINX) -b html docs docs/_build/html
	$(SPHINX) -b doctest docs docs/_build/doctest
	$(BIN)/python docs/check_pages.py docs/_build/html

linkcheck: $(VENV)/docs.stamp
	$(SPHINX) -b linkcheck docs docs/_build/linkcheck

# From the sdist, so that nothing of the checkout helps: the wheel is all that is installed.
dist: $(VENV)/dev.stamp
	rm -rf dist $(FRESH)
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python $(INSTALL) -c requirements-dev.txt -r requirements-test.txt "$$(ls dist/*.whl)[cli,numba,explorer]"
	tar -xzf dist/*.tar.gz -C $(FRESH)
	rm -rf $(FRESH)/clipaware-*/src
	cd $(FRESH)/clipaware-* && ../bin/python -m pytest -n 2 $(DIST_TESTS)

bench: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks

torture: $(VENV)/dev.stamp
	$(BIN)/python -m torture --minutes $(MINUTES) --seed $(SEED) --backends '$(BACKENDS)' --keep

load: $(VENV)/dev.stamp
	$(BIN)/python -m load
	$(BIN)/python -m load --no-numba --frameworks numpy torch

fuzz: $(VENV)/dev.stamp
	$(BIN)/python -m load.readers --seed $(SEED)

# In an environment of its own: it is no dependency of anything here.
audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python $(INSTALL) pip-audit
	.venv-audit/bin/pip-audit --no-deps -r requirements-dev.txt -r requirements-docs.txt

mutants: $(VENV)/dev.stamp $(TRITON)/dev.stamp
	$(BIN)/python -m mutants $(FAULTS)

versions:
	$(PYTHON) versions.py $(ENVIRONMENTS)

# Also what was compiled for the tests.
clean:
	rm -rf $(VENV) .venv-* .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis clipaware-demo dist load-found docs/_build docs/gallery docs/api/generated
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
