# `make train` and `make test` each set everything up and run, on a fresh clone with Python 3.11+.
#
#   make train ARGS=RUN.yaml     train your own run
#   make test WORKERS=8          more test processes
#   make test-all                exhaustive tests, too
#   make test-versions           core tests with the oldest and the newest versions of libraries
#   make durations               where the seconds of the last `make test` went
#   make mutants                 plant faults, and see that tests catch each
#   make PYTHON=python3.12 ...   another interpreter for .venv
#   make check                   style, types and gates only
#   make native-test             the native allocator's own tests, plain and with sanitizers
#   make wheels                  wheels of farspan, farspan-memory and farspan-plan, sdists; in dist/
#   make site                    the documentation as a site, in build/site; no network
#   make format                  rewrite the sources in the project's style

PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

BIN     := .venv/bin
# farspan, which `make train` needs no more than; and what tests and the site are made by.
STAMP   := .venv/.installed
DEV     := .venv/.dev
# The allocator, a package of its own.
MEMORY  := packages/farspan-memory
NATIVE  := $(addprefix $(MEMORY)/,setup.py pyproject.toml native/CMakeLists.txt) \
           $(wildcard $(MEMORY)/native/include/*.h $(MEMORY)/native/src/*)
SMALL   := packaging/farspan-plan
GATES   := tests/test_layering.py tests/test_size.py

# Builds of the native tests: their sanitizers, and which tests (all, or a pattern).
NATIVE_TESTS      := plain address thread
SANITIZE_address  := address,undefined
SANITIZE_thread   := thread
# One thread has no races.
ONLY_thread       := test_threads

.PHONY: train test test-all only-test only-test-all test-versions test-oldest test-newest durations mutants check format site wheels clean native-test $(NATIVE_TESTS:%=native-test-%)

# OpenMP threads that wait without spinning: beside another process on two cores a step of the
# default run took 3.5 to 4.4 s with this and 5 to 30 s without.
export OMP_WAIT_POLICY ?= PASSIVE
# Or every process that tests start compiles the package anew, which takes 2 s, and every worker the
# tests, which takes 11.
unexport PYTHONDONTWRITEBYTECODE

train: $(STAMP)
	$(BIN)/farspan train $(ARGS)

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(addprefix --ignore=,$(GATES))

# Types and gates are long work for one core: beside the tests nobody waits for them.
BESIDE := --jobs 2 check

test: $(DEV)
	$(MAKE) $(BESIDE) only-test

test-all: $(DEV)
	$(MAKE) $(BESIDE) only-test-all

only-test: $(DEV)
	$(PYTEST) --durations-file build/durations.json

only-test-all: $(DEV)
	$(PYTEST) -m '' --hypothesis-profile=thorough --durations-file build/durations-all.json

durations: $(DEV)
	$(BIN)/python -m tests.durations $(ARGS)

# Each in an environment of its own, the newest as pip resolves them that day. Records with what the
# tests passed, and shows it in the guide.
test-versions: test-oldest test-newest

test-oldest: CONSTRAINTS := --constraint constraints-oldest.txt
test-oldest test-newest: test-%:
	$(PYTHON) -m venv --clear build/versions/$*
	build/versions/$*/bin/python -m pip install $(CONSTRAINTS) --editable $(MEMORY) --editable '.[dev]'
	build/versions/$*/bin/python -m tests.versions $*
	build/versions/$*/bin/python -m tests.versions page

mutants: $(DEV)
	$(BIN)/python -m tests.mutants --workers $(WORKERS) $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -s $(GATES)

native-test: $(NATIVE_TESTS:%=native-test-%)

$(NATIVE_TESTS:%=native-test-%): native-test-%:
	cmake -S $(MEMORY)/native -B build/native-$* -DTESTS=ON -DSANITIZE=$(SANITIZE_$*)
	cmake --build build/native-$* --parallel $(WORKERS) $(addprefix --target ,$(ONLY_$*))
	ctest --test-dir build/native-$* --output-on-failure --parallel $(WORKERS) $(addprefix -R ,$(ONLY_$*))

site: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The wheel of farspan is made of the sdist, which shows that nothing is missing there.
wheels: $(DEV)
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m build --no-isolation --outdir dist $(MEMORY)
	$(BIN)/python -m build --no-isolation --outdir dist --wheel $(SMALL)

clean:
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
	rm -rf $(SMALL)/build $(SMALL)/*.egg-info $(MEMORY)/build $(MEMORY)/src/*.egg-info

# The stamp is written last: an interrupted installation starts anew, since an environment made by
# two interpreters is broken; a finished one is brought up to date.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@command -v $(PYTHON) >/dev/null || { \
	    echo "farspan needs Python 3.11 or newer, but $(PYTHON) is not on PATH;" \
	        "name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "farspan needs Python 3.11 or newer, but $(PYTHON) is" \
	        "$$($(PYTHON) -V 2>&1); name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	test -e $@ || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable $(MEMORY) --editable .
	@test -e $(MEMORY)/src/farspan_memory/libfarspan_memory.so || \
	    echo "without g++ and CMake 3.20 or newer the allocator was not built:" \
	        "runs have PyTorch's own" >&2
	@touch $@

$(DEV): $(STAMP)
	$(BIN)/python -m pip install --constraint constraints.txt --editable $(MEMORY) --editable '.[dev,docs]'
	@touch $@
