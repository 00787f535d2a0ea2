# make quickstart: set up .venv on first use, train the embedded default with S-SGD and CoCoD-SGD, compare.
# make test:       set up .venv on first use, then lint, type-check and run the tests.
# make test-slow:  the longer checks; some 25 minutes.
# make test-oldest, test-cpu, test-integrations: other versions of torch, and other people's tools; own environments.
# make docs:       the documentation site, into site/; open site/index.html.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test test-slow test-oldest test-cpu test-integrations lint style types docs bench bench-simulated bench-core bench-mixed bench-plan clean

QUICKSTART := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

quickstart: $(READY)
	$(BIN)/cocod train configs/quickstart.yaml algorithm.name=ssgd name=ssgd output=$(QUICKSTART)
	$(BIN)/cocod train configs/quickstart.yaml algorithm.name=cocod name=cocod output=$(QUICKSTART)
	@echo
	@$(BIN)/cocod compare $(QUICKSTART)/ssgd $(QUICKSTART)/cocod
	@echo "run folders: $(QUICKSTART)/ssgd $(QUICKSTART)/cocod"

# Several files at a time, and the types beside them; then, one by one, what needs the whole machine. All, even if one fails.
test: $(READY) style
	@$(BIN)/mypy > $(VENV)/types.log 2>&1 & types=$$!; failed=0; \
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not alone and not slow" || failed=1; \
	wait $$types || failed=1; cat $(VENV)/types.log; \
	$(BIN)/pytest -m "alone and not slow" || failed=1; \
	exit $$failed

test-slow: $(READY)
	$(BIN)/pytest -m slow
	$(BIN)/python -m tests.resume
	$(BIN)/python -m tests.soak

# What the library promises on every torch that pyproject.toml allows; then a small run from YAML.
LIBRARY := accelerate auto_plan averaging combinations degenerate device exactness features fragments gradients header leaving nodes \
    optimizer_state outer package partition payload peers resume rounds sharding sync
SHORT := task.train_limit=512 task.test_limit=256 schedule.epochs=2 schedule.decay_epochs=[]
LIBRARY_TESTS := $(LIBRARY:%=tests/test_%.py)

test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/pytest -m "not slow" $(LIBRARY_TESTS)
	cd $$(mktemp -d) && $(CURDIR)/.venv-oldest/bin/cocod train $(CURDIR)/configs/quickstart.yaml $(SHORT)

test-cpu: .venv-cpu/.ready
	.venv-cpu/bin/pytest -m "not slow" $(LIBRARY_TESTS)
	cd $$(mktemp -d) && $(CURDIR)/.venv-cpu/bin/cocod train $(CURDIR)/configs/quickstart.yaml $(SHORT)

test-integrations: .venv-integrations/.ready
	.venv-integrations/bin/pytest -m "not slow" tests/test_loops.py tests/test_integrations.py \
	    tests/test_members.py tests/test_members_refused.py \
	    "tests/test_tutorials.py::test_a_page_does_what_it_says[docs/tutorials/lightning.md]" \
	    "tests/test_tutorials.py::test_a_page_does_what_it_says[docs/tutorials/machines_that_come_and_go.md]"

# The oldest versions of pyproject.toml.
.venv-oldest/.ready: WHAT := '.[test]' torch==2.7.0 accelerate==1.1.0
# A torch that many stacks pin; its CPU build, where pip finds one.
.venv-cpu/.ready: WHAT := '.[test]' torch==2.13.0
.venv-integrations/.ready: WHAT := '.[integrations]' torch==2.13.0

.venv-%/.ready: pyproject.toml
	@echo "installing into .venv-$*: some minutes"
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --editable $(WHAT)
	touch $@

lint: style types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/mkdocs build --strict

# Every contender on slow links, for real; takes root for the network lab, and about 40 minutes of an idle machine.
bench: $(READY)
	-$(BIN)/pip install --quiet --editable .[elastic]
	$(BIN)/python -m benchmarks.links configs/bench/links.yaml

# Whether the simulator's step times are those of real workers; takes root, and a quarter of an hour of an idle machine.
bench-simulated: $(READY)
	$(BIN)/python -m benchmarks.links configs/bench/simulated.yaml --out benchmarks/results/simulated

bench-core: $(READY)
	$(BIN)/python -m benchmarks.core

bench-mixed: $(READY)
	$(BIN)/python -m benchmarks.mixed

# Whether cocod plan finds the best period of a slow link; some 6 minutes, in the network lab if there can be one.
bench-plan: $(READY)
	$(BIN)/python -m benchmarks.plan

# Installed anew only when the dependencies may have changed; the marker comes last, so a broken install is not reused.
$(READY): pyproject.toml
	@echo "installing into $(VENV): some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-cpu .venv-integrations build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
