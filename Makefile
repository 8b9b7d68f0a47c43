# Everything runs in .venv, made on first use with the exact versions of constraints.txt.
# Another interpreter: make PYTHON=python3.12 test

PYTHON ?= $(firstword $(foreach p,python3.11 python3 python,$(shell $(p) -c 'print("$(p)")' 2>/dev/null)))
BIN := .venv/bin
# CI installs the same versions from hashes.txt, where pip compares every file with its published hash.
PINS ?= constraints.txt
READY := .venv/.ready
# Of today: tomorrow there may be newer versions.
NEWEST := .newest/.ready-$(shell date +%F)

# One thread per process: the models of the tests are tiny, and a worker per core uses it better than threads do. Byte code is
# kept whatever the environment says: the tests start a hundred processes that import transformers.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow newest-environment test-newest test-oldest test-fuzz test-conformance soak audit check
.PHONY: style docs build
.PHONY: bench-gpu coverage mutate test-formats

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 26

demo: $(READY)  ## draft heads against their base on the bundled models
	$(BIN)/hf-drafthead demo

test: $(READY)  ## the tests, doctests included
	$(TEST)

test-fuzz: $(READY)  ## thousands of random calls against the base: trees, bases, settings, drafters, heads
	FUZZ_EXAMPLES=3000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -p no:logging tests/generation/test_fuzz.py

test-slow: $(READY)  ## the tests that take long, and all cases of those of which `make test` runs a few
	$(TEST) -m slow

newest-environment:
	@echo $(NEWEST)

test-newest: $(NEWEST)  ## what `pip install .` brings today, with nothing pinned (a download of 5 GB; needs a package index)
	OMP_NUM_THREADS=1 .newest/bin/python tests/tools/newest.py --minutes $(or $(MINUTES),60)

# The README's install, and what its tests need. Where torch with CUDA is not to be had, that for CPUs is taken.
$(NEWEST): pyproject.toml
	rm -rf .newest
	$(PYTHON) -m venv .newest
	.newest/bin/pip install --disable-pip-version-check --quiet --no-compile . || { \
		echo "NOT AS pip install . BRINGS IT TODAY: torch is the pinned one, for CPUs alone"; \
		.newest/bin/pip install --disable-pip-version-check --quiet --no-compile . "$$(grep '^torch==' constraints.txt)"; }
	.newest/bin/pip install --disable-pip-version-check --quiet --no-compile gguf hypothesis lm-format-enforcer pytest pytest-xdist ruff
	@touch $@

test-conformance: $(READY)  ## transformers' common tests, with CONFORMANCE=the tests folder of its source
	@test -n "$(CONFORMANCE)" || { echo "say where transformers' tests are: make test-conformance CONFORMANCE=transformers/tests"; exit 1; }
	CONFORMANCE=$(CONFORMANCE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -o addopts=--import-mode=importlib -o filterwarnings=default --disable-warnings tests/conformance

test-oldest: .oldest/.ready  ## the tests of the rooms that know transformers and torch, with the oldest versions allowed (needs a package index)
	OMP_NUM_THREADS=1 .oldest/bin/python -m pytest -q -n auto --dist worksteal $(or $(OLDEST_TESTS),tests/generation tests/modeling)

.oldest/.ready: pyproject.toml constraints.txt constraints-oldest.txt
	test -x .oldest/bin/pip || $(PYTHON) -m venv .oldest
# All other packages as pinned: a search for versions that go with the oldest ones does not end.
	grep -viE '^(torch|transformers|huggingface.hub|setuptools)==' constraints.txt | cat - constraints-oldest.txt > .oldest/constraints.txt
	.oldest/bin/pip install --disable-pip-version-check --quiet --no-compile --constraint .oldest/constraints.txt --editable '.[dev]'
	@touch $@

soak: $(READY)  ## 2,000 generations of mixed settings on the bundled models against the base; COUNT=300 for fewer
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --count $(or $(COUNT),2000)

mutate: $(READY)  ## small changes of the walks, rules, tree and cache that no quick test notices, by mutmut (needs a package index)
	test -d .mutmut || $(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt --target .mutmut mutmut
	OMP_NUM_THREADS=1 PYTHONPATH=.mutmut $(BIN)/python -m mutmut run
	PYTHONPATH=.mutmut $(BIN)/python -m mutmut results

coverage: $(READY)  ## lines of bases/, generation/ and modeling/ that their tests run; less than 95 % is an error
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -q tests/generation tests/modeling
	$(BIN)/python -m coverage report

audit:  ## known vulnerabilities of the pinned packages (needs a package index)
	test -x .audit/bin/pip-audit || { $(PYTHON) -m venv .audit && .audit/bin/pip install --disable-pip-version-check --quiet pip-audit; }
	.audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

check: $(READY)  ## lint, format and types, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: $(READY)  ## fix lint and formatting automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## the site in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build: $(READY)  ## sdist and wheel in dist/, checked
	rm -rf dist build
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

bench-gpu:  ## what a GPU shows within 10 minutes, in benchmarks/results/results.jsonl (needs torch and transformers, installs nothing)
	$(PYTHON) benchmarks/gpu.py

test-formats: $(READY)  ## exported heads in the speculators library, in an environment of its own (needs a package index)
	test -x .speculators/bin/pip || $(PYTHON) -m venv .speculators
	.speculators/bin/pip install --disable-pip-version-check --quiet 'speculators==0.9.0' $$(grep '^torch==' constraints.txt)
# It asks for these, but only for other kinds of heads, and they must be of the very build of torch.
	.speculators/bin/pip uninstall --yes --quiet torchvision torchaudio
	SPECULATORS_PYTHON=$(CURDIR)/.speculators/bin/python $(BIN)/python -m pytest -q tests/formats/test_speculators.py

$(READY): pyproject.toml $(PINS)
	@test -n "$(PYTHON)" || { echo "no Python found: install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
# All pinned versions at once, which spares pip the search for versions that fit; then whatever this platform needs besides.
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps --requirement $(PINS)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@
