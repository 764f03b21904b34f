# The interface to everything: people and CI call these targets and nothing else.

# Where programs of others are kept that tests and checks run, for every clone: tests/go-tools.sh.
export GPUSTOW_TOOLS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpustow
TOOLS := $(GPUSTOW_TOOLS)
DENY_VERSION := 0.20.2
DENY := $(TOOLS)/cargo-deny-$(DENY_VERSION)/bin/cargo-deny
MDBOOK_VERSION := 0.5.4
MDBOOK := $(TOOLS)/mdbook-$(MDBOOK_VERSION)/bin/mdbook
CARGO := cargo
RUN := $(CARGO) run --locked
PROGRAMS := --features gpustow-testkit/programs
# How often the cases that look for races are repeated. CI repeats them 20 times at night.
ROUNDS := 3
# The minor of Kubernetes that the tests run: one of the folders of tests/control-plane.
KUBERNETES ?= 1.36
export KUBERNETES
# Arguments for demo, cluster and the benches: make demo ARGS="--seed 7 --nodes 12"
ARGS :=

comma := ,

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Try it

.PHONY: demo
demo: ## Compare gpustow with whole GPUs on a simulated cluster (ARGS=--help for options)
	$(CARGO) build --locked --package gpustow-demo
	@target/debug/demo $(ARGS)

.PHONY: demo-picture
demo-picture: ## Write the animated picture of the demo for the README
	$(CARGO) build --locked --package gpustow-demo
	target/debug/demo --picture docs/images/demo.svg

.PHONY: cluster
cluster: control-plane ## Start a real control plane with simulated GPU nodes, until Ctrl-C
	tests/programs.sh gpustow gpustow-agent kubectl-gpustow cluster
	@target/debug/cluster $(ARGS)

##@ Test (CONTRIBUTING.md lists the targets for each change, and their requirements)

# Cases of tests/integration that need programs of others which take long to build, or an earlier build of ours.
BESIDE := previous:: prometheus:: observability:: dashboard::a_pod_counts dashboard::every_query
# Cases that need Kubernetes 1.37: test-versions runs them on it.
GANGS := gang_binding:: gang_faults:: gang_preemption:: gang_tables:: control_plane::gangs
# Cases of tests/simulate without a control plane.
WORLDS_ALONE := of_300_servers a_world_ every_world_
NOT_CLUSTER := $(BESIDE) $(WORLDS_ALONE) $(if $(filter 1.37,$(KUBERNETES)),,$(GANGS))
REPORT := tests/report.py

.PHONY: test
test: ## Run all tests that need neither root nor a control plane
	@$(REPORT) "make test" "make test-cluster adds the tests on a real Kubernetes control plane." \
	    $(CARGO) test --workspace --locked -- --skip control_plane::

# Cases that use the lanes of fault_rig.rs. A CI with two machines runs these on one (PART=lanes), all others on the other
# (PART=others).
LANES := asleep:: bind_faults:: claims:: config:: evidence:: faults:: fence:: fragmented:: history:: late_views:: moving:: preemption:: \
    provision:: races:: reclaim:: reservations:: serving:: shutdown:: starts:: takeover:: wire::
PART :=
IN_PART := $(if $(filter lanes,$(PART)),$(LANES),$(if $(filter others,$(PART)),$(patsubst %,--skip %,$(LANES))))

# Most cases wait for pauses of the product, so there are more threads than cores. With eight, two cores are so busy that
# waits of 30 seconds end too soon.
.PHONY: test-cluster
test-cluster: ## Run the tests on a real Kubernetes control plane (KUBERNETES=1.37: on that one)
	@tests/prerequisites.sh control-plane helm
	@tests/programs.sh gpustow-agent
	@GPUSTOW_ROUNDS=$(ROUNDS) $(REPORT) "make test-cluster" "make test-node adds the tests on a real kubelet." \
	    $(CARGO) test --workspace --locked --test integration --test testkit --test simulate -- \
	    --test-threads 3 $(IN_PART) $(patsubst %,--skip %,$(NOT_CLUSTER))

.PHONY: test-long
test-long: ## Run 200,000 histories of the ledger's model and 60 simulated worlds, from FROM on
	@$(if $(FROM),GPUSTOW_FROM='$(FROM)') GPUSTOW_HISTORIES=200000 GPUSTOW_SEEDS=60 $(REPORT) "make test-long" "" \
	    $(CARGO) test --workspace --locked --test ledger --test simulate -- no_history every_world

