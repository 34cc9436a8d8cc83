# Muster: build, test, demonstrate. `make help` lists what there is.
# Nothing has to be set up first: what is missing on a Debian 12 machine is installed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

ROOT := $(CURDIR)
BIN := $(ROOT)/bin
DEV := $(BIN)/dev
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/muster

export GOTOOLCHAIN := local
LAB := go run -buildvcs=false ./lab
# Tools are built from modules of their own, outside the workspace.
TOOLGO := GOWORK=off GOFLAGS=-buildvcs=false CGO_ENABLED=0 go

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null)
# When the source was last changed: what packages say instead of when they were built.
DATE ?= $(or $(shell git log -1 --format=%ct 2>/dev/null),1767225600)
BUILDINFO := github.com/muster-k8s/muster/internal/buildinfo
LDFLAGS := -s -w -X $(BUILDINFO).version=$(VERSION) -X $(BUILDINFO).commit=$(COMMIT)
# Empty variables of Go count as not set: the file of `go env -w` would decide.
BUILD := GOENV=off GOFLAGS= GOEXPERIMENT= CGO_ENABLED=0
COMMANDS := muster bootstrapper joinservice kms probe

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "  %-18s %s\n", $$1, $$2}'

##### Build

.PHONY: build
build: ## Build muster, bootstrapper, joinservice, kms and probe, static, into bin/
	$(BUILD) go build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o $(BIN)/ $(COMMANDS:%=./cmd/%)

.PHONY: lab-bin
lab-bin: ## Build the lab program into bin/
	$(BUILD) go build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o $(BIN)/lab ./lab

.PHONY: images
images: build ## Build the services' OCI images, without a container engine, into dist/images/
	go run -buildvcs=false ./deploy/images -version '$(VERSION)' -commit '$(COMMIT)' -bin $(BIN) -o $(ROOT)/dist/images

.PHONY: packages
packages: build ## Build Debian packages and a tarball of the CLI and the bootstrapper into dist/packages/
	go run -buildvcs=false ./deploy/packages -version '$(VERSION)' -date '$(DATE)' -bin $(BIN) -o $(ROOT)/dist/packages

.PHONY: release
release: build ## Programs, packages and OCI images for amd64 and arm64 (each image one index of both), into dist/release/
	for arch in amd64 arm64; do \
	  $(BUILD) GOARCH=$$arch go build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o $(BIN)/$$arch/ $(COMMANDS:%=./cmd/%) || exit 1; \
	done
	go run -buildvcs=false ./deploy/packages -version '$(VERSION)' -date '$(DATE)' -arch amd64,arm64 -bin $(BIN) -native $(BIN)/muster -o $(ROOT)/dist/release
	go run -buildvcs=false ./deploy/images -version '$(VERSION)' -commit '$(COMMIT)' -arch amd64,arm64 -bin $(BIN) -o $(ROOT)/dist/release/images

# OWNER_KEYS and EK_ROOTS complete the image's configuration, IMAGE_CONFIG replaces it; BUILDER_KEY signs what is built; `go run ./deploy/vm -h` lists the rest.
.PHONY: vm-image
vm-image: deps kube build ## Build the disk image of machines and predict its measurements, into dist/vm/ (as root; VM_FLAGS=… for more)
	go run -buildvcs=false ./deploy/vm -version '$(VERSION)' -date '$(DATE)' -bin $(BIN) -containerd "$$($(LAB) kube-binaries)" -o $(ROOT)/dist/vm \
	  $(if $(IMAGE_CONFIG),-config '$(IMAGE_CONFIG)') $(if $(OWNER_KEYS),-owner-keys '$(OWNER_KEYS)') $(if $(EK_ROOTS),-ek-roots '$(EK_ROOTS)') $(if $(BUILDER_KEY),-builder-key '$(BUILDER_KEY)') $(VM_FLAGS)

.PHONY: vm-lock
vm-lock: deps kube ## Write deploy/vm/packages.lock: what the image is made of, as Debian's mirror has it now (as root; VM_FLAGS=… for another mirror)
	go run -buildvcs=false ./deploy/vm lock -containerd "$$($(LAB) kube-binaries --pinned)" $(VM_FLAGS)

