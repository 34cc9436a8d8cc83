package tpm_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSWTPMKeepsTheContract(t *testing.T) {
	tpmtest.Contract(t, func(t testing.TB) tpm.Device { return tpmtest.SWTPM(t).Open() })
}

func TestSWTPMWithoutCertificates(t *testing.T) {
	tpmtest.BareContract(t, func(t testing.TB) tpm.Device { return tpmtest.SWTPM(t, tpmtest.Bare()).Open() })
}

// raw opens an emulator for commands that package tpm does not send.
func raw(t testing.TB, e *tpmtest.Emulator) transport.TPM {
	t.Helper()
	dev, err := tpm.OpenPath(e.Socket)
	if err != nil {
		t.Fatal(err)
	}
	return tpm.Patient(dev)
}

// exchange passes a device's evidence through the real attester and verifier.
func exchange(t testing.TB, dev tpm.Device, ca *attesttest.CA) (attest.Claims, error) {
	t.Helper()
	a, err := tpm2.NewAttester(tpm2.Config{TPM: dev, Purpose: attest.PurposeMachine, Bank: tpm.SHA256})
	if err != nil {
		t.Fatal(err)
	}
	return attesttest.Claims(t.Context(), a, attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
}

func TestLeftoversOfAKilledProcessMakeRoom(t *testing.T) {
	e := tpmtest.SWTPM(t)
	dev := raw(t, e)
	for range 3 { // as many as swtpm has room for
		if _, err := (gotpm.CreatePrimary{
			PrimaryHandle: gotpm.AuthHandle{Handle: gotpm.TPMRHEndorsement, Auth: gotpm.PasswordAuth(nil)},
			InPublic:      gotpm.New2B(tpm.AKTemplate(false)),
		}).Execute(dev); err != nil {
			t.Fatal(err)
		}
	}
	mine := e.Open()
	if _, err := mine.Quote(t.Context(), [32]byte{1}, tpm.SHA256); err != nil {
		t.Error(err)
	}
	rsp, err := gotpm.GetCapability{Capability: gotpm.TPMCapHandles, Property: 0x80000000, PropertyCount: 10}.Execute(dev)
	if err != nil {
		t.Fatal(err)
	}
	if list, err := rsp.CapabilityData.Data.Handles(); err != nil || len(list.Handle) != 0 {
		t.Errorf("%d handles stayed loaded (%v)", len(list.Handle), err)
	}
}

func TestAResetTPMIsTheSameMachine(t *testing.T) {
	e := tpmtest.SWTPM(t)
	dev := e.Open()
	before, err := dev.Quote(t.Context(), [32]byte{1}, tpm.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	ek, err := dev.EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e.Restart() // saved contexts are invalid now
	after, err := dev.Quote(t.Context(), [32]byte{1}, tpm.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	again, err := dev.EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before.AKPublic, after.AKPublic) || !bytes.Equal(ek.Public, again.Public) {
		t.Error("after a reset the keys are others")
	}
}

// A power cut after a use of the endorsement key's auth value counts as an attempt to guess it
// (Part 1, dictionary attack protection), so that value is not used.
func TestATPMWhosePowerIsCutOftenStillProvesItsKeys(t *testing.T) {
	e := tpmtest.SWTPM(t)
	for i := range 8 {
		dev := e.Open()
		ek := must(dev.EndorsementKey(t.Context()))(t)
		certified := must(x509.ParseCertificate(ek.Certificates[0]))(t)
		key := must(tpm.EncapsulationKey(certified.PublicKey))(t)
		public := must(gotpm.Unmarshal[gotpm.TPMTPublic](must(dev.AttestationKey(t.Context()))(t)))(t)
		name := must(gotpm.ObjectName(public))(t)
		blob, secret, err := gotpm.CreateCredential(rand.Reader, key, name.Buffer, []byte("secret"))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := dev.ActivateCredential(t.Context(), blob, secret); err != nil || string(got) != "secret" {
			t.Fatalf("after %d power cuts: %q, %v", i, got, err)
		}
		e.Restart()
	}
}

func TestBanks(t *testing.T) {
	e := tpmtest.SWTPM(t, tpmtest.Banks("sha256,sha384"))
	dev := e.Open()
	data := []byte("cluster")
	if err := dev.Measure(t.Context(), 15, data); err != nil {
		t.Fatal(err)
	}
	for _, bank := range []tpm.Bank{tpm.SHA256, tpm.SHA384} {
		h, _ := bank.Hash()
		d := h.New()
		d.Write(data)
		q, err := dev.Quote(t.Context(), [32]byte{1}, bank)
		if err != nil {
			t.Fatal(err)
		}
		if want := bank.Extended(make([]byte, bank.Size()), d.Sum(nil)); !bytes.Equal(q.PCRs[15], want) {
			t.Errorf("%s: PCR 15 is %x, want %x: the lock is open in this bank (B1)", bank, q.PCRs[15], want)
		}
		if want := attest.LockValue(h, sha256.Sum256(data)); bytes.Equal(q.PCRs[15], want) {
			t.Errorf("%s: the data were hashed twice", bank)
		}
	}
	if _, err := dev.Quote(t.Context(), [32]byte{1}, tpm.SHA512); !errors.Is(err, tpm.ErrBankInactive) {
		t.Errorf("%v, want ErrBankInactive", err)
	}
	digest := sha256.Sum256(data)
	tpmtest.Extend(t, raw(t, e), tpm.SHA256, 4, digest[:])
	for bank, want := range map[tpm.Bank][]byte{tpm.SHA256: tpm.SHA256.Extended(make([]byte, 32), digest[:]), tpm.SHA384: make([]byte, 48)} {
		if got, err := dev.ReadPCR(t.Context(), bank, 4); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: PCR 4 is %x (%v), want %x", bank, got, err, want)
		}
	}
}

func TestTheNodeLockIsWhatTheVerifierComputes(t *testing.T) {
	dev := tpmtest.SWTPM(t).Open()
	cluster := sha256.Sum256([]byte("a cluster"))
	if err := dev.Measure(t.Context(), attest.LockPCR, cluster[:]); err != nil {
		t.Fatal(err)
	}
	got, err := dev.ReadPCR(t.Context(), tpm.SHA256, attest.LockPCR)
	if err != nil {
		t.Fatal(err)
	}
	if want := attest.LockValue(crypto.SHA256, cluster); !bytes.Equal(got, want) {
		t.Errorf("PCR 15 is %x, the verifier computes %x", got, want)
	}
}

func TestQuotesWhilePCRsMove(t *testing.T) {
	e := tpmtest.SWTPM(t)
	quoter := e.Open()
	// With a lock of its own, it extends without waiting, like the kernel.
	rude := tpm.Open(e.Socket, tpm.WithLock(filepath.Join(t.TempDir(), "other.lock")))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if err := rude.Measure(t.Context(), 10, []byte("x")); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	for i := range 20 {
		q, err := quoter.Quote(t.Context(), [32]byte{byte(i)}, tpm.SHA256)
		if errors.Is(err, tpm.ErrPCRsMoved) {
			continue // it returned an error, not values that were not signed
		}
		if err != nil {
			t.Error(err)
			break
		}
		ak, err := tpm2.ParseAttestationKey(q.AKPublic)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tpm2.VerifyQuote(ak, evidenceOf(q), [32]byte{byte(i)}); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
}

func evidenceOf(q tpm.Quote) *attestv1.Tpm2Evidence {
	return &attestv1.Tpm2Evidence{AkPublic: q.AKPublic, Attest: q.Attest, Signature: q.Signature, Bank: uint32(q.Bank), Pcrs: q.PCRs}
}

func TestProcessesTakeTurns(t *testing.T) {
	e := tpmtest.SWTPM(t)
	var wg sync.WaitGroup
	for range 3 { // each TPM opens the lock file itself, as a process does
		dev := e.Open()
		wg.Go(func() {
			for i := range 4 {
				if _, err := dev.Quote(t.Context(), [32]byte{byte(i)}, tpm.SHA256); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestWaitingForTheLockEndsWithTheContext(t *testing.T) {
	e := tpmtest.SWTPM(t)
	held, err := os.OpenFile(e.Lock, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := syscall.Flock(int(held.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	dev := e.Open()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	first := make(chan error, 1)
	go func() { _, err := dev.ReadPCR(ctx, tpm.SHA256, 0); first <- err }()
	if _, err := dev.ReadPCR(ctx, tpm.SHA256, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want deadline exceeded", err)
	}
	if err := <-first; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want deadline exceeded", err)
	}
	if err := syscall.Flock(int(held.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if _, err := dev.ReadPCR(t.Context(), tpm.SHA256, 0); err != nil {
		t.Error(err)
	}
}

func TestPathsThatAreNoTPM(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	lock := tpm.WithLock(filepath.Join(dir, "lock"))
	for name, dev := range map[string]*tpm.TPM{
		"a file":                tpm.Open(file, lock),
		"nothing":               tpm.Open(filepath.Join(dir, "none"), lock),
		"a lock without folder": tpm.Open(file, tpm.WithLock(filepath.Join(dir, "none", "lock"))),
		"a lock that is a link": tpm.Open(file, tpm.WithLock(link(t, dir))),
	} {
		if _, err := dev.AttestationKey(t.Context()); err == nil {
			t.Errorf("%s was taken for a TPM", name)
		}
	}
}

func link(t testing.TB, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(dir, "file"), path); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestResponsesThatMakeNoSense(t *testing.T) {
	for name, response := range map[string][]byte{
		"none":                 {},
		"half a header":        {0x80, 0x01, 0, 0},
		"a size below its own": {0x80, 0x01, 0, 0, 0, 9, 0, 0, 0, 0},
		"4 GiB":                {0x80, 0x01, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0},
		"cut short":            {0x80, 0x01, 0, 0, 0, 20, 0, 0, 0, 0, 1, 2},
		"an error":             {0x80, 0x01, 0, 0, 0, 10, 0, 0, 1, 0x01},
		"no parameters":        {0x80, 0x01, 0, 0, 0, 10, 0, 0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "tpm") // short: a socket's path is limited
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			socket := filepath.Join(dir, "s")
			l, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = c.Read(make([]byte, 4096))
					_, _ = c.Write(response)
					c.Close()
				}
			})
			if _, err := tpm.Open(socket, tpm.WithLock(filepath.Join(dir, "lock"))).AttestationKey(t.Context()); err == nil {
				t.Error("taken for a key")
			}
			l.Close()
			wg.Wait()
		})
	}
}

func TestParseBank(t *testing.T) {
	for _, b := range []tpm.Bank{tpm.SHA256, tpm.SHA384, tpm.SHA512} {
		if got, err := tpm.ParseBank(b.String()); err != nil || got != b {
			t.Errorf("%s: %v %v", b, got, err)
		}
	}
	for _, s := range []string{"", "sha1", "SHA256", "sha-256"} {
		if _, err := tpm.ParseBank(s); err == nil {
			t.Errorf("%q was read", s)
		}
	}
}

func BenchmarkQuote(b *testing.B) {
	dev := tpmtest.SWTPM(b).Open()
	for b.Loop() {
		if _, err := dev.Quote(b.Context(), [32]byte{1}, tpm.SHA256); err != nil {
			b.Fatal(err)
		}
	}
}

// must unwraps a result in a test: must(f())(t).
func must[V any](v V, err error) func(testing.TB) V {
	return func(t testing.TB) V {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
