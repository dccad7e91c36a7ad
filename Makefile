# Everything a person or CI does here. `make` alone lists it.
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(if $(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo yes),$(p))))
# One process more than there are cores, as many tests wait, each with a database server of its own; a file is run whole
# in one of them.
BESIDE := -n $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1) --dist loadfile --no-loadscope-reorder
# Generated requests per operation in `make fuzz`.
EXAMPLES ?= 10
# What `make test-quick` runs. The files that it leaves out take half of the CPU time, or need their tests with a server.
QUICK := tests/unit tests/testing tests/conformance tests/docs/test_pages.py --ignore-glob='*_oracle.py' $(addprefix --ignore=tests/, \
	unit/test_conftest.py unit/test_import_cost.py unit/test_mutate.py unit/cli/test_doctor.py unit/cli/test_serve.py \
	unit/cli/test_simulate.py unit/recurrence/test_recurrence_properties.py unit/targets/test_address_ssrf.py \
	testing/test_plugins.py conformance/test_query_plans.py)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Separate distributions of this repository, which the tests and the benchmarks use.
PACKAGES := packages/timebell-celery packages/timebell-fcm-emulator packages/timebell-torture
UV_COMPILE := $(BIN)/uv pip compile --universal --generate-hashes --no-header --no-annotate --python-version 3.11 --quiet --extra server --extra secrets --extra oidc pyproject.toml requirements/build.in

# Hundreds of processes start in the tests: what one of them has compiled, the next need not.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-quick test-all coverage mutate fuzz screens check audit format openapi docs pictures bench measure figures sbom release lock clean

help: ## list what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Timebell needs Python 3.11 or newer: install it, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks its venv module: install it (Debian: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

define install
$(PIP) install --require-hashes -r requirements/$(1).txt
$(PIP) install --no-deps --no-build-isolation -e .
$(if $(2),$(PIP) install --no-deps --no-build-isolation $(addprefix -e ,$(2)))
@touch $@
endef

$(VENV)/.run: requirements/run.txt pyproject.toml | $(BIN)/python
	$(call install,run)

$(VENV)/.dev: requirements/dev.txt pyproject.toml $(PACKAGES:%=%/pyproject.toml) | $(BIN)/python
	$(call install,dev,$(PACKAGES))

$(VENV)/.bench: requirements/bench.txt pyproject.toml $(PACKAGES:%=%/pyproject.toml) | $(BIN)/python
	$(call install,bench,$(PACKAGES))

run: $(VENV)/.run ## install into .venv and start the demo: real jobs within seconds, page on port 8700
	$(BIN)/timebell dev examples/quickstart.py

test: $(VENV)/.dev ## install what the tests need, a real PostgreSQL included, and run them
	$(BIN)/python -m pytest $(BESIDE) --one-variant $(if $(SLOW_TENTH),--slow-tenth $(SLOW_TENTH))

test-quick: $(VENV)/.dev ## the quick tests of pure code, the command line and the store: on SQLite, without servers
	$(BIN)/python -m pytest $(BESIDE) --without-servers --one-variant $(QUICK)

test-all: $(VENV)/.dev ## also the soaks, full sweeps, ten-million-row tables and all mutants
	$(BIN)/python -m pytest $(BESIDE) -m "slow or not slow"
	$(MAKE) mutate

coverage: $(VENV)/.dev ## lines and branches that tests execute, least covered modules first (COVERAGE=tests/unit: by these tests)
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest $(BESIDE) $(COVERAGE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort=cover | sed -n '1,42p;$$p'

mutate: $(VENV)/.dev ## seed small bugs and report those that no test detects (MUTATE="--budget 600 --seed x": some of them)
	$(BIN)/python -m scripts.mutate $(MUTATE)

fuzz: $(VENV)/.dev ## 20,000 generated API requests: all checks of Schemathesis, then forged credentials (EXAMPLES=50: more)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.api.fuzz --max-examples $(EXAMPLES)

screens: $(VENV)/.dev ## pictures of every page into .cache/screens/pages: light and dark, desktop and phone
	$(BIN)/python -m tests.ui.screens

pictures: $(VENV)/.dev ## record the terminal session and take the screenshots of the documentation
	$(BIN)/python -m scripts.recording
	$(BIN)/python -m scripts.pictures

check: $(VENV)/.dev ## format, lint, types, import directions, language, licenses
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/style.py
	$(BIN)/python -m scripts.licenses
	@echo "check: all fine"

$(VENV)/audit/.installed: requirements/audit.txt | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r $<
	@touch $@

# Not part of `make check`, which needs no network.
audit: $(VENV)/audit/.installed ## known vulnerabilities of the pinned packages; needs access to pypi.org
	for lock in run dev bench; do $(VENV)/audit/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/$$lock.txt || exit 1; done

format: $(VENV)/.dev ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

openapi: $(VENV)/.dev ## write the OpenAPI document to build/openapi.json
	mkdir -p build
	$(BIN)/python -m timebell.api.v1 > build/openapi.json

docs: $(VENV)/.dev ## the documentation as a site, into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict -f docs-site/mkdocs.yml
	@echo "docs: build/site/index.html"

bench: ## the figures, beside a peer's (BENCH="W2,W3 --stores sqlite" for some of them)
	@$(MAKE) --no-print-directory VENV=$(VENV)/bench measure

# Some peers need other versions than the tests do, so they are apart.
measure: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(BENCH)

figures: $(VENV)/.dev ## what an installation costs: size and time of pip install, import, start
	$(BIN)/python scripts/figures.py

sbom: $(VENV)/.dev ## write sbom.json, the CycloneDX bill of materials of timebell[server]
	$(BIN)/python scripts/sbom.py > sbom.json

release: $(VENV)/.dev ## build the files of a release into build/release (VERSION=0.1.0): packages, notes, SBOM, checksums
	$(BIN)/python -m scripts.release $(VERSION)

lock: $(VENV)/.dev ## pin the newest versions, with hashes
	$(PIP) install uv
	$(UV_COMPILE) --upgrade -o requirements/run.txt
	$(UV_COMPILE) requirements/dev.in -c requirements/run.txt -o requirements/dev.txt
	$(UV_COMPILE) requirements/bench.in -c requirements/run.txt -o requirements/bench.txt
	$(BIN)/uv pip compile --universal --generate-hashes --no-header --no-annotate --python-version 3.11 --quiet requirements/audit.in -o requirements/audit.txt

clean: ## remove the environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