.PHONY: test-image
test-image: deps kube build ## Build the disk image twice from nothing but packages, and compare (as root, 10 minutes); not part of test
	MUSTER_VM_CONTAINERD="$$($(LAB) kube-binaries --pinned)" VERSION='$(VERSION)' COMMIT='$(COMMIT)' go test -count=1 -timeout 40m -tags image -v -run TestTwoBuilds ./deploy/vm

.PHONY: generate
generate: $(DEV)/.dev ## Write gen/ from proto/, and deep copies and CRDs from api/
	rm -rf gen/muster gen/grpc
	PATH=$(DEV):$$PATH buf generate
	go generate ./api/...

##### Check

.PHONY: test
test: deps check ## Everything that CI runs: checks, unit and integration tests, attacks, and a real cluster
	@# Clusters mostly wait, but have deadlines: unit tests beside them get the processors' time that is left. A failure ends nothing, so that one run
	@# shows all of them.
	mkdir -p $(BIN)
	$(MAKE) --no-print-directory -k -j2 e2e unit 2>&1 | tee $(BIN)/test.log || \
	  { echo; echo 'What failed, of $(BIN)/test.log:'; grep -E '^(FAIL|panic:|WARNING: DATA RACE|goleak:|the tests cannot start:|after the tests:)|--- FAIL:|_test\.go:[0-9]+: |\.go:[0-9]+: Error' $(BIN)/test.log | cut -c1-400 | tail -40; exit 1; }

# Without what a debugger needs, binaries are linked quicker; vet is the linter's.
GOTEST := go test -race -vet=off -ldflags=-w
# By default, each process with the race detector sleeps for a second when it ends, in case goroutines are left that could race. Tests look for goroutines
# that are left, and hundreds of these processes are commands of scripts.
export GORACE ?= atexit_sleep_ms=10

UNIT_PACKAGES ?= 4

.PHONY: unit
unit: deps kube ## Unit, property and integration tests, attacks and oracles with the race detector, in all three modules
	@# More at once than two processors: packages with an API server wait most of the time, and so do tests that are parallel.
	MUSTER_KUBE_BIN=$$($(LAB) kube-binaries) nice -n 19 $(GOTEST) -p $(UNIT_PACKAGES) -parallel 8 -timeout 40m $$(go list ./... | grep -v /e2e) ./gen/... ./trust/... $(E2E_UNIT)

# Those that `make test` runs; CONTRIBUTING.md says why the others are in E2E_LONG. Those of E2E_UNIT have no cluster, and long time limits: they run beside unit tests.
E2E := ./e2e/demo ./e2e/attack/floods
E2E_UNIT = ./e2e/attack ./e2e/hardwareoracle ./e2e/tpmoracle
E2E_LONG := ./e2e/controlplane ./e2e/crash ./e2e/lab ./e2e/leave ./e2e/observe ./e2e/operate ./e2e/token ./e2e/upgrade
E2E_VM := ./e2e/vm ./e2e/statedisk ./lab/internal/vm
# The files that these tests are made of: a test that has passed runs again after a change of one of them.
E2E_FILES := Makefile go.mod go.sum go.work go.work.sum api cmd deploy e2e gen internal lab proto services tools trust docs/image.md docs/runbooks.md
E2E_FILES += $(patsubst %,:(exclude,glob)%/**/*_test.go,api cmd deploy internal services tools trust)
# These mostly wait, and run beside each other.
E2E_VM_WAIT := TestANodeThatIsCutOffForLongerThanItsCertificatesLiveComesBack|TestALoneControlPlaneIsRecovered

.PHONY: e2e
e2e: deps kube images lab-bin ## Floods, and a real cluster of attested machines
	MUSTER_KUBE_BIN=$$($(LAB) kube-binaries) $(GOTEST) -count=1 -timeout 40m -p 1 $(E2E)

