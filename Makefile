# `make check` is all that CI runs. Tools come from .venv, at the versions of constraints.txt.

BIN ?= .venv/bin
export OMP_NUM_THREADS = 1
export NO_MKDOCS_2_WARNING = 1

.PHONY: check lint types docstrings spelling test docs format

check: lint types docstrings spelling test docs

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy --strict src

# pydoclint would have every docstring with an example list all arguments and the result (101, 103,
# 201, 4xx). Here a docstring may leave them out: what it does list, tests/test_docstrings.py compares.
docstrings:
	$(BIN)/pydoclint --version
	! $(BIN)/pydoclint --quiet src 2>&1 | grep -E 'DOC(0|102|104|105|3|6)|Error'

spelling:
	$(BIN)/codespell

# Examples, doctests and the code of every page are tests too.
test:
	$(BIN)/python -m pytest

docs:
	$(BIN)/mkdocs build --strict --quiet

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
