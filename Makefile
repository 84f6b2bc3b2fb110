# make demo   sets everything up on a fresh machine, converts the trained example model and decodes with it
# make test   sets everything up and runs the tests (no GPU needed)
# make lint   ruff, mypy, clang-format            make lib   builds the CUDA library (CUDA_ARCHS="80 90", JOBS=8), no GPU needed
# make wheel  the library for all GPUs of a release (or CUDA_ARCHS), then a wheel that carries it, in dist/
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt
CUDA_ARCHS ?= 90
CXX_FILES = $(wildcard $(foreach dir,plugins/* tests/emulator tests/driver,$(foreach ext,h cuh cu cpp,$(dir)/*.$(ext))))
# sm_80 A100, 89 L4 and L40S, 90 H100 and H200, 100 B200, 120 RTX Blackwell.
RELEASE_ARCHS := 80 89 90 100 120
JOBS ?= 2

.PHONY: demo test lint lib wheel clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.test lint lib
	$(BIN)/python -m pytest tests/cpu -n 2 --dist loadfile --cov --cov-report=term --cov-fail-under=90

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror --style=file:plugins/.clang-format $(CXX_FILES)

# Without a CUDA toolkit the compiler comes from PyPI. The script compiles again what has changed.
lib: $(VENV)/.made
	@command -v c++ >/dev/null || { echo "a C++ compiler is needed; on Debian and Ubuntu: apt-get install g++" >&2; exit 2; }
	@command -v $${NVCC:-nvcc} >/dev/null || [ -x "$$CUDA_HOME/bin/nvcc" ] || $(PIP) -e '.[lib]'
	PYTHON=$(BIN)/python CUDA_ARCHS="$(CUDA_ARCHS)" JOBS=$(JOBS) build_scripts/build_plugins.sh

wheel: CUDA_ARCHS := $(if $(filter command line environment,$(origin CUDA_ARCHS)),$(CUDA_ARCHS),$(RELEASE_ARCHS))
wheel: lib
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

# One environment; the stamps record what has been installed into it.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Choose one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "cannot create a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml requirements/constraints.txt
	$(PIP) -e '.[torch,progress]'
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml requirements/constraints.txt
	$(PIP) -e '.[test,lint]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf out build dist trtllm_replayssm/lib .pytest_cache .mypy_cache .ruff_cache *.egg-info
