# make PYTHON=/path/to/python3 ... takes a certain interpreter; make train ARGS='--config.steps=500' adds flags.
export PYTHON
.PHONY: help setup train test test-cuda mutate lint format bench bench-budget clean

help: ## what there is to do
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: ## make .venv and install what is needed, once
	@tools/setup.sh

train: setup ## train the default model on Python's own source files; again: go on from its checkpoint
	.venv/bin/python main.py --config=configs/default.py --workdir=runs/default $(ARGS)

test: setup ## run the tests
	.venv/bin/python -m pytest $(ARGS)

test-cuda: setup ## install the extra cuda12 (4 GB) and run the tests that compile for a GPU; they need no GPU
	.venv/bin/python -m pip install -q '.[cuda12]'
	.venv/bin/python -m pytest -m cuda -n 0 $(ARGS)

mutate: setup ## break the code in small ways and see that the tests notice
	.venv/bin/python tools/mutate.py $(ARGS)

lint: setup ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m mypy

format: setup ## let ruff mend what it can
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup ## measure that compile time does not grow with depth
	.venv/bin/python bench/compile_time.py

bench-budget: setup ## compile plans and fixed settings for TPUs and GPUs that are not here (hours, 4 GB), and write the page
	.venv/bin/python -m pip install -q '.[cuda12,tpu]'
	.venv/bin/python bench/plan_search.py
	.venv/bin/python bench/exhaustive.py
	.venv/bin/python bench/budget.py
	.venv/bin/python bench/budget_report.py --out=docs

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
