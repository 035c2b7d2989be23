# Two commands for a fresh clone on a machine with Python 3.10 or later and nothing else:
#   make demo     make test
# What they need goes into .venv, pinned by constraints.txt. A stamp in .venv records each finished
# set-up, so the next run starts at once.

PYTHON ?= python3
SHARD  ?= 1/20
BIN    := .venv/bin

# A machine that forbids files of bytecode would compile this package for each process that starts.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-hosts demo-replicas demo-slurm test test-all test-pythons mutants mutants-map soak-profile check news release-check docs docs-serve format bench clean

help: ## list the targets
	@echo "pymonarch: actors on meshes of processes, in pure Python"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-19s %s\n", $$1, $$2}'
	@echo
	@echo "  DEMO='--procs 4 --epochs 5' and TESTS='tests/unit -k shape' pass arguments on;"
	@echo "  PYTHON=python3.12 chooses the interpreter that .venv is made with."

demo: .venv/.ready-examples ## set up, then train a network over a proc mesh and kill one process
	@$(BIN)/python examples/train_digits.py --kill $(DEMO)

demo-hosts: .venv/.ready-examples,tls ## the same over TLS on two machines (network namespaces; needs root); one is lost
	@$(BIN)/python examples/demo_hosts.py $(DEMO)

demo-replicas: .venv/.ready-examples ## train with replicas that are killed at random, and watch it go on
	@$(BIN)/python examples/train_digits_replicas.py $(DEMO)

demo-slurm: .venv/.ready-examples ## the same on a Slurm cluster that is started for it (needs root, slurmctld, slurmd)
	@$(BIN)/python examples/demo_slurm.py $(DEMO)

# All tests share the cores (see tests/file_queue.py); a few that are chosen by TESTS run in one process.
QUEUE := -n auto -q

test: .venv/.ready-dev ## set up, then run the tests, without the slow ones
	@$(BIN)/python -m pytest $(or $(TESTS),$(QUEUE) -m "not slow")

test-all: .venv/.ready-dev ## run all tests, also the slow ones, the checks, and all on the other Pythons
	@ALL=1 $(BIN)/python -m pytest $(QUEUE) .ci/jobs tests

test-pythons: .venv/.ready-dev ## run tests on the other Pythons that are installed (VERSIONS="3.10 3.12")
	@$(BIN)/python -m pytest .ci/jobs/test_pythons.py

mutants-map: .venv/.ready-dev ## find which tests reach a line, for make mutants (runs them under coverage)
	@$(BIN)/python tests/soak/mutations.py --map

mutants: .venv/.ready-dev ## change the code in many places, and see whether a test fails (SHARD=1/20: an hour)
	@$(BIN)/python tests/soak/mutations.py --shard $(SHARD)

soak-profile: .venv/.ready-dev ## look at programs of torch all the time, for SECONDS (300)
	@$(BIN)/python tests/soak/profiles.py $(SECONDS)

check: .venv/.ready-dev ## lint, format, types (mypy and pyright, strict), layers
	@$(BIN)/python -m pytest -v .ci/jobs/test_checks.py

news: .venv/.ready-dev ## show what the next section of CHANGELOG.md will say
	@$(BIN)/towncrier build --draft 2>/dev/null

release-check: .venv/.ready-release ## build wheel, sdist and SBOM into dist/; check and install them
	@$(BIN)/python .ci/release.py

docs: .venv/.ready-dev ## build the site of the documentation in out/site; write the pages that are made
	@$(BIN)/python docs/make_settings.py
	@$(BIN)/python docs/make_diagrams.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "out/site/index.html"

docs-serve: .venv/.ready-dev ## serve the site, and build it anew after each change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: .venv/.ready-dev ## let ruff format the code and fix what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: .venv/.ready-bench ## measure against torchmonarch and Ray, or go on with it (BENCH=--publish: and make the pages)
	@$(BIN)/python benchmarks/run.py $(BENCH)

clean: ## remove .venv, caches and what programs wrote
	rm -rf .venv .venv-3.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist out
	find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready-%: pyproject.toml constraints.txt .ci/set_up.py
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) not found. Install Python 3.10 or later (Debian: apt-get install python3-venv)," >&2; \
	  echo "or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) .ci/set_up.py $*
	@touch $@
