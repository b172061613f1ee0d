# Two commands do everything on a fresh machine with Python >= 3.10: `make search` and `make test`.
PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
ARGS ?=

.PHONY: search test test-slow fuzz pages test-clients docs docs-test lint format install develop clean

search: install  ## the main job on the default config; ARGS="model=llama3_8b ..." overrides
	$(VENV)/bin/darts-parallel $(ARGS)

# compiled files are kept, or every process compiles all again
# a test that takes `faulthandler_timeout` ends its process, and the others go on
TEST := PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n 2 --dist worksteal -o faulthandler_exit_on_timeout=true

test: develop  ## all tests but the slow ones
	$(TEST) -m 'not slow' $(ARGS)

test-slow: develop  ## each takes some 2 s or more, or builds a wheel, or starts processes of its own
	$(TEST) -m slow $(ARGS)

fuzz: develop  ## random problems against an enumeration, bad values, kills; ARGS="--problems 1000 --seed 1"
	$(VENV)/bin/python -m tests.fuzz $(ARGS)

define PAGES
compare problems=core seeds=3 oracle_seconds=10 publish=true
gradient_share publish=true
validate_cost_model held_out=[house,source,model,device] publish=true
reproduce_fasop publish=true
answers publish=true
trainer_switches jobs=1 publish=true
bilevel publish=true
endef
export PAGES

pages: develop  ## every page of results, with the seconds that each takes; ARGS=compare: those of one command alone
	@echo "$$PAGES" | grep "^$(ARGS)" | while read -r page; do began=$$(date +%s); set -f; \
	$(VENV)/bin/python -m experiments.$$page < /dev/null || exit 1; \
	echo "$$(($$(date +%s) - began)) s: $$page"; done
	@test -n "$(ARGS)" || $(VENV)/bin/python -m tests.fuzz --problems 500 --publish

test-clients: $(CLIENTS)/installed  ## the real trainers read the golden exports; MEGATRON, GALVATRON, TORCHTITAN=FOLDER: checkouts
	MEGATRON="$(MEGATRON)" GALVATRON="$(GALVATRON)" TORCHTITAN="$(TORCHTITAN)" $(CLIENTS)/bin/python -m pytest -c /dev/null -p no:cacheprovider --rootdir clients -q clients $(ARGS)

lint: develop  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: install  ## the site of docs/, into site/: pages, links and the reference, checked
	$(VENV)/bin/pip install -qq -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

docs-test: install  ## every command of README and every block marked `run` runs; the site then shows what it prints
	$(VENV)/bin/python docs/run_commands.py $(ARGS)

format: develop  ## apply ruff's formatting and fixes
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

install: $(VENV)/installed
develop: $(VENV)/developed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -qq -c constraints.txt -e .
	touch $@

$(VENV)/developed: $(VENV)/installed
	$(VENV)/bin/pip install -qq -c constraints.txt -e '.[dev]'
	touch $@

$(CLIENTS)/installed: clients/requirements.txt constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	grep -v '^transformers' constraints.txt > $(CLIENTS)/constraints.txt
	$(CLIENTS)/bin/pip install --quiet -r clients/requirements.txt -c $(CLIENTS)/constraints.txt -e .
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) dist build .pytest_cache .mypy_cache .ruff_cache
