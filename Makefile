# Two commands do everything on a fresh machine with Python >= 3.10: `make search` and `make test`.
PYTHON ?= python3
VENV := .venv
ARGS ?=

.PHONY: search test lint format install develop clean

search: install  ## the main job on the default config; ARGS="model=llama3_8b ..." overrides
	$(VENV)/bin/darts-parallel $(ARGS)

test: develop  ## all tests
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: develop  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: develop  ## apply ruff's formatting and fixes
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

install: $(VENV)/installed
develop: $(VENV)/developed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/developed: $(VENV)/installed
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
