# The verbs of the project. Each makes .venv first if it is missing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test test-all check format bench pretrain clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report,hub,ray,onnx,serve,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/dosapp demo

test: $(READY)  ## the fast suite
	$(BIN)/pytest -n 2 -m 'not slow'

test-all: $(READY)  ## with the slow suite
	$(BIN)/pytest -n 2

check: $(READY)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

bench: $(READY)  ## ratios, on a quiet machine
	$(BIN)/dosapp bench --growth --out bench

pretrain: $(READY)  ## the embedded backbone, from nothing
	$(BIN)/dosapp pretrain --out pretrained

clean:
	rm -rf .venv demo runs bench .mypy_cache .ruff_cache
