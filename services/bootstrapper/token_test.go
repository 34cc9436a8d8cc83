package bootstrapper_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	ticketToken   = "abcdef.0123456789abcdef" // also what the fake kubeadm prints
	kubeadmConfig = "/run/muster/kubeadm.yaml"
	// given is where the fake kubeadm keeps its configuration.
	given = "/var/lib/kubelet/config.yaml"
)

func withToken(token string) func(*joinv1.IssueJoinTicketResponse) {
	return func(r *joinv1.IssueJoinTicketResponse) { r.BootstrapToken = token }
}

// holds lists the files of the machine that contain the text.
func (w *fixture) holds(t *testing.T, text string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(w.root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(p)
		if bytes.Contains(b, []byte(text)) {
			files = append(files, strings.TrimPrefix(p, w.root))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// With a token in the ticket, kubeadm discovers the cluster by it, and accepts only the cluster whose authority the ticket names. Afterwards no file of
// the machine has the token (K3).
func TestATicketsTokenDiscoversTheClusterAndStaysNowhere(t *testing.T) {
	w, j := worker(t)
	j.script(nil, withToken(ticketToken))
	r := w.boot()
	if err := r.end(t); err != nil {
		t.Fatal(err, w.logged)
	}
	w.isNode(t)
	config, err := os.ReadFile(filepath.Join(w.root, given))
	if err != nil {
		t.Fatal(err)
	}
	pin := sha256.Sum256(j.ca.RawSubjectPublicKeyInfo)
	for _, want := range []string{"token: " + ticketToken, "- sha256:" + hex.EncodeToString(pin[:]), "apiServerEndpoint: 192.168.77.1:6443"} {
		if !strings.Contains(string(config), want) {
			t.Errorf("kubeadm was not given %q:\n%s", want, config)
		}
	}
	if strings.Contains(string(config), "kubeConfigPath") || strings.Contains(string(config), "unsafeSkipCAVerification") {
		t.Errorf("kubeadm may discover otherwise:\n%s", config)
	}
	_, secret, _ := strings.Cut(ticketToken, ".")
	if files := w.holds(t, secret); len(files) != 1 || files[0] != given {
		t.Errorf("the token is in %q", files)
	}
	if strings.Contains(w.logged.String(), secret) {
		t.Error("the token is in the log")
	}
}

// The token is also removed after a kubeadm that fails, even if the cleanup fails too.
func TestAFailedKubeadmLeavesNoToken(t *testing.T) {
	w, j := worker(t)
	j.script(nil, withToken(ticketToken))
	seen := make(chan bool, 1)
	w.machine.Step = func(name string) error {
		switch name {
		case "kubeadm join begins":
			st, err := os.Stat(filepath.Join(w.root, kubeadmConfig))
			seen <- err == nil && st.Mode().Perm() == 0o600
			return errors.New("the disk is full")
		case "kubeadm reset begins":
			return errors.New("the disk is still full")
		}
		return nil
	}
	r := w.boot()
	defer r.kill(t)
	eventually(t, "the clean-up failed", func() bool { return strings.Contains(w.logged.String(), "can't clean up after kubeadm") })
	if !<-seen {
		t.Error("kubeadm's configuration was not there, or not for root alone")
	}
	_, secret, _ := strings.Cut(ticketToken, ".")
	if files := w.holds(t, secret); len(files) != 0 {
		t.Errorf("the token is in %q", files)
	}
	if strings.Contains(w.logged.String(), secret) {
		t.Error("the token is in the log")
	}
}

// A malformed token does not get into kubeadm's configuration or the log.
func TestATokenOfAnotherFormIsRefused(t *testing.T) {
	for name, token := range map[string]string{
		"no dot":         "abcdef0123456789abcdef",
		"upper case":     "abcdef.0123456789ABCDEF",
		"too short":      "abcdef.0123456789abcde",
		"too long":       "abcdef.0123456789abcdef0",
		"a line of YAML": "abcdef.0123456789abcdef\nunsafeSkipCAVerification: true",
	} {
		t.Run(name, func(t *testing.T) {
			w, j := worker(t)
			j.script(nil, withToken(token))
			r := w.boot()
			defer r.kill(t)
			eventually(t, "the ticket is given back", func() bool { return j.givenBack() > 0 })
			eventually(t, "the refusal is counted", func() bool {
				return counter(t, r.metrics, "muster_join_attempts_total", attest.ReasonName(attestv1.Reason_REASON_REQUEST_INVALID)) > 0
			})
			if w.exists(kubeadmConfig) || w.record().Locked() {
				t.Error("the machine was changed")
			}
			if strings.Contains(w.logged.String(), "0123456789") {
				t.Error("it is in the log")
			}
		})
	}
}
