package bootstrapper_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/catrust"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// While the cluster's authority is rotated, tickets have two of one name, in either order. kube-controller-manager takes a file with one.
func TestAMachineJoinsWhileTheAuthorityIsRotated(t *testing.T) {
	for _, role := range []string{"worker", "control-plane"} {
		for name, order := range map[string]func(own, other []byte) []byte{
			"the signer is the first":  func(own, other []byte) []byte { return slices.Concat(own, other) },
			"the signer is the second": func(own, other []byte) []byte { return slices.Concat(other, own) },
		} {
			t.Run(role+", "+name, func(t *testing.T) {
				w, j := worker(t)
				w.meta.Role = role
				_, other := worker(t)
				both := order(certPEM(j.ca), certPEM(other.ca))
				j.script(nil, func(r *joinv1.IssueJoinTicketResponse) {
					r.CaCertificate = both
					for _, f := range r.GetControlPlaneFiles() {
						if f.GetPath() == "ca.crt" {
							f.Content = both
						}
					}
				})
				r := w.boot()
				if err := r.end(t); err != nil {
					t.Fatal(err, w.logged)
				}
				w.isNode(t)
				if c, err := kubelet.ClusterOf(w.root, kubeadm.KubeletConf); err != nil || !bytes.Equal(bytes.TrimSpace(c.CertificateAuthorityData), bytes.TrimSpace(both)) {
					t.Errorf("%+v, %v", c, err)
				}
				if role == "worker" {
					return
				}
				for file, want := range map[string][]byte{"ca.crt": both, "muster-signing.crt": certPEM(j.ca)} {
					if got, err := os.ReadFile(filepath.Join(w.root, machine.PKIFolder, file)); err != nil || !bytes.Equal(got, want) {
						t.Errorf("%s: %s, %v", file, got, err)
					}
				}
			})
		}
	}
}

// rotates gives the joinservice's cluster another authority, and returns the certificates of the one before and of the new one, and the cross certificate.
func (j *joinservice) rotates(t *testing.T) (before, next, cross []byte) {
	t.Helper()
	_, other := worker(t)
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "ca.crt"), certPEM(j.ca), 0o600), os.WriteFile(filepath.Join(dir, "ca.key"), j.keyPEM(), 0o600)); err != nil {
		t.Fatal(err)
	}
	a, err := clusterca.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.CrossSign(other.ca)
	if err != nil {
		t.Fatal(err)
	}
	before = certPEM(j.ca)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.ca, j.key = other.ca, other.key
	return before, certPEM(j.ca), certPEM(c)
}

// A7: a worker that was off for a whole rotation of the authority has nothing that leads to the new one but its attested session.
func TestAWorkerThatWasOffTakesTheAuthorityFromItsJoinservice(t *testing.T) {
	w, j := joined(t)
	before, next, _ := j.rotates(t)
	w.later(30 * time.Hour)
	j.ahead.Store(int64(30 * time.Hour))
	answers := map[string][]byte{"none": nil, "what is none": []byte("x"), "the one before": before}
	names := slices.Sorted(maps.Keys(answers))
	j.onRenewal(func(n int, out *joinv1.RenewNodeCertificatesResponse) error {
		if n <= len(names) { // it can't verify the certificates
			out.CaCertificate = answers[names[n-1]]
		} else {
			out.CaCertificate = next
		}
		return nil
	})
	if err := w.boot().end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	if n := len(j.renewedCSRs()); n != len(names)+1 {
		t.Errorf("it has asked %d times: %s", n, w.logged)
	}
	conf, err := kubelet.ClusterOf(w.root, kubeadm.KubeletConf)
	if err != nil || !bytes.Equal(conf.CertificateAuthorityData, next) {
		t.Errorf("%+v, %v", conf, err)
	}
	if got, err := os.ReadFile(filepath.Join(w.root, machine.PKIFolder, "ca.crt")); err != nil || !bytes.Equal(got, next) {
		t.Errorf("%s, %v", got, err)
	}
	if !w.machine.Running(machine.UnitKubelet) || w.kubeletPair(t, clientFile).CheckSignatureFrom(j.ca) != nil {
		t.Error("the kubelet does not run with a certificate of the new authority")
	}
}

