// Package operate examines a real cluster as its owner does: which machines are nodes, which wait and why, and which
// faults are reported after something was broken.
package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/doctor"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/lab/demo"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// seat is the owner's workstation, beside a cluster of node1 and node2.
type seat struct {
	lab *driver.Lab
	bin string
}

func newSeat(t *testing.T) *seat {
	t.Helper()
	lab, root := labtest.New(t, "muster-op")
	s := &seat{lab: lab, bin: filepath.Join(root, "bin")}
	if err := demo.Cluster(t.Context(), demo.Options{Lab: lab, Bin: s.bin, Images: filepath.Join(root, "dist", "images"), Out: t.Output()}); err != nil {
		t.Fatal(err)
	}
	return s
}

// at runs a program on a machine and returns its standard output.
func (s *seat) at(ctx context.Context, where, stdin string, argv ...string) (string, error) {
	cmd, err := s.lab.Command(ctx, where, argv...)
	if err != nil {
		return "", err
	}
	var errOut strings.Builder
	cmd.Stdin, cmd.Stderr = strings.NewReader(stdin), &errOut
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, errOut.String())
	}
	return string(out), err
}

func (s *seat) muster(ctx context.Context, args ...string) (string, error) {
	return s.at(ctx, driver.Owner, "", append([]string{filepath.Join(s.bin, "muster")}, args...)...)
}

func (s *seat) kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	return s.at(ctx, "node1", stdin, append([]string{"kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf"}, args...)...)
}

// show puts the output for a person into the test's log.
func (s *seat) show(t *testing.T, args ...string) {
	t.Helper()
	out, err := s.muster(t.Context(), args...)
	t.Logf("$ muster %s\n%s(%v)", strings.Join(args, " "), out, err)
}

// until waits for a condition.
func until(t *testing.T, f func() error) {
	t.Helper()
	deadline := time.After(10 * time.Minute)
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal(err)
		}
	}
}

func decode[T any](text string, err error) (*T, error) {
	out := new(T)
	if jerr := json.Unmarshal([]byte(text), out); jerr != nil {
		return nil, errors.Join(err, jerr)
	}
	return out, nil
}

func TestTheOwnerSeesWhatIsWrong(t *testing.T) {
	s := newSeat(t)
	if _, err := s.lab.AddNode(t.Context(), driver.Node{Name: "node3", JoinEndpoints: []string{"192.168.77.11:30090"}, TamperBootstrapper: true}); err != nil {
		t.Fatal(err)
	}
	t.Run("a machine that waits says its phase and why", s.oneMachine)
	t.Run("the cluster says who waits and why", s.whoWaits)
	t.Run("doctor finds nothing wrong, then what was broken, and nothing again", s.doctor)
	t.Run("doctor on the machines themselves", s.onTheMachines)
	t.Run("doctor on a machine by an order", s.byOrder)
}

func (s *seat) oneMachine(t *testing.T) {
	var st *appraisal.MachineStatus
	until(t, func() (err error) {
		st, err = decode[appraisal.MachineStatus](s.muster(t.Context(), "status", "--endpoint", "192.168.77.13", "--output", "json"))
		if err == nil && st.Reason != "POLICY_REFUSED" {
			err = fmt.Errorf("it says %+v", st)
		}
		return err
	})
	if st.Phase != "waiting" || st.NodeName != "node3" || st.Proven || st.Problem.Reason != "POLICY_REFUSED" || st.Remedy == "" || len(st.JoinEndpoints) != 1 {
		t.Errorf("%+v", st)
	}
	s.show(t, "status", "--endpoint", "192.168.77.13")
	s.show(t, "doctor", "--endpoint", "192.168.77.13")
	// node2 is a node: its bootstrapper has ended, and the command explains that.
	if _, err := s.muster(t.Context(), "status", "--endpoint", "192.168.77.12"); err == nil || !strings.Contains(err.Error(), "is a node already") {
		t.Errorf("a node: %v", err)
	}
}

