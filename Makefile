# Everything starts here: each target sets up what it needs. `make help` lists them.
.DEFAULT_GOAL := help
BIN := .venv/bin
# Tests that run at once: most of their time they wait for processes and servers that they started.
WORKERS ?= 2

.PHONY: help setup demo test test-failed test-slow test-native check bench image lock clean

help:
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 20

setup: .venv/.ready ## the environment in .venv (uv; CPU or CUDA by what the host has)

.venv/.ready: pyproject.toml constraints.txt tools/setup hatch_build.py dalipipe/graphs/resize.c
	@tools/setup

demo: setup ## the main job: a small lake of JPEGs, packed, cached, decoded and trained on
	@$(BIN)/dalipipe demo

test: setup ## the tests (without the slow soak tests)
	@$(BIN)/pytest -q -m "not slow" -n $(WORKERS) --dist worksteal

test-failed: setup ## the tests that failed last time, one after the other
	@$(BIN)/pytest -q -m "not slow" --last-failed --last-failed-no-failures none

test-slow: setup ## the soak tests
	@$(BIN)/pytest -q -m slow

test-native: setup ## the tests of the C kernel, compiled with the address and undefined-behaviour sanitizers
	@CFLAGS="-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
	  LD_PRELOAD="$$(cc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/pytest -q tests/unit/graphs/test_native.py tests/unit/graphs/test_resize.py

check: setup ## format, lint, types, direction of imports
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache >.venv/imports.log || { cat .venv/imports.log; exit 1; }
	@$(BIN)/pytest -q tests/unit/test_start.py
	@echo "check: clean"

bench: setup ## the benchmarks' quick form; each file in benchmarks/ answers one question
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file --quick || exit 1; done

image: ## the CPU image by Docker or buildah, and the demo run in it
	@tools/image

TORCH := 2.13.0# the release that the tests ran with; raise it together with constraints.txt

lock: ## renews constraints.txt from pyproject.toml
	@echo "torch==$(TORCH)" | uv pip compile --quiet --universal --all-extras --no-header --no-annotate \
	  --python-version 3.10 --constraint - pyproject.toml -o constraints.txt

clean: ## removes the environment, caches and demo data
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .dalipipe-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
