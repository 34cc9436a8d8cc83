package doctor

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/tpm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// silent is a TPM that does not answer.
type silent struct{ TPM }

func (silent) ReadPCR(context.Context, tpm.Bank, int) ([]byte, error) {
	return nil, errors.New("no such device")
}

// keyless is a TPM whose endorsement key cannot be read.
type keyless struct{ TPM }

func (keyless) EndorsementKey(context.Context) (tpm.EK, error) { return tpm.EK{}, nil }

// defined is a TPM in which the owner has defined an index for a certificate.
type defined struct{ TPM }

func (defined) CertificateIndex(context.Context) (tpm.CertificateIndex, error) {
	return tpm.CertificateIndex{Index: 0x01C10002}, nil
}

// bare is a TPM without an EK certificate.
type bare struct{ TPM }

func (b bare) EndorsementKey(ctx context.Context) (tpm.EK, error) {
	ek, err := b.TPM.EndorsementKey(ctx)
	ek.Certificates = nil
	return ek, err
}

// wrongPlatform is a TPM whose platform key does not fit its certificate.
type wrongPlatform struct{ TPM }

func (wrongPlatform) PlatformCertificates(context.Context) ([][]byte, error) {
	return nil, errors.New("the platform key's certificate is for another key")
}

// platform is a TPM with a cloud's platform key.
type platform struct {
	TPM
	machine *attesttest.Machine
}

func (p platform) PlatformCertificates(ctx context.Context) ([][]byte, error) {
	return p.machine.PlatformCertificates(ctx)
}

// platformUntil is one whose certificate, of a year, ends then.
func platformUntil(t *testing.T, m *host, end time.Time) platform {
	t.Helper()
	return platform{m.Machine, attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{Platform: &attesttest.Platform{Azure: true, Certificate: func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = end.AddDate(-1, 0, 0), end
	}}})}
}

// nitro is a NitroTPM.
type nitro struct {
	TPM
	machine *attesttest.Machine
}

func (n nitro) NitroDocument(ctx context.Context, nonce [32]byte) ([]byte, error) {
	return n.machine.NitroDocument(ctx, nonce)
}

// host is a machine without faults.
type host struct {
	*attesttest.Machine
	dir         string
	cfg         Config
	date        func() time.Time // of its joinservice's clock
	image, meta string
}

func (m *host) write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(m.dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// file writes a file in a folder of its own.
func (m *host) file(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(filepath.Join(m.dir, name)), 0o755); err != nil {
		t.Fatal(err)
	}
	m.write(t, name, content)
}

func newMachine(t *testing.T) *host {
	t.Helper()
	ca := attesttest.NewCA(t)
	m := &host{Machine: attesttest.NewMachine(t, ca, attesttest.Options{}), dir: t.TempDir(), date: time.Now}
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", m.date().UTC().Format(http.TimeFormat))
	}))
	t.Cleanup(s.Close)
	m.image = fmt.Sprintf("apiVersion: muster.dev/v1alpha1\nkind: ImageConfiguration\nstateDisk: {mode: plain, path: /var/lib/muster/state}\ntpm: {eventLog: %q}\nownerKeys: [%s]\n",
		m.EventLog(), base64.StdEncoding.EncodeToString(make([]byte, 32)))
	m.meta = fmt.Sprintf("apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\nname: node2\nrole: worker\naddresses: [192.0.2.12]\njoinEndpoints: [%q]\n", s.Listener.Addr())
	for name, content := range map[string]string{
		"sys/kernel/security/lockdown": "none integrity [confidentiality]\n", "sys/module/module/parameters/sig_enforce": "Y\n",
		"proc/sys/kernel/kexec_load_disabled": "1\n", "sys/module/apparmor/parameters/enabled": "Y\n", "sbin/apparmor_parser": "",
		"usr/lib/systemd/system/kubelet.service": "[Unit]\nConditionPathExists=/run/muster/kubelet-may-start\n[Service]\nExecStart=/usr/local/bin/kubelet\n",
	} {
		m.file(t, name, content)
	}
	m.cfg = Config{
		Root: m.dir, Image: m.write(t, "image.yaml", m.image), Metadata: m.write(t, "metadata.yaml", m.meta), Found: filepath.Join(m.dir, "found.yaml"), Journal: filepath.Join(m.dir, "journal"),
		OpenTPM: func(*metadata.Image) (TPM, error) { return m.Machine, nil }, Roots: ca.Roots(), Folders: []string{m.dir}, Built: time.Now(), Now: time.Now,
	}
	return m
}

