package tpm_test

import (
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// platformTemplate is that of a cloud's attestation key: Muster's without the marker.
func platformTemplate(rsaKey bool) gotpm.TPMTPublic {
	t := tpm.AKTemplate(rsaKey)
	t.AuthPolicy = gotpm.TPM2BDigest{}
	return t
}

// provisionPlatform does the work of a cloud: it makes the key, has ca certify it, and stores what the
// guest needs.
func provisionPlatform(t testing.TB, dev transport.TPM, ca *attesttest.CA, slot int, p attesttest.Platform) {
	t.Helper()
	s := tpm.PlatformSlots[slot]
	template := platformTemplate(s.RSA)
	key := must(gotpm.CreatePrimary{
		PrimaryHandle: gotpm.AuthHandle{Handle: gotpm.TPMRHEndorsement, Auth: gotpm.PasswordAuth(nil)},
		InPublic:      gotpm.New2B(template),
	}.Execute(dev))(t)
	public := must(gotpm.Pub(*must(key.OutPublic.Contents())(t)))(t)
	tpmtest.WriteNV(t, dev, s.Certificate, append(ca.IssuePlatform(t, public, p)[0], make([]byte, 10)...))
	if s.Template != 0 {
		tpmtest.WriteNV(t, dev, s.Template, gotpm.Marshal(template))
	} else {
		must(gotpm.EvictControl{
			Auth:             gotpm.AuthHandle{Handle: gotpm.TPMRHOwner, Auth: gotpm.PasswordAuth(nil)},
			ObjectHandle:     &gotpm.NamedHandle{Handle: key.ObjectHandle, Name: key.Name},
			PersistentHandle: gotpm.TPMHandle(s.Handle),
		}.Execute(dev))(t)
	}
	must(gotpm.FlushContext{FlushHandle: key.ObjectHandle}.Execute(dev))(t)
}

func TestSWTPMWithAPlatformKeyAttests(t *testing.T) {
	ca := attesttest.NewCA(t)
	for name, tt := range map[string]struct {
		slot int
		p    attesttest.Platform
		kind attest.EKKind
	}{
		"Google, ECC": {0, attesttest.Platform{Project: "ours", Zone: "zone-a"}, attest.EKP256},
		"Google, RSA": {1, attesttest.Platform{Project: "ours", Zone: "zone-a"}, attest.EKRSA2048},
		"Azure":       {2, attesttest.Platform{Azure: true}, attest.EKRSA2048},
	} {
		t.Run(name, func(t *testing.T) {
			e := tpmtest.SWTPM(t) // it has EK certificates, too
			provisionPlatform(t, raw(t, e), ca, tt.slot, tt.p)
			var id attest.MachineID
			for range 2 {
				dev := e.Open()
				for range 2 { // the second time from what is cached
					c, err := exchange(t, dev, ca)
					if err != nil {
						t.Fatal(err)
					}
					if c.Endorsement() != "platform-ak" || c.EKKind() != tt.kind || c.Instance().Project != tt.p.Project || id != (attest.MachineID{}) && c.Machine() != id {
						t.Errorf("%s, %s, %+v, machine %s after %s", c.Endorsement(), c.EKKind(), c.Instance(), c.Machine(), id)
					}
					id = c.Machine()
				}
				e.Restart()
			}
		})
	}
}

func TestPlatformKeysThatDoNotFitTheirCertificatesAreRefused(t *testing.T) {
	ca := attesttest.NewCA(t)
	certificate := attesttest.NewMachine(t, ca, attesttest.Options{Platform: &attesttest.Platform{Project: "ours", Zone: "a"}})
	chain := must(certificate.PlatformCertificates(t.Context()))(t)
	template := gotpm.Marshal(platformTemplate(false))
	for name, nv := range map[string]map[uint32][]byte{
		"a certificate for another key":   {0x01C10002: chain[0], 0x01C10003: template},
		"a certificate without template":  {0x01C10002: chain[0]},
		"a template that is none":         {0x01C10002: chain[0], 0x01C10003: []byte("template")},
		"an index without a certificate":  {0x01C10002: make([]byte, 100), 0x01C10003: template},
		"a certificate that is none":      {0x01C10002: []byte{0x30, 0x03, 1, 2, 3}, 0x01C10003: template},
		"a certificate without a handle":  {0x01C101D0: chain[0]},
		"a template of a key for secrets": {0x01C10002: chain[0], 0x01C10003: gotpm.Marshal(gotpm.ECCEKTemplate)},
	} {
		t.Run(name, func(t *testing.T) {
			e := tpmtest.SWTPM(t, tpmtest.Bare())
			for index, data := range nv {
				tpmtest.WriteNV(t, raw(t, e), index, data)
			}
			dev := e.Open()
			if _, err := dev.PlatformCertificates(t.Context()); err == nil {
				t.Error("certificates were returned")
			}
			// The machine does not fall back to another identity (A8).
			if _, err := exchange(t, dev, ca); err == nil {
				t.Error("it attests as another machine")
			}
		})
	}
}
