# Every target sets up what it needs; the stamps in .venv make each step happen once.
#   make demo | test | lint | bench        PYTHON=python3.12 picks the interpreter, ARGS="-k packing" reaches the command
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test lint bench clean

demo: $(VENV)/demo.stamp
	$(BIN)/dspark demo $(ARGS)

test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check $(ARGS) .
	$(BIN)/ruff format --check .

bench: $(VENV)/dev.stamp
	$(BIN)/dspark bench $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info

# Without a GPU, take the CPU build, which is gigabytes smaller than the default one on Linux; the default index is the
# fallback where the CPU index cannot be reached. With a GPU, the package's own requirements bring the default build.
$(VENV)/torch.stamp:
	@echo "Setting up $(VENV): once, a few minutes"
	$(PYTHON) -m venv $(VENV)
	@command -v nvidia-smi >/dev/null \
	  || $(BIN)/pip install -q --no-deps $(TORCH) --index-url $(CPU_INDEX) --retries 0 --timeout 10 2>/dev/null \
	  || $(BIN)/pip install -q $(TORCH)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/pip install -q -e '.[demo]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/pip install -q -e '.[dev]'
	@touch $(VENV)/demo.stamp $@
