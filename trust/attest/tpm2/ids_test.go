package tpm2_test

import (
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
	"github.com/muster-k8s/muster/trust/internal/endorsement/bareek"
	"github.com/muster-k8s/muster/trust/internal/endorsement/ekcert"
	"github.com/muster-k8s/muster/trust/internal/endorsement/nitrotpm"
	"github.com/muster-k8s/muster/trust/internal/endorsement/platformak"
)

// The vectors come from a program that shares no code with this one: it parses the captured certificates and the document itself.
func TestMachineIDsEqualTheVectorsOfAnIndependentProgram(t *testing.T) {
	raw, err := os.ReadFile("testdata/ids/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	type vector struct{ File, Public, Module, ID string }
	var all struct {
		EK       []vector `json:"ek_certificate"`
		Bare     []vector `json:"bare_ek"`
		Platform []vector `json:"platform_ak"`
		Nitro    []vector `json:"nitro_tpm"`
	}
	if err := json.Unmarshal(raw, &all); err != nil {
		t.Fatal(err)
	}
	if len(all.EK) != 3 || len(all.Bare) != 3 || len(all.Platform) != 8 || len(all.Nitro) != 3 {
		t.Fatalf("%d, %d, %d and %d vectors", len(all.EK), len(all.Bare), len(all.Platform), len(all.Nitro))
	}
	read := func(name string) (ders [][]byte) { // below trust
		text, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
			ders = append(ders, block.Bytes)
		}
		return ders
	}
	same := func(name string, id [32]byte, want string) {
		t.Helper()
		if got := hex.EncodeToString(id[:]); got != want {
			t.Errorf("%s: the machine ID is %s, want %s", name, got, want)
		}
	}
	for _, v := range all.EK {
		ders := read(v.File)
		root, err := x509.ParseCertificate(ders[len(ders)-1])
		if err != nil {
			t.Fatal(err)
		}
		r, err := ekcert.Endorsement{}.Verify(endorsement.Input{Evidence: &attestv1.Tpm2Evidence{EkCertificates: ders[:len(ders)-1]}, Roots: []*x509.Certificate{root}, Now: y2026})
		if err != nil {
			t.Fatal(err)
		}
		same(v.File, r.Machine, v.ID)
	}
	for _, v := range all.Bare {
		r, err := bareek.Endorsement{}.Verify(endorsement.Input{Evidence: &attestv1.Tpm2Evidence{EkPublic: unhex(t, v.Public)}})
		if err != nil {
			t.Fatal(err)
		}
		same(v.Public, r.Machine, v.ID)
	}
	for _, v := range all.Platform {
		leaf, err := x509.ParseCertificate(read(v.File)[0])
		if err != nil {
			t.Fatal(err)
		}
		instance, err := platformak.Identify(leaf)
		if err != nil {
			t.Fatal(err)
		}
		same(v.File, platformak.MachineID(leaf, instance), v.ID)
		instance.ID ^= 1
		if id := platformak.MachineID(leaf, instance); hex.EncodeToString(id[:]) == v.ID {
			t.Errorf("%s: another instance has this ID", v.File)
		}
	}
	for _, v := range all.Nitro {
		same(v.Module, nitrotpm.MachineID(v.Module), v.ID)
	}
	document, err := os.ReadFile("../../internal/endorsement/nitrotpm/testdata/nitrotpm.cbor")
	if err != nil {
		t.Fatal(err)
	}
	if module, err := nitrotpm.Module(document); err != nil || module != all.Nitro[0].Module {
		t.Errorf("the captured document is of module %q, %v", module, err)
	}
}
