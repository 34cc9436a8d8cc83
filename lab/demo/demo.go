// Package demo demonstrates Muster on a lab: five machines become a real Kubernetes cluster, one of them only once its
// owner has approved it, and three that must not join are refused.
//
// [Run] is a script that reads from top to bottom. Every step checks its result, and the first wrong one ends it with
// an error: it is also the product's acceptance test. The policy is made from the image's measurements before any
// machine exists, so no data from a machine can be in it.
package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// Options are the options of a run. All fields but Keep are required.
type Options struct {
	Lab    *driver.Lab
	Bin    string    // folder with lab, muster and bootstrapper
	Images string    // folder with the services' images (joinservice.tar, kms.tar) and digests.json
	Out    io.Writer // the output for a person
	// Keep leaves the cluster up.
	Keep bool
	// WhileTokenWorks, if set, is called while kubeadm's bootstrap token is put back.
	WhileTokenWorks func(context.Context) error
}

// Refusal is the result of a machine that had to be refused.
type Refusal struct {
	// Who, in a few words.
	Who string
	// Reason is the code by which it was refused.
	Reason string
	// Evidence is a line of a log or an answer that proves it.
	Evidence string
}

// Report is the result of a run.
type Report struct {
	Nodes    []string
	Members  []string // of etcd
	Refusals []Refusal
	Took     time.Duration
}

// cluster is the name of the demonstration's cluster; the owner's folder is muster-demo.
const cluster = "demo"

type run struct {
	Options
	started time.Time
	number  int
	report  Report
	ticket  ticket // the intruder's copy of node2's ticket
}

// Run brings the cluster up, shows it, and tries to join three machines that must be refused. It takes the lab down
// at the end, also after an error, unless Keep is set.
func Run(ctx context.Context, o Options) (report Report, err error) {
	for _, path := range []*string{&o.Bin, &o.Images} { // commands run in other folders
		if *path, err = filepath.Abs(*path); err != nil {
			return report, err
		}
	}
	r := &run{Options: o, started: time.Now()}
	o.Lab.Log = &indent{to: o.Out}
	if !o.Keep {
		defer func() {
			// The demonstration may have been interrupted; its objects are removed nevertheless.
			err = errors.Join(err, r.step(context.WithoutCancel(ctx), "Take everything down again", func(ctx context.Context) error { return o.Lab.Down(ctx) }))
		}()
	}
	for _, s := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"Prepare the machines' image, a network, and a mirror for images and components", r.up},
		{"Decide what is acceptable: a policy from the image's measurements, before any machine exists", r.policy},
		{"Boot node1 and node2, each with a TPM 2.0 of its own", r.boot},
		{"Look at node1's firmware, and accept it as a machine class of the policy", r.firmware},
		{"muster init: verify node1, then make it the first control plane", r.init},
		{"node2 joins by itself, with a ticket for what it has booted", r.join},
		{"Look at the cluster", r.look},
		{"Pods talk from node to node", r.echo},
		{"node5 joins as a second control plane, once its owner has enrolled it", r.secondControlPlane},
		{"node6, whose TPM has no EK certificate, is refused until muster approve lists it", r.approve},
		{"node7 joins by the attestation key that its cloud has certified", r.cloudMachine},
		{"Refused: a machine with one changed byte in its bootstrapper", r.refuseTampered},
		{"Refused: a machine whose TPM no listed root certifies", r.refuseForeign},
		{"Refused: no evidence, but all of node2's ticket except its private keys", r.refuseIntruder},
		{"Refused: the same with kubeadm's bootstrap token and bindings put back by hand", r.refuseToken},
		{"Nothing of the refused is left", r.unchanged},
	} {
		if err := r.step(ctx, s.name, s.do); err != nil {
			return r.report, err
		}
	}
	r.report.Took = time.Since(r.started)
	r.summary()
	return r.report, nil
}

