# make pretrain   set up and train a small GPT with activation swap on CPU
# make test       set up and run all tests (TESTS=tests/unit for some, PYTEST_ARGS="-x -k plan" for pytest's options)
# make test-oldest  set up the oldest supported torch beside it (.venv-oldest) and run some tests of swap and recompute
# make test-native  builds the engine's hot path in C++ (make native) and runs some tests of swap and recompute on it
# make hashes     after patches were read against another Megatron or torch: note their sources (upstream.json)
# make test-newest  the same for the newest and the oldest megatron-core (.venv-compat; where there is a Python 3.12)
# make compat     what works on which megatron-core: an environment for each (with a Python 3.12 that it finds), the doctor
#                 and some tests in it, and the table of that (VERSIONS="0.14.0 0.19.2" for some, COMPAT=folder)
# make megatron-lm MEGATRON_LM=PATH  a checkout's own scripts by each feature, bits compared (ONLY=pretrain_gpt.py for one)
# make peer-suite MEGATRON_LM=PATH   its unit tests beside each feature (needs pytest-mock, too; ONLY=transformer for some)
#                 and, with MINDSPEED=PATH, MindSpeed's
# make device     what is to be known of an accelerator, in pieces: installs nothing, PYTHON has to have torch and
#                 megatron-core (DEVICE=npu, MINUTES=9, ONLY=bits-chunks,swap, RESULTS=folder; goes on where it stopped)
# make check      ruff, types and the unit tests: the quick loop
# make wheel-check  the wheel in a fresh environment of each Python that is found, outside the checkout: doctor and demo
#                 (VERSIONS="3.10 3.13" for some, WHEELS=folder for the environments, which go afterwards)
# make docs       the pages as HTML in build/docs, warnings and links that lead nowhere being errors (.venv-docs; DOCS=folder)
# make lint, make types, make doctor, make clean
#
# PYTHON=python3.12       the interpreter to make the environment with (3.10 to 3.13)
# TORCH="torch==2.6.0"    another torch than the one in requirements-cpu.txt (export it, or give it in every call)
# JOBS=2                  how many test files run at a time (0: in pytest's own process)
# VENV=/some/folder       where the environment goes; VENV= installs nothing and takes PYTHON as it is

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
DEVICE ?= cpu
TESTS ?= tests
PYTEST_ARGS ?=
JOBS ?= 2
MINUTES ?= 25
ONLY ?=
RESULTS ?=
COMPAT ?= .venv-compat
DOCS ?= .venv-docs
WHEELS ?=
VERSIONS ?=
OLDEST := 2.6.0
OLDEST_TESTS := tests/asynchrony/test_swap_waits.py tests/memory/test_life_cycle.py tests/memory/test_eviction.py \
    $(foreach kind,dense moe,'tests/numerics/test_swap.py::test_every_policy_on_every_kind_of_model[$(kind)]') \
    tests/numerics/test_recompute.py::test_other_kinds_of_model

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
ENVIRONMENT := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
else
RUN := $(abspath $(VENV))/bin/python
ENVIRONMENT := PATH="$(abspath $(VENV))/bin:$$PATH"
endif

# The rest of these two files has little to do with the hot path.
NATIVE_SURVIVAL := test_with_less_and_less_memory_every_bit_is_the_same test_beside_a_memory_plan \
    test_many_steps_under_pressure_grow_nothing test_everything_may_leave_before_every_operator \
    test_what_no_operator_asked_for_is_had_in_a_second_attempt_at_the_step \
    test_room_made_for_fused_operators_does_not_stop_their_recompute
NATIVE_ACCELERATOR := test_swap test_attached_models test_recompute_and_mixes test_swap_on_several_ranks test_survival \
    test_each_wait_of_the_mover test_a_branch_on_a_stream_of_its_own \
    test_a_steady_state_waits_for_nothing_and_allocates_nothing test_how_often_the_host_speaks_to_the_device_for_a_copy
NATIVE_TESTS := tests/memory/test_life_cycle.py tests/memory/test_peak.py tests/memory/test_native_operators.py \
    tests/memory/test_tape_native.py tests/memory/test_custom_functions.py tests/memory/test_held_elsewhere.py \
    tests/memory/test_recompute.py tests/memory/test_recompute_draws.py tests/memory/test_parts_of_a_storage.py \
    tests/memory/test_unusual_tensors.py tests/attachment/test_transforms.py \
    $(foreach one,$(NATIVE_SURVIVAL),tests/memory/test_survive_oom.py::$(one)) tests/asynchrony/test_swap_waits.py \
    tests/numerics/test_swap.py::test_every_policy_on_every_kind_of_model tests/numerics/test_swap.py::test_every_layout \
    tests/numerics/test_recompute.py::test_every_policy tests/numerics/test_recompute.py::test_other_kinds_of_model \
    tests/numerics/test_recompute.py::test_expert_layers \
    $(foreach one,$(NATIVE_ACCELERATOR),tests/accelerator/test_activations.py::$(one))