.PHONY: test-all
test-all: test test-cluster test-long ## Run the three targets above

.PHONY: test-beside
test-beside: ## Run the tests that need Prometheus or an earlier build of gpustow
	@tests/prerequisites.sh control-plane prometheus previous
	GPUSTOW_ROUNDS=$(ROUNDS) $(CARGO) test --workspace --locked --test integration -- $(BESIDE)

.PHONY: test-versions
test-versions: ## Test version-dependent behaviour on each minor of Kubernetes (ARGS="1.34 1.38" for some)
	@tests/versions/run.sh $(ARGS)

# With processes, mounts and a network of their own.
NODE_TEST := tests/node/apart.sh $(CARGO) test --offline --workspace --locked --test node -- --test-threads 1

.PHONY: test-node
test-node: node ## Test a real kubelet with containers, including test-install (root, see CONTRIBUTING.md; KUBELET=1.34: an older one)
	$(NODE_TEST) --skip this_machines_gpu

.PHONY: test-install
test-install: node ## Install gpustow on a node as in the documentation, from its images (root; see CONTRIBUTING.md)
	$(NODE_TEST) install::

# The kubelet is a set of its own.
node test-node test-install test-gpu: export KUBELET ?= $(KUBERNETES)
.PHONY: node
node: control-plane helm
	@tests/node/image.sh >/dev/null
	@tests/node/images.sh >/dev/null
	tests/programs.sh gpustow-agent

.PHONY: test-gpu
test-gpu: node ## Test on this machine's NVIDIA GPU: the agent compared with nvidia-smi, pods' programs in a cluster, pods that share compute (root)
	@python3 tests/gpu/run.py
	$(CARGO) test --workspace --locked --test gpu -- --test-threads 1 --nocapture
	$(NODE_TEST) this_machines_gpu --nocapture

.PHONY: test-page
test-page: ## Test the page of kubectl gpustow ui in headless Chromium
	@tests/page/run.sh

.PHONY: test-neighbours
test-neighbours: control-plane ## Test together with the real Kueue, Karpenter and JobSet (builds them once)
	@tests/neighbours/build.sh kueue >/dev/null
	@tests/neighbours/build.sh karpenter >/dev/null
	@tests/neighbours/build.sh jobset >/dev/null
	$(CARGO) test --workspace --locked --test neighbours -- --test-threads 1 --skip jobset:: --skip gang
	@KUBERNETES=1.37 tests/control-plane/build.sh >/dev/null
	KUBERNETES=1.37 $(CARGO) test --workspace --locked --test neighbours -- --test-threads 1 jobset:: gang

.PHONY: screenshots
screenshots: ## Take the page's pictures in docs/images again
	@tests/page/run.sh --screenshots docs/images

.PHONY: images
images: ## Build every image as an OCI archive, with its bill of materials (PROFILE=dev ARCHS=amd64: see images/build.sh)
	@images/sbom.sh "$$(images/build.sh)"

.PHONY: soak
soak: ## Run test-all with the repeated cases 200 times
	@$(MAKE) --no-print-directory test-all ROUNDS=200

.PHONY: simulate
simulate: ## Simulate SEEDS (10,000) histories of the whole extender, from FROM (0) on; SEED=7: print that one
	@RUST_LOG=$${RUST_LOG-$(if $(SEED),gpustow=debug$(comma)gpustow_agent=info)} GPUSTOW_SEED='$(SEED)' GPUSTOW_SEEDS=$(or $(SEEDS),10000) GPUSTOW_FROM=$(or $(FROM),0) \
	    $(CARGO) test $(if $(SEED),,--profile simulate) --workspace --locked --test simulate $(if $(SEED),a_world_comes,every) -- --nocapture

.PHONY: torture
torture: control-plane ## Cause real faults on a real control plane for an hour, by a seed (ARGS=--help for options)
	$(CARGO) build --locked --workspace $(PROGRAMS) --bin gpustow --bin torture
	target/debug/torture $(ARGS)

