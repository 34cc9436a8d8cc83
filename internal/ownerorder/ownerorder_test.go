package ownerorder

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	owner = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, 32))
	now   = time.Unix(1_800_000_000, 0).UTC()
)

func public(k ed25519.PrivateKey) ed25519.PublicKey { return ed25519.PublicKey(k[32:]) }

func order() Order {
	return Order{Cluster: keys.ClusterID{1, 2, 3}, Request: []byte("request"), At: now}
}

// The vector was made by other programs: Python's struct and hashlib, and OpenSSL for the signature.
func TestTheFormIsThatOfAnIndependentProgram(t *testing.T) {
	const (
		input     = "6d75737465722061646d696e6973747261746f72206f7264657220763100000000200102030000000000000000000000000000000000000000000000000000000000000000077265717565737400000008000000006b49d200"
		name      = "muster-admin-e3c036aaf28f50363e0f4736a826abb4"
		signature = "j1y8LORDGtEqM40tYt4VR2m3tlUtMPFzcXZXZeWm11QfJBJOgzZ5Rxkapzxqcss9begxkXCUuKi514X1DRKZCg=="
	)
	o := order()
	if got := hex.EncodeToString(o.input()); got != input {
		t.Errorf("signed is %s", got)
	}
	if o.Name() != name {
		t.Errorf("the name is %s", o.Name())
	}
	if got := base64.StdEncoding.EncodeToString(o.Sign(owner).Signature); got != signature {
		t.Errorf("the signature is %s", got)
	}
}