.PHONY: test-long
test-long: deps kube images lab-bin ## The other real clusters: control planes, crashes, leaving, upgrade, monitoring (as root, 45 minutes; continues after an interruption); not part of test
	MUSTER_KUBE_BIN=$$($(LAB) kube-binaries) go run -buildvcs=false ./tools/longtests -state $(BIN)/passed -files '$(E2E_FILES)' -timeout 60m $(E2E_LONG)

.PHONY: test-renewal
test-renewal: deps kube images lab-bin ## Nodes outlive their certificates: running, off, and cut off, in an hour (as root); not part of test
	$(GOTEST) -count=1 -timeout 120m -tags renewal -v ./e2e/renewal/

.PHONY: test-kubernetes
test-kubernetes: deps kube kube-previous images lab-bin ## An upgrade of Kubernetes by one minor version, with power cuts, in about an hour (as root; the first time also a build of the release before); not part of test
	$(GOTEST) -count=1 -timeout 150m -tags kubernetes -v ./e2e/kubernetes/

.PHONY: test-crash
test-crash: deps kube images lab-bin ## Every crash: 200 races of init and join, hundreds of kills, outages during joins
	MUSTER_CRASH_LONG=1 $(GOTEST) -count=1 -timeout 90m -v ./e2e/crash

.PHONY: test-floods
test-floods: deps kube ## Every flood of an unauthenticated client against every listener, a minute each, with honest machines beside it (as root, four hours)
	MUSTER_KUBE_BIN=$$($(LAB) kube-binaries) MUSTER_FLOODS_LONG=1 $(GOTEST) -count=1 -timeout 8h -v ./e2e/attack/floods

.PHONY: test-runbooks
test-runbooks: deps kube images lab-bin ## The blocks of docs/runbooks.md on a real cluster, in 40 minutes (as root); not part of test
	$(GOTEST) -count=1 -timeout 80m -tags runbook -v ./e2e/runbook/

.PHONY: test-arm64
test-arm64: deps release ## The programs and the unit tests of trust for arm64, emulated by QEMU (as root, half an hour); not part of test
	$(LAB) deps qemu-user-static
	qemu-aarch64-static $(BIN)/arm64/muster version
	qemu-aarch64-static $(BIN)/arm64/bootstrapper version
	code=0; qemu-aarch64-static $(BIN)/arm64/bootstrapper doctor || code=$$?; test $$code -eq 1 # it finds that this is no machine of a cluster
	GOARCH=arm64 CGO_ENABLED=0 go test -vet=off -count=1 -p 1 -timeout 60m -exec qemu-aarch64-static ./trust/...

.PHONY: test-vm
test-vm: deps kube kube-previous images lab-bin ## Virtual machines: boot, join, reboot, tampering, power cuts, moved disks, two images, recovery, upgrade of Kubernetes (as root, five hours on two cores; continues after an interruption); not part of test
	go run -buildvcs=false ./tools/longtests -tags vm -state $(BIN)/passed -files '$(E2E_FILES)' -timeout 120m -together '$(E2E_VM_WAIT)' $(E2E_VM)

# How long each fuzz target runs.
FUZZTIME ?= 1m

.PHONY: fuzz
fuzz: ## Each fuzz target of the tree for FUZZTIME, a minute by default (three quarters of an hour for all); not part of test
	@# go test fuzzes one target of one package at a time. A failure ends nothing; its input is in the package's testdata/fuzz.
	@failed=; while IFS=: read -r file target; do \
	  echo "== $$file $$target"; \
	  go test -vet=off -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "./$${file%/*}" </dev/null || failed="$$failed $$target"; \
	done < <(git grep -E '^func Fuzz[A-Za-z0-9]*\(' -- '*_test.go' | sed -E 's/:func (Fuzz[A-Za-z0-9]*)\(.*/:\1/'); \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

.PHONY: check
check: lint breaking generated modules static ## Everything that needs no running service

