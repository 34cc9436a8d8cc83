package metadata

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func rootPEM(t *testing.T, ca bool) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "EK root"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: ca, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func indent(s string) string { return "  " + strings.ReplaceAll(strings.TrimSpace(s), "\n", "\n  ") }

const imageHead = "apiVersion: muster.dev/v1alpha1\nkind: ImageConfiguration\n"

func TestParseImage(t *testing.T) {
	key, next := base64.StdEncoding.EncodeToString(make([]byte, 32)), base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, 32))
	img, err := ParseImage([]byte(imageHead + `
stateDisk: {mode: plain, path: /var/lib/muster/state}
tpm: {device: /run/muster/tpm.sock, eventLog: /run/muster/log, bank: sha256}
ownerKeys: [` + key + `, ` + next + `]
lowestPolicySerial: 7
backup: {every: 24h, keep: 5}
ekRoots: |
` + indent(rootPEM(t, true)) + `
kubeadm:
  ignorePreflightErrors: [SystemVerification]
  clusterConfiguration: {etcd: {local: {imageTag: 3.6.16-0}}}
`))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(img.OwnerKeys.Strings(), []string{key, next}) || img.Backup != (Backup{Every: 24 * time.Hour, Keep: 5}) || img.LowestPolicySerial != 7 || len(img.EKRoots) != 1 || img.Listen.Init != ":9000" || img.Listen.Recover != ":9999" || img.Kubeadm.CRISocket == "" || len(img.Kubeadm.ClusterConfiguration) == 0 {
		t.Fatalf("got %+v", img)
	}
}

func TestAnEncryptedDiskHasIntegrityUnlessTold(t *testing.T) {
	for yaml, want := range map[string]string{
		"stateDisk: {mode: luks, path: /dev/sda}\n":                         IntegrityHMAC,
		"stateDisk: {mode: luks, path: /dev/sda, integrity: hmac-sha256}\n": IntegrityHMAC,
		"stateDisk: {mode: luks, path: /dev/sda, integrity: none}\n":        IntegrityNone,
		"stateDisk: {mode: plain, path: /state}\n":                          "",
	} {
		img, err := ParseImage([]byte(imageHead + yaml))
		if err != nil || img.StateDisk.Integrity != want {
			t.Errorf("%s: %+v, %v", yaml, img, err)
			continue
		}
		if weak := slices.Equal(img.Insecure(), []string{InsecureIntegrity}); weak != (want == IntegrityNone) || !weak && len(img.Insecure()) > 0 {
			t.Errorf("%s: insecure in %q", yaml, img.Insecure())
		}
	}
}

func TestAnImageKnowsItsOwnerUnlessTold(t *testing.T) {
	disk := imageHead + "stateDisk: {mode: plain, path: /state}\n"
	for yaml, want := range map[string]struct {
		err      error
		insecure []string
	}{
		disk + "ownerKeys: [" + base64.StdEncoding.EncodeToString(make([]byte, 32)) + "]\n": {},
		disk + "insecure: {noOwnerKey: true}\n":                                             {nil, []string{InsecureOwner}},
		disk + "insecure: {noOwnerKey: false}\n":                                            {ErrNoOwner, nil},
		disk:                                                                                {ErrNoOwner, nil},
	} {
		img, err := ParseImage([]byte(yaml))
		if err != nil {
			t.Fatal(err)
		}
		if got := img.KnowsOwner(); !errors.Is(got, want.err) || !slices.Equal(img.Insecure(), want.insecure) {
			t.Errorf("%s: %v, insecure in %q", yaml, got, img.Insecure())
		}
	}
}