func (r *run) step(ctx context.Context, name string, do func(context.Context) error) error {
	r.number++
	fmt.Fprintf(r.Out, "\n── %d. %s\n", r.number, name)
	start := time.Now()
	if err := do(ctx); err != nil {
		fmt.Fprintf(r.Out, "   FAILED after %.1f s: %v\n", time.Since(start).Seconds(), err)
		return fmt.Errorf("%s: %w", name, err)
	}
	fmt.Fprintf(r.Out, "   done in %.1f s\n", time.Since(start).Seconds())
	return nil
}

func (r *run) say(format string, args ...any) {
	for line := range strings.Lines(strings.TrimRight(fmt.Sprintf(format, args...), "\n")) {
		fmt.Fprintf(r.Out, "   %s\n", strings.TrimRight(line, "\n"))
	}
}

func (r *run) summary() {
	fmt.Fprintf(r.Out, "\n%-76s %s\n", "REFUSED", "RESULT")
	for _, f := range r.report.Refusals {
		fmt.Fprintf(r.Out, "%-76s %s\n", f.Who, f.Reason)
	}
	fmt.Fprintf(r.Out, "\nAdmitted: %s. Refused: %d. All in %.0f s.\n", strings.Join(r.report.Nodes, ", "), len(r.report.Refusals), r.report.Took.Seconds())
	if r.Keep {
		fmt.Fprintf(r.Out, "\nThe cluster is up. Try:\n  bin/lab exec owner -- muster status\n  bin/lab exec node1 -- kubectl --kubeconfig /etc/kubernetes/admin.conf get pods -A\n  bin/lab shell node2\nmake demo-down takes it down.\n")
	}
}

func (r *run) refused(who, reason, evidence string) {
	r.report.Refusals = append(r.report.Refusals, Refusal{who, reason, evidence})
	r.say("%s: %s", reason, shorten(evidence, 400))
}

func shorten(s string, n int) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) <= n {
		return s
	}
	return s[:n] + " …"
}

// at runs a command in a machine or on the owner's workstation and returns its output.
func (r *run) at(ctx context.Context, where string, argv ...string) (string, error) {
	return r.pipe(ctx, where, nil, argv...)
}

func (r *run) pipe(ctx context.Context, where string, stdin []byte, argv ...string) (string, error) {
	cmd, err := r.Lab.Command(ctx, where, argv...)
	if err != nil {
		return "", err
	}
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &stderr
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s on %s: %w\n%s%s", argv[0], where, err, out.String(), stderr.String())
	}
	return out.String(), nil
}

// show runs a command and shows it with its output.
func (r *run) show(ctx context.Context, where string, argv ...string) error {
	r.say("%s$ %s", where, strings.Join(argv, " "))
	cmd, err := r.Lab.Command(ctx, where, argv...)
	if err != nil {
		return err
	}
	w := &indent{to: r.Out}
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Run()
	w.flush()
	return err
}

// indent puts lines under a step. Machines that boot at the same time share one.
type indent struct {
	to io.Writer

	mu   sync.Mutex
	rest []byte
}

func (i *indent) Write(b []byte) (int, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.rest = append(i.rest, b...)
	for {
		n := bytes.IndexByte(i.rest, '\n')
		if n < 0 {
			return len(b), nil
		}
		fmt.Fprintf(i.to, "     %s\n", i.rest[:n])
		i.rest = i.rest[n+1:]
	}
}

func (i *indent) flush() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.rest) > 0 {
		fmt.Fprintf(i.to, "     %s\n", i.rest)
		i.rest = nil
	}
}

// kubectl runs kubectl as the cluster's administrator, on node1.
func (r *run) kubectl(ctx context.Context, args ...string) (string, error) {
	return r.at(ctx, "node1", append([]string{"kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf"}, args...)...)
}

// patience bounds each wait, on a computer that does other things too: a step takes seconds on one that doesn't.
const patience = 10 * time.Minute

// until repeats a check until it succeeds, and returns its last error after [patience].
func until(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not after %s: %w", patience, err)
		case <-tick.C:
		}
	}
}

func (r *run) owner(name string) string { return filepath.Join(r.Lab.OwnerDir(), name) }

func (r *run) writeOwner(name string, content []byte) error {
	return os.WriteFile(r.owner(name), content, 0o600)
}