// Invariant B6.
func TestEachHarmOfAMachineIsFound(t *testing.T) {
	worst := func(r *checkup.Report) (out []checkup.Finding) {
		for _, f := range r.Findings {
			if f.Level != checkup.OK {
				out = append(out, f)
			}
		}
		return out
	}
	sound := Examine(t.Context(), newMachine(t).cfg)
	for _, f := range worst(sound) {
		// The free space of the test's disk is unknown.
		if f.Check != CheckDisk {
			t.Errorf("a sound machine: %+v", f)
		}
	}
	for name, tt := range map[string]struct {
		check    string
		level    checkup.Level
		wantText string
		harm     func(t *testing.T, m *host)
	}{
		"an image configuration with an unknown field": {CheckImage, checkup.Fail, "colour", func(t *testing.T, m *host) { m.write(t, "image.yaml", m.image+"colour: red\n") }},
		"an image without an owner's key": {CheckImage, checkup.Fail, "ownerKeys is missing", func(t *testing.T, m *host) {
			m.write(t, "image.yaml", upTo(m.image, "ownerKeys"))
		}},
		"an image without an owner's key, on purpose": {CheckImage, checkup.Warn, "insecure.noOwnerKey", func(t *testing.T, m *host) {
			m.write(t, "image.yaml", upTo(m.image, "ownerKeys")+"insecure: {noOwnerKey: true}\n")
		}},
		"an image without integrity of the disk": {CheckImage, checkup.Warn, "is not detected", func(t *testing.T, m *host) {
			m.write(t, "image.yaml", strings.Replace(m.image, "{mode: plain, path: /var/lib/muster/state}", "{mode: luks, path: /dev/vda, integrity: none}", 1))
		}},
		"metadata without a name": {CheckMetadata, checkup.Fail, "name", func(t *testing.T, m *host) {
			m.write(t, "metadata.yaml", strings.Replace(m.meta, "name: node2\n", "", 1))
		}},
		"metadata that lead nowhere": {CheckMetadata, checkup.Fail, "nothing will happen", func(t *testing.T, m *host) {
			m.write(t, "metadata.yaml", upTo(m.meta, "joinEndpoints"))
		}},
		"a damaged journal":                {CheckJournal, checkup.Fail, "damaged", func(t *testing.T, m *host) { m.write(t, "journal", "x") }},
		"a TPM that does not answer":       {CheckTPM, checkup.Fail, "no such device", func(_ *testing.T, m *host) { m.opens(silent{m.Machine}) }},
		"a TPM without an EK certificate":  {CheckEK, checkup.Warn, "bare-ek", func(_ *testing.T, m *host) { m.opens(bare{m.Machine}) }},
		"a certificate of the owner's":     {CheckEK, checkup.Warn, "NV index 0x01c10002", func(_ *testing.T, m *host) { m.opens(defined{m.Machine}) }},
		"junk of the owner's":              {CheckEK, checkup.Warn, "NV index 0x01c10002", func(_ *testing.T, m *host) { m.opens(defined{wrongPlatform{m.Machine}}) }},
		"a TPM with a broken platform key": {CheckEK, checkup.Fail, "platform", func(_ *testing.T, m *host) { m.opens(wrongPlatform{m.Machine}) }},
		"a platform key whose certificate has ended": {CheckEK, checkup.Fail, "so the machine is refused with EK_UNTRUSTED", func(t *testing.T, m *host) {
			m.opens(platformUntil(t, m, time.Now().Add(-time.Hour)))
		}},
		"a platform key whose certificate ends in a month": {CheckEK, checkup.Warn, "its certificate ends at", func(t *testing.T, m *host) {
			m.opens(platformUntil(t, m, time.Now().AddDate(0, 1, 0)))
		}},
		"a NitroTPM that quotes SHA-256": {CheckEK, checkup.Fail, "sha384", func(t *testing.T, m *host) {
			m.opens(nitro{m.Machine, attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{Nitro: &attesttest.Nitro{}})})
		}},
		"a TPM without an EK":          {CheckEK, checkup.Fail, "endorsement key", func(_ *testing.T, m *host) { m.opens(keyless{m.Machine}) }},
		"an EK that no root certifies": {CheckEK, checkup.Fail, "unknown authority", func(t *testing.T, m *host) { m.cfg.Roots = attesttest.NewCA(t).Roots() }},
		"an event log that is gone": {CheckEventLog, checkup.Fail, "no such file", func(t *testing.T, m *host) {
			m.write(t, "image.yaml", strings.Replace(m.image, m.EventLog(), "/nowhere/log", 1))
		}},
		"an event log that leads elsewhere":    {CheckEventLog, checkup.Fail, "EVENTLOG_REPLAY", func(_ *testing.T, m *host) { m.SetPCR(4, make([]byte, 32)) }},
		"a lock that the journal knows not of": {CheckLock, checkup.Fail, "PCR 15", func(_ *testing.T, m *host) { m.LockTo([32]byte{9}) }},
		"a lock that was not taken again": {CheckLock, checkup.Warn, "PCR 15 is zero", func(t *testing.T, m *host) {
			err := journal.Open(m.cfg.Journal).Save(journal.Record{Step: journal.StepLocked, Kind: journal.KindJoin, ClusterID: make([]byte, 32), Ticket: make([]byte, 16), NodeName: "node2"})
			if err != nil {
				t.Fatal(err)
			}
		}},
		"a clock of before the build":     {CheckClock, checkup.Fail, "was built", func(_ *testing.T, m *host) { m.cfg.Built = time.Now().Add(48 * time.Hour) }},
		"a clock that is three hours off": {CheckClock, checkup.Fail, "off that of", func(_ *testing.T, m *host) { m.date = func() time.Time { return time.Now().Add(3 * time.Hour) } }},
		"a clock that is two minutes off": {CheckClock, checkup.Warn, "off that of", func(_ *testing.T, m *host) { m.date = func() time.Time { return time.Now().Add(-2 * time.Minute) } }},
		"joinservices that are not there": {CheckJoinservices, checkup.Fail, "none of 1", func(t *testing.T, m *host) {
			l := listen(t)
			_ = l.Close()
			m.write(t, "metadata.yaml", upTo(m.meta, "joinEndpoints")+fmt.Sprintf("joinEndpoints: [%q]\n", l.Addr()))
		}},
		"a kernel that is not locked down": {CheckKernel, checkup.Warn, "not locked down", func(t *testing.T, m *host) {
			m.file(t, "sys/kernel/security/lockdown", "[none] integrity confidentiality\n")
		}},
		"a kernel without lockdown":        {CheckKernel, checkup.Warn, "not locked down", func(t *testing.T, m *host) { m.file(t, "sys/kernel/security/lockdown", "") }},
		"modules without signatures":       {CheckKernel, checkup.Warn, "modules without", func(t *testing.T, m *host) { m.file(t, "sys/module/module/parameters/sig_enforce", "N\n") }},
		"a kernel that starts another one": {CheckKernel, checkup.Warn, "kexec", func(t *testing.T, m *host) { m.file(t, "proc/sys/kernel/kexec_load_disabled", "0\n") }},
		"a kernel without AppArmor":        {CheckKernel, checkup.Warn, "AppArmor is off", func(t *testing.T, m *host) { m.file(t, "sys/module/apparmor/parameters/enabled", "N\n") }},
		"an image without AppArmor's parser": {CheckKernel, checkup.Warn, "apparmor_parser", func(t *testing.T, m *host) {
			if err := os.Remove(filepath.Join(m.dir, "sbin/apparmor_parser")); err != nil {
				t.Fatal(err)
			}
		}},
		"an image without a kubelet's unit": {CheckUnits, checkup.Fail, "kubelet.service is not in the image", func(t *testing.T, m *host) {
			if err := os.Remove(filepath.Join(m.dir, "usr/lib/systemd/system/kubelet.service")); err != nil {
				t.Fatal(err)
			}
		}},
		"a kubelet that starts by itself": {CheckUnits, checkup.Fail, "before the bootstrapper has compared", func(t *testing.T, m *host) {
			m.file(t, "etc/systemd/system/kubelet.service", "[Unit]\nConditionPathExists=/var/lib/kubelet/config.yaml\n[Service]\nConditionPathExists=/run/muster/kubelet-may-start\n")
		}},
		"a kubelet whose condition a drop-in removes": {CheckUnits, checkup.Fail, "before the bootstrapper has compared", func(t *testing.T, m *host) {
			m.file(t, "etc/systemd/system/kubelet.service.d/50-x.conf", "[Unit]\nConditionPathExists=\n")
		}},
		"a kubelet all of whose conditions a drop-in removes": {CheckUnits, checkup.Fail, "before the bootstrapper has compared", func(t *testing.T, m *host) {
			m.file(t, "etc/systemd/system/kubelet.service.d/50-x.conf", "[Unit]\nConditionFileNotEmpty=\n")
		}},
		"a kubelet whose condition a drop-in of all services removes": {CheckUnits, checkup.Fail, "before the bootstrapper has compared", func(t *testing.T, m *host) {
			m.file(t, "run/systemd/system/service.d/50-x.conf", "[Unit]\nConditionPathExists=\n")
		}},
		"a unit that can't be read": {CheckUnits, checkup.Fail, "kubelet.service", func(t *testing.T, m *host) {
			m.file(t, "etc/systemd/system/kubelet.service", "[Unit\n")
		}},
		"a disk that is full": {CheckDisk, checkup.Fail, "0 MiB", func(_ *testing.T, m *host) { m.cfg.Folders = []string{"/proc"} }},
		"a control plane's certificate that has ended": {CheckCertificates, checkup.Fail, "apiserver ended at", func(t *testing.T, m *host) {
			m.certificate(t, time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour))
		}},
		"a control plane's certificate that was not renewed": {CheckCertificates, checkup.Warn, "should have been renewed", func(t *testing.T, m *host) {
			m.certificate(t, time.Now().Add(-9*time.Hour), time.Now().Add(time.Hour))
		}},
		"a control plane's certificate that can't be read": {CheckCertificates, checkup.Fail, "apiserver.crt", func(t *testing.T, m *host) {
			m.certificate(t, time.Now(), time.Now())
			m.write(t, "etc/kubernetes/pki/apiserver.crt", "x")
		}},
		"a port that is taken": {CheckPorts, checkup.Fail, "not free", func(t *testing.T, m *host) {
			_, port, err := net.SplitHostPort(listen(t).Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			n, err := strconv.Atoi(port)
			if err != nil {
				t.Fatal(err)
			}
			m.cfg.Ports = []int{n}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			tt.harm(t, m)
			found := false
			got := worst(Examine(t.Context(), m.cfg))
			for _, f := range got {
				found = found || f.Check == tt.check && f.Level == tt.level && strings.Contains(f.Detail, tt.wantText)
				if f.Remedy == "" {
					t.Errorf("without a remedy: %+v", f)
				}
			}
			if !found {
				t.Errorf("%s does not say %q: %+v", tt.check, tt.wantText, got)
			}
		})
	}
}

