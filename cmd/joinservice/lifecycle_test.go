package main

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	healthv1 "github.com/muster-k8s/muster/gen/grpc/health/v1"
	"github.com/muster-k8s/muster/gen/grpc/health/v1/healthv1connect"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestThePolicyChangesWithoutARestart(t *testing.T) {
	s := setUp(t)
	next := attesttest.NewMachine(t, s.ca, attesttest.Options{Image: "next release"})
	m := s.machine(t)
	ask := func(who *attesttest.Machine) error {
		_, err := s.dial(t, who.Attester(attest.PurposeMachine)).IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
		return err
	}
	if err := ask(next); rpc.ReasonFrom(err) != attestv1.Reason_REASON_POLICY_REFUSED {
		t.Fatalf("%v, want POLICY_REFUSED", err)
	}
	both := attesttest.Policy(t, s.ca, []*attesttest.Machine{s.cp1, next}, attesttest.ControlPlanes(s.listed...), func(p *attestv1.Policy) {
		p.Serial, p.Insecure = 2, &attestv1.InsecureSwitches{AllowPlainState: true}
	})
	s.inForce(t, s.SetPolicy(t, both))
	s.ticketFor(t, next, worker(t))
	good := s.join.Metric(t, "muster_policy_generation")
	s.status(t, func(st v1alpha1.AttestationPolicyStatus) bool {
		return st.Accepted && st.Serial == 2 && st.Reason == "" && len(st.Insecure) == 1
	})

	_, otherKey, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	text := func(change func(*attestv1.Policy)) string {
		return string(attesttest.Policy(t, s.ca, []*attesttest.Machine{m}, attesttest.ControlPlanes(s.listed...), change))
	}
	sign := func(json string) string {
		return base64.StdEncoding.EncodeToString(attest.SignPolicy(s.Owner, []byte(json)).GetSignature())
	}
	lower, empty := text(func(p *attestv1.Policy) { p.Serial = 1 }), text(func(p *attestv1.Policy) { p.Serial, p.Version = 9, 3 })
	newer := text(func(p *attestv1.Policy) { p.Serial = 9 })
	for name, tt := range map[string]struct {
		policy, signature string
		reason            attestv1.Reason
	}{
		"a lower serial":           {lower, sign(lower), attestv1.Reason_REASON_POLICY_INVALID},
		"a version of the future":  {empty, sign(empty), attestv1.Reason_REASON_POLICY_INVALID},
		"no JSON":                  {"{", sign("{"), attestv1.Reason_REASON_POLICY_INVALID},
		"signed with another key":  {newer, base64.StdEncoding.EncodeToString(attest.SignPolicy(otherKey, []byte(newer)).GetSignature()), attestv1.Reason_REASON_POLICY_SIGNATURE},
		"the signature of another": {newer, sign(lower), attestv1.Reason_REASON_POLICY_SIGNATURE},
		"one byte was changed":     {newer + " ", sign(newer), attestv1.Reason_REASON_POLICY_SIGNATURE},
	} {
		t.Run(name+" keeps the good one and says so", func(t *testing.T) {
			refusaltest.Reported(t, s.observations(t), tt.reason, refusaltest.Places{
				Metric: []string{"muster_policy_rejected"},
				Log:    []string{"msg", "policy refused; what was in force before stays in force"},
				Audit:  []string{"event", "policy refused"},
			}, func() { s.SetPolicyObject(t, tt.policy, tt.signature) })
			s.status(t, func(st v1alpha1.AttestationPolicyStatus) bool {
				return !st.Accepted && st.Reason == attest.ReasonName(tt.reason) && st.Message != ""
			})
			if got := s.join.Metric(t, "muster_policy_generation"); got != good {
				t.Errorf("generation %v is in force, want %v", got, good)
			}
			if err := ask(next); err != nil {
				t.Errorf("the good policy is no longer applied: %v", err)
			}
			s.inForce(t, s.SetPolicy(t, both))
			good = s.join.Metric(t, "muster_policy_generation")
		})
	}
	t.Run("without one no machine is accepted", func(t *testing.T) {
		if err := s.Client.DeleteAllOf(t.Context(), &v1alpha1.AttestationPolicy{}); err != nil {
			t.Fatal(err)
		}
		membertest.Eventually(t, func() error { return membertest.Want(s.join.Ready(t) != nil, "still ready") })
		client := joinv1connect.NewJoinServiceClient(rpc.HTTPClient(s.blind(t, next.Attester(attest.PurposeMachine))), "https://"+s.join.Addr, rpc.ClientOptions()...)
		err := refusaltest.Refused(t, s.observations(t), attestv1.Reason_REASON_NOT_READY, refusaltest.Connection(), func() error {
			_, err := client.IssueJoinTicket(t.Context(), worker(t).IssueJoinTicketRequest)
			return err
		})
		if rpc.RetryAfterFrom(err) == 0 {
			t.Errorf("%v does not say when to try again", err)
		}
	})
}

