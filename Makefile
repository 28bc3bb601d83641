# Targets of the project. Each creates .venv first if it is missing.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --disable-pip-version-check -c constraints.txt
READY_TO_USE := .venv/ready-to-use
READY := .venv/ready

.PHONY: setup demo test test-all check format docs dist lock sbom bench pretrain clean

setup: $(READY)

# What the demo, reports, the service and `dosapp data inspect` need. PIP_EXTRA_INDEX_URL can add an
# index of CPU builds.
$(READY_TO_USE): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[report,serve,inspect]'
	@touch $@

# Everything else, for tests and development
$(READY): $(READY_TO_USE)
	$(INSTALL) -e '.[report,serve,inspect,hub,ray,onnx,dev]'
	@touch $@

demo: $(READY_TO_USE)
	$(BIN)/dosapp demo

test: $(READY)  ## the fast suite
	$(BIN)/pytest -n 2 -m 'not slow'

test-all: $(READY)  ## the whole suite
	$(BIN)/pytest -n 2

check: $(READY)
	$(BIN)/ruff format --check src tests tools
	$(BIN)/ruff check src tests tools
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format src tests tools
	$(BIN)/ruff check --fix src tests tools

docs: $(READY)  ## the documentation site, site/index.html; it can be opened from the disk
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(READY)  ## wheel and sdist
	$(BIN)/python -m build --no-isolation --outdir dist

lock: $(READY)  ## versions and hashes of the container's packages, within constraints.txt
	echo 'hatchling==1.33.0' | $(BIN)/uv pip compile --quiet pyproject.toml - --extra serve \
	    -c constraints.txt --generate-hashes --no-annotate --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_28 --custom-compile-command 'make lock' \
	    -o container-requirements.txt

sbom: $(READY)  ## what the container holds, as CycloneDX
	$(BIN)/cyclonedx-py requirements container-requirements.txt --pyproject pyproject.toml \
	    --output-reproducible -o sbom.json

bench: $(READY)  ## on a machine without other load
	$(BIN)/dosapp bench --growth --out bench

pretrain: $(READY)  ## train the embedded backbone from scratch
	$(BIN)/dosapp pretrain --out pretrained

clean:
	rm -rf .venv demo dist site runs bench .mypy_cache .ruff_cache
