package catrust

import (
	"bytes"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

// authority is one as kubeadm makes it.
type authority struct {
	*clusterca.Authority
	pem []byte
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	c, k, err := pkiutil.NewCertificateAuthority(&pkiutil.CertConfig{Config: certutil.Config{CommonName: "kubernetes"}, NotAfter: time.Now().Add(time.Hour), EncryptionAlgorithm: kubeadmapi.EncryptionAlgorithmECDSAP256})
	if err != nil {
		t.Fatal(err)
	}
	key, err := keyutil.MarshalPrivateKeyToPEM(k)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "ca.crt"), pkiutil.EncodeCertPEM(c), 0o600), os.WriteFile(filepath.Join(dir, "ca.key"), key, 0o600)); err != nil {
		t.Fatal(err)
	}
	a, err := clusterca.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	return authority{a, pkiutil.EncodeCertPEM(c)}
}

func (a authority) cross(t *testing.T, next authority) []byte {
	t.Helper()
	c, err := a.CrossSign(next.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	return pkiutil.EncodeCertPEM(c)
}

func (a authority) sum() []byte { return sum(a.Certificate()) }

// node is a node whose kubelet runs.
type node struct {
	Config
	t       *testing.T
	machine *machinetest.Machine
}

func newNode(t *testing.T, controlPlane bool, trusts ...authority) *node {
	t.Helper()
	root := t.TempDir()
	n := &node{t: t, machine: &machinetest.Machine{Root: root}}
	n.Config = Config{Root: root, ControlPlane: controlPlane, Machine: n.machine, Interval: time.Millisecond, Log: slog.New(slog.DiscardHandler)}
	conf, err := kubelet.Kubeconfig("192.0.2.1:6443", list(trusts))
	if err != nil {
		t.Fatal(err)
	}
	n.write(kubeadm.KubeletConf, conf)
	n.write(caFile, list(trusts))
	n.write(machine.KubeletMayStart, nil)
	if err := n.machine.Unit(t.Context(), "start", machine.UnitKubelet); err != nil {
		t.Fatal(err)
	}
	return n
}

func list(of []authority) (out []byte) {
	for _, a := range of {
		out = append(out, a.pem...)
	}
	return out
}

func (n *node) write(path string, content []byte) {
	n.t.Helper()
	if err := machine.WriteFile(filepath.Join(n.Root, path), content, 0o600, 0o700); err != nil {
		n.t.Fatal(err)
	}
}

// trusts returns what ca.crt and the kubeconfig have.
func (n *node) trusts() (ca, conf []byte) {
	n.t.Helper()
	ca, err := os.ReadFile(filepath.Join(n.Root, caFile))
	if err != nil {
		n.t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(n.Root, kubeadm.KubeletConf))
	if err != nil {
		n.t.Fatal(err)
	}
	return ca, kubelet.Authorities(text)
}

func (n *node) restarts() (count int) {
	for _, c := range n.machine.Calls() {
		if c == "try-restart "+machine.UnitKubelet {
			count++
		}
	}
	return count
}

func (n *node) report() *joinv1.ReattestRequest {
	req := &joinv1.ReattestRequest{}
	Report(n.Root, req)
	return req
}

func TestAWorkerTakesAnAuthorityForWhichOneStandsThatItTrusts(t *testing.T) {
	a, b, evil := newAuthority(t), newAuthority(t), newAuthority(t)
	for name, tt := range map[string]struct {
		trusts, sent []authority
		cross        []byte
		want         []authority // nil: what it has
		says         string
	}{
		"the same":                                {[]authority{a}, []authority{a}, nil, nil, ""},
		"a second one":                            {[]authority{a}, []authority{b, a}, a.cross(t, b), []authority{b, a}, ""},
		"another one alone":                       {[]authority{a}, []authority{b}, a.cross(t, b), []authority{b}, ""},
		"another order":                           {[]authority{a, b}, []authority{b, a}, nil, []authority{b, a}, ""},
		"the end of a rotation":                   {[]authority{b, a}, []authority{b}, nil, []authority{b}, ""},
		"a second one without cross certificate":  {[]authority{a}, []authority{b, a}, nil, nil, "reboot the machine"},
		"one for which itself stands":             {[]authority{a}, []authority{b, a}, b.pem, nil, "reboot the machine"},
		"one for which another one stands":        {[]authority{a}, []authority{evil, b}, b.cross(t, evil), nil, "reboot the machine"},
		"one for which the one that is sent does": {[]authority{a}, []authority{evil, b, a}, b.cross(t, evil), nil, "reboot the machine"},
		"the cross certificate of another one":    {[]authority{a}, []authority{evil, a}, a.cross(t, b), nil, "reboot the machine"},
		"two cross certificates":                  {[]authority{a}, []authority{b, evil, a}, slices.Concat(a.cross(t, b), a.cross(t, evil)), nil, "reboot the machine"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, false, tt.trusts...)
			if err := Deliver(n.Root, n.report(), &joinv1.ReattestResponse{CaCertificate: list(tt.sent), CrossCertificate: tt.cross}); err != nil {
				t.Fatal(err)
			}
			err := n.update(t.Context())
			if tt.says == "" && err != nil || tt.says != "" && (err == nil || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("got %v, want %q", err, tt.says)
			}
			if got := Foreign(n.Root); got != (err != nil) {
				t.Errorf("foreign: %v", got)
			}
			want, restarts := tt.want, 1
			if want == nil {
				want, restarts = tt.trusts, 0
			}
			for range 2 {
				if ca, conf := n.trusts(); !bytes.Equal(ca, list(want)) || !bytes.Equal(conf, list(want)) {
					t.Errorf("it trusts %s and %s", ca, conf)
				}
				if got := n.restarts(); got != restarts {
					t.Errorf("the kubelet was restarted %d times, want %d", got, restarts)
				}
				_ = n.update(t.Context()) // again
			}
			var sums [][]byte
			for _, w := range want {
				sums = append(sums, w.sum())
			}
			if got := n.report().GetAuthorities(); !slices.EqualFunc(got, sums, bytes.Equal) {
				t.Errorf("it reports %x, want %x", got, sums)
			}
		})
	}
}

