// Package metadata reads a machine's two small YAML files at boot. One is trusted, the other is not.
//
// The image's configuration is measured: it is the same on all machines of an image, and a change of it changes PCR values. The machine's metadata come
// from the operator of the infrastructure. They are not measured and not certified, so false metadata must only be able to harm the machine's own chance
// to join: the name, role and addresses are requests that joinservice checks.
//
// Both are read strictly: unknown or duplicate fields, other versions and missing values are errors that name the field.
package metadata

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// These are the paths of the files.
const (
	ImagePath   = "/etc/muster/image.yaml"
	MachinePath = "/etc/muster/metadata.yaml"
	// RunPath is the file of a machine whose metadata are from a [Source]: found once in a boot, and kept in memory.
	RunPath = layout.RunMetadata
)

// APIVersion is the version of both files.
const APIVersion = "muster.dev/v1alpha1"

// maxFile bounds both files, in bytes.
const maxFile = 256 << 10

// These are the disk modes.
const (
	// DiskPlain is a folder on an unencrypted disk.
	DiskPlain = "plain"
	// DiskLUKS is a LUKS2 volume.
	DiskLUKS = "luks"
)

// These are the integrity modes of a LUKS2 volume.
const (
	IntegrityHMAC = "hmac-sha256"
	IntegrityNone = "none"
)

// Image is the image-wide, measured configuration.
type Image struct {
	// StateDisk configures the state disk. Its mode has no default.
	StateDisk StateDisk
	// TPM configures the TPM.
	TPM TPM
	// OwnerKeys are the owner's public keys: a signature of any of them is the owner's. nil: the image has none.
	OwnerKeys attest.OwnerKeys
	// NoOwnerKey is insecure: without OwnerKeys, a machine accepts a joinservice on every machine that booted the same as itself, under one of EKRoots.
	// Without both it neither joins nor becomes a first machine; see [Image.KnowsOwner].
	NoOwnerKey bool
	// LowestPolicySerial is the least serial that a policy of this owner may have (B7); 0 for any.
	LowestPolicySerial uint64
	// EKRoots are the EK roots for NoOwnerKey.
	EKRoots []*x509.Certificate
	// Backup is the schedule of backups on control planes.
	Backup Backup
	// Kubeadm is the image's part of kubeadm's configuration.
	Kubeadm Kubeadm
	// Listen configures the bootstrapper's addresses.
	Listen Listen
	// Metadata configures where machines look for their metadata.
	Metadata Sources
}

// Sources configures where the machines of an image look for their metadata.
type Sources struct {
	// Providers are names of [ProviderNames], in the order in which the machine looks. Empty: all of them in their own order, of the clouds only the one
	// that the firmware's tables name.
	Providers []string `json:"providers,omitempty"`
}

// These are the names of providers, one for each kind of source; package provider has them.
const (
	ProviderMedium      = "medium"
	ProviderCredential  = "credential"
	ProviderNoCloud     = "nocloud"
	ProviderConfigDrive = "configdrive"
	ProviderAWS         = "aws"
	ProviderGCP         = "gcp"
	ProviderAzure       = "azure"
	ProviderOpenStack   = "openstack"
)

// CloudNames returns the names of the providers that are a cloud's metadata service.
func CloudNames() []string {
	return []string{ProviderAWS, ProviderGCP, ProviderAzure, ProviderOpenStack}
}

// ProviderNames returns the names of all providers in their default order: those of the machine itself, then clouds.
func ProviderNames() []string {
	return append([]string{ProviderMedium, ProviderCredential, ProviderNoCloud, ProviderConfigDrive}, CloudNames()...)
}

func (s Sources) validate() error {
	cloud := ""
	for i, p := range s.Providers {
		if !slices.Contains(ProviderNames(), p) || slices.Contains(s.Providers[:i], p) {
			return fmt.Errorf("metadata.providers[%d]: want one of %s, each once, not %q", i, strings.Join(ProviderNames(), ", "), p)
		}
		if slices.Contains(CloudNames(), p) {
			// A cloud that does not answer and one that is not there look the same, so a second one would never be asked.
			if cloud != "" {
				return fmt.Errorf("metadata.providers[%d]: %s is a second cloud beside %s: name one, or leave metadata.providers out, and each machine asks the cloud that its firmware names", i, p, cloud)
			}
			cloud = p
		}
	}
	return nil
}

