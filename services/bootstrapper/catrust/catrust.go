// Package catrust keeps what a node trusts as the cluster's authority: ca.crt, by which its kubelet verifies who gives it orders, and the kubelet's
// kubeconfig, by which it verifies API servers.
//
// A node takes authorities only from its own attested sessions with a joinservice (A7), never from an object of the API: who has the old authority's key can
// write those. The attester, which parses what others send, can't write the files. It stores what it got, and the process that writes them takes a new
// authority only with a cross certificate by one that the node trusts already. ca.crt has the order of the joinservice's: the authority that signs now is
// the first one. On a control plane, the rotation writes ca.crt, and only the kubeconfig follows.
package catrust

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/util/cert"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

const (
	// Inbox has what the attester got last.
	Inbox = "/var/lib/muster/attester/authorities"
	// begun exists while the kubelet may run with an earlier kubeconfig.
	begun = "/var/lib/muster/renewal/authorities-begun"
	// caFile has the authorities by which the kubelet verifies clients.
	caFile = machine.PKIFolder + "/ca.crt"
	// maxList bounds the authorities of a cluster, maxBytes their certificates.
	maxList, maxBytes = 4, 64 << 10
	// maxInbox bounds [Inbox], in bytes: both lists in base64. The attester could write any other size.
	maxInbox = 4 * maxBytes
)

// inbox is the content of [Inbox], in PEM.
type inbox struct {
	Authorities []byte `json:"authorities"`
	Cross       []byte `json:"cross,omitempty"`
	// For are the hashes that the node had reported. The answer counts only while it trusts these: the disk's comparison (B8) and the kubelet's next
	// certificates bring newer authorities.
	For [][]byte `json:"for"`
}

// errForeign means that the cluster has an authority for which none stands that the node trusts.
var errForeign = errors.New("none that this node trusts has signed for it")

// Parse returns a joinservice's list of authorities, or an error if it is none.
func Parse(text []byte) ([]*x509.Certificate, error) {
	if len(text) == 0 || len(text) > maxBytes {
		return nil, fmt.Errorf("the authorities have %d bytes, want 1 to %d", len(text), maxBytes)
	}
	list, err := kubelet.ParsePEM(text)
	switch {
	case err != nil:
		return nil, err
	case len(list) > maxList:
		return nil, fmt.Errorf("%d authorities, want at most %d", len(list), maxList)
	case slices.ContainsFunc(list, func(c *x509.Certificate) bool { return !c.IsCA }):
		return nil, errors.New("a certificate is that of no authority")
	}
	return list, nil
}

// Deliver stores the authorities of a joinservice's answer to a report, unless they are there.
func Deliver(root string, req *joinv1.ReattestRequest, resp *joinv1.ReattestResponse) error {
	if _, err := Parse(resp.GetCaCertificate()); err != nil {
		return err
	}
	if len(resp.GetCrossCertificate()) > maxBytes {
		return fmt.Errorf("the cross certificate has %d bytes", len(resp.GetCrossCertificate()))
	}
	text, err := json.Marshal(inbox{resp.GetCaCertificate(), resp.GetCrossCertificate(), req.GetAuthorities()})
	if err != nil {
		return err
	}
	path := filepath.Join(root, Inbox)
	if is, err := os.ReadFile(path); err == nil && bytes.Equal(is, text) {
		return nil
	}
	return machine.WriteFile(path, text, 0o600, 0o700)
}

func sum(c *x509.Certificate) []byte {
	s := sha256.Sum256(c.Raw)
	return s[:]
}

// unique returns the first [maxList] different certificates of a list.
func unique(list []*x509.Certificate) (out []*x509.Certificate) {
	for _, c := range list {
		if !slices.ContainsFunc(out, c.Equal) && len(out) < maxList {
			out = append(out, c)
		}
	}
	return out
}

// Report adds to a report what the node trusts, and who has issued its kubelet's certificates. It is empty while the kubelet may run with earlier files.
func Report(root string, req *joinv1.ReattestRequest) {
	if _, err := os.Stat(filepath.Join(root, begun)); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	list, err := cert.CertsFromFile(filepath.Join(root, caFile))
	if err != nil {
		return
	}
	conf, err := os.ReadFile(filepath.Join(root, kubeadm.KubeletConf))
	if err != nil {
		return
	}
	connects, err := cert.ParseCertsPEM(kubelet.Authorities(conf))
	if err != nil {
		return
	}
	for _, c := range unique(list) {
		if slices.ContainsFunc(connects, c.Equal) {
			req.Authorities = append(req.Authorities, sum(c))
		}
		for _, name := range []string{kubelet.ClientFile, kubelet.ServingFile} {
			leaf, err := kubelet.Certificate(root, name)
			if err == nil && leaf.CheckSignatureFrom(c) == nil && !slices.ContainsFunc(req.GetKubeletAuthorities(), func(b []byte) bool { return bytes.Equal(b, sum(c)) }) {
				req.KubeletAuthorities = append(req.KubeletAuthorities, sum(c))
			}
		}
	}
	req.KubeletAuthorities = req.GetKubeletAuthorities()[:min(2, len(req.GetKubeletAuthorities()))]
}

// Config lists what [Watch] needs. All fields are required but ControlPlane.
type Config struct {
	// Root is the root of the file system: "/" on a machine.
	Root string
	// ControlPlane: a rotation by the owner's orders writes ca.crt.
	ControlPlane bool
	Machine      machine.Machine
	// Interval is the pause between two looks.
	Interval time.Duration
	Log      *slog.Logger
}

