// Package runbook runs the runbooks of docs/runbooks.md on one cluster, from its first boot to the end of
// Muster in it, and executes the blocks of that page unchanged. Three control planes and two workers lose power, TPMs and
// disks on the way. It takes a quarter of an hour, and so is not part of `make test`; `make test-runbooks` runs it,
// by its build tag.
package runbook