.PHONY: overload
overload: control-plane ## Flood a real control plane, and measure how long others wait (ARGS=--help for options)
	$(CARGO) build --locked --release --bin gpustow
	$(RUN) --package gpustow-testkit --features programs --bin overload -- --gpustow target/release/gpustow $(ARGS)

.PHONY: fuzz
fuzz: ## Fuzz every parser of foreign input, an hour each (ARGS="pod report": these two; MINUTES=5; KEEP=1 adds to the corpora)
	@crates/fuzz/run.sh $(ARGS)

# The one test that is left out edits the library's table of symbols, on which the sanitizer relies. Leaks are not looked
# for: those of a library that was unloaded cannot be told.
.PHONY: sanitize
sanitize: ## Run the agent's tests under AddressSanitizer, with the simulated NVML: all unsafe code
	RUSTC_BOOTSTRAP=1 RUSTFLAGS='-Zsanitizer=address -Clink-arg=-rdynamic' ASAN_OPTIONS=detect_leaks=0 \
	    CARGO_TARGET_DIR=target/sanitize $(CARGO) test --workspace --locked \
	    --target "$$(rustc -vV | sed -n 's/^host: //p')" --test agent -- --skip a_library_without_the_call

.PHONY: teeth
teeth: control-plane ## Take each fix out again, and check that the ledger's model, the simulated world or a test finds it (ARGS=tests/teeth/NAME.patch for some)
	@tests/teeth/run.sh $(ARGS)

##@ Measure

.PHONY: bench
bench: ## Benchmark the decision and the routes, and packing against others (OPENB=DIR: on the openb trace too)
	$(CARGO) bench --locked --bench '*' -- $(ARGS)
	$(RUN) --release --package gpustow-sim --bin gpustow-sim -- bench $(if $(OPENB),--openb '$(OPENB)')

.PHONY: bench-cluster
bench-cluster: control-plane ## Measure pods per second through the real kube-scheduler with and without the extender, 1,000 and 5,000 nodes
	$(CARGO) build --locked --release --bin gpustow
	$(RUN) --release --package gpustow-testkit --features programs --bin bench-cluster -- $(ARGS)

.PHONY: bench-peers
bench-peers: control-plane ## Compare kube-scheduler, gpustow, Volcano and KAI with equal pods, on 100 to 5,000 nodes (builds them once; ARGS=--help for options)
	$(CARGO) build --locked --release --bin gpustow
	$(RUN) --package gpustow-testkit --features programs --bin bench-peers -- $(ARGS)

.PHONY: bench-server
bench-server: control-plane ## Measure a full cluster: the extender's memory, answers and takeover, agents' reports, and the plugin's commands
	$(CARGO) build --locked --release --package gpustow --package kubectl-gpustow
	$(RUN) --release --package gpustow-testkit --features programs --bin bench-server -- $(ARGS)

.PHONY: bench-scheduler-perf
bench-scheduler-perf: control-plane ## Run Kubernetes' scheduler_perf without and with the extender (NODES=1000 ROUNDS=3)
	$(CARGO) build --locked --release --bin gpustow
	benches/scheduler_perf/run.sh

.PHONY: bench-admission
bench-admission: control-plane ## Measure the cost of admission, compared with none and, from 1.36 on, with an earlier build's policies
	$(CARGO) build --locked --release --package gpustow
	@mkdir -p target/bench-admission
	@git archive be7e12d7 manifests scheduler-config | tar -x -C target/bench-admission
	$(RUN) --package gpustow-testkit --features programs --bin bench-admission -- \
	    $(if $(filter-out 1.34 1.35,$(KUBERNETES)),--earlier target/bench-admission/manifests/base) $(ARGS)

.PHONY: bench-agent
bench-agent: control-plane ## Measure the agent's cost on its node, and how soon its report decides
	$(CARGO) build --locked --release --package gpustow --package gpustow-agent --package gpustow-fake-nvml
	$(RUN) --release --package gpustow-testkit --features programs --bin bench-agent -- $(ARGS)

##@ Check and generate

.PHONY: generate
generate: ## Write the generated manifests, the dashboard and the reference
	$(RUN) --package gpustow-generate

.PHONY: lines
lines: ## Count the lines of code of each part against its budget
	@$(CARGO) test --quiet --workspace --locked --test generate -- --exact lines::each_part_keeps_to_its_budget_of_lines --nocapture