// Watch brings the node's files up to date until ctx ends. It continues after failures.
func Watch(ctx context.Context, cfg Config) error {
	if err := required.Fields("authorities.Watch", cfg, "ControlPlane"); err != nil {
		return err
	}
	last := ""
	for {
		err := cfg.update(ctx)
		switch {
		case err == nil:
			last = ""
		case ctx.Err() == nil && err.Error() != last: // the error stays the same until an administrator acts
			last = err.Error()
			cfg.Log.ErrorContext(ctx, "the authorities that this node trusts are not brought up to date", "err", err)
		}
		if retry.Wait(ctx, cfg.Interval) != nil {
			return nil //nolint:nilerr // stopped by its caller
		}
	}
}

// update makes one attempt.
func (cfg Config) update(ctx context.Context) error {
	on := func(path string) string { return filepath.Join(cfg.Root, path) }
	is, err := os.ReadFile(on(caFile))
	if err != nil {
		return err
	}
	want := is
	if !cfg.ControlPlane {
		if want, err = wanted(cfg.Root, is); err != nil {
			return err
		}
	}
	conf, err := os.ReadFile(on(kubeadm.KubeletConf))
	if err != nil {
		return err
	}
	_, unfinished := os.Stat(on(begun))
	if same(is, want) && same(kubelet.Authorities(conf), want) && errors.Is(unfinished, fs.ErrNotExist) {
		return nil
	}
	if err := machine.WriteFile(on(begun), nil, 0o600, 0o700); err != nil {
		return err
	}
	if err := Take(cfg.Root, want, cfg.ControlPlane); err != nil {
		return err
	}
	// A running kubelet has read the kubeconfig. One that is stopped is left alone: the bootstrapper may have stopped it (J11). Pods keep running.
	if err := cfg.Machine.Unit(ctx, "try-restart", machine.UnitKubelet); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitKubelet, err)
	}
	if err := os.Remove(on(begun)); err != nil {
		return err
	}
	cfg.Log.InfoContext(ctx, "the authorities that this node trusts are brought up to date", "authorities", names(want))
	return machine.Sync(filepath.Dir(on(begun)))
}

// Foreign reports whether the cluster has an authority that the node can take only with its kubelet's next certificates, or with its disk's key.
func Foreign(root string) bool {
	is, err := os.ReadFile(filepath.Join(root, caFile))
	if err == nil {
		_, err = wanted(root, is)
	}
	return errors.Is(err, errForeign)
}

// wanted returns the authorities that a worker has to trust, in PEM: those from the attester, or the present ones if it has none for these. It is an error
// if one is new, and no authority that the node trusts has signed its cross certificate.
func wanted(root string, is []byte) ([]byte, error) {
	text, err := machine.ReadUpTo(filepath.Join(root, Inbox), maxInbox)
	if errors.Is(err, fs.ErrNotExist) {
		return is, nil
	}
	if err != nil {
		return nil, err
	}
	var got inbox
	if err := json.Unmarshal(text, &got); err != nil {
		return nil, fmt.Errorf("%s: %w", Inbox, err)
	}
	want, err := Parse(got.Authorities)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Inbox, err)
	}
	have, err := cert.ParseCertsPEM(is)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", caFile, err)
	}
	if !slices.EqualFunc(unique(have), got.For, func(c *x509.Certificate, id []byte) bool { return bytes.Equal(sum(c), id) }) {
		return is, nil
	}
	cross, _ := cert.ParseCertsPEM(got.Cross) // none: no authority is new
	for _, next := range want {
		if slices.ContainsFunc(have, next.Equal) || len(cross) == 1 && clusterca.Crosses(cross[0], next, have) {
			continue
		}
		return nil, fmt.Errorf("the cluster has another authority, %s, and %w: reboot the machine, which then gets it with its disk's key or its kubelet's next certificates", hex.EncodeToString(sum(next)), errForeign)
	}
	return got.Authorities, nil
}

// Take writes the authorities that the node trusts from now on, in PEM, by rename: ca.crt, unless this is a control plane, and the kubelet's kubeconfig. The
// kubelet has to be started, or restarted, after that.
func Take(root string, authorities []byte, controlPlane bool) error {
	file := filepath.Join(root, caFile)
	if is, err := os.ReadFile(file); err != nil {
		return err
	} else if !controlPlane && !same(is, authorities) {
		if err := machine.WriteFile(file, authorities, 0o644, 0o755); err != nil {
			return err
		}
	}
	file = filepath.Join(root, kubeadm.KubeletConf)
	conf, err := os.ReadFile(file)
	if err != nil || same(kubelet.Authorities(conf), authorities) {
		return err
	}
	if conf, err = kubelet.WithAuthorities(conf, authorities); err != nil {
		return fmt.Errorf("%s: %w", kubeadm.KubeletConf, err)
	}
	return machine.WriteFile(file, conf, 0o600, 0o755)
}

// same reports whether two lists in PEM have the same certificates in the same order.
func same(a, b []byte) bool {
	x, errX := cert.ParseCertsPEM(a)
	y, errY := cert.ParseCertsPEM(b)
	return errX == nil && errY == nil && slices.EqualFunc(x, y, (*x509.Certificate).Equal)
}

// names returns the SHA-256 of the authorities of a list, for a log.
func names(authorities []byte) (out []string) {
	list, _ := cert.ParseCertsPEM(authorities) // it was parsed before
	for _, c := range list {
		out = append(out, hex.EncodeToString(sum(c)))
	}
	return out
}
