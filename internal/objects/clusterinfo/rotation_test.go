package clusterinfo

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"
)

// newPublic returns the public part of a new key, with its ID.
func newPublic(t *testing.T, key RotatedKey) (id, public string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block := &pem.Block{Type: "PUBLIC KEY"}
	if key == ServiceAccountKey {
		block.Bytes, err = x509.MarshalPKIXPublicKey(private.Public())
	} else {
		block.Type, block.Bytes = "CERTIFICATE", nil
		template := &x509.Certificate{SerialNumber: big.NewInt(1)}
		block.Bytes, err = x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	}
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(block.Bytes)
	return hex.EncodeToString(sum[:]), string(pem.EncodeToMemory(block))
}

func TestARotationIsRead(t *testing.T) {
	id := strings.Repeat("ab", 32)
	front, ca := newPublic(t, FrontProxyCA)
	other, _ := newPublic(t, FrontProxyCA)
	for name, tt := range map[string]struct {
		wrong, right Rotation
	}{
		"an unknown key":                     {Rotation{Key: "another-ca", Phase: RotationAccept}, Rotation{Key: ServiceAccountKey, Phase: RotationAccept}},
		"an unknown phase":                   {Rotation{Key: EncryptionKey, Phase: "drop", ID: id}, Rotation{Key: EncryptionKey, Phase: RotationFinish, ID: id}},
		"a phase that needs a key":           {Rotation{Key: EncryptionKey, Phase: RotationUse}, Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id}},
		"an ID in capitals":                  {Rotation{Key: EncryptionKey, Phase: RotationUse, ID: strings.ToUpper(id)}, Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id}},
		"an ID of another size":              {Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id[2:]}, Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id}},
		"no public part of a key that has":   {Rotation{Key: FrontProxyCA, Phase: RotationUse, ID: front}, Rotation{Key: FrontProxyCA, Phase: RotationUse, ID: front, Public: ca}},
		"a public part of another key":       {Rotation{Key: FrontProxyCA, Phase: RotationUse, ID: other, Public: ca}, Rotation{Key: FrontProxyCA, Phase: RotationUse, ID: front, Public: ca}},
		"a public part without an ID":        {Rotation{Key: FrontProxyCA, Phase: RotationAccept, Public: ca}, Rotation{Key: FrontProxyCA, Phase: RotationAccept}},
		"a public part of a key without one": {Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id, Public: "x"}, Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id}},
	} {
		if err := tt.wrong.check(); err == nil {
			t.Errorf("%s is accepted", name)
		}
		if err := tt.right.check(); err != nil {
			t.Errorf("%s, repaired: %v", name, err)
		}
	}
	if !(*Rotation)(nil).Joins() || (*Rotation)(nil).check() != nil {
		t.Error("no rotation keeps control planes out")
	}
}

// Who can write a report, or the cluster's description, can't have a key of his own taken for the new one.
func TestAPublicPartIsThatOfItsKey(t *testing.T) {
	for _, key := range RotatedKeys() {
		if key.PublicFile() == "" {
			if key.CheckPublic(strings.Repeat("ab", 32), "x") == nil {
				t.Errorf("%s has a public part", key)
			}
			continue
		}
		id, public := newPublic(t, key)
		other, foreign := newPublic(t, key)
		block, _ := pem.Decode([]byte(public))
		for name, wrong := range map[string]string{
			"nothing":             "",
			"no PEM":              "x",
			"another key":         foreign,
			"two keys":            public + foreign,
			"text behind":         public + "x",
			"another type of PEM": string(pem.EncodeToMemory(&pem.Block{Type: "RSA PUBLIC KEY", Bytes: block.Bytes})),
		} {
			if key.CheckPublic(id, wrong) == nil {
				t.Errorf("%s: %s is accepted", key, name)
			}
		}
		noKey := sha256.Sum256([]byte("x"))
		if key.CheckPublic(hex.EncodeToString(noKey[:]), string(pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: []byte("x")}))) == nil {
			t.Errorf("%s: what is no key is accepted", key)
		}
		if key.CheckPublic(other, public) == nil {
			t.Errorf("%s: another ID is accepted", key)
		}
		if err := key.CheckPublic(id, public); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
}

func TestAPhaseIsReachedByWhatAControlPlaneReports(t *testing.T) {
	id, old := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
	r := &Rotation{Key: ServiceAccountKey, ID: id}
	for name, tt := range map[string]struct {
		s    KeyState
		want string // of accept, use and finish
	}{
		"nothing":                    {KeyState{}, ""},
		"the old key":                {KeyState{Accepts: []string{old}, Uses: old}, ""},
		"staged, not accepted":       {KeyState{Accepts: []string{old}, Uses: old, Staged: []string{id}}, ""},
		"accepted, not staged":       {KeyState{Accepts: []string{old, id}, Uses: old}, ""},
		"accepted":                   {KeyState{Accepts: []string{old, id}, Uses: old, Staged: []string{id}}, "accept"},
		"used":                       {KeyState{Accepts: []string{id, old}, Uses: id, Staged: []string{id}}, "accept use"},
		"joined with it":             {KeyState{Accepts: []string{id, old}, Uses: id}, "accept use"},
		"used and not accepted":      {KeyState{Accepts: []string{old}, Uses: id}, ""},
		"the only one, still staged": {KeyState{Accepts: []string{id}, Uses: id, Staged: []string{id}}, "accept use"},
		"the only one":               {KeyState{Accepts: []string{id}, Uses: id}, "accept use finish"},
	} {
		var got []string
		for _, p := range []RotationPhase{RotationAccept, RotationUse, RotationFinish} {
			if r.Reached(p, tt.s) {
				got = append(got, string(p))
			}
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
		if (&Rotation{Key: ServiceAccountKey}).Reached(RotationAccept, tt.s) {
			t.Errorf("%s: a phase without a key is reached", name)
		}
	}
}
