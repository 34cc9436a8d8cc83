package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

func TestUnlockHasNothingToDoForAFolder(t *testing.T) {
	dir := t.TempDir()
	image := write(t, filepath.Join(dir, "image.yaml"), fmt.Sprintf("apiVersion: muster.dev/v1alpha1\nkind: ImageConfiguration\nstateDisk: {mode: plain, path: %s/state}\n", dir))
	if err := run(t.Context(), []string{"unlock", "--image", image, "--metadata", filepath.Join(dir, "none")}, io.Discard, io.Discard); err != nil {
		t.Error(err)
	}
}

// In the initramfs, when the state disk is mounted: a machine that has booted for the first time has no journal, and a
// damaged one stops it.
func TestAcceptedReadsTheJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	image := filepath.Join(t.TempDir(), "image.yaml")
	accepted := func() error {
		return run(t.Context(), []string{"accepted", "--image", image, "--journal", path}, io.Discard, io.Discard)
	}
	if err := accepted(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the image's configuration: %v", err)
	}
	write(t, image, "apiVersion: muster.dev/v1alpha1\nkind: ImageConfiguration\nstateDisk: {mode: plain, path: /state}\n")
	if err := accepted(); err != nil {
		t.Errorf("a first boot: %v", err)
	}
	write(t, path, "no journal")
	if err := accepted(); !errors.Is(err, journal.ErrCorrupt) {
		t.Errorf("a damaged journal: %v", err)
	}
}

// The machine waits, whatever is wrong, and reports why on its console and to clients.
func TestUnlockSaysWhatItWaitsForWithARealTPM(t *testing.T) {
	dir, e := t.TempDir(), tpmtest.SWTPM(t)
	image, err := os.ReadFile(imageFile(t, dir, e))
	if err != nil {
		t.Fatal(err)
	}
	device := filepath.Join(dir, "device")
	write(t, filepath.Join(dir, "image.yaml"), strings.Replace(string(image), fmt.Sprintf("{mode: plain, path: %s/state}", dir), fmt.Sprintf("{mode: luks, path: %s}", device), 1))
	meta := write(t, filepath.Join(dir, "metadata.yaml"), "apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\nname: node1\nrole: worker\naddresses: [192.168.77.11]\n")
	screen := write(t, filepath.Join(dir, "console"), "")
	p := start(t, "unlock", "--image", filepath.Join(dir, "image.yaml"), "--metadata", meta, "--tpm-lock", e.Lock, "--console", screen)
	at := p.line("listening")
	shows(t, screen, "muster: can't use the state disk: STATE_DISK (the state disk can't be used): the state disk: open "+device+": no such file or directory; next try in 1 s\r\n")
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	s, err := initv1connect.NewMachineServiceClient(&http.Client{Transport: transport}, fmt.Sprint("https://", at["init"])).GetStatus(t.Context(), &initv1.GetStatusRequest{})
	if err != nil || s.GetPhase() != initv1.Phase_PHASE_UNLOCKING || s.GetLastReason() != attestv1.Reason_REASON_STATE_DISK || s.GetNodeName() != "node1" {
		t.Errorf("%v, %v", s, err)
	}
	// Over a session, for a client that appraises the machine first.
	session, err := atls.NewTransport(atls.ClientConfig{Attester: atls.NoAttester, Verifier: realVerifier(t, e), Appraiser: unlocked{}, PeerPurpose: attest.PurposeMachine})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = session.Close() }()
	proven, err := initv1connect.NewMachineServiceClient(rpc.HTTPClient(session), fmt.Sprint("https://", at["init"]), rpc.ClientOptions()...).GetStatus(t.Context(), &initv1.GetStatusRequest{})
	if err != nil || proven.GetLastReason() != attestv1.Reason_REASON_STATE_DISK {
		t.Errorf("%v, %v", proven, err)
	}
	_, body := get(t, fmt.Sprint("http://", at["metrics"], "/metrics"))
	if !strings.Contains(body, `muster_unlock_attempts_total{reason="STATE_DISK"}`) {
		t.Error("no muster_unlock_attempts_total in the metrics")
	}
}