// Invariant J9.
func TestOnlyTheOwnersOrderForThisClusterAndNowCounts(t *testing.T) {
	otherKey := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{8}, 32))
	for name, tt := range map[string]struct {
		change func(*Signed)
		owner  attest.OwnerKeys
		now    time.Time
		want   attestv1.Reason
	}{
		"the owner's":               {},
		"at its oldest":             {now: now.Add(MaxAge)},
		"of a clock that is ahead":  {now: now.Add(-MaxAhead)},
		"another key's":             {change: func(s *Signed) { *s = s.Sign(otherKey) }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"nobody's":                  {change: func(s *Signed) { s.Signature = nil }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"with a changed signature":  {change: func(s *Signed) { s.Signature[63] ^= 1 }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"with another request":      {change: func(s *Signed) { s.Request = []byte("Request") }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"with a longer request":     {change: func(s *Signed) { s.Request = append(s.Request, 0) }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"with another time":         {change: func(s *Signed) { s.At = s.At.Add(time.Second) }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"with another cluster":      {change: func(s *Signed) { s.Cluster[0]++ }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"for another cluster":       {change: func(s *Signed) { s.Cluster[0]++; *s = s.Sign(owner) }, want: attestv1.Reason_REASON_REQUEST_INVALID},
		"too old":                   {now: now.Add(MaxAge + time.Second), want: attestv1.Reason_REASON_CLOCK_SKEW},
		"of the future":             {now: now.Add(-MaxAhead - time.Second), want: attestv1.Reason_REASON_CLOCK_SKEW},
		"where no owner is known":   {owner: attest.OwnerKeys{}, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"a policy that he signed":   {change: func(s *Signed) { s.Signature = attest.SignPolicy(owner, s.input()).GetSignature() }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
		"a policy of the same text": {change: func(s *Signed) { s.Signature = attest.SignPolicy(owner, s.input()[len(domain):]).GetSignature() }, want: attestv1.Reason_REASON_OWNER_SIGNATURE},
	} {
		t.Run(name, func(t *testing.T) {
			s := order().Sign(owner)
			if tt.change != nil {
				tt.change(&s)
			}
			if tt.owner == nil {
				tt.owner = attest.OwnerKeys{public(owner)}
			}
			if tt.now.IsZero() {
				tt.now = now
			}
			err := s.Verify(tt.owner, keys.ClusterID{1, 2, 3}, tt.now)
			if tt.want == attestv1.Reason_REASON_UNSPECIFIED {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if attest.ReasonOf(err) != tt.want {
				t.Errorf("%v, want %s", err, attest.ReasonName(tt.want))
			}
		})
	}
}

// An order must not be usable as the owner's signature of a policy, which would admit machines (J9).
func TestAnOrderIsNoPolicy(t *testing.T) {
	o := order()
	for _, text := range [][]byte{o.input(), o.input()[len(domain):], o.Request} {
		_, err := attest.OpenPolicy(attest.OwnerKeys{public(owner)}, &attestv1.SignedPolicy{Policy: text, Signature: o.Sign(owner).Signature})
		if attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_SIGNATURE {
			t.Errorf("%v, want POLICY_SIGNATURE", err)
		}
	}
}

// Two different orders never have the same input: a byte can't move from one part to the next.
func TestEveryPartIsInTheSignatureAndTheName(t *testing.T) {
	seen := map[string]bool{}
	for _, o := range []Order{
		order(),
		{Cluster: keys.ClusterID{1, 2, 4}, Request: []byte("request"), At: now},
		{Cluster: keys.ClusterID{1, 2, 3}, Request: []byte("reques"), At: now},
		{Cluster: keys.ClusterID{1, 2, 3}, Request: []byte("request\x00"), At: now},
		{Cluster: keys.ClusterID{1, 2, 3}, Request: nil, At: now},
		{Cluster: keys.ClusterID{1, 2, 3}, Request: []byte("request"), At: now.Add(-time.Second)},
	} {
		for _, text := range []string{string(o.input()), o.Name(), string(o.Sign(owner).Signature)} {
			if seen[text] {
				t.Errorf("%v has what another has: %q", o, text)
			}
			seen[text] = true
		}
	}
}

func TestAnOrderIsReadAsItWasSent(t *testing.T) {
	s := order().Sign(owner)
	got, err := Parse(s.Wire())
	if err != nil || got.Verify(attest.OwnerKeys{public(owner)}, s.Cluster, now) != nil || got.Name() != s.Name() {
		t.Fatalf("%+v, %v", got, err)
	}
	for name, change := range map[string]func(*joinv1.AdministratorOrder){
		"no cluster":           func(w *joinv1.AdministratorOrder) { w.ClusterId = nil },
		"a long cluster":       func(w *joinv1.AdministratorOrder) { w.ClusterId = append(w.GetClusterId(), 0) },
		"no request":           func(w *joinv1.AdministratorOrder) { w.Csr = nil },
		"a long request":       func(w *joinv1.AdministratorOrder) { w.Csr = make([]byte, MaxRequest+1) },
		"no time":              func(w *joinv1.AdministratorOrder) { w.SignedAt = nil },
		"a part of a second":   func(w *joinv1.AdministratorOrder) { w.SignedAt.Nanos = 1 },
		"a time of no year":    func(w *joinv1.AdministratorOrder) { w.SignedAt = &timestamppb.Timestamp{Seconds: 1 << 60} },
		"no signature":         func(w *joinv1.AdministratorOrder) { w.Signature = nil },
		"a signature too long": func(w *joinv1.AdministratorOrder) { w.Signature = append(w.GetSignature(), 0) },
	} {
		w := proto.CloneOf(s.Wire())
		change(w)
		if _, err := Parse(w); attest.ReasonOf(err) != attestv1.Reason_REASON_REQUEST_INVALID {
			t.Errorf("%s: %v, want REQUEST_INVALID", name, err)
		}
	}
	if _, err := Parse(nil); attest.ReasonOf(err) != attestv1.Reason_REASON_REQUEST_INVALID {
		t.Errorf("nothing: %v, want REQUEST_INVALID", err)
	}
}

func TestAnAnnotationIsReadAsItWasWritten(t *testing.T) {
	s := order().Sign(owner)
	got, err := ParseNote(s.Note(), s.Cluster, s.Request)
	if err != nil || got.Verify(attest.OwnerKeys{public(owner)}, s.Cluster, now) != nil || got.Name() != s.Name() {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, note := range []string{"", " ", s.Note() + " ", s.Note() + "\n", " " + s.Note(), strings.Replace(s.Note(), "Z ", "+00:00 ", 1), strings.Replace(s.Note(), "Z ", ".0Z ", 1), strings.TrimSuffix(s.Note(), "=")} {
		if _, err := ParseNote(note, s.Cluster, s.Request); err == nil {
			t.Errorf("%q was read", note)
		}
	}
}

func FuzzParseNote(f *testing.F) {
	f.Add(order().Sign(owner).Note())
	f.Add("2027-01-15T08:00:00Z AAAA")
	f.Fuzz(func(t *testing.T, note string) {
		s, err := ParseNote(note, keys.ClusterID{1, 2, 3}, []byte("request"))
		if err == nil && s.Note() != note {
			t.Errorf("%q is also written as %q", note, s.Note())
		}
		if note != order().Sign(owner).Note() && err == nil && s.Verify(attest.OwnerKeys{public(owner)}, s.Cluster, now) == nil {
			t.Errorf("%q passes for the owner's order", note)
		}
	})
}