// certificate gives the machine a control plane's certificate.
func (m *host) certificate(t *testing.T, from, to time.Time) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: from, NotAfter: to}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(m.dir, "etc/kubernetes/pki"), 0o700); err != nil {
		t.Fatal(err)
	}
	m.write(t, "etc/kubernetes/pki/apiserver.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
}

func (m *host) opens(d TPM) {
	m.cfg.OpenTPM = func(*metadata.Image) (TPM, error) { return d, nil }
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func TestWithoutRootsTheOwnerHasToJudge(t *testing.T) {
	m := newMachine(t)
	m.cfg.Roots = []*x509.Certificate(nil)
	for _, f := range Examine(t.Context(), m.cfg).Findings {
		if f.Check == CheckEK && (f.Level != checkup.OK || !strings.Contains(f.Detail, m.ID().String())) {
			t.Errorf("%+v", f)
		}
	}
}

// The workstation has this line of a node by muster doctor --node.
func TestTheStateDiskIsNamed(t *testing.T) {
	m := newMachine(t)
	const disk = "3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab"
	err := journal.Open(m.cfg.Journal).Save(journal.Record{Step: journal.StepLocked, Kind: journal.KindJoin, ClusterID: make([]byte, 32), Ticket: make([]byte, 16), NodeName: "node2", DiskID: disk})
	if err != nil {
		t.Fatal(err)
	}
	r := Examine(t.Context(), m.cfg)
	if !slices.ContainsFunc(r.Findings, func(f checkup.Finding) bool {
		return f.Check == CheckJournal && f.Level == checkup.OK && strings.HasSuffix(f.Detail, ", with the state disk "+disk)
	}) {
		t.Errorf("%+v", r.Findings)
	}
}

func upTo(text, field string) string {
	before, _, _ := strings.Cut(text, field)
	return before
}

func TestTheSourceOfTheMetadataIsShown(t *testing.T) {
	m := newMachine(t)
	shown := func() (out string) {
		for _, f := range Examine(t.Context(), m.cfg).Findings {
			if f.Check == CheckMetadata {
				out += f.Detail
			}
		}
		return out
	}
	if got := shown(); got != "valid: node2, worker, 192.0.2.12; from "+m.cfg.Metadata {
		t.Errorf("a file: %q", got)
	}
	if err := os.Remove(m.cfg.Metadata); err != nil {
		t.Fatal(err)
	}
	if got := shown(); !strings.Contains(got, "no such file") {
		t.Errorf("no metadata: %q", got)
	}
	m.write(t, "found.yaml", m.meta+"source: {provider: aws, from: 'http://169.254.169.254', platform: [name], ignored: [providerID]}\n")
	if got := shown(); got != "valid: node2, worker, 192.0.2.12; from aws (http://169.254.169.254), which gave name; malformed and not taken: providerID" {
		t.Errorf("found metadata: %q", got)
	}
}

func TestNamesOfJoinservicesThatDNSDoesNotKnowAreFound(t *testing.T) {
	d := &doctor{Config: newMachine(t).cfg, meta: &metadata.Machine{JoinEndpoints: []string{"srv:_muster-join._tcp.example.org"}}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // each look-up fails at once
	d.joinservices(ctx)
	if len(d.Findings) != 1 || d.Findings[0].Check != CheckJoinservices || d.Findings[0].Level != checkup.Fail || !strings.Contains(d.Findings[0].Detail, "_muster-join._tcp.example.org") {
		t.Errorf("%+v", d.Findings)
	}
}
