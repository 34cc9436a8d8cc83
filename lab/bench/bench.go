// Package bench measures the cost of attestation: it compares clusters made through Muster with clusters made with
// kubeadm by hand, on the same machines, alternately.
//
// A round is one of each: init of a first machine and join of a second, both to the moment at which the node is
// Ready. The order changes from round to round, so that a machine that becomes slower or faster favors neither. [Run]
// returns every figure; docs/performance.md has the medians.
package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// Options are the options of a run. All fields are required.
type Options struct {
	Lab    *driver.Lab
	Bin    string    // folder with lab, muster and bootstrapper
	Images string    // folder with the services' images (joinservice.tar, kms.tar) and digests.json
	Rounds int       // at least 1
	Out    io.Writer // progress, a line per cluster
}

// Sample is one cluster of either kind. Durations are in seconds.
type Sample struct {
	// Init is from the start of the command until kubeadm has finished; Init.Ready until the
	// node is Ready too; Init.Done until the command has ended (Muster: its services answer).
	Init Times `json:"init"`
	// Join is from the start of the machine's bootstrapper, or of kubeadm.
	Join Times `json:"join"`
	// Stages are Muster's own, by name; see stages.go. Empty for a cluster by hand.
	Stages map[string]float64 `json:"stages,omitempty"`
	// Resources are what Muster's processes used, by name.
	Resources map[string]Usage `json:"resources,omitempty"`
	// Requests are those to the API server from the ticket's decision until it was issued, by client and request
	// ("joinservice create attestednodes").
	Requests map[string]int `json:"requests,omitempty"`
}

// Times are in seconds from the beginning of the measurement.
type Times struct {
	Kubeadm float64 `json:"kubeadm"`
	Ready   float64 `json:"ready"`
	Done    float64 `json:"done"`
}

// Results are all samples of a run, in the order in which they were taken.
type Results struct {
	Version  string    `json:"version"`
	Machine  string    `json:"machine"`
	Time     time.Time `json:"time"`
	Load     string    `json:"load"` // load averages before the run, /proc/loadavg
	Muster   []Sample  `json:"muster"`
	Kubeadm  []Sample  `json:"kubeadm"`
	Failures []string  `json:"failures,omitempty"` // rounds that did not finish, which no median includes
}

type run struct {
	Options
	round int
}

// Run takes the samples, in a lab of its own that it takes down at the end.
func Run(ctx context.Context, o Options) (res Results, err error) {
	for _, path := range []*string{&o.Bin, &o.Images} { // commands run in other folders
		if *path, err = filepath.Abs(*path); err != nil {
			return res, err
		}
	}
	if o.Rounds < 1 {
		return res, errors.New("bench: at least one round is needed")
	}
	if res, err = describe(); err != nil {
		return res, err
	}
	r := &run{Options: o}
	defer func() { err = errors.Join(err, o.Lab.Down(context.WithoutCancel(ctx))) }()
	if err := o.Lab.Up(ctx, driver.Up{
		Lab: filepath.Join(o.Bin, "lab"), Bootstrapper: filepath.Join(o.Bin, "bootstrapper"), Preinstalled: []string{"kubelet", "kubeadm", "kubectl"}, Audit: true,
		Muster: r.tool(),
		Images: []string{filepath.Join(o.Images, "joinservice.tar"), filepath.Join(o.Images, "kms.tar")},
	}); err != nil {
		return res, err
	}
	if err := r.policy(ctx); err != nil {
		return res, err
	}
	for r.round = 1; r.round <= o.Rounds; r.round++ {
		kinds := []kind{{"muster", r.muster, &res.Muster}, {"kubeadm", r.byHand, &res.Kubeadm}}
		if r.round%2 == 0 {
			kinds[0], kinds[1] = kinds[1], kinds[0]
		}
		for _, k := range kinds {
			s, err := r.sample(ctx, k)
			switch {
			case ctx.Err() != nil:
				return res, context.Cause(ctx)
			case err != nil: // reported in the results; the others still count
				res.Failures = append(res.Failures, fmt.Sprintf("round %d, %s: %v", r.round, k.name, err))
				fmt.Fprintf(o.Out, "%2d %-8s FAILED: %v\n", r.round, k.name, err)
			default:
				*k.into = append(*k.into, s)
				fmt.Fprintf(o.Out, "%2d %-8s init: kubeadm %6.2f ready %6.2f done %6.2f   join: kubeadm %6.2f ready %6.2f\n",
					r.round, k.name, s.Init.Kubeadm, s.Init.Ready, s.Init.Done, s.Join.Kubeadm, s.Join.Ready)
			}
		}
	}
	return res, nil
}

type kind struct {
	name string
	do   func(context.Context) (Sample, error)
	into *[]Sample
}

// sample makes a cluster and takes it down again.
func (r *run) sample(ctx context.Context, k kind) (s Sample, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	defer func() {
		clean := context.WithoutCancel(ctx)
		st, serr := r.Lab.Status(clean)
		err = errors.Join(err, serr)
		for _, m := range st.Machines {
			err = errors.Join(err, r.Lab.RemoveNode(clean, m.Name))
		}
	}()
	return k.do(ctx)
}

// at runs a command in a machine or on the owner's workstation and returns its output.
func (r *run) at(ctx context.Context, where string, stdin []byte, argv ...string) ([]byte, error) {
	cmd, err := r.Lab.Command(ctx, where, argv...)
	if err != nil {
		return nil, err
	}
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s on %s: %w\n%s%s", argv[0], where, err, tail(out.String()), tail(stderr.String()))
	}
	return out.Bytes(), nil
}

func tail(s string) string {
	lines := strings.SplitAfter(s, "\n")
	return strings.Join(lines[max(0, len(lines)-12):], "")
}

// ready waits until a node is Ready, in a watch. If the watch breaks (a starting API server accepts connections and
// drops them), it is started again.
func (r *run) ready(ctx context.Context, kubeconfig, node string) error {
	kubectl := []string{"kubectl", "--kubeconfig", kubeconfig, "wait", "node/" + node, "--timeout=180s"}
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for _, condition := range []string{"create", "condition=Ready"} {
		for {
			_, err := r.at(ctx, driver.Owner, nil, append(kubectl, "--for="+condition)...)
			if err == nil {
				break
			}
			select {
			case <-ctx.Done():
				return errors.Join(context.Cause(ctx), err)
			case <-again.C:
			}
		}
	}
	return nil
}
