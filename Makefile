# make demo and make test do everything on a fresh machine: environment, installation, run.
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
ETCD := $(VENV)/.etcd
NETWORK := $(VENV)/.network
HADOOP := $(VENV)/.hadoop
BROWSER := $(VENV)/.browser
SLURM := $(VENV)/.slurm
DEVICE := $(VENV)/.device
# Real workers share the cores with the tests around them, and many a test waits for an outage to pass: with two at a time
# a third of two cores is idle, with four they are in each other's way.
JOBS ?= 3

.PHONY: install demo test test-fast lint format bench federated-table soak zoo clean

install: $(STAMP) $(ETCD) $(NETWORK) $(HADOOP) $(BROWSER) $(SLURM) $(DEVICE)

# What `make demo` needs and nothing more: whoever has a look should not wait for test servers and browsers.
# torch comes first and exactly: a range would bring a build of several gigabytes.
$(DEMO): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(STAMP): $(DEMO)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# For the ledger of several hosts. Never fails: without etcd its tests are skipped, and say so.
$(ETCD): scripts/install_etcd.sh $(STAMP)
	scripts/install_etcd.sh
	touch $@

# For hosts in network namespaces. Never fails either.
$(NETWORK): scripts/install_network_tools.sh $(STAMP)
	scripts/install_network_tools.sh
	touch $@

# For checkpoints on HDFS. Never fails either; fetches 220 MB once.
$(HADOOP): scripts/install_hadoop.sh $(STAMP)
	scripts/install_hadoop.sh
	touch $@

# For the dashboard's page. Never fails either.
$(BROWSER): scripts/install_browser.sh $(STAMP)
	scripts/install_browser.sh
	touch $@

# For jobs on a real Slurm. Never fails either.
$(SLURM): scripts/install_slurm.sh $(STAMP)
	scripts/install_slurm.sh
	touch $@

# The simulated accelerator. Without g++ its tests are skipped, and say so.
$(DEVICE): $(wildcard tests/harness/device/*) $(STAMP)
	$(BIN)/python -m tests.harness.device.build
	touch $@

demo: $(DEMO)
	$(BIN)/python scripts/demo.py

test: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --layers $(TESTS)

# Whatever starts no process: machines, codecs, the simulator, the parts in this process.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --fast --layers -r fE $(TESTS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/draw_phases.py --check
	$(BIN)/python scripts/draw_options.py --check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Figures for the README. On a quiet machine; about an hour.
bench: install
	$(BIN)/python benchmarks/steady_state.py --check --json steady_state.json
	$(BIN)/python benchmarks/recovery.py --check --json recovery.json
	$(BIN)/python benchmarks/recovery.py --fault kill --ledger etcd --check --json recovery_etcd.json
	$(BIN)/python benchmarks/ledger.py --check --json ledger.json
	$(BIN)/python benchmarks/checkpoint.py --check --json checkpoint.json
	$(BIN)/python benchmarks/notice.py --check --json notice.json
	$(BIN)/python benchmarks/detection.py --check --json detection.json
	$(BIN)/python benchmarks/stragglers.py --check --json stragglers.json
	$(BIN)/python benchmarks/dashboard.py --check --json dashboard.json
	$(BIN)/python benchmarks/masked_sums.py --json masked_sums.json
	$(BIN)/python benchmarks/elastic.py --check --json elastic.json
	$(BIN)/python benchmarks/event_cost.py --check --json event_cost.json
	$(BIN)/python benchmarks/starting.py --check --json starting.json
	$(BIN)/python benchmarks/aggregators.py --check --json aggregators.json
	$(BIN)/python benchmarks/agreement.py --check --json agreement.json
	$(BIN)/python benchmarks/flower_replies.py --check --json flower_replies.json
	$(BIN)/python benchmarks/tables.py --check --json tables.json
	$(BIN)/python benchmarks/horovod.py --check --json horovod.json
	$(BIN)/python benchmarks/keras.py --check --json keras.json
	$(BIN)/python benchmarks/trainers.py --check --json trainers.json
	$(BIN)/python benchmarks/streams.py --check --json streams.json
	$(BIN)/python benchmarks/group_memory.py --check --json group_memory.json
	$(BIN)/python benchmarks/push_codecs.py --check --json push_codecs.json
	$(BIN)/python benchmarks/modes.py --check --json modes.json
	$(BIN)/python benchmarks/parameter_server.py --check --json parameter_server.json

# docs/reference/robustness.md: every rule against every attack. About an hour on one core; goes on where it was left.
federated-table: install
	$(BIN)/python scripts/federated_table.py --check

# Ten seeds of 40 faults each on real processes, twenty of a script of several loops, five on three hosts, 220 kills
# during saves, a federation on Flower under fire, whatever may happen on the simulated device, and a million simulated
# schedules.
soak: install
	for seed in 1 2 3 4 5 6 7 8 9 10; do \
	  $(BIN)/python -m tests.soak.exactness --workers 4 --steps 300 --faults 40 --seed $$seed || exit 1; done
	for seed in $$(seq 20); do \
	  $(BIN)/python -m tests.soak.exactness --loops 4 --steps 120 --faults 6 --workers 3 --seed $$seed || exit 1; done
	for seed in 1 2 3 4 5; do \
	  $(BIN)/python -m tests.soak.exactness --ledger etcd --hosts 3 --workers 4 --steps 300 --faults 40 \
	    --seed $$seed || exit 1; done
	for seed in 1 2 3; do \
	  $(BIN)/python -m tests.soak.checkpoint_faults --points 60 --seed $$seed || exit 1; done
	for seed in $$(seq 20); do \
	  $(BIN)/python -m tests.soak.servers --for 120s --seed $$seed || exit 1; done
	$(BIN)/python -m tests.soak.flower
	$(BIN)/python -m tests.soak.flower --masked
	if $(BIN)/python -c 'from tests.harness import device; raise SystemExit(not device.is_built())'; then \
	  $(BIN)/python -m tests.soak.devices || exit 1; else echo "the simulated device is not compiled: no g++ here"; fi
	for storage in s3 hdfs; do \
	  $(BIN)/python -m tests.soak.checkpoint_faults --points 20 --storage $$storage || exit 1; done
	$(BIN)/python -m tests.harness.simulator --schedules 1000000
	$(BIN)/python -m tests.harness.runtime --schedules 20000
	HOLDFAST_DRILLS=all $(BIN)/python -m pytest tests/drills tests/end_to_end/test_torchrun.py tests/end_to_end/test_slurm.py \
	  tests/integrations/huggingface tests/integrations/lightning tests/integrations/ray tests/integrations/variables

# Every shape of models, optimizers, data and scripts that we know, alone, with three workers and with faults; nightly, about
# 15 minutes on a quiet machine. zoo.json has the results, from which docs/reference/supported.md is written.
zoo: install
	$(BIN)/python tests/zoo/run.py --jobs 2 --json zoo.json --write-docs

clean:
	rm -rf $(VENV) .tools build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
