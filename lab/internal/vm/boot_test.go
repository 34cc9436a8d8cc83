//go:build vm

package vm

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"

	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/vtpm"
)

// The boot disk has no boot loader, so firmware starts its own shell, which runs startup.nsh: the least
// that can boot.
func TestAMachineKeepsItsTPMAndItsDiskOverPowerCuts(t *testing.T) {
	dir, image := shortDir(t), filepath.Join(t.TempDir(), "boot.raw")
	if err := WriteMedium(t.Context(), image, map[string][]byte{"startup.nsh": []byte("@echo -off\r\necho booted\r\n")}); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	c := Config{Dir: dir, Image: image, CA: newCA(t), State: 8, Memory: 512, Medium: map[string][]byte{"metadata.yaml": []byte("x")}, Spawn: spawner(t), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()

	var before chip
	for boot := 1; boot <= 2; boot++ {
		m, err := Start(ctx, c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.Kill(context.WithoutCancel(ctx)) }) // killed again if all goes well
		if _, err := m.Wait(ctx, func(line string) bool { return line == "booted" }); err != nil {
			t.Fatal(err)
		}
		if !m.Alive() || !m.TPM.Alive() {
			t.Error("it has booted, and has no power")
		}
		if err := m.Kill(ctx); err != nil {
			t.Fatal(err)
		}
		if m.Alive() || m.TPM.Alive() {
			t.Error("it runs on without power")
		}
		if _, err := m.Wait(ctx, func(string) bool { return false }); !errors.Is(err, errPowerOff) {
			t.Errorf("waiting for the console of a machine without power: %v", err)
		}
		t.Logf("power cut %d after %.1f s", boot, time.Since(begun).Seconds())

		now := look(t, tpmOf(dir))
		state, err := os.OpenFile(StatePath(dir), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		mark := make([]byte, 6)
		switch boot {
		case 1:
			if fi, err := state.Stat(); err != nil || fi.Size() != 8<<20 {
				t.Errorf("the state disk is %v, %v", fi, err)
			}
			_, err = state.WriteAt([]byte("marker"), 4096)
		case 2:
			if !bytes.Equal(now.ek, before.ek) {
				t.Error("it is another TPM than before the power cut")
			}
			if !bytes.Equal(now.nv, before.nv) {
				t.Error("its EK certificate has changed")
			}
			// This program's own look at it was one reset, the machine's second boot is the other.
			if now.resets != before.resets+2 {
				t.Errorf("reset %d times, then %d: the machine has not started this TPM", before.resets, now.resets)
			}
			if _, err = state.ReadAt(mark, 4096); string(mark) != "marker" {
				t.Errorf("the state disk holds %q", mark)
			}
		}
		if err := errors.Join(err, state.Close()); err != nil {
			t.Fatal(err)
		}
		before = now
	}
	if consoles, err := filepath.Glob(filepath.Join(dir, "console.*.log")); err != nil || len(consoles) < 2 {
		t.Errorf("%v, %v: not a console for each power on", consoles, err)
	}
}

// A chip is what of a TPM must outlive the power.
type chip struct {
	ek, nv []byte
	resets uint32
}

// ekCertificate is the NV index of the RSA 2048 EK's certificate (TCG EK Credential Profile, section 2.2.1.4).
const ekCertificate = tpm2.TPMHandle(0x01c00002)

// look powers a TPM for as long as it takes to ask it, on a thread of its own.
func look(t *testing.T, at vtpm.TPM) chip {
	t.Helper()
	runtime.LockOSThread() // the TPM's process ends with the thread that starts it
	defer runtime.UnlockOSThread()
	if err := os.RemoveAll(at.Socket()); err != nil {
		t.Fatal(err)
	}
	cmd := at.Command()
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := host.ProcessOf(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Signal(9); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait() // killed
	}()
	if err := at.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn, err := linuxudstpm.Open(at.Socket())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var c chip
	ek, err := tpm2.CreatePrimary{PrimaryHandle: tpm2.TPMRHEndorsement, InPublic: tpm2.New2B(tpm2.RSAEKTemplate)}.Execute(conn)
	if err != nil {
		t.Fatal(err)
	}
	c.ek = ek.Name.Buffer
	if _, err := (tpm2.FlushContext{FlushHandle: ek.ObjectHandle}).Execute(conn); err != nil {
		t.Fatal(err)
	}
	pub, err := tpm2.NVReadPublic{NVIndex: ekCertificate}.Execute(conn)
	if err != nil {
		t.Fatal(err)
	}
	read, err := tpm2.NVRead{
		AuthHandle: tpm2.AuthHandle{Handle: ekCertificate, Name: pub.NVName, Auth: tpm2.PasswordAuth(nil)},
		NVIndex:    tpm2.NamedHandle{Handle: ekCertificate, Name: pub.NVName}, Size: 256,
	}.Execute(conn)
	if err != nil {
		t.Fatal(err)
	}
	c.nv = slices.Clone(read.Data.Buffer)
	now, err := tpm2.ReadClock{}.Execute(conn)
	if err != nil {
		t.Fatal(err)
	}
	c.resets = now.CurrentTime.ClockInfo.ResetCount
	return c
}
