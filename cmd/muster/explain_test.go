package main

import (
	"context"
	"crypto"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/explain"
	"github.com/muster-k8s/muster/internal/image"
	"github.com/muster-k8s/muster/internal/image/imagetest"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog/eventlogtest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// booted writes the event log of a machine that has booted an image, after a change of its measurements.
func booted(t *testing.T, way []explain.Step, change func([]explain.Step) []explain.Step) string {
	t.Helper()
	w := eventlogtest.NewWriter(tpm.SHA256)
	for _, s := range change(slices.Clone(way)) {
		if err := w.Append(s.PCR, eventlog.IPL, map[tpm.Bank][]byte{tpm.SHA256: s.Digest}, []byte("as logged")); err != nil {
			t.Fatal(err)
		}
	}
	return save(t, filepath.Join(t.TempDir(), "log"), w.Bytes())
}

// accepting is a policy that accepts the image.
func accepting(t *testing.T, way []explain.Step) string {
	t.Helper()
	ca := attesttest.NewCA(t)
	text := attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}, func(p *attestv1.Policy) {
		values := explain.Values(crypto.SHA256, way)
		for _, v := range p.GetTpm2().GetImages()[0].GetPcrs() {
			if v.Value = strings.Repeat("0", 64); values[int(v.GetIndex())] != nil {
				v.Value = hex.EncodeToString(values[int(v.GetIndex())])
			}
		}
		p.Tpm2.Classes, p.Insecure = nil, &attestv1.InsecureSwitches{AnyFirmware: true}
	})
	return save(t, filepath.Join(t.TempDir(), "policy.yaml"), text)
}

func TestARefusalIsExplainedByTheImage(t *testing.T) {
	parts := imagetest.New(t)
	program := parts.Program(t)
	disk := parts.Write(t)
	plain, err := image.Steps(program, crypto.SHA256, false)
	if err != nil {
		t.Fatal(err)
	}
	secure, err := image.Steps(program, crypto.SHA256, true)
	if err != nil {
		t.Fatal(err)
	}
	at := func(way []explain.Step, what string) int {
		i := slices.IndexFunc(way, func(s explain.Step) bool { return strings.HasPrefix(s.What, what) })
		if i < 0 {
			t.Fatalf("the image has no %s: %+v", what, way)
		}
		return i
	}
	same := func(s []explain.Step) []explain.Step { return s }
	another := func(what string) func(s []explain.Step) []explain.Step {
		return func(s []explain.Step) []explain.Step {
			s[at(s, what)].Digest = make([]byte, 32)
			return s
		}
	}
	for name, tt := range map[string]struct {
		way     []explain.Step
		change  func([]explain.Step) []explain.Step
		without bool     // --image is not given
		want    []string // parts of the output
		differs bool
	}{
		"the image":                  {way: plain, change: same, want: []string{"The PCRs are those of image image-0", "Nothing differs"}},
		"the image with Secure Boot": {way: secure, change: same, want: []string{"Nothing differs"}},
		"another command line": {way: plain, change: another("the content of section .cmdline"), differs: true,
			want: []string{"The closest is image-0", "PCR 11", "another the content of section .cmdline, \"", "the log calls it EV_IPL \"as logged\"", "It is not verified"}},
		"another initial RAM disk": {way: plain, change: another("the initial RAM disk"), differs: true, want: []string{"PCR 9 ", "another the initial RAM disk"}},
		"another kernel file":      {way: plain, change: another("the unified kernel image"), differs: true, want: []string{"PCR 4 ", "another the unified kernel image, a file"}},
		"one measurement too many": {way: plain, differs: true, want: []string{"not expected: EV_IPL"},
			change: func(s []explain.Step) []explain.Step {
				return append(s, explain.Step{PCR: 11, Digest: make([]byte, 32)})
			}},
		"a command line from outside": {way: plain, differs: true, want: []string{"PCR 12", "no configuration from outside", "has in the PCRs that differ", "EV_IPL \"as logged\""},
			change: func(s []explain.Step) []explain.Step {
				return append(s, explain.Step{PCR: 12, Digest: make([]byte, 32)})
			}},
		"without an image": {way: plain, change: another("the initial RAM disk"), without: true, differs: true, want: []string{"PCR 9 ", "has in the PCRs that differ"}},
	} {
		t.Run(name, func(t *testing.T) {
			var out, problems strings.Builder
			a := &app{stdout: &out, stderr: &problems}
			args := []string{"explain", booted(t, tt.way, tt.change), "--policy", accepting(t, tt.way)}
			if !tt.without {
				args = append(args, "--image", disk)
			}
			err := a.run(t.Context(), args)
			if tt.differs != (err != nil) || err != nil && exitCode(err) != exitFailed {
				t.Errorf("%v\n%s", err, problems.String())
			}
			for _, w := range tt.want {
				if !strings.Contains(out.String(), w) {
					t.Errorf("no %q in\n%s", w, out.String())
				}
			}
		})
	}
	t.Run("another image than the policy's is noticed", func(t *testing.T) {
		var out strings.Builder
		changed := another("the initial RAM disk")(slices.Clone(plain))
		_ = (&app{stdout: &out, stderr: &out}).run(t.Context(), []string{"explain", booted(t, plain, same), "--policy", accepting(t, changed), "--image", disk})
		if !strings.Contains(out.String(), "is not the policy's image: it gives other values in PCR 9.") {
			t.Errorf("%s", out.String())
		}
	})
}