// StateDisk is the mode and the place of a machine's state.
type StateDisk struct {
	// Mode is [DiskPlain] or [DiskLUKS].
	Mode string `json:"mode"`
	// Path is the folder (plain) or the device (luks).
	Path string `json:"path"`
	// Integrity, of mode luks, is "hmac-sha256" (default) or "none": then writes to the disk by an attacker are not detected.
	Integrity string `json:"integrity,omitempty"`
}

// Backup is how often control planes make a backup of the cluster by themselves.
type Backup struct {
	// Every is the time between two; 0: only when the owner orders one. At least [MinBackupEvery].
	Every time.Duration
	// Keep is how many stay on the state disk: 1 to [MaxBackups], 3 if there is no other value.
	Keep int
}

const (
	// MinBackupEvery is the shortest time between two backups: each reads the whole etcd.
	MinBackupEvery = 10 * time.Minute
	// MaxBackups bounds the backups on a state disk.
	MaxBackups = 100
	// backupsKept is the default number of kept backups.
	backupsKept = 3
)

type backupFile struct {
	Every string `json:"every,omitempty"`
	Keep  *int   `json:"keep,omitempty"`
}

func (f backupFile) parse(owner attest.OwnerKeys) (Backup, error) {
	b := Backup{Keep: backupsKept}
	if f.Keep != nil {
		b.Keep = *f.Keep
	}
	if b.Keep < 1 || b.Keep > MaxBackups {
		return b, fmt.Errorf("backup.keep: want 1 to %d, not %d", MaxBackups, b.Keep)
	}
	if f.Every == "" {
		return b, nil
	}
	var err error
	if b.Every, err = time.ParseDuration(f.Every); err != nil || b.Every < MinBackupEvery {
		return b, fmt.Errorf(`backup.every: want at least %s, as in "24h", not %q`, MinBackupEvery, f.Every)
	}
	if len(owner) == 0 {
		return b, errors.New("backup.every: backups are encrypted for the owner's key: write ownerKeys, or remove backup")
	}
	return b, nil
}

// TPM is the path of the machine's TPM 2.0, and its settings.
type TPM struct {
	// Device is the path of a character device or of an emulator's unix socket. Default
	// /dev/tpmrm0.
	Device string `json:"device,omitempty"`
	// EventLog is the path of the firmware's event log. Default: Linux's path.
	EventLog string `json:"eventLog,omitempty"`
	// Bank is the PCR bank that is quoted: sha256 (default), sha384 or sha512.
	Bank string `json:"bank,omitempty"`
}

// Kubeadm is the image's part of kubeadm's configuration; package kubeadm merges it, and Muster's settings win.
type Kubeadm struct {
	// CRISocket is the container runtime's endpoint. Default
	// unix:///run/containerd/containerd.sock.
	CRISocket string `json:"criSocket,omitempty"`
	// IgnorePreflightErrors lists kubeadm's checks that this image can't pass.
	IgnorePreflightErrors []string `json:"ignorePreflightErrors,omitempty"`
	// ClusterConfiguration, KubeletConfiguration and KubeProxyConfiguration are
	// fragments of the kinds of the same name.
	ClusterConfiguration   json.RawMessage `json:"clusterConfiguration,omitempty"`
	KubeletConfiguration   json.RawMessage `json:"kubeletConfiguration,omitempty"`
	KubeProxyConfiguration json.RawMessage `json:"kubeProxyConfiguration,omitempty"`
}

// Listen has HOST:PORT addresses; an empty host means all addresses.
type Listen struct {
	// Init is the address of the init server. Default ":9000".
	Init string `json:"init,omitempty"`
	// Recover is the address of a control plane's recovery server, while the state disk waits for its key. Default ":9999".
	Recover string `json:"recover,omitempty"`
	// Metrics is the address of metrics and probes, in plain HTTP. Default "127.0.0.1:9466".
	Metrics string `json:"metrics,omitempty"`
	// AttesterMetrics is the same for the attester. Default "127.0.0.1:9465".
	AttesterMetrics string `json:"attesterMetrics,omitempty"`
}

