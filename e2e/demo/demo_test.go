// Package demo runs the demonstration as a test, and then lets in, repaired, whom the
// demonstration refused: what was refused was refused for its one fault.
package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/demo"
	"github.com/muster-k8s/muster/lab/driver"
)

// lines shows each line of the demonstration in the test's log.
type lines struct{ t *testing.T }

func (l lines) Write(b []byte) (int, error) {
	l.t.Log(strings.TrimRight(string(b), "\n"))
	return len(b), nil
}

func TestDemonstration(t *testing.T) {
	dir, err := os.MkdirTemp("/var/lib", "muster-e2e")
	if err != nil {
		t.Fatalf("%v: this test makes machines out of namespaces, so it needs root", err)
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	lab, err := driver.Open(dir, lines{t})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("take the lab down: %v", err)
		}
	})
	report, err := demo.Run(t.Context(), demo.Options{
		Lab: lab, Bin: filepath.Join(root, "bin"), Images: filepath.Join(root, "dist", "images"), Out: lines{t}, Keep: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(report.Nodes, []string{"node1", "node2"}) {
		t.Errorf("admitted: %v", report.Nodes)
	}
	var reasons []string
	for _, r := range report.Refusals {
		reasons = append(reasons, r.Reason)
	}
	for _, want := range []string{"POLICY_REFUSED", "EK_UNTRUSTED", "PEER_NOT_ATTESTED"} {
		if !slices.Contains(reasons, want) {
			t.Errorf("nobody was refused with %s: %v", want, reasons)
		}
	}
	for _, name := range []string{"node3", "node4"} {
		t.Run(name+" is admitted once its one fault is repaired", func(t *testing.T) {
			if err := lab.RemoveNode(t.Context(), name); err != nil {
				t.Fatal(err)
			}
			if _, err := lab.AddNode(t.Context(), driver.Node{Name: name, JoinEndpoints: []string{"192.168.77.11:30090"}}); err != nil {
				t.Fatal(err)
			}
			if err := ready(t.Context(), lab, name); err != nil {
				t.Error(err)
			}
		})
	}
}

// ready waits until the node is.
func ready(ctx context.Context, lab *driver.Lab, name string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		cmd, err := lab.Command(ctx, "node1", "kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", "get", "node", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err != nil {
			return err
		}
		out, err := cmd.CombinedOutput()
		if err == nil && string(out) == "True" {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), fmt.Errorf("%s is not Ready: %s", name, out))
		case <-tick.C:
		}
	}
}
