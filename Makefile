# make book   set everything up, run the notebooks, build the book into _build/html
# make test   the same, then every test
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := book
.PHONY: book serve test lint linkcheck print bench clean browser

STARTED := $(shell date +%s)
PY := .venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The environment is made again when what it is made from changes: requirements, package metadata, this folder's place.
stamp = .venv/.$(1)-$(firstword $(shell { cat $(2) pyproject.toml; echo '$(CURDIR)'; } | cksum))
RUN_READY := $(call stamp,run,requirements.txt)
TEST_READY := $(call stamp,test,requirements.txt requirements-dev.txt)

book: $(RUN_READY)
	@$(PY) scripts/build_book.py --started $(STARTED)

serve: book
	@echo "http://localhost:8000/ (Ctrl-C ends it)"
	@$(PY) -m http.server 8000 --bind 127.0.0.1 --directory _build/html

test: book $(TEST_READY) browser
	@$(PY) -m pytest -n 3 --dist loadfile

lint: $(TEST_READY)
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/codespell && .venv/bin/mypy

linkcheck: book # asks other hosts; what is within the book, `make test` checks
	@PYTHONPATH=. .venv/bin/jupyter-book build . --builder linkcheck --path-output _build/linkcheck --quiet

print: book browser # the whole book as one PDF, drawn by Chrome or Chromium
	@PYTHONPATH=. .venv/bin/jupyter-book build . --builder singlehtml --path-output _build/print --quiet
	@cd _build/print/_build/singlehtml/book && ln -sfn ../_static _static && "$$($(CURDIR)/$(PY) $(CURDIR)/tests/browser.py)" \
	  --headless --no-sandbox --disable-gpu --no-pdf-header-footer --virtual-time-budget=60000 \
	  --print-to-pdf=$(CURDIR)/_build/book.pdf "file://$$PWD/index.html" 2>/dev/null
	@ls -l _build/book.pdf

bench: $(TEST_READY)
	@KINETO_LOG_LEVEL=6 TORCH_CPP_LOG_LEVEL=ERROR $(PY) -m benchmarks # or the profiler and sockets say what they do

clean:
	rm -rf _build book/experiments .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(RUN_READY):
	@python=""; for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "Python 3.11 or newer is needed; name it with: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  $$python -m venv --clear .venv || { echo "Could not make .venv. On Debian: apt install python3-venv" >&2; exit 1; }; \
	fi
	@echo "installing requirements.txt into .venv (a few minutes the first time)"
	@$(PY) -m pip install --quiet -r requirements.txt
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	@rm -f .venv/.run-* && touch $@

$(TEST_READY): $(RUN_READY)
	@echo "installing requirements-dev.txt into .venv"
	@$(PY) -m pip install --quiet -r requirements-dev.txt
	@rm -f .venv/.test-* && touch $@

# The browser tests look for Chrome or Chromium themselves and say so when there is none.
browser:
	@if ! $(PY) tests/browser.py >/dev/null; then \
	  sudo=""; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
	  if command -v apt-get >/dev/null; then \
	    echo "installing Debian's chromium for the browser tests"; \
	    { $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 \
	      || echo "could not install chromium"; \
	  fi; \
	fi
