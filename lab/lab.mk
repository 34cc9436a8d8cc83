# The lab's targets; the Makefile at the top includes this file.

LAB_DIR ?= /var/lib/muster-lab

.PHONY: lab-test
lab-test: deps kube ## Test the lab: two machines, a cluster by hand, nothing left behind (as root)
	go test -race -timeout 15m ./lab/...
	go test -race -count=1 -timeout 20m ./e2e/lab/

.PHONY: lab-down
lab-down: lab-bin ## Take down the lab in LAB_DIR, also one whose daemon was killed
	$(BIN)/lab --dir $(LAB_DIR) down