// The comparison of its disk has given a worker the new authority (B8). Its kubelet's certificate leads nowhere, though it has not ended.
func TestACertificateOfADroppedAuthorityIsReplaced(t *testing.T) {
	w, j := joined(t)
	_, next, _ := j.rotates(t)
	if err := kubelet.PointKubeconfig(w.root); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		authorities []byte
		asks        int
	}{{next, 1}, {next, 1}} {
		if err := catrust.Take(w.root, tt.authorities, false); err != nil {
			t.Fatal(err)
		}
		w.reboot()
		if err := w.boot().end(t); err != nil {
			t.Fatal(err, w.logged)
		}
		if n := len(j.renewedCSRs()); n != tt.asks {
			t.Errorf("it has asked %d times, want %d", n, tt.asks)
		}
	}
}

// A control plane that joins while the authority is rotated has only the new key, and can sign no cross certificate.
func TestAControlPlaneThatJoinsGetsTheCrossCertificate(t *testing.T) {
	for name, tt := range map[string]struct {
		send func(before, next, cross []byte) []byte
		want bool
	}{
		"the right one":        {func(_, _, cross []byte) []byte { return cross }, true},
		"the authority before": {func(before, _, _ []byte) []byte { return before }, false},
		"the new authority":    {func(_, next, _ []byte) []byte { return next }, false},
		"it twice":             {func(_, _, cross []byte) []byte { return slices.Concat(cross, cross) }, false},
		"nothing":              {func(_, _, _ []byte) []byte { return nil }, false},
		"something else":       {func(_, _, _ []byte) []byte { return []byte("x") }, false},
	} {
		t.Run(name, func(t *testing.T) {
			w, j := worker(t)
			w.meta.Role = "control-plane"
			before, next, cross := j.rotates(t)
			j.script(nil, func(r *joinv1.IssueJoinTicketResponse) {
				r.CaCertificate, r.CrossCertificate = slices.Concat(next, before), tt.send(before, next, cross)
				for _, f := range r.GetControlPlaneFiles() {
					if f.GetPath() == "ca.crt" {
						f.Content = r.GetCaCertificate()
					}
				}
			})
			if err := w.boot().end(t); err != nil {
				t.Fatal(err, w.logged)
			}
			w.isNode(t)
			if got, err := os.ReadFile(filepath.Join(w.root, machine.PKIFolder, clusterca.CrossFile)); (err == nil) != tt.want || tt.want && !bytes.Equal(got, cross) {
				t.Errorf("%s, %v", got, err)
			}
		})
	}
}

// The attester stores what its joinservice sends, and changes nothing of the node. Another process writes the files, and the node reports them.
func TestANodeTakesTheAuthoritiesFromItsAttestation(t *testing.T) {
	w, j := node(t)
	before, next, cross := j.rotates(t)
	conf, err := kubelet.Kubeconfig("192.0.2.1:6443", before)
	if err != nil {
		t.Fatal(err)
	}
	w.put(t, "etc/kubernetes/pki/ca.crt", string(before))
	w.put(t, "etc/kubernetes/kubelet.conf", string(conf))
	j.again = func(int) (*joinv1.ReattestResponse, error) {
		return &joinv1.ReattestResponse{CaCertificate: slices.Concat(next, before), CrossCertificate: cross}, nil
	}
	w.reattest()
	reported := func() int {
		j.mu.Lock()
		defer j.mu.Unlock()
		return len(j.trusted)
	}
	eventually(t, "they are stored", func() bool { return w.exists(catrust.Inbox) })
	eventually(t, "the old one is reported", func() bool { return reported() == 1 })
	if w.get("etc/kubernetes/pki/ca.crt") != string(before) {
		t.Error("the attester has changed what the node trusts")
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- catrust.Watch(ctx, catrust.Config{Root: w.root, Machine: w.machine, Interval: time.Millisecond, Log: slog.New(slog.DiscardHandler)})
	}()
	eventually(t, "both are reported", func() bool { return reported() == 2 })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := w.get("etc/kubernetes/pki/ca.crt"); got != string(next)+string(before) {
		t.Errorf("it trusts %s", got)
	}
}
