package platformak

import (
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"unicode"

	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// Providers of certificates, as policies write them.
const (
	GCP   = "gcp"
	Azure = "azure"
)

// oidGCEInstance is Google's extension with the identity of a virtual machine.
var oidGCEInstance = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 11129, 2, 1, 21}

// azureNames end the common names of Azure's certificates: Trusted Launch and confidential VMs.
var azureNames = []string{".TrustedVM.Azure.windows.net", ".ConfidentialVM.Azure.windows.net"}

// maxName is the longest name of an instance, in bytes.
const maxName = 128

// Identify returns the virtual machine that a platform key's certificate names. An error means that it
// is no certificate of an attestation key of a known provider.
func Identify(leaf *x509.Certificate) (checked.Instance, error) {
	switch {
	case !endorsement.Canonical(leaf): // A8
		return checked.Instance{}, errors.New("its key has an unusual type or encoding")
	case leaf.IsCA:
		return checked.Instance{}, errors.New("it is that of an authority")
	case leaf.KeyUsage != x509.KeyUsageDigitalSignature: // those of endorsement keys have other usages
		return checked.Instance{}, errors.New("its key usage is not digital signature alone: it is for no attestation key")
	}
	var found *pkix.Extension
	for i, e := range leaf.Extensions {
		if e.Id.Equal(oidGCEInstance) {
			if found != nil {
				return checked.Instance{}, fmt.Errorf("it has the extension %s twice", oidGCEInstance)
			}
			found = &leaf.Extensions[i]
		}
	}
	if found != nil {
		return parseGCE(found.Value)
	}
	if slices.ContainsFunc(leaf.UnknownExtKeyUsage, oidAIKCertificate.Equal) {
		return parseAzure(leaf.Subject.CommonName)
	}
	return checked.Instance{}, fmt.Errorf("it has neither the extension %s (gcp) nor the extended key usage %s (azure)", oidGCEInstance, oidAIKCertificate)
}

// gceInstance is the content of the extension, as go-tpm-tools documents it.
type gceInstance struct {
	Zone          string `asn1:"utf8"`
	ProjectNumber *big.Int
	ProjectID     string   `asn1:"utf8"`
	InstanceID    *big.Int // 64 bits, unsigned
	InstanceName  string   `asn1:"utf8"`
	Security      struct {
		Version    int64 `asn1:"explicit,tag:0,optional"`
		Production bool  `asn1:"explicit,tag:1,optional"`
		// Further elements, whose meaning is not documented, are ignored.
	} `asn1:"explicit,tag:0"`
}

func parseGCE(der []byte) (checked.Instance, error) {
	var g gceInstance
	if rest, err := asn1.Unmarshal(der, &g); err != nil || len(rest) > 0 {
		return checked.Instance{}, errors.New("its instance extension is malformed")
	}
	if !g.Security.Production {
		return checked.Instance{}, errors.New("it is of a virtual machine that is not in production: its host's firmware is unknown")
	}
	for _, s := range []string{g.Zone, g.ProjectID, g.InstanceName} {
		if !printable(s) {
			return checked.Instance{}, fmt.Errorf("its instance extension has a name that is empty, too long or not printable: %q", s)
		}
	}
	if g.ProjectNumber.Sign() <= 0 || g.ProjectNumber.BitLen() > 64 || g.InstanceID.Sign() <= 0 || g.InstanceID.BitLen() > 64 {
		return checked.Instance{}, errors.New("its instance extension has a number out of range")
	}
	return checked.Instance{
		Provider: GCP, Project: g.ProjectID, ProjectNumber: g.ProjectNumber.Uint64(), Zone: g.Zone, ID: g.InstanceID.Uint64(), Name: g.InstanceName,
	}, nil
}

func parseAzure(name string) (checked.Instance, error) {
	for _, suffix := range azureNames {
		if host, ok := strings.CutSuffix(name, suffix); ok && printable(host) && !strings.Contains(host, ".") {
			return checked.Instance{Provider: Azure, Name: name}, nil
		}
	}
	return checked.Instance{}, fmt.Errorf("its common name %q is not that of a virtual machine of Azure", name)
}

func printable(s string) bool {
	return s != "" && len(s) <= maxName && !strings.ContainsFunc(s, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) })
}

// MachineID returns SHA-256("muster platform key" || 0x00 || provider || 0x00 || SHA-256 of the key's
// SubjectPublicKeyInfo || uint64(project number) || uint64(instance ID)). Numbers that a certificate does
// not have are 0. Names are left out: they can change while the machine stays the same.
func MachineID(leaf *x509.Certificate, i checked.Instance) [32]byte {
	key := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	h := sha256.New()
	h.Write([]byte("muster platform key\x00" + i.Provider + "\x00"))
	h.Write(key[:])
	h.Write(binary.BigEndian.AppendUint64(nil, i.ProjectNumber))
	h.Write(binary.BigEndian.AppendUint64(nil, i.ID))
	return [32]byte(h.Sum(nil))
}
