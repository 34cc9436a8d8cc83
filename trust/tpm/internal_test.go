package tpm

import (
	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// Slot is a place where the EK Credential Profile stores a certificate.
type Slot struct {
	Name     string
	Index    uint32
	Template gotpm.TPMTPublic
	Nonce    uint32 // 0: none
}

// Slots lists the slots and templates that EndorsementKey knows.
func Slots() []Slot {
	names := []string{"L-2", "H-2", "H-3", "L-1", "H-1"}
	var out []Slot
	for i, s := range ekSlots {
		out = append(out, Slot{names[i], uint32(s.index), s.kind.template(s.high, s.kind.unique(s.high)), uint32(s.nonce)})
	}
	return out
}

// NonceTemplate is the template of a slot with a nonce in its unique part.
func NonceTemplate(i int, nonce []byte) gotpm.TPMTPublic {
	s := ekSlots[i]
	return s.kind.template(s.high, s.kind.uniqueFromNonce(nonce))
}

// Forget clears t's cached keys, as in a new process.
func (t *TPM) Forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ek, t.platform, t.nitro = nil, nil, nil
	t.keys = map[keyID]savedKey{}
}

// Internals that external tests need.
var (
	OpenPath          = openPath
	SplitCertificates = splitCertificates
	DirectPath        = directPath
)

// Patient returns a TPM that retries as conn's does.
func Patient(dev transport.TPM) transport.TPM { return patient{dev} }

// PlatformSlots are the places of platform keys.
var PlatformSlots = func() (out []struct {
	Certificate, Template, Handle uint32
	RSA                           bool
}) {
	for i, s := range platformSlots {
		out = append(out, struct {
			Certificate, Template, Handle uint32
			RSA                           bool
		}{uint32(s.certificate), uint32(s.template), uint32(s.handle), i > 0})
	}
	return out
}()