.PHONY: help pretrain native test test-oldest test-native test-newest compat megatron-lm peer-suite check lint types doctor device \
    hashes docs wheel-check clean environment
.DEFAULT_GOAL := help

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

# Phony: the script itself sees whether setup.cfg, pyproject.toml, the pins or TORCH have changed.
environment:
ifneq ($(strip $(VENV)),)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" .ci/environment
endif

pretrain: environment
	$(ENVIRONMENT) PYTHON="$(RUN)" DEVICE=$(DEVICE) examples/pretrain_gpt_swap.sh

# tests/conftest.py puts the fast tests first; most of the others start up to four ranks of their own.
PARALLEL = $(if $(filter-out 0,$(JOBS)),-n $(JOBS) --dist loadfile)

test: environment
	$(ENVIRONMENT) OMP_NUM_THREADS=1 $(RUN) -m pytest --durations=10 $(PARALLEL) $(PYTEST_ARGS) $(TESTS)

test-oldest: environment
	RUN="$(RUN)" OLDEST=$(OLDEST) INSTALL="$(INSTALL)" .ci/oldest --quiet $(PARALLEL) $(OLDEST_TESTS)

native: environment
	$(ENVIRONMENT) $(RUN) -m mindspeed_mem build-native

test-native: native
	$(ENVIRONMENT) MINDSPEED_MEM_NATIVE=1 OMP_NUM_THREADS=1 $(RUN) -m pytest $(PARALLEL) $(PYTEST_ARGS) $(NATIVE_TESTS)

# The next two have environments of their own: the Python of the others may be too old for the newest.
COMPAT_RUN = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(RUN) tests/compat.py --folder "$(COMPAT)"

test-newest: environment
	$(COMPAT_RUN) --quick $(if $(INSTALL),--install)

compat: environment
	$(COMPAT_RUN) $(if $(VERSIONS),--only $(VERSIONS))

# A checkout of 0.17 or newer wants Python 3.12, as its megatron-core does.
megatron-lm peer-suite: environment
	@test -n "$(MEGATRON_LM)" || { echo "name a checkout of Megatron-LM: make $@ MEGATRON_LM=PATH" >&2; exit 2; }
	$(ENVIRONMENT) $(RUN) -m tests.$(subst -,_,$@) "$(MEGATRON_LM)" $(if $(ONLY),--only $(ONLY)) \
	    $(if $(filter peer-suite,$@),$(if $(MINDSPEED),--mindspeed "$(MINDSPEED)"))

lint: types
	$(ENVIRONMENT) $(RUN) -m ruff check .
	$(ENVIRONMENT) $(RUN) -m ruff format --check .

types: environment
	$(ENVIRONMENT) $(RUN) -m mypy

check: lint
	@$(MAKE) --no-print-directory test TESTS=tests/unit PYTEST_ARGS="-m 'not slow and not distributed' $(PYTEST_ARGS)"

doctor: environment
	$(ENVIRONMENT) $(RUN) -m mindspeed_mem doctor

# .venv has a torch for the CPU: taken is PYTHON, unless VENV is named. DEVICE has another default here.
device:
	$(if $(filter command environment override,$(firstword $(origin VENV))),$(ENVIRONMENT) $(RUN),$(PYTHON)) \
	    benchmarks/on_device.py --minutes $(MINUTES) $(if $(filter file,$(origin DEVICE)),,--device $(DEVICE)) \
	    $(if $(ONLY),--only "$(ONLY)") $(if $(RESULTS),--results "$(RESULTS)")

hashes: environment
	$(ENVIRONMENT) MINDSPEED_MEM_DEVICE=cpu $(RUN) -c "from mindspeed_mem.tools import examination; examination.write_hashes()"

wheel-check: environment
	$(ENVIRONMENT) $(RUN) -m tests.wheels $(VERSIONS) $(if $(WHEELS),--folder "$(WHEELS)") \
	    $(if $(TORCH),--torch "$(patsubst torch==%,%,$(TORCH))")

# Its environment has Sphinx and nothing of the others.
docs:
	PYTHON="$(PYTHON)" VENV="$(DOCS)" .ci/docs

# Only the default environments: one that VENV names may hold other people's packages.
clean:
	rm -rf .venv .venv-oldest .venv-compat .venv-docs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