// imageFile is the format of the file.
type imageFile struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	StateDisk  StateDisk `json:"stateDisk"`
	TPM        TPM       `json:"tpm,omitempty"`
	OwnerKeys  []string  `json:"ownerKeys,omitempty"`
	EKRoots    string    `json:"ekRoots,omitempty"`
	// LowestPolicySerial is read by the cluster's services too: internal/service.
	LowestPolicySerial uint64     `json:"lowestPolicySerial,omitempty"`
	Backup             backupFile `json:"backup,omitzero"`
	Kubeadm            Kubeadm    `json:"kubeadm,omitempty"`
	Listen             Listen     `json:"listen,omitempty"`
	Metadata           Sources    `json:"metadata,omitzero"`
	Insecure           struct {
		NoOwnerKey bool `json:"noOwnerKey,omitempty"`
	} `json:"insecure,omitzero"`
}

// LoadImage reads an image's configuration.
func LoadImage(file string) (*Image, error) { return load(file, ParseImage) }

// ParseImage parses an image's configuration (YAML).
func ParseImage(b []byte) (*Image, error) {
	var f imageFile
	if err := strict(b, &f, "ImageConfiguration", func() (string, string) { return f.APIVersion, f.Kind }); err != nil {
		return nil, err
	}
	img := &Image{StateDisk: f.StateDisk, TPM: f.TPM, Kubeadm: f.Kubeadm, Listen: f.Listen, Metadata: f.Metadata, NoOwnerKey: f.Insecure.NoOwnerKey, LowestPolicySerial: f.LowestPolicySerial}
	if img.StateDisk.Mode == DiskLUKS {
		setDefault(&img.StateDisk.Integrity, IntegrityHMAC)
	}
	setDefault(&img.TPM.Device, "/dev/tpmrm0")
	setDefault(&img.TPM.EventLog, "/sys/kernel/security/tpm0/binary_bios_measurements")
	setDefault(&img.TPM.Bank, "sha256")
	setDefault(&img.Kubeadm.CRISocket, "unix:///run/containerd/containerd.sock")
	setDefault(&img.Listen.Init, ":9000")
	setDefault(&img.Listen.Recover, ":9999")
	setDefault(&img.Listen.Metrics, "127.0.0.1:9466")
	setDefault(&img.Listen.AttesterMetrics, "127.0.0.1:9465")
	if err := img.validate(); err != nil {
		return nil, err
	}
	var err error
	if f.OwnerKeys != nil {
		if img.OwnerKeys, err = attest.ParseOwnerKeys(f.OwnerKeys); err != nil {
			return nil, fmt.Errorf("ownerKeys: %w", err)
		}
	}
	if len(img.OwnerKeys) > 0 && img.NoOwnerKey {
		return nil, errors.New("insecure.noOwnerKey: there are ownerKeys, so take this out")
	}
	if len(img.OwnerKeys) == 0 && img.LowestPolicySerial > 0 {
		return nil, errors.New("lowestPolicySerial: it has no effect without ownerKeys: write the owner's key, or remove lowestPolicySerial")
	}
	if img.Backup, err = f.Backup.parse(img.OwnerKeys); err != nil {
		return nil, err
	}
	roots, err := parseRoots(f.EKRoots)
	if err != nil {
		return nil, fmt.Errorf("ekRoots: %w", err)
	}
	img.EKRoots = roots
	return img, nil
}