// What is neither a log nor evidence is refused; the same file, repaired, is read.
func TestFilesThatCannotBeExplainedAreRefused(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := save(t, filepath.Join(t.TempDir(), "policy.yaml"), attesttest.Policy(t, ca, []*attesttest.Machine{m}))
	ev, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{1})
	if err != nil {
		t.Fatal(err)
	}
	evidence := func(change func(*attestv1.Tpm2Evidence)) []byte {
		c := proto.CloneOf(ev)
		change(c.GetTpm2())
		b, err := proto.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	log, err := os.ReadFile(m.EventLog())
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		file []byte
		want string // part of the error; empty: it is explained, and nothing differs
	}{
		"an event log":                       {log, ""},
		"evidence":                           {evidence(func(*attestv1.Tpm2Evidence) {}), ""},
		"nothing":                            {nil, "neither an event log nor evidence"},
		"a text":                             {[]byte("x"), "neither an event log nor evidence"},
		"a log that is cut off":              {log[:len(log)-1], "event log"},
		"evidence without a log":             {evidence(func(e *attestv1.Tpm2Evidence) { e.Events = nil }), "no event log"},
		"evidence of another bank":           {evidence(func(e *attestv1.Tpm2Evidence) { e.Bank = uint32(tpm.SHA384) }), "another bank"},
		"PCRs that are not those of the log": {evidence(func(e *attestv1.Tpm2Evidence) { e.Pcrs[4] = make([]byte, 32) }), "EVENTLOG_REPLAY"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			err := (&app{stdout: &out, stderr: &out}).run(t.Context(), []string{"explain", save(t, filepath.Join(t.TempDir(), "file"), tt.file), "--policy", policy})
			if tt.want == "" {
				if err != nil || !strings.Contains(out.String(), "Nothing differs") {
					t.Errorf("%v\n%s", err, out.String())
				}
			} else if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want one about %q", err, tt.want)
			}
		})
	}
}

// A machine that waits is explained by its verified evidence, also one that is refused.
func TestAWaitingMachineIsExplained(t *testing.T) {
	ca := attesttest.NewCA(t)
	model := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := save(t, filepath.Join(t.TempDir(), "policy.yaml"), attesttest.Policy(t, ca, []*attesttest.Machine{model}))
	for name, tt := range map[string]struct {
		m    *attesttest.Machine
		want []string
		code int // 0: it is accepted
	}{
		"an accepted one": {model, []string{"the verified evidence of machine " + model.ID().String(), "Nothing differs"}, 0},
		"another image":   {attesttest.NewMachine(t, ca, attesttest.Options{Image: "tampered"}), []string{"Refused with POLICY_REFUSED", "PCR 9 ", `EV_IPL "initrd of tampered"`}, exitFailed},
		"other firmware":  {attesttest.NewMachine(t, ca, attesttest.Options{SecureBoot: true}), []string{"No class of the policy has these PCRs", "PCR 7 ", `"SecureBoot=1"`}, exitFailed},
		"a bare one":      {attesttest.NewMachine(t, ca, attesttest.Options{Bare: true}), []string{"Refused with EK_UNTRUSTED", "The machine's boot does not differ", "muster approve"}, exitFailed},
		"a foreign TPM":   {attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}), nil, exitRefused},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			err := (&app{stdout: &out, stderr: &out}).run(t.Context(), []string{"explain", serveMachine(t, tt.m), "--policy", policy})
			if err == nil && tt.code != 0 || err != nil && exitCode(err) != tt.code {
				t.Errorf("%v, want exit code %d\n%s", err, tt.code, out.String())
			}
			for _, w := range tt.want {
				if !strings.Contains(out.String(), w) {
					t.Errorf("no %q in\n%s", w, out.String())
				}
			}
		})
	}
}