// The rotation by the owner's orders writes a control plane's ca.crt.
func TestAControlPlanesKubeconfigFollowsItsOwnFile(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	n := newNode(t, true, a)
	if err := Deliver(n.Root, n.report(), &joinv1.ReattestResponse{CaCertificate: list([]authority{b, a}), CrossCertificate: a.cross(t, b)}); err != nil {
		t.Fatal(err)
	}
	for _, trusts := range [][]authority{{a}, {a, b}, {b, a}, {b}} {
		n.write(caFile, list(trusts))
		if err := n.update(t.Context()); err != nil {
			t.Fatal(err)
		}
		if ca, conf := n.trusts(); !bytes.Equal(ca, list(trusts)) || !bytes.Equal(conf, list(trusts)) {
			t.Errorf("it trusts %s and %s", ca, conf)
		}
	}
	if n.restarts() != 3 {
		t.Errorf("the kubelet was restarted %d times", n.restarts())
	}
}

// A joinservice sends authorities only if the report differs. So an answer may be older than what the node got with its disk's key (B8) or its kubelet's
// certificates.
func TestAnAnswerDoesNotReplaceWhatTheNodeGotSince(t *testing.T) {
	a, b, c := newAuthority(t), newAuthority(t), newAuthority(t)
	for name, tt := range map[string]struct {
		trusted, sent, since []authority
		cross                []byte
	}{
		"the rotation has ended":             {[]authority{a}, []authority{b, a}, []authority{b}, a.cross(t, b)},
		"the next rotation is settled":       {[]authority{b, a}, []authority{b}, []authority{c, b}, nil},
		"an authority that it does not know": {[]authority{a}, []authority{c, b}, []authority{b}, nil},
	} {
		n := newNode(t, false, tt.trusted...)
		if err := Deliver(n.Root, n.report(), &joinv1.ReattestResponse{CaCertificate: list(tt.sent), CrossCertificate: tt.cross}); err != nil {
			t.Fatal(err)
		}
		if err := Take(n.Root, list(tt.since), false); err != nil {
			t.Fatal(err)
		}
		if err := n.update(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if ca, conf := n.trusts(); !bytes.Equal(ca, list(tt.since)) || !bytes.Equal(conf, list(tt.since)) || Foreign(n.Root) {
			t.Errorf("%s: it trusts %s and %s", name, ca, conf)
		}
	}
}

// A joinservice refuses a report with two equal hashes.
func TestAnAuthorityThatIsTwiceInTheFileIsReportedOnce(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	n := newNode(t, false, a, a, b)
	if got := n.report().GetAuthorities(); len(got) != 2 || !bytes.Equal(got[0], a.sum()) || !bytes.Equal(got[1], b.sum()) {
		t.Errorf("it reports %x", got)
	}
	if err := Deliver(n.Root, n.report(), &joinv1.ReattestResponse{CaCertificate: list([]authority{b})}); err != nil {
		t.Fatal(err)
	}
	if err := n.update(t.Context()); err != nil {
		t.Fatal(err)
	}
	if ca, _ := n.trusts(); !bytes.Equal(ca, b.pem) {
		t.Errorf("it trusts %s", ca)
	}
}

// The owner drops the old authority when all nodes report the new one: a kubelet that has not read it yet would be lost.
func TestANodeReportsWhatItsRunningKubeletTrusts(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	n := newNode(t, false, a)
	if err := Deliver(n.Root, n.report(), &joinv1.ReattestResponse{CaCertificate: list([]authority{b, a}), CrossCertificate: a.cross(t, b)}); err != nil {
		t.Fatal(err)
	}
	crash := errors.New("the program ends here")
	n.machine.Step = func(string) error { return crash }
	if err := n.update(t.Context()); !errors.Is(err, crash) {
		t.Fatal(err)
	}
	if got := n.report().GetAuthorities(); len(got) > 0 {
		t.Errorf("it reports %x, and its kubelet was not restarted", got)
	}
	n.machine.Step = nil
	if err := n.update(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := n.report().GetAuthorities(); len(got) != 2 || n.restarts() != 2 {
		t.Errorf("it reports %x after %d restarts", got, n.restarts())
	}
	// Only what both files have counts.
	n.write(caFile, list([]authority{b}))
	if got := n.report().GetAuthorities(); len(got) != 1 || !bytes.Equal(got[0], b.sum()) {
		t.Errorf("it reports %x", got)
	}
}

func TestANodeReportsWhoHasIssuedItsKubeletsCertificates(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	n := newNode(t, false, b, a)
	k, err := kubelet.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	request, _, err := k.Requests("w1", nil)
	if err != nil {
		t.Fatal(err)
	}
	bundle := func(by authority) []byte {
		c, err := by.Sign(request, x509.ExtKeyUsageClientAuth, time.Minute, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		out, err := kubelet.Bundle(c, k.Client)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	for name, tt := range map[string]struct {
		client, serving authority
		want            []authority
	}{
		"the old one":               {a, a, []authority{a}},
		"one of each":               {b, a, []authority{b, a}},
		"the new one":               {b, b, []authority{b}},
		"one that is not trusted":   {newAuthority(t), b, []authority{b}},
		"none that the node trusts": {newAuthority(t), newAuthority(t), nil},
		"the other one of each":     {a, b, []authority{b, a}},
	} {
		if err := kubelet.Place(n.Root, bundle(tt.client), bundle(tt.serving)); err != nil {
			t.Fatal(err)
		}
		var got, want []string
		for _, s := range n.report().GetKubeletAuthorities() {
			got = append(got, hex.EncodeToString(s))
		}
		for _, w := range tt.want {
			want = append(want, hex.EncodeToString(w.sum()))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func TestWhatIsNoListOfAuthoritiesIsNotStored(t *testing.T) {
	a := newAuthority(t)
	k, err := kubelet.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	request, _, err := k.Requests("w1", nil)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := a.Sign(request, x509.ExtKeyUsageClientAuth, time.Minute, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for name, ca := range map[string][]byte{"nothing": nil, "no PEM": []byte("x"), "a node's certificate": leaf, "too many": bytes.Repeat(a.pem, 5), "too much": bytes.Repeat([]byte("\n"), 64<<10+1)} {
		if err := Deliver(root, nil, &joinv1.ReattestResponse{CaCertificate: ca}); err == nil {
			t.Errorf("%s is stored", name)
		}
	}
	if err := Deliver(root, nil, &joinv1.ReattestResponse{CaCertificate: a.pem, CrossCertificate: bytes.Repeat([]byte("\n"), 64<<10+1)}); err == nil {
		t.Error("a large cross certificate is stored")
	}
	if err := Deliver(root, nil, &joinv1.ReattestResponse{CaCertificate: a.pem}); err != nil {
		t.Error(err)
	}
}

// The attester, which an attacker may control, must not make the process that writes the kubelet's files run out of memory.
func TestALargeAnswerIsNotRead(t *testing.T) {
	root := t.TempDir()
	ca := newAuthority(t)
	if err := Deliver(root, &joinv1.ReattestRequest{}, &joinv1.ReattestResponse{CaCertificate: ca.pem, CrossCertificate: bytes.Repeat([]byte("x"), maxBytes)}); err != nil {
		t.Fatal(err)
	}
	if _, err := wanted(root, ca.pem); err != nil {
		t.Errorf("the largest answer: %v", err)
	}
	if err := os.Truncate(filepath.Join(root, Inbox), 1<<30); err != nil {
		t.Fatal(err)
	}
	if _, err := wanted(root, ca.pem); err == nil || !strings.Contains(err.Error(), "has more than") {
		t.Errorf("a large one: %v", err)
	}
}
