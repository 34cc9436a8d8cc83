// Package vtpm gives each machine of the lab a TPM 2.0: a swtpm process of its own, made
// by swtpm_setup, with endorsement key certificates from a CA of the lab.
//
// The TPM lives outside the machine, as a chip does: the machine gets its command socket
// and nothing else, and can't reset it, stop it or see its state.
package vtpm

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// A CA issues EK certificates. Its folder holds ca.pem, key.pem and swtpm_setup's
// configuration, which keeps the host's own swtpm CA out of it.
type CA struct{ Dir string }

// NewCA makes a self-signed CA (ECDSA P-256, ten years) in dir, or returns the one that is
// there. EK certificates come from it directly, so its certificate is the root that a
// policy names.
func NewCA(dir, name string) (CA, error) {
	ca := CA{Dir: dir}
	if _, err := os.Stat(ca.CertPath()); err == nil {
		return ca, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return ca, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return ca, err
	}
	now := time.Now()
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    now.Add(-time.Hour), NotAfter: now.AddDate(10, 0, 0),
		IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return ca, err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return ca, err
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, f := range []struct {
		name string
		data []byte
	}{
		{"localca.conf", fmt.Appendf(nil, "statedir = %s\nsigningkey = %s\nissuercert = %s\ncertserial = %s\n", dir, at("key.pem"), ca.CertPath(), at("serial"))},
		{"localca.options", []byte("--platform-manufacturer Muster\n--platform-version 1\n--platform-model lab\n")},
		{"setup.conf", fmt.Appendf(nil, "create_certs_tool = /usr/bin/swtpm_localca\ncreate_certs_tool_config = %s\ncreate_certs_tool_options = %s\nactive_pcr_banks = sha256\n", at("localca.conf"), at("localca.options"))},
		{"key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})},
		{"ca.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}, // last, because it marks the state as complete
	} {
		if err := os.WriteFile(at(f.name), f.data, 0o600); err != nil {
			return ca, err
		}
	}
	return ca, nil
}

// CertPath is the CA's certificate, PEM.
func (c CA) CertPath() string { return filepath.Join(c.Dir, "ca.pem") }

// A TPM is one swtpm; its folder holds the state and the socket.
type TPM struct{ Dir string }

// Socket is the Unix socket that takes TPM commands. A connection may carry one command
// or several; the next connection is served when the one before it has closed.
func (t TPM) Socket() string { return filepath.Join(t.Dir, "tpm.sock") }

// Manufacture makes the TPM's state: RSA-2048 and ECC P-384 endorsement keys with
// certificates from ca in NV memory, and the SHA-256 bank alone. It takes about a second.
func (t TPM) Manufacture(ctx context.Context, ca CA) error {
	return t.manufacture(ctx, ca, "--create-ek-cert", "--lock-nvram")
}

// ManufactureBare makes the state of a TPM that stores no certificates.
func (t TPM) ManufactureBare(ctx context.Context, ca CA) error { return t.manufacture(ctx, ca) }

func (t TPM) manufacture(ctx context.Context, ca CA, certificates ...string) error {
	state := filepath.Join(t.Dir, "state")
	// swtpm_setup gives up when its swtpm has not started within 5 s. On a busy computer that takes longer.
	for try := 1; ; try++ {
		if err := os.MkdirAll(state, 0o700); err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, "swtpm_setup", append([]string{"--tpm2", "--runas", "root", "--tpmstate", state,
			"--pcr-banks", "sha256", "--config", filepath.Join(ca.Dir, "setup.conf")}, certificates...)...)
		out, err := cmd.CombinedOutput()
		if err == nil {
			return nil
		}
		if err = fmt.Errorf("swtpm_setup, try %d: %w\n%s", try, err, out); try == 5 || ctx.Err() != nil {
			return err
		}
		if err := os.RemoveAll(state); err != nil {
			return err
		}
	}
}

// Command returns swtpm's command line; it ends with its parent thread.
func (t TPM) Command() *exec.Cmd {
	// "disconnect": a client that opens, asks and closes for each command never blocks the next one.
	// "startup-clear": power has just come on, all PCRs are at their start.
	cmd := exec.Command("swtpm", "socket", "--tpm2", "--tpmstate", "dir=state", "--server", "type=unixio,path=tpm.sock,disconnect",
		"--flags", "not-need-init,startup-clear")
	cmd.Dir = t.Dir // relative paths: a socket's path is limited to 107 bytes
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	return cmd
}

// ControlSocket is where swtpm listens for QEMU, in the TPM's folder.
const ControlSocket = "control.sock"

// ChipCommand returns the command line of a swtpm that is soldered to a QEMU machine: QEMU starts, resets
// and stops it by its control socket, and it ends when QEMU does.
func (t TPM) ChipCommand() *exec.Cmd {
	cmd := exec.Command("swtpm", "socket", "--tpm2", "--tpmstate", "dir=state", "--ctrl", "type=unixio,path="+ControlSocket, "--terminate")
	cmd.Dir = t.Dir
	return cmd
}

// WaitChip returns when what [TPM.ChipCommand] has started listens.
func (t TPM) WaitChip(ctx context.Context) error {
	return wait(ctx, func() bool {
		fi, err := os.Stat(filepath.Join(t.Dir, ControlSocket))
		return err == nil && fi.Mode()&os.ModeSocket != 0
	})
}

// WaitReady returns when the TPM takes connections, which is a moment after its socket has a name.
func (t TPM) WaitReady(ctx context.Context) error {
	return wait(ctx, func() bool {
		c, err := new(net.Dialer).DialContext(ctx, "unix", t.Socket())
		return err == nil && c.Close() == nil
	})
}

func wait(ctx context.Context, ready func() bool) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ready() {
		select {
		case <-ctx.Done():
			return errors.Join(errors.New("swtpm did not open its socket; see tpm.log in the machine's folder"), ctx.Err())
		case <-tick.C:
		}
	}
	return nil
}