func TestAnImageIsRefused(t *testing.T) {
	disk := "stateDisk: {mode: plain, path: /state}\n"
	for name, tt := range map[string]struct{ yaml, want string }{
		"empty":                      {"", "want apiVersion"},
		"another kind":               {"apiVersion: muster.dev/v1alpha1\nkind: Pod\n" + disk, "ImageConfiguration"},
		"a lowest serial and no key": {imageHead + disk + "lowestPolicySerial: 7\n", "lowestPolicySerial: "},
		"a lowest serial below 0":    {imageHead + disk + "lowestPolicySerial: -1\n", "lowestPolicySerial"},
		"a backup every minute":      {imageHead + disk + "ownerKeys: [" + base64.StdEncoding.EncodeToString(make([]byte, 32)) + "]\nbackup: {every: 1m}\n", "backup.every: "},
		"a backup of no length":      {imageHead + disk + "backup: {every: daily}\n", "backup.every: "},
		"a backup for nobody":        {imageHead + disk + "backup: {every: 24h}\n", "write ownerKeys"},
		"no backups kept":            {imageHead + disk + "backup: {keep: 0}\n", "backup.keep: "},
		"too many backups kept":      {imageHead + disk + "backup: {keep: 101}\n", "backup.keep: "},
		"an unknown field":           {imageHead + disk + "stateDisc: {}\n", "stateDisc"},
		"an unknown inner field":     {imageHead + "stateDisk: {mode: plain, path: /state, key: x}\n", "key"},
		"a doubled field":            {imageHead + disk + disk, "already set"},
		"a disk without a mode":      {imageHead + "stateDisk: {path: /state}\n", "no default"},
		"another disk mode":          {imageHead + "stateDisk: {mode: zfs, path: /state}\n", "zfs"},
		"integrity of a folder":      {imageHead + "stateDisk: {mode: plain, path: /state, integrity: none}\n", "stateDisk.integrity"},
		"another integrity":          {imageHead + "stateDisk: {mode: luks, path: /dev/sda, integrity: crc32}\n", "crc32"},
		"a relative path":            {imageHead + "stateDisk: {mode: plain, path: state}\n", "stateDisk.path"},
		"a path that climbs":         {imageHead + "stateDisk: {mode: plain, path: /a/../b}\n", "stateDisk.path"},
		"another bank":               {imageHead + disk + "tpm: {bank: sha1}\n", "sha256"},
		"an owner's key cut short":   {imageHead + disk + "ownerKeys: [AAAA]\n", "ownerKeys"},
		"an empty list of owners":    {imageHead + disk + "ownerKeys: []\n", "ownerKeys: want 1 to 4 keys"},
		"one owner's key alone":      {imageHead + disk + "ownerKey: " + base64.StdEncoding.EncodeToString(make([]byte, 32)) + "\n", "ownerKey"},
		"an owner and none":          {imageHead + disk + "ownerKeys: [" + base64.StdEncoding.EncodeToString(make([]byte, 32)) + "]\ninsecure: {noOwnerKey: true}\n", "insecure.noOwnerKey"},
		"an unknown switch":          {imageHead + disk + "insecure: {anything: true}\n", "anything"},
		"roots that are no PEM":      {imageHead + disk + "ekRoots: hello\n", "ekRoots"},
		"a root that is no CA":       {imageHead + disk + "ekRoots: |\n" + indent(rootPEM(t, false)) + "\n", "certificate authority"},
		"an unknown provider":        {imageHead + disk + "metadata: {providers: [vmware]}\n", "metadata.providers[0]"},
		"a provider twice":           {imageHead + disk + "metadata: {providers: [aws, aws]}\n", "metadata.providers[1]"},
		"two clouds":                 {imageHead + disk + "metadata: {providers: [aws, nocloud, gcp]}\n", "metadata.providers[2]: gcp is a second cloud"},
		"a runtime over TCP":         {imageHead + disk + "kubeadm: {criSocket: 'tcp://1.2.3.4:5'}\n", "criSocket"},
		"a listener without a port":  {imageHead + disk + "listen: {init: localhost}\n", "listen.init"},
		"recovery without a port":    {imageHead + disk + "listen: {recover: localhost}\n", "listen.recover"},
	} {
		if _, err := ParseImage([]byte(tt.yaml)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want an error with %q", name, err, tt.want)
		}
	}
}

const machineHead = "apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\n"

func TestParseMachine(t *testing.T) {
	m, err := ParseMachine([]byte(machineHead + "name: node1\nrole: control-plane\naddresses: [192.168.77.11, 'fd00::1']\ninitSecretHash: " +
		strings.Repeat("ab", 32) + "\njoinEndpoints: ['192.168.77.11:30090', 'cluster.example:30090']\n"))
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "node1" || len(m.Addresses) != 2 || m.InitSecretHash == nil || len(m.JoinEndpoints) != 2 {
		t.Fatalf("got %+v", m)
	}
}