func (img *Image) validate() error {
	switch img.StateDisk.Mode {
	case DiskPlain, DiskLUKS:
	case "":
		return errors.New(`stateDisk.mode is missing and has no default: write "plain" (state is not encrypted, and the policy must allow that) or "luks"`)
	default:
		return fmt.Errorf(`stateDisk.mode: want "plain" or "luks", not %q`, img.StateDisk.Mode)
	}
	if err := img.StateDisk.validateIntegrity(); err != nil {
		return err
	}
	for _, p := range []struct{ field, path string }{
		{"stateDisk.path", img.StateDisk.Path}, {"tpm.device", img.TPM.Device}, {"tpm.eventLog", img.TPM.EventLog},
	} {
		if !path.IsAbs(p.path) || path.Clean(p.path) != p.path || p.path == "/" {
			return fmt.Errorf("%s: want an absolute, clean path, not %q", p.field, p.path)
		}
	}
	if _, err := tpm.ParseBank(img.TPM.Bank); err != nil {
		return fmt.Errorf("tpm.bank: %w", err)
	}
	if !strings.HasPrefix(img.Kubeadm.CRISocket, "unix:///") {
		return fmt.Errorf("kubeadm.criSocket: want unix:///PATH, not %q", img.Kubeadm.CRISocket)
	}
	for _, a := range []struct{ field, addr string }{
		{"listen.init", img.Listen.Init}, {"listen.recover", img.Listen.Recover}, {"listen.metrics", img.Listen.Metrics}, {"listen.attesterMetrics", img.Listen.AttesterMetrics},
	} {
		if _, _, err := net.SplitHostPort(a.addr); err != nil {
			return fmt.Errorf("%s: want HOST:PORT: %w", a.field, err)
		}
	}
	return img.Metadata.validate()
}

func (d StateDisk) validateIntegrity() error {
	switch {
	case d.Integrity == "":
	case d.Mode != DiskLUKS:
		return fmt.Errorf("stateDisk.integrity: only mode %q has it", DiskLUKS)
	case d.Integrity != IntegrityHMAC && d.Integrity != IntegrityNone:
		return fmt.Errorf("stateDisk.integrity: want %q or %q, not %q", IntegrityHMAC, IntegrityNone, d.Integrity)
	}
	return nil
}

// ErrNoOwner means that an image has no owner's key and does not set insecure.noOwnerKey.
var ErrNoOwner = errors.New("ownerKeys is missing, so a joinservice could not be distinguished from another machine that poses as one: " +
	"put the owner's public key into image.yaml (muster key), or insecure: {noOwnerKey: true}")

// KnowsOwner returns nil if the image has an owner's key or sets insecure.noOwnerKey; otherwise [ErrNoOwner].
func (img *Image) KnowsOwner() error {
	if len(img.OwnerKeys) == 0 && !img.NoOwnerKey {
		return ErrNoOwner
	}
	return nil
}

// These are labels of muster_insecure_config.
const (
	// InsecureIntegrity is the label of [IntegrityNone].
	InsecureIntegrity = "state_integrity_none"
	// InsecureOwner is the label of NoOwnerKey.
	InsecureOwner = "owner_key_unknown"
)

// Insecure returns the labels of muster_insecure_config for the settings of the image that weaken the machine.
func (img *Image) Insecure() (labels []string) {
	if img.StateDisk.Integrity == IntegrityNone {
		labels = append(labels, InsecureIntegrity)
	}
	if img.NoOwnerKey {
		labels = append(labels, InsecureOwner)
	}
	return labels
}

func parseRoots(text string) ([]*x509.Certificate, error) {
	var roots []*x509.Certificate
	rest := []byte(strings.TrimSpace(text))
	for len(rest) > 0 {
		block, more := pem.Decode(rest)
		if block == nil || block.Type != "CERTIFICATE" {
			return nil, errors.New("want PEM certificates and nothing else")
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(roots)+1, err)
		}
		if !c.IsCA {
			return nil, fmt.Errorf("certificate %d: %q is not a certificate authority", len(roots)+1, c.Subject)
		}
		roots = append(roots, c)
		rest = more
	}
	return roots, nil
}

func setDefault(s *string, v string) {
	if *s == "" {
		*s = v
	}
}

// strict decodes one document by [Unmarshal], and refuses every other kind.
func strict(b []byte, into any, kind string, got func() (string, string)) error {
	if err := Unmarshal(b, into); err != nil {
		return err
	}
	if v, k := got(); v != APIVersion || k != kind {
		return fmt.Errorf("want apiVersion %s and kind %s, not %q and %q", APIVersion, kind, v, k)
	}
	return nil
}

// load reads a file of bounded size and names it in every error.
func load[T any](file string, parse func([]byte) (*T, error)) (*T, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxFile {
		return nil, fmt.Errorf("%s: longer than %d bytes", file, maxFile)
	}
	v, err := parse(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return v, nil
}