func (s *seat) whoWaits(t *testing.T) {
	var st *clusterapi.Status
	until(t, func() (err error) {
		st, err = decode[clusterapi.Status](s.muster(t.Context(), "status", "--output", "json"))
		switch {
		case err != nil:
			return err
		case len(st.Waiting) != 1:
			return fmt.Errorf("waiting: %+v", st.Waiting)
		case len(st.Nodes) != 2 || st.Nodes[1].ClientExpires == nil || st.Nodes[1].ServingExpires == nil || !st.Nodes[1].Ready:
			return fmt.Errorf("nodes: %+v", st.Nodes)
		case len(st.Pods) != 2 || len(st.Certificates) != 2 || len(st.Attention) != 0:
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	if w := st.Waiting[0]; w.Reason != "POLICY_REFUSED" || w.Address != "192.168.77.13" || w.Remedy == "" {
		t.Errorf("%+v", w)
	}
	s.show(t, "status")
	until(t, func() error { // a machine that is not enrolled was refused, and that is no reason to fail
		_, err := s.muster(t.Context(), "status", "--check", "--timeout", "20m")
		return err
	})
}

// examine returns doctor's findings that are not OK. Its exit code must be 1 exactly if a check failed.
func (s *seat) examine(t *testing.T) (failed []checkup.Finding) {
	t.Helper()
	text, err := s.muster(t.Context(), "doctor", "--output", "json", "--timeout", "20m")
	r, jerr := decode[checkup.Report](text, err)
	if jerr != nil {
		t.Fatal(jerr)
	}
	for _, f := range r.Findings {
		switch f.Level {
		case checkup.Fail:
			failed = append(failed, f)
		case checkup.Warn:
			t.Logf("warning: %+v", f)
		case checkup.OK:
		}
	}
	if (err != nil) != (len(failed) > 0) {
		t.Errorf("exit code %v, failed %+v", err, failed)
	}
	return failed
}

func (s *seat) doctor(t *testing.T) {
	const binding = "muster-node-certificates"
	for _, f := range s.examine(t) {
		t.Errorf("a sound cluster: %+v", f)
	}
	s.show(t, "doctor")
	saved, err := s.kubectl(t.Context(), "", "get", "validatingadmissionpolicybinding", binding, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.kubectl(t.Context(), "", "delete", "validatingadmissionpolicybinding", binding); err != nil {
		t.Fatal(err)
	}
	failed := s.examine(t)
	if len(failed) != 1 || failed[0].Check != doctor.CheckAdmission || !strings.Contains(failed[0].Detail, binding+" was deleted") || failed[0].Remedy == "" {
		t.Errorf("%+v", failed)
	}
	s.show(t, "doctor")
	var object map[string]any
	if err := json.Unmarshal([]byte(saved), &object); err != nil {
		t.Fatal(err)
	}
	meta, _ := object["metadata"].(map[string]any)
	object["metadata"] = map[string]any{"name": binding, "labels": meta["labels"], "annotations": meta["annotations"]}
	again, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.kubectl(t.Context(), string(again), "create", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	for _, f := range s.examine(t) {
		t.Errorf("after it was put back: %+v", f)
	}
}

func (s *seat) onTheMachines(t *testing.T) {
	for _, where := range []string{"node2", "node3"} {
		text, err := s.at(t.Context(), where, "", "bootstrapper", "doctor", "--output", "json")
		r, jerr := decode[checkup.Report](text, err)
		if jerr != nil {
			t.Fatal(jerr)
		}
		for _, f := range r.Findings {
			if f.Level == checkup.Fail && f.Check != "disk space" {
				t.Errorf("%s: %+v", where, f)
			}
		}
	}
	out, err := s.at(t.Context(), "node3", "", "bootstrapper", "doctor")
	t.Logf("node3$ bootstrapper doctor\n%s(%v)", out, err)
}

// ordered runs a command that orders a node's machine an action. The machine attests at once.
func (s *seat) ordered(t *testing.T, node, action string, args ...string) (string, error) {
	t.Helper()
	done := make(chan struct{})
	var out string
	var err error
	go func() {
		defer close(done)
		out, err = s.muster(t.Context(), append(args, "--output", "json")...)
	}()
	until(t, func() error {
		text, err := s.kubectl(t.Context(), "", "get", "attestednode", node, "-o", `jsonpath={.metadata.annotations.muster\.dev/order}`)
		if err == nil && !strings.Contains(text, `"action":"`+action+`"`) {
			err = fmt.Errorf("the order of %s is %q", node, text)
		}
		return err
	})
	if _, err := s.at(t.Context(), node, "", "systemctl", "restart", "muster-attester"); err != nil { // it attests at its start
		t.Fatal(err)
	}
	<-done
	return out, err
}

// byOrder has machines examine themselves without a login there (B11), and prove what they booted: a control plane and a worker.
func (s *seat) byOrder(t *testing.T) {
	for _, node := range []string{"node1", "node2"} {
		out, err := s.ordered(t, node, "doctor", "doctor", "--node", node)
		r, err := decode[checkup.Report](out, err)
		if err != nil {
			t.Fatal(err)
		}
		for _, check := range []string{"TPM", "event log", "journal", "node lock", "clock"} {
			if i := slices.IndexFunc(r.Findings, func(f checkup.Finding) bool { return f.Check == check }); i < 0 || r.Findings[i].Level == checkup.Fail {
				t.Errorf("%s says of %q: %+v", node, check, r.Findings)
			}
		}
		out, err = s.ordered(t, node, "verify", "verify", node)
		v, err := decode[appraisal.Report](out, err)
		if err != nil {
			t.Fatal(err)
		}
		id, err := s.kubectl(t.Context(), "", "get", "attestednode", node, "-o", "jsonpath={.spec.machineID}")
		if err != nil || !v.Accepted || v.Machine != id || v.Lock != "locked to this cluster" || v.Image == "" || v.Record != nil {
			t.Errorf("%s, machine %s, is verified as %+v: %v", node, id, v, err)
		}
	}
	audit, err := s.at(t.Context(), "node1", "", "cat", "/var/log/muster/audit.jsonl")
	if err != nil || strings.Count(audit, `"event":"order reported"`) < 4 || strings.Count(audit, `"detail":"done"`) != 4 {
		t.Errorf("the audit log does not have all ends: %v\n%s", err, audit)
	}
	s.show(t, "status")
}
