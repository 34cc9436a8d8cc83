// Package kubernetes upgrades a real cluster by one minor version of Kubernetes: three control planes and two workers, with a workload
// that must keep answering, and with the power cut in the middle of each kind of node. It takes an hour at least, and is not part of
// `make test`; `make test-kubernetes` runs it, by its build tag.
package kubernetes