.PHONY: lint
lint: $(DEV)/.dev $(DEV)/.lint ## Lint Go and protobuf
	PATH=$(DEV):$$PATH buf lint
	PATH=$(DEV):$$PATH buf format -d --exit-code >/dev/null || { echo 'run: bin/dev/buf format -w'; exit 1; }
	$(DEV)/golangci-lint run ./... ./gen/... ./trust/...

# proto/baseline.binpb is the schema that the last release had, or, before the first one, that
# the schemas were last agreed on: `make baseline` writes it, on purpose only.
.PHONY: breaking
breaking: $(DEV)/.dev ## Fail if the wire contract breaks with its baseline
	PATH=$(DEV):$$PATH buf breaking --against proto/baseline.binpb

.PHONY: baseline
baseline: $(DEV)/.dev ## Agree on the wire contract as it is now
	PATH=$(DEV):$$PATH buf build -o proto/baseline.binpb

.PHONY: generated
generated: ## Fail if generating again changes anything
	@# What has not changed gets its old times back: go test caches no results of tests that have read newer files.
	@dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; cp -a gen api "$$dir/"; \
	$(MAKE) --no-print-directory generate; \
	if ! diff -r "$$dir/gen" gen || ! diff -r "$$dir/api" api; then echo 'generated files are out of date: commit what `make generate` wrote'; git status --short -- gen api; exit 1; fi; \
	(cd "$$dir" && find gen api -exec touch -r {} $(ROOT)/{} ';')

.PHONY: modules
modules: ## Build each module by itself, as an importer would
	GOWORK=off go build -buildvcs=false ./...
	cd gen && GOWORK=off go build ./...
	cd trust && GOWORK=off go build ./...

.PHONY: static
static: build ## Check that what ships is static and leaves nothing unfinished, and that trust builds for arm64
	@for c in $(COMMANDS); do if ldd $(BIN)/$$c >/dev/null 2>&1; then echo "$$c is not static"; exit 1; fi; done
	@$(BUILD) GOARCH=arm64 go build ./trust/... # `make release` builds the programs: several minutes
	@$(BIN)/muster version | grep -qF '$(VERSION)' || { echo 'the version is not stamped'; exit 1; }
	@if git grep -niE '\b(tod[o]|fixm[e])\b' -- ':!*.sum' ':!*go.mod' ':!go.work.sum'; then echo 'unfinished work in the tree'; exit 1; fi
	@if git grep -niE '\b(fak[e]s?|stu[b]s?|moc[k]s?)\b' -- '*.go' ':!*_test.go' ':!*test/*.go' ':!e2e/*'; then echo 'test doubles in what ships'; exit 1; fi
	@if git grep -nE '\b[tb]\.Ski[p]|SkipNo[w]' -- '*_test.go'; then echo 'a test that skips itself'; exit 1; fi

##### Demonstrate

.PHONY: demo
demo: deps kube images lab-bin ## A real attested cluster on this machine, step by step (KEEP=1 leaves it up)
	$(BIN)/lab demo $(if $(KEEP),--keep)

.PHONY: demo-down
demo-down: lab-bin ## Remove what `make demo KEEP=1` left
	$(BIN)/lab down

##### What they need

.PHONY: deps
deps: ## Install the Debian packages that tests and demo use (as root)
	@$(LAB) deps

.PHONY: kube
kube: deps ## Build Kubernetes, etcd, containerd and CoreDNS from their modules, once (cached by content)
	@$(LAB) kube-binaries >/dev/null

.PHONY: kube-previous
kube-previous: kube ## Build the release of Kubernetes that tests upgrade from, once (cached by content)
	@$(LAB) kube-binaries --previous >/dev/null

$(DEV)/.dev: tools/dev/go.mod tools/dev/go.sum
	cd tools/dev && $(TOOLGO) build -o $(DEV)/ tool
	@touch $@

$(DEV)/.lint: tools/lint/go.mod tools/lint/go.sum
	cd tools/lint && $(TOOLGO) build -o $(DEV)/ tool
	@touch $@

include lab/lab.mk

.PHONY: clean
clean: ## Remove what was built here (not the caches)
	rm -rf $(BIN) dist