func TestMetadataAreRefused(t *testing.T) {
	for name, tt := range map[string]struct{ yaml, want string }{
		"an unknown field":         {"name: a\nrole: worker\naddresses: [10.0.0.1]\ntoken: x\n", "token"},
		"a name with a dot":        {"name: a.b\nrole: worker\naddresses: [10.0.0.1]\n", "name"},
		"a long name":              {"name: " + strings.Repeat("a", 64) + "\nrole: worker\naddresses: [10.0.0.1]\n", "name"},
		"a name that is a path":    {"name: ../a\nrole: worker\naddresses: [10.0.0.1]\n", "name"},
		"no role":                  {"name: a\naddresses: [10.0.0.1]\n", "role"},
		"another role":             {"name: a\nrole: master\naddresses: [10.0.0.1]\n", "role"},
		"no address":               {"name: a\nrole: worker\n", "addresses"},
		"loopback":                 {"name: a\nrole: worker\naddresses: [127.0.0.1]\n", "addresses[0]"},
		"an address twice":         {"name: a\nrole: worker\naddresses: [10.0.0.1, 10.0.0.1]\n", "addresses[1]"},
		"an address with a zone":   {"name: a\nrole: worker\naddresses: ['fe80::1%eth0']\n", "addresses[0]"},
		"a short hash":             {"name: a\nrole: worker\naddresses: [10.0.0.1]\ninitSecretHash: abcd\n", "initSecretHash"},
		"a service of no domain":   {"name: a\nrole: worker\naddresses: [10.0.0.1]\njoinEndpoints: ['srv:_muster-join._tcp']\n", "joinEndpoints[0]"},
		"a service over UDP":       {"name: a\nrole: worker\naddresses: [10.0.0.1]\njoinEndpoints: ['srv:_muster-join._udp.example.org']\n", "joinEndpoints[0]"},
		"a service of two lines":   {"name: a\nrole: worker\naddresses: [10.0.0.1]\njoinEndpoints: [\"srv:_muster-join._tcp.a\\nb\"]\n", "joinEndpoints[0]"},
		"a service with a space":   {"name: a\nrole: worker\naddresses: [10.0.0.1]\njoinEndpoints: ['srv:_muster-join._tcp.a b']\n", "joinEndpoints[0]"},
		"a host name as service":   {"name: a\nrole: worker\naddresses: [10.0.0.1]\njoinEndpoints: ['srv:example.org']\n", "joinEndpoints[0]"},
		"an endpoint without port": {"name: a\nrole: worker\naddresses: [10.0.0.1]\njoinEndpoints: [10.0.0.2]\n", "joinEndpoints[0]"},
		"port 0":                   {"name: a\nrole: worker\naddresses: [10.0.0.1]\njoinEndpoints: ['10.0.0.2:0']\n", "joinEndpoints[0]"},
	} {
		if _, err := ParseMachine([]byte(machineHead + tt.yaml)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want an error with %q", name, err, tt.want)
		}
	}
}

func TestErrorsNameTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "metadata.yaml")
	if _, err := LoadMachine(file); err == nil || !strings.Contains(err.Error(), file) {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(strings.Repeat("#", maxFile+1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadMachine(file); err == nil || !strings.Contains(err.Error(), file) {
		t.Fatal(err)
	}
}

func TestAnImageNamesProviders(t *testing.T) {
	const disk = "stateDisk: {mode: plain, path: /state}\n"
	for _, p := range append(CloudNames(), "medium, credential, nocloud, configdrive") {
		if img, err := ParseImage([]byte(imageHead + disk + "metadata: {providers: [" + p + "]}\n")); err != nil || len(img.Metadata.Providers) == 0 {
			t.Errorf("%s: %v", p, err)
		}
	}
	if img, err := ParseImage([]byte(imageHead + disk + "metadata: {providers: [aws, nocloud]}\n")); err != nil || len(img.Metadata.Providers) != 2 {
		t.Errorf("one cloud: %v", err)
	}
}