.PHONY: workflows
workflows: ## Check the workflows of GitHub
	@release/workflows.sh

# Tests on a control plane often wait for the product's pauses. What only computes runs beside them, at low priority and in a
# target folder of its own, because cargo locks one for as long as it compiles. The page's test waits for a browser most of
# the time, so it runs beside that of the node.
.PHONY: ci
ci: fmt workflows test ## Run all that must hold before a change lands
	@trap 'kill 0' INT TERM; \
	{ CARGO_TARGET_DIR='$(CURDIR)/target/lint' nice -n 19 $(MAKE) clippy doc deny book && nice -n 19 $(MAKE) test-long; } \
	    >target/computes.log 2>&1 & computes=$$!; \
	$(MAKE) test-cluster && $(MAKE) --jobs 2 --output-sync test-node test-page; failed=$$?; \
	if wait $$computes; then grep -E '^(make test|deny|book)' target/computes.log; else cat target/computes.log; failed=1; fi; \
	exit $$failed

.PHONY: fmt
fmt: ## Check the formatting
	$(CARGO) fmt --all --check

.PHONY: clippy
clippy: ## Check the lints
	$(CARGO) clippy --workspace --all-targets $(PROGRAMS) --locked -- -D warnings
	$(CARGO) clippy --workspace --test integration --test testkit --test node --test neighbours --test gpu --locked -- -D warnings
	$(CARGO) clippy --package gpustow-demo --package gpustow --no-default-features --lib --locked -- -D warnings

.PHONY: doc
doc: ## Check that the documentation builds
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --document-private-items --locked

.PHONY: deny
deny: $(DENY) ## Check licences, sources and duplicates of the dependencies, and advisories if reachable
	$(DENY) --locked check licenses bans sources
	@if $(DENY) --locked fetch db; then \
	    $(DENY) --locked check --disable-fetch advisories; \
	else \
	    echo 'deny: NOT CHECKED: the advisory database cannot be fetched from here' >&2; \
	fi

.PHONY: book
book: $(MDBOOK) ## Build docs as a book in target/book, and check its links
	$(MDBOOK) build
	@python3 tests/book/check.py target/book

##@ Release (docs/releasing.md has the order)

.PHONY: release-version
release-version: ## Check the version in every file that names it (TAG=v1.2.3: and in the CHANGELOG)
	@release/version.sh

.PHONY: release-push
release-push: ## Push images and chart (REGISTRY=…: there)
	@release/push.sh

.PHONY: release-plugin
release-plugin: ## Pack the plugin for this system
	@release/plugin.sh

.PHONY: release-manifests
release-manifests: ## Write a file for each way of installing by kubectl alone
	@release/manifests.sh

.PHONY: release-index
release-index: ## Write the checksums of the artifacts, and krew's entry
	@release/index.sh

.PHONY: release-sign
release-sign: ## Sign the pushed and attached artifacts
	@release/sign.sh

.PHONY: release-verify
release-verify: ## Pull the pushed artifacts, and verify them as a user would
	@release/verify.sh

.PHONY: release-dry-run
release-dry-run: images control-plane helm ## Make a whole release against a registry on loopback, pull it and verify it
	@release/dry-run.sh

##@ Programs of others

.PHONY: control-plane
control-plane: ## Build the Kubernetes and etcd that the tests run (once)
	@tests/control-plane/build.sh >/dev/null

.PHONY: prometheus
prometheus: ## Build the Prometheus that the tests run (once)
	@tests/prometheus/build.sh >/dev/null

.PHONY: helm
helm: ## Build the Helm that the tests run (once; HELM=3: that one)
	@tests/helm/build.sh >/dev/null

.PHONY: previous
previous: ## Build the earlier programs that the tests run together with today's (once)
	@tests/previous/build.sh >/dev/null

$(MDBOOK):
	$(CARGO) install mdbook --version $(MDBOOK_VERSION) --locked --debug --no-default-features --features search \
	    --target-dir target/tools --root $(TOOLS)/mdbook-$(MDBOOK_VERSION)

$(DENY):
	$(CARGO) install cargo-deny --version $(DENY_VERSION) --locked --debug \
	    --target-dir target/tools --root $(TOOLS)/cargo-deny-$(DENY_VERSION)
