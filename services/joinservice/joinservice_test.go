package joinservice

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

var shared *membertest.Cluster

func TestMain(m *testing.M) {
	kubetest.Verify(m, func(ctx context.Context) (stop func() error, err error) {
		shared, err = membertest.Start(ctx, "../../deploy/charts/testdata/rendered.yaml")
		if err != nil {
			return nil, err
		}
		return shared.Stop, nil
	})
}

func TestNothingIsMadeThatChecksNothing(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("a service without anything was made")
	}
	if _, err := NewRefusals(nil, nil, nil, nil, nil); err == nil {
		t.Error("refusals without an appraiser were made")
	}
}

// Invariant J6.
func TestAControlPlanesFilesAreThoseOfTheListAndNoOther(t *testing.T) {
	dir, outside := t.TempDir(), filepath.Join(t.TempDir(), "secret")
	write := func(path, content string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range controlPlaneFiles {
		write(filepath.Join(dir, name), name)
	}
	write(filepath.Join(dir, "apiserver.key"), "stays here")
	write(outside, "stays there")
	files, err := readPKI(dir, controlPlaneFiles)
	if err != nil || len(files) != 9 || files[2].GetPath() != "encryption.yaml" {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for name, spoil := range map[string]func(path string) error{
		"missing":                  os.Remove,
		"empty":                    func(p string) error { return os.WriteFile(p, nil, 0o600) },
		"longer than 64 KiB":       func(p string) error { return os.WriteFile(p, make([]byte, maxPKIFile+1), 0o600) },
		"a link out of the folder": func(p string) error { return errors.Join(os.Remove(p), os.Symlink(outside, p)) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, "sa.key")
			if err := spoil(path); err != nil {
				t.Fatal(err)
			}
			if files, err := readPKI(dir, controlPlaneFiles); err == nil {
				t.Errorf("read %v", files)
			}
			_ = os.Remove(path)
			write(path, "sa.key")
			if _, err := readPKI(dir, controlPlaneFiles); err != nil {
				t.Errorf("repaired: %v", err)
			}
		})
	}
}

func TestATokenIsReadWholeOrNotAtAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	for name, tt := range map[string]struct {
		content string
		ok      bool
	}{
		"a token": {"abc\n", true}, "an empty file": {"", false}, "blanks": {" \n", false}, "too long": {strings.Repeat("x", maxToken+1), false},
	} {
		if err := os.WriteFile(path, []byte(tt.content), 0o600); err != nil {
			t.Fatal(err)
		}
		if token, err := readToken(path); (err == nil) != tt.ok || tt.ok && token != "abc" {
			t.Errorf("%s: %q, %v", name, token, err)
		}
	}
	if _, err := readToken(path + "x"); err == nil {
		t.Error("a missing file gave a token")
	}
}

// A machine does not get refusals of the key service that are about joinservice.
func TestARefusalOfTheKeyServiceIsNotTheMachines(t *testing.T) {
	for reason, want := range map[attestv1.Reason]attestv1.Reason{
		attestv1.Reason_REASON_BANNED:            attestv1.Reason_REASON_KMS_UNAVAILABLE,
		attestv1.Reason_REASON_POLICY_REFUSED:    attestv1.Reason_REASON_KMS_UNAVAILABLE,
		attestv1.Reason_REASON_WORKLOAD_IDENTITY: attestv1.Reason_REASON_KMS_UNAVAILABLE,
		attestv1.Reason_REASON_ROOT_SEALED:       attestv1.Reason_REASON_ROOT_SEALED,
	} {
		for name, err := range map[string]error{
			"over the wire": rpc.Error(attest.Refuse(reason, "x")), "as a verdict": &attest.Refusal{Reason: reason, Remote: true},
			"around a dial": connect.NewError(connect.CodeUnavailable, attest.Refuse(reason, "x")),
		} {
			got := keyRefused(err)
			if attest.ReasonOf(got) != want || rpc.RetryAfterFrom(got) == 0 {
				t.Errorf("%s %s gave %v", attest.ReasonName(reason), name, got)
			}
			if rpc.ReasonFrom(rpc.Error(got)) != want {
				t.Errorf("%s %s leaves as %v", attest.ReasonName(reason), name, rpc.Error(got))
			}
		}
	}
}
