package atls

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// hexBytes is a value in the vectors.
type hexBytes []byte

func (h *hexBytes) UnmarshalText(text []byte) (err error) {
	*h, err = hex.DecodeString(string(text))
	return err
}

type vectors struct {
	ExporterLabel string `json:"exporter_label"`
	Sessions      []struct {
		Name             string
		EKM              hexBytes
		ClientOffer      hexBytes `json:"client_offer"`
		ServerOffer      hexBytes `json:"server_offer"`
		Offers           hexBytes
		ActivationSecret hexBytes `json:"activation_secret"`
		Sides            []struct {
			Role       string
			Binding    hexBytes
			Statements map[attest.Purpose]hexBytes
			Response   hexBytes
		}
	}
}

func readVectors(t *testing.T) vectors {
	t.Helper()
	raw, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var v vectors
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	if len(v.Sessions) < 4 {
		t.Fatalf("%d sessions, want at least 4", len(v.Sessions))
	}
	return v
}

// The vectors come from a program that shares no code with this one (A1).
func TestFormulasEqualTheVectorsOfAnIndependentProgram(t *testing.T) {
	v := readVectors(t)
	if v.ExporterLabel != exporterLabel {
		t.Errorf("label %q, want %q", exporterLabel, v.ExporterLabel)
	}
	for _, s := range v.Sessions {
		t.Run(s.Name, func(t *testing.T) {
			for _, raw := range [][]byte{s.ClientOffer, s.ServerOffer} {
				f, got, err := readFrame(bytes.NewReader(raw), maxFrame, nil)
				if err != nil || f.GetOffer() == nil {
					t.Fatalf("offer %x: %v, %v", raw, f, err)
				}
				if !bytes.Equal(got, raw) {
					t.Errorf("raw frame %x, want it as it came: %x", got, raw)
				}
			}
			offers := hashOffers(s.ClientOffer, s.ServerOffer)
			if !bytes.Equal(offers[:], s.Offers) {
				t.Fatalf("offers %x, want %x", offers, s.Offers)
			}
			roles := map[string]role{"client": roleClient, "server": roleServer}
			if len(s.Sides) != len(roles) {
				t.Fatalf("%d sides", len(s.Sides))
			}
			for _, side := range s.Sides {
				b := newBinding(roles[side.Role], [32]byte(s.EKM), offers)
				if !bytes.Equal(b[:], side.Binding) {
					t.Fatalf("%s: binding %x, want %x", side.Role, b, side.Binding)
				}
				if len(side.Statements) != 4 {
					t.Fatalf("%d purposes, want 4", len(side.Statements))
				}
				for purpose, want := range side.Statements {
					if got := attest.NewStatement(purpose, b); !bytes.Equal(got[:], want) {
						t.Errorf("%s: statement for %s is %x, want %x", side.Role, purpose, got, want)
					}
				}
				if got := tpm2.ActivationMAC(s.ActivationSecret, b); !bytes.Equal(got, side.Response) {
					t.Errorf("%s: response %x, want %x", side.Role, got, side.Response)
				}
			}
		})
	}
}

func TestOfferFramesAreEncodedAsInTheVectors(t *testing.T) {
	tpm := []attestv1.Format{attestv1.Format_FORMAT_TPM2}
	want := map[string]*attestv1.Offer{
		"mutual":                 {Gives: tpm, Accepts: tpm},
		"client does not attest": {Accepts: tpm},
		"empty offers":           {},
	}
	for _, s := range readVectors(t).Sessions {
		o, ok := want[s.Name]
		if !ok {
			continue
		}
		raw, err := encodeFrame(offerFrame(o))
		if err != nil || !bytes.Equal(raw, s.ClientOffer) {
			t.Errorf("%s: %x, %v; want %x", s.Name, raw, err, s.ClientOffer)
		}
		delete(want, s.Name)
	}
	if len(want) > 0 {
		t.Errorf("no vectors for %v", want)
	}
}

// A change of any part changes the binding: each part prevents an attack.
func TestEveryPartIsInTheBinding(t *testing.T) {
	ekm, offers := [32]byte{1}, [32]byte{2}
	seen := map[attest.Binding]string{}
	for name, b := range map[string]attest.Binding{
		"as is":              newBinding(roleClient, ekm, offers),
		"another role":       newBinding(roleServer, ekm, offers),
		"another session":    newBinding(roleClient, [32]byte{3}, offers),
		"other offers":       newBinding(roleClient, ekm, [32]byte{3}),
		"offers swapped":     newBinding(roleClient, ekm, hashOffers([]byte("b"), []byte("a"))),
		"offers not swapped": newBinding(roleClient, ekm, hashOffers([]byte("a"), []byte("b"))),
	} {
		if other, ok := seen[b]; ok {
			t.Errorf("%q and %q have one binding", name, other)
		}
		seen[b] = name
	}
}

func lengthPrefixed(body []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}
