package attest

import (
	"encoding/hex"
	"regexp"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// MaxRevoked is how many keys and certificates together a policy may revoke.
const MaxRevoked = 1024

// Certificate is one certificate of an endorsement key's chain, as a policy revokes it.
type Certificate = checked.Certificate

// revoked holds the revoked keys and certificates. The zero value revokes nothing.
type revoked struct {
	keys         map[[32]byte]bool
	certificates map[issued]bool
}

// issued identifies a certificate by its issuer's key and its serial number in hexadecimal digits.
type issued struct {
	issuer [32]byte
	serial string
}

var serialNumber = regexp.MustCompile(`^[1-9a-f][0-9a-f]{0,39}$`)

// FormatFirmwareVersion returns a TPM's firmware version as a policy has it: "0x" and 16 hexadecimal digits.
func FormatFirmwareVersion(v uint64) string { return endorsement.FormatFirmwareVersion(v) }

func (p *Policy) parseRevoked(r *attestv1.Revoked) error {
	if n := len(r.GetKeys()) + len(r.GetCertificates()); n > MaxRevoked {
		return invalid("tpm2.revoked lists %d keys and certificates, more than %d: revoke the authority that issued them", n, MaxRevoked)
	}
	p.revoked = revoked{keys: map[[32]byte]bool{}, certificates: map[issued]bool{}}
	for i, s := range r.GetKeys() {
		key, err := parseHex(s, 32)
		if err != nil {
			return invalid("tpm2.revoked.keys[%d]: %q: %w", i, s, err)
		}
		if p.revoked.keys[[32]byte(key)] {
			return invalid("tpm2.revoked.keys lists %s twice", s)
		}
		p.revoked.keys[[32]byte(key)] = true
	}
	for m := range p.revoked.keys {
		for _, rules := range p.rules {
			if field := rules.Listed(m); field != "" {
				return invalid("tpm2.revoked.keys has machine %x, and %s lists it: remove it from one of them", m, field)
			}
		}
	}
	for _, m := range p.servers {
		if p.revoked.keys[m] {
			return invalid("tpm2.revoked.keys has machine %s, and controlPlanes lists it: ban its node first, then remove the machine from controlPlanes in the same edit, or remove the key from tpm2.revoked", m)
		}
	}
	for i, c := range r.GetCertificates() {
		issuer, err := parseHex(c.GetIssuerKey(), 32)
		if err != nil {
			return invalid("tpm2.revoked.certificates[%d].issuerKey: %q: %w", i, c.GetIssuerKey(), err)
		}
		if !serialNumber.MatchString(c.GetSerial()) {
			return invalid("tpm2.revoked.certificates[%d].serial is %q: want 1 to 40 lower-case hexadecimal digits without leading zeros", i, c.GetSerial())
		}
		k := issued{[32]byte(issuer), c.GetSerial()}
		if p.revoked.certificates[k] {
			return invalid("tpm2.revoked.certificates lists serial number %s of issuer %s twice", c.GetSerial(), c.GetIssuerKey())
		}
		p.revoked.certificates[k] = true
	}
	return nil
}

// check refuses a machine whose ID is revoked, or whose chain contains a revoked key or certificate. The
// chain begins with the endorsed key's certificate and ends with the root. A chain without certificates
// cannot be checked, so it is also refused (A3).
func (r revoked) check(machine MachineID, chain []Certificate) error {
	if r.keys[machine] {
		return Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "the policy revokes the key %s (tpm2.revoked.keys): it is this machine's ID", machine)
	}
	if len(chain) == 0 {
		return Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "the EK certificate's chain is not known, so it cannot be compared with what the policy revokes")
	}
	for i, c := range chain {
		if r.keys[c.Key] {
			return Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "the policy revokes the key %s of %q (tpm2.revoked.keys)", hex.EncodeToString(c.Key[:]), c.Subject)
		}
		if i+1 < len(chain) && r.certificates[issued{chain[i+1].Key, c.Serial}] {
			return Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "the policy revokes the certificate of %q with serial number %s, issued by %q (tpm2.revoked.certificates)", c.Subject, c.Serial, chain[i+1].Subject)
		}
	}
	return nil
}