// blind appraises the joinservice only by what it boots, because it has no policy to present.
func (s *fixture) blind(t *testing.T, a attest.Attester) *atls.Transport {
	t.Helper()
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: a, Verifier: attesttest.Verifier(t, s.ca), PeerPurpose: attest.PurposeJoinservice,
		Appraiser: attesttest.ParsedPolicy(t, s.ca, []*attesttest.Machine{s.cp1}).For(attest.LockedTo(s.ID)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = transport.Close() })
	return transport
}

func (s *fixture) status(t *testing.T, fits func(v1alpha1.AttestationPolicyStatus) bool) {
	t.Helper()
	membertest.Eventually(t, func() error {
		p := &v1alpha1.AttestationPolicy{}
		if err := s.Client.Get(t.Context(), client.ObjectKey{Name: v1alpha1.PolicyName}, p); err != nil {
			return err
		}
		return membertest.Want(p.Status.ObservedGeneration == p.Generation && fits(p.Status), "status %+v", p.Status)
	})
}

func TestABanTakesEffectAtOnce(t *testing.T) {
	s := setUp(t)
	m, w := s.machine(t), worker(t)
	node := s.asNode(t, w, s.ticketFor(t, m, w))
	membertest.Eventually(t, func() error { return node.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}) })
	pending := renewal("w1")
	ban := func(banned bool) {
		membertest.Eventually(t, func() error { // joinservice writes the status meanwhile
			n := s.Node(t, "w1")
			n.Spec.Banned = banned
			return s.Client.Update(t.Context(), n)
		})
	}
	var open joinv1connect.JoinServiceClient
	ask := func() error {
		_, err := open.IssueJoinTicket(t.Context(), w.IssueJoinTicketRequest)
		return err
	}
	if err := patiently(t, func() error { open = s.overOneConnection(t, m.Attester(attest.PurposeMachine)); return ask() }); err != nil {
		t.Fatal(err)
	}
	ban(true)
	membertest.Eventually(t, func() error { // on the connection of before, while its evidence counts
		err := ask()
		if rpc.ReasonFrom(err) == attestv1.Reason_REASON_VERDICT_OLD {
			open = s.dial(t, m.Attester(attest.PurposeMachine))
		}
		return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_BANNED, "%v, want BANNED", err)
	})
	membertest.Eventually(t, func() error {
		err := node.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, client.DryRunAll)
		return membertest.Want(apierrors.IsForbidden(err) || apierrors.IsInvalid(err), "the banned node could write: %v", err)
	})
	if !s.Access(t).Entry("w1").Suspended {
		t.Error("it is not suspended")
	}
	ban(false)
	membertest.Eventually(t, func() error {
		return membertest.Want(!s.Access(t).Entry("w1").Suspended, "it may not write again")
	})
	open = s.dial(t, m.Attester(attest.PurposeMachine))
	membertest.Eventually(t, ask)
	s.decided(t, s.file(t, pending), certificatesv1.CertificateApproved, "AttestedMachine")
}

func TestItSaysWhetherItServes(t *testing.T) {
	s := setUp(t)
	health := healthv1connect.NewHealthClient(rpc.HTTPClient(s.transport(t, atls.NoAttester)), "https://"+s.join.Addr, rpc.ClientOptions()...)
	membertest.Eventually(t, func() error {
		resp, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: joinv1connect.JoinServiceName})
		if err != nil {
			return err
		}
		return membertest.Want(resp.GetStatus() == healthv1.HealthCheckResponse_SERVING, "status %s", resp.GetStatus())
	})
}

