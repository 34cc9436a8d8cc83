# The lab's targets; the Makefile at the top includes this file.

LAB_DIR ?= /var/lib/muster-lab

.PHONY: lab-test
lab-test: deps kube ## Test the lab: two machines, a cluster by hand, nothing left behind (as root)
	$(GOTEST) -timeout 15m ./lab/...
	$(GOTEST) -count=1 -timeout 20m ./e2e/lab/

.PHONY: lab-down
lab-down: lab-bin ## Take down the lab in LAB_DIR, also one whose daemon was killed
	$(BIN)/lab --dir $(LAB_DIR) down

.PHONY: bench-cluster
bench-cluster: deps kube images lab-bin ## Measure clusters through Muster and by hand, ten of each, into docs/performance.md (20 minutes)
	$(BIN)/lab bench $(if $(ROUNDS),--rounds $(ROUNDS))

.PHONY: control-planes
control-planes: deps kube images lab-bin ## Five control planes, and one that is cut off in the middle of its join (as root, 10 minutes)
	MUSTER_E2E_CONTROL_PLANES=5 $(GOTEST) -count=1 -timeout 30m -tags long -v ./e2e/controlplane

.PHONY: bench-scale
bench-scale: deps kube build ## Measure what the number of enrolled nodes costs, into docs/performance.md (the ratios after 3 minutes; half an hour in all)
	command -v gnuplot >/dev/null || apt-get install -qq --no-install-recommends gnuplot-nox
	MUSTER_KUBE_BIN=$$($(LAB) kube-binaries) go test -tags scale -count=1 -timeout 60m -run '^TestScale$$' -v ./cmd/joinservice -program $(BIN)/joinservice -page $(CURDIR)/docs/performance.md $(SCALE_FLAGS)
