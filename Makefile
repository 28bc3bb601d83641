# Targets of the project. Each creates .venv first if it is missing.
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

test-all: $(READY)  ## the whole suite
	$(BIN)/pytest -n 2

check: $(READY)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

bench: $(READY)  ## on a machine without other load
	$(BIN)/dosapp bench --growth --out bench

pretrain: $(READY)  ## train the embedded backbone from scratch
	$(BIN)/dosapp pretrain --out pretrained

clean:
	rm -rf .venv demo runs bench .mypy_cache .ruff_cache
