package attest

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

func TestAListOfOwnersKeysIsChecked(t *testing.T) {
	text := func(b byte) string {
		return base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{b}, ed25519.PublicKeySize))
	}
	four := []string{text(1), text(2), text(3), text(4)}
	for _, list := range [][]string{four[:1], four[:2], four} {
		keys, err := ParseOwnerKeys(list)
		if err != nil || !slices.Equal(keys.Strings(), list) || !keys.Has(keys[len(list)-1]) || keys.Has(make([]byte, 32)) {
			t.Errorf("%q: %q, %v", list, keys.Strings(), err)
		}
	}
	for name, tt := range map[string]struct {
		list []string
		says string
	}{
		"no list":               {nil, "1 to 4 keys, not 0"},
		"an empty list":         {[]string{}, "1 to 4 keys, not 0"},
		"five keys":             {append(slices.Clone(four), text(5)), "1 to 4 keys, not 5"},
		"a key twice":           {[]string{text(1), text(2), text(1)}, "key 3: " + text(1) + " is listed twice"},
		"an empty key":          {[]string{text(1), ""}, "key 2: want"},
		"a key cut short":       {[]string{text(1)[:40]}, "key 1: want"},
		"no base64":             {[]string{strings.Repeat("!", 44)}, "key 1: want"},
		"other bits at its end": {[]string{text(1)[:42] + "F="}, "key 1: want"}, // a second spelling of the same key
	} {
		if _, err := ParseOwnerKeys(tt.list); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestASignatureIsOfOneOfTheKeys(t *testing.T) {
	var keys OwnerKeys
	var private []ed25519.PrivateKey
	for range MaxOwnerKeys + 1 {
		public, k, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		keys, private = append(keys, public), append(private, k)
	}
	keys = keys[:MaxOwnerKeys] // the last one is a stranger's
	message := []byte("message")
	for i, k := range private {
		signature := ed25519.Sign(k, message)
		if i == MaxOwnerKeys {
			if keys.Signer(message, signature) != nil || keys.Verify(message, signature) {
				t.Error("a stranger's signature is the owner's")
			}
			continue
		}
		if !keys.Signer(message, signature).Equal(keys[i]) || !keys.Verify(message, signature) {
			t.Errorf("key %d is not found", i)
		}
		if keys.Verify([]byte("Message"), signature) || keys.Verify(message, signature[:63]) || keys.Verify(message, nil) || OwnerKeys(nil).Verify(message, signature) {
			t.Errorf("key %d: something else is accepted", i)
		}
	}
}

func TestOpenPolicy(t *testing.T) {
	_, pemRoot := ca(t, "operator")
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	otherPub, other, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, stranger, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	good := SignPolicy(priv, encode(t, goodPolicy(pemRoot)))
	ofOther := SignPolicy(other, good.GetPolicy())
	for name, tt := range map[string]struct {
		keys OwnerKeys
		s    *attestv1.SignedPolicy
		by   ed25519.PublicKey
	}{
		"the only key":            {OwnerKeys{pub}, good, pub},
		"the first of two keys":   {OwnerKeys{pub, otherPub}, good, pub},
		"the second of two keys":  {OwnerKeys{pub, otherPub}, ofOther, otherPub},
		"a key after another one": {OwnerKeys{otherPub}, ofOther, otherPub},
	} {
		if p, err := OpenPolicy(tt.keys, tt.s); err != nil || p.Serial() != 7 || !p.Signer().Equal(tt.by) {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if p, err := ParsePolicy(good.GetPolicy()); err != nil || p.Signer() != nil {
		t.Errorf("an unsigned policy has the signer %x, %v", p.Signer(), err)
	}
	changed := proto.CloneOf(good)
	changed.Policy = append(changed.Policy, ' ')
	for name, tt := range map[string]struct {
		keys OwnerKeys
		s    *attestv1.SignedPolicy
	}{
		"another key's signature": {OwnerKeys{pub}, ofOther},
		"another key":             {OwnerKeys{otherPub}, good},
		"a stranger's signature":  {OwnerKeys{pub, otherPub}, SignPolicy(stranger, good.GetPolicy())},
		"changed bytes":           {OwnerKeys{pub, otherPub}, changed},
		"no signature":            {OwnerKeys{pub}, &attestv1.SignedPolicy{Policy: good.GetPolicy()}},
		"nothing":                 {OwnerKeys{pub}, nil},
		"no key":                  {nil, good},
		"an empty list":           {OwnerKeys{}, good},
		"a key cut short":         {OwnerKeys{pub[:31]}, good},
		"a candidate":             {OwnerKeys{pub}, SignCandidate(priv, good.GetPolicy())},
		"a signature over the bare bytes": {OwnerKeys{pub}, &attestv1.SignedPolicy{
			Policy: good.GetPolicy(), Signature: ed25519.Sign(priv, good.GetPolicy()),
		}},
	} {
		t.Run(name+" is refused", func(t *testing.T) {
			if _, err := OpenPolicy(tt.keys, tt.s); ReasonOf(err) != attestv1.Reason_REASON_POLICY_SIGNATURE {
				t.Errorf("error %v", err)
			}
			if n, err := OpenSerial(tt.keys, tt.s); ReasonOf(err) != attestv1.Reason_REASON_POLICY_SIGNATURE || n != 0 {
				t.Errorf("its serial is %d, error %v", n, err)
			}
		})
	}
}

// B7: what another version has accepted counts, whatever this one refuses in it.
func TestTheSerialOfAPolicyThatThisVersionRefuses(t *testing.T) {
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	twice := MachineID{1}.String()
	for name, tt := range map[string]struct {
		json string
		want uint64 // 0: it has none
	}{
		"a list with an ID twice":      {`{"version": 2, "serial": "7", "controlPlanes": ["` + twice + `", "` + twice + `"]}`, 7},
		"a later version":              {`{"version": 3, "serial": 8, "later": {"a": [1]}}`, 8},
		"no serial":                    {`{"version": 2}`, 0},
		"no JSON":                      {`serial: 7`, 0},
		"more bytes than a policy has": {`{"serial": 7` + strings.Repeat(" ", MaxPolicySize) + `}`, 0},
	} {
		s := SignPolicy(priv, []byte(tt.json))
		if _, err := OpenPolicy(OwnerKeys{pub}, s); ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
			t.Errorf("%s: %v", name, err)
		}
		n, err := OpenSerial(OwnerKeys{pub}, s)
		if n != tt.want || (err != nil) != (tt.want == 0) || err != nil && ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
			t.Errorf("%s: serial %d, %v", name, n, err)
		}
	}
}