// A machine that waits is named by its ID, one that has joined by its node.
func TestAMachineIsExplainedByItsIDAndByItsNode(t *testing.T) {
	api, ca := cluster(t), attesttest.NewCA(t)
	model := attesttest.NewMachine(t, ca, attesttest.Options{})
	folder := filepath.Join(t.TempDir(), "muster-prod")
	if err := ownersFolder(folder, api, attesttest.Policy(t, ca, []*attesttest.Machine{model})); err != nil {
		t.Fatal(err)
	}
	dir, err := ownerdir.Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	joined := dir.Cluster()
	joined.ClusterID = strings.Repeat("ab", 32)
	if err := errors.Join(dir.Save(joined), dir.Close()); err != nil {
		t.Fatal(err)
	}
	tampered := attesttest.NewMachine(t, ca, attesttest.Options{Image: "tampered"})
	entry, err := waiting.Entry{Reason: "POLICY_REFUSED", Address: serveMachine(t, tampered), Image: "image-0", Differs: "PCR 9 is another", Since: time.Now(), Last: time.Now()}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	list := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: waiting.ConfigMap}, Data: map[string]string{tampered.ID().String(): entry}}
	if err := api.Client.Create(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	explained := func(args ...string) (stdout, stderr string, err error) {
		var out, problems strings.Builder
		err = (&app{stdout: &out, stderr: &problems}).run(t.Context(), append([]string{"explain", "--directory", folder}, args...))
		return out.String(), problems.String(), err
	}
	out, problems, err := explained(tampered.ID().String())
	if exitCode(err) != exitFailed || !strings.Contains(problems, "record, which is unverified: refused with POLICY_REFUSED; image image-0") || !strings.Contains(problems, "PCR 9 is another") {
		t.Errorf("%v\n%s", err, problems)
	}
	for _, w := range []string{"the verified evidence of machine " + tampered.ID().String(), "Refused with POLICY_REFUSED", `EV_IPL "initrd of tampered"`} {
		if !strings.Contains(out, w) {
			t.Errorf("no %q in\n%s", w, out)
		}
	}
	if out, _, err := explained(model.ID().String()); attest.ReasonOf(err) != attestv1.Reason_REASON_NOT_ENROLLED || out != "" {
		t.Errorf("a machine that does not wait: %v\n%s", err, out)
	}

	// Its own machine is asked by an order that it alone can answer. None runs here; owner/lifecycle has the answer.
	c, err := attesttest.Claims(t.Context(), model.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{9})
	if err != nil {
		t.Fatal(err)
	}
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: model.ID().String(), Role: v1alpha1.RoleWorker, DiskID: "5f0c95b6-2a3d-4c7e-9f10-000000000071", DiskMode: v1alpha1.DiskModeLUKS}}
	if err := api.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	n.Status.EKPublic, n.Status.AKName = base64.StdEncoding.EncodeToString(c.EKPublic()), hex.EncodeToString(c.AKName())
	if err := api.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	out, problems, err = explained("w1", "--timeout", "5s")
	if err == nil || out != "" || !strings.Contains(problems, "w1: ") || !strings.Contains(err.Error(), fmt.Sprintf("the order %q to w1 is withdrawn", ownerorder.ActionVerify)) {
		t.Errorf("a node that does not answer: %v\n%s\n%s", err, out, problems)
	}
}

// serveMachine serves a machine's port 9000, and returns its address.
func serveMachine(t *testing.T, m *attesttest.Machine) string {
	t.Helper()
	return serveMachineAt(t, m, "127.0.0.1:0")
}

func serveMachineAt(t *testing.T, m *attesttest.Machine, address string) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	metrics, err := rpc.NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	server, err := rpc.NewServer(rpc.Config{
		Listener: l, ATLS: atls.ServerConfig{Attester: m.Attester(attest.PurposeMachine), Appraiser: atls.NoAppraiser},
		Services: []rpc.Service{rpc.Serve(initv1connect.MachineServiceName, initv1connect.MachineServiceHandler(initv1connect.UnimplementedMachineServiceHandler{}), initv1connect.NewMachineServiceHandler)},
		Health:   rpc.NewHealth(), Metrics: metrics, Log: slog.New(slog.DiscardHandler), Grace: time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// What a machine booted is not all that a policy demands.
func TestARefusalForTheHardwareReportIsExplained(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := func(require ...string) string {
		return save(t, filepath.Join(t.TempDir(), "policy.yaml"), attesttest.Policy(t, ca, []*attesttest.Machine{m}, func(p *attestv1.Policy) {
			p.Hardware = &attestv1.HardwarePolicy{Require: require, SevSnp: &attestv1.SevSnpRules{
				MinTcb: []*attestv1.SevSnpTcb{{Product: "Milan", BootLoader: new(uint32), Tee: new(uint32), Snp: new(uint32), Microcode: new(uint32)}}, Keys: []string{"vcek"}, AnyChip: true, AnyMeasurement: true,
			}}
		}))
	}
	explained := func(policy string) (string, error) {
		var out strings.Builder
		err := (&app{stdout: &out, stderr: &out}).run(t.Context(), []string{"explain", serveMachine(t, m), "--policy", policy})
		return out.String(), err
	}
	out, err := explained(policy("sev-snp"))
	if err == nil || exitCode(err) != exitFailed || !strings.Contains(out, "Refused with POLICY_REFUSED") || !strings.Contains(out, "The refusal above has another reason") || !strings.Contains(out, "docs/hardware-reports.md") {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err := explained(policy()); err != nil || !strings.Contains(out, "Nothing differs.") {
		t.Errorf("%v\n%s", err, out)
	}
}
