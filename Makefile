# `make help` lists the targets. Each sets up what it needs, in $(VENV), and is quick the second time.
#   make test PYTHON=python3.12 TORCH="torch --index-url URL"     another Python, another torch

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc)
PYTEST_ARGS ?=
DEMO_ARGS ?=
STORY_ARGS ?= $(filter --small,$(DEMO_ARGS))
BENCH_ARGS ?=
FUZZ_SECONDS ?= 20
SOAK_SECONDS ?= 240
SOAK_SEED ?= 1

PY := $(VENV)/bin/python
CPP := $(MAKE) -C csrc --no-print-directory -j$(JOBS)
# $(call cpp_run,TARGET,LOCK,VARIABLES): compiles under a lock (setup.py takes build/.lock too), then runs the result.
define cpp_run
	@mkdir -p build
	@flock build/$(2) $(CPP) tests $(3)
	@$(CPP) $(1) $(3)
endef
ASAN := SANITIZE=address,undefined OUT=$(CURDIR)/build/asan
TSAN := SANITIZE=thread OUT=$(CURDIR)/build/tsan
CPP_FILES = $(shell find csrc tests/csrc tests/fake_gpu tests/fake_verbs tests/gpu_emulation tests/rdma_vm tests/hosts -name '*.h' -o -name '*.cc') \
  $(wildcard hip_kernels/*.cu hip_kernels/*.cuh hip_kernels/*.cc) hip_kernels/kernels.h
# Two processors' worth: with more on two they take as long, and get in each other's way.
SIDE_BY_SIDE := -n 2 --dist loadfile
MACHINES := -n 2 --dist loadfile tests/test_rdma_*.py
PYTHON_FILES := monarch_rdma tests benchmarks examples build_backend hipify_rules .ci setup.py

.PHONY: help setup build hip-toolchain demo test test-long test-rdma kernels soak test-cpp bench lint asan tsan fuzz format clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/setup-done ## system packages, the virtual environment and its Python packages

$(VENV)/setup-done: pyproject.toml .ci/venv.sh .ci/system_packages.sh
	@.ci/system_packages.sh build $(PYTHON)
	@.ci/venv.sh $(VENV) $(PYTHON) "$(TORCH)" test dev
	@touch $@

# Installed once in editable mode (metadata and the monarch-rdma command); after that only what changed is compiled.
build: setup ## the native pieces, in the source tree
	@MAX_JOBS=$(JOBS) $(PY) setup.py -q build_ext --inplace
	@test $(VENV)/install-done -nt pyproject.toml || { \
	  $(PY) -m pip --disable-pip-version-check install -q --no-build-isolation --no-deps -e . && \
	  touch $(VENV)/install-done; }

hip-toolchain: setup ## a HIP compiler for AMD's GPUs, without ROCm or a GPU; where there can be none, tests skip
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" .ci/hip_toolchain.sh >/dev/null || [ $$? -eq 77 ]

$(VENV)/demo-done: $(VENV)/setup-done
	@.ci/venv.sh $(VENV) $(PYTHON) "$(TORCH)" demo
	@touch $@

demo: build $(VENV)/demo-done ## moves a real model's weights, then trains one under faults (DEMO_ARGS="--small")
	$(VENV)/bin/monarch-rdma demo $(DEMO_ARGS)
	$(PY) -m examples.llama_diloco.story $(STORY_ARGS)

# Both parts are run whatever came of the first one. 5: there are no tests in a part, of what PYTEST_ARGS names.
REST := $(SIDE_BY_SIDE) --ignore-glob='*/test_rdma_*.py'
define both_parts # ENVIRONMENT, ARGUMENTS
	@set -x; $(1) $(PY) -m pytest $(REST) $(2) $(PYTEST_ARGS); rest=$$?; \
	$(1) $(PY) -m pytest $(MACHINES) $(2) $(PYTEST_ARGS); machines=$$?; { set +x; } 2>/dev/null; \
	for code in $$rest $$machines; do [ $$code -eq 0 ] || [ $$code -eq 5 ] || exit $$code; done
endef

test: build $(VENV)/demo-done hip-toolchain test-cpp ## every test, in minutes (PYTEST_ARGS="-k name")
	$(call both_parts)

test-long: build $(VENV)/demo-done hip-toolchain test-cpp ## the same with many more rounds of killing, stopping and random input
	$(call both_parts,MONARCH_RDMA_TEST_ROUNDS=long,--timeout 1800)

test-rdma: build ## the tests in virtual machines with Soft-RoCE alone (RDMA without a card)
	@flock build/.lock $(CPP) rdma_vm
	@$(PY) tests/rdma_vm || true  # makes the machine, or says why not; then the tests skip
	$(PY) -m pytest $(MACHINES) $(PYTEST_ARGS)

kernels: build hip-toolchain ## compiles the GPU kernels for every GPU and looks at what came out
	$(PY) -m pytest -rs tests/test_gpu_builds.py $(PYTEST_ARGS)

soak: build ## a program under a random fault a second, SOAK_SECONDS long, from SOAK_SEED
	MONARCH_RDMA_TEST_SOAK_SECONDS=$(SOAK_SECONDS) MONARCH_RDMA_TEST_SOAK_SEED=$(SOAK_SEED) \
	  $(PY) -m pytest -s tests/test_soak.py

test-cpp: setup ## the C++ unit tests alone
	$(call cpp_run,check,.lock,)

bench: build ## speed beside memcpy, iperf3 and raw sockets (BENCH_ARGS="-k name")
	@.ci/system_packages.sh bench
	$(PY) -m pytest benchmarks $(BENCH_ARGS)
	$(PY) benchmarks/report.py
	$(PY) benchmarks/bench_actor.py --quick
	$(PY) benchmarks/bench_supervision.py --quick
	$(PY) benchmarks/bench_sharding.py
	$(PY) benchmarks/bench_collectives.py --quick

asan: setup ## the C++ tests under the address and undefined behaviour sanitisers
	$(call cpp_run,check,.lock-asan,$(ASAN))

tsan: setup ## the C++ tests under the thread sanitiser
	$(call cpp_run,check,.lock-tsan,$(TSAN))

fuzz: setup ## random input for the parsers, FUZZ_SECONDS each, under the address sanitiser
	$(call cpp_run,fuzz,.lock-asan,$(ASAN) FUZZ_SECONDS=$(FUZZ_SECONDS))

lint: setup ## clang-format, ruff and mypy; changes nothing
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	$(VENV)/bin/ruff check $(wildcard $(PYTHON_FILES))
	$(VENV)/bin/ruff format --check $(wildcard $(PYTHON_FILES))
	$(VENV)/bin/mypy

format: setup ## lays out C++ and Python as lint wants it
	$(VENV)/bin/clang-format -i $(CPP_FILES)
	$(VENV)/bin/ruff check --fix --exit-zero --quiet $(wildcard $(PYTHON_FILES))
	$(VENV)/bin/ruff format $(wildcard $(PYTHON_FILES))

clean: ## removes what was built, but not $(VENV)
	rm -rf build dist *.egg-info monarch_rdma/*.so monarch_rdma/bin
	rm -f $(VENV)/install-done