// After a power loss a control plane's pods start together, and the API server is not the first. A service that ended then
// would be restarted at ever longer intervals.
func TestAServiceStartsBeforeItsAPIServer(t *testing.T) {
	s := setUp(t)
	api, err := s.As(t.Context(), namespace, "kms")
	if err != nil {
		t.Fatal(err)
	}
	var dials atomic.Int32
	api.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if dials.Add(1) <= 5 {
			return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	second := s.keys(t, api) // waits until it is ready
	if n := dials.Load(); n <= 5 {
		t.Errorf("the API server was dialled %d times", n)
	}
	if strings.Contains(second.Log.String(), `"level":"ERROR"`) {
		t.Errorf("what passes is logged as an error:\n%s", second.Log)
	}
}

func TestFlagsThatAreWrongAreNamed(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"no owner's key":       {nil, "--owner-keys"},
		"a short owner's key":  {[]string{"--owner-keys=AAAA"}, "--owner-keys"},
		"a missing kubeconfig": {[]string{"--owner-keys=" + base64.StdEncoding.EncodeToString(shared.Public), "--image=" + image(t), "--kubeconfig=/nowhere"}, "/nowhere"},
		"an unknown flag":      {[]string{"--unknown"}, "unknown"},
		"a missing audit folder": {[]string{
			"--owner-keys=" + base64.StdEncoding.EncodeToString(shared.Public), "--image=" + image(t), "--kubeconfig=" + shared.Kubeconfig, "--attester=" + t.TempDir() + "/attest.sock", "--audit=/nowhere/audit.jsonl",
		}, "/nowhere/audit.jsonl"},
	} {
		t.Run(name, func(t *testing.T) {
			err := run(context.WithoutCancel(t.Context()), tt.args, io.Discard)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q in it", err, tt.want)
			}
		})
	}
}

// Without the list no node may write, so it must not be deleted by mistake. If it is missing, other parts continue, and its
// owner can create it again.
func TestTheListOfNodesThatMayNotWriteSurvivesASlip(t *testing.T) {
	s := setUp(t)
	ctx := t.Context()
	list := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: nodeaccess.ConfigMap}}
	membertest.Eventually(t, func() error { // when the API server has compiled the policy
		err := s.Client.Delete(ctx, list, client.DryRunAll)
		return membertest.Want(apierrors.IsForbidden(err) || apierrors.IsInvalid(err), "it could be deleted: %v", err)
	})
	for name, slip := range map[string]func() error{
		"with all ConfigMaps of its namespace": func() error {
			return s.Client.DeleteAllOf(ctx, &corev1.ConfigMap{}, client.InNamespace(namespace), client.DryRunAll)
		},
		"with its namespace": func() error {
			return s.Client.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, client.DryRunAll)
		},
	} {
		if err := slip(); err == nil || !strings.Contains(err.Error(), "muster uninstall") {
			t.Errorf("it could be deleted %s: %v", name, err)
		}
	}
	another := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "x-"}}
	if err := s.Client.Create(ctx, another); err != nil {
		t.Fatal(err)
	}
	if err := s.Client.DeleteAllOf(ctx, &corev1.ConfigMap{}, client.InNamespace(another.Name)); err != nil {
		t.Errorf("the ConfigMaps of another namespace: %v", err)
	}
	if err := s.Client.Delete(ctx, another); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	binding := &unstructured.Unstructured{}
	binding.SetAPIVersion("admissionregistration.k8s.io/v1")
	binding.SetKind("ValidatingAdmissionPolicyBinding")
	if err := s.Client.Get(ctx, client.ObjectKey{Name: "muster-keep-node-access"}, binding); err != nil {
		t.Fatal(err)
	}
	if err := s.Client.Delete(ctx, binding); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, func() error { return s.Client.Delete(ctx, list) })
	other := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "x-"}}
	if err := s.Client.Create(ctx, other, client.DryRunAll); err != nil {
		t.Errorf("without the list an administrator can't write: %v", err)
	}
	list.ResourceVersion = ""
	if err := s.Client.Create(ctx, list); err != nil {
		t.Errorf("the list cannot be made anew: %v", err)
	}
	binding.SetResourceVersion("")
	membertest.Eventually(t, func() error { return s.Client.Create(ctx, binding) })
}

// image is the configuration of an image that accepts policies of any serial.
func image(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.yaml")
	if err := os.WriteFile(path, []byte("apiVersion: muster.dev/v1alpha1\nkind: ImageConfiguration\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
