package ownerorder_test

import (
	"crypto/ed25519"
	"crypto/sha256"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// B11: a machine executes what its owner has signed for it, in time, and nothing else.
func TestAnOrderIsForOneMachineAndForSomeTime(t *testing.T) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	stranger, strangers, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	on := ownerorder.Addressee{Cluster: keys.ClusterID{1}, Machine: attest.MachineID{2}, Disk: "5f0c95b6-2a3d-4c7e-9f10-000000000001", Node: "w1"}
	good := ownerorder.MachineOrder{
		Cluster: on.Cluster.String(), Node: on.Node, Machine: on.Machine, Disk: on.Disk, Action: ownerorder.ActionReboot, SignedAt: at, NotAfter: at.Add(time.Hour),
	}
	const (
		accepted  = attestv1.Reason_REASON_ACCEPTED
		signature = attestv1.Reason_REASON_OWNER_SIGNATURE
		invalid   = attestv1.Reason_REASON_REQUEST_INVALID
		clock     = attestv1.Reason_REASON_CLOCK_SKEW
	)
	for name, tt := range map[string]struct {
		order  func(*ownerorder.MachineOrder)
		signed func(*ownerorder.SignedMachineOrder)
		by     ed25519.PrivateKey
		owner  attest.OwnerKeys
		now    time.Time
		want   attestv1.Reason
	}{
		"the owner's":                      {want: accepted},
		"at its last second":               {now: at.Add(time.Hour), want: accepted},
		"the owner's clock is a bit ahead": {now: at.Add(-ownerorder.MaxAhead), want: accepted},
		"signed by somebody else":          {by: strangers, want: signature},
		"this image has another owner":     {owner: attest.OwnerKeys{stranger}, want: signature},
		"this image has no owner":          {owner: attest.OwnerKeys{}, want: signature},
		"the text was changed":             {signed: func(s *ownerorder.SignedMachineOrder) { s.Text = strings.Replace(s.Text, "reboot", "doctor", 1) }, want: signature},
		"the signature was cut":            {signed: func(s *ownerorder.SignedMachineOrder) { s.Signature = s.Signature[:63] }, want: signature},
		"too long": {order: func(o *ownerorder.MachineOrder) {
			o.Action = ownerorder.Action(strings.Repeat("x", ownerorder.MaxMachineOrder))
		}, want: signature},
		"for another cluster":               {order: func(o *ownerorder.MachineOrder) { o.Cluster = keys.ClusterID{9}.String() }, want: invalid},
		"for another machine":               {order: func(o *ownerorder.MachineOrder) { o.Machine = attest.MachineID{9} }, want: invalid},
		"for the disk before":               {order: func(o *ownerorder.MachineOrder) { o.Disk = "5f0c95b6-2a3d-4c7e-9f10-000000000009" }, want: invalid},
		"for another name":                  {order: func(o *ownerorder.MachineOrder) { o.Node = "cp1" }, want: invalid},
		"valid for longer than an order is": {order: func(o *ownerorder.MachineOrder) { o.NotAfter = at.Add(ownerorder.MaxMachineLife + time.Second) }, want: invalid},
		"never valid":                       {order: func(o *ownerorder.MachineOrder) { o.NotAfter = at }, want: invalid},
		"expired":                           {now: at.Add(time.Hour + time.Second), want: clock},
		"from the future":                   {now: at.Add(-ownerorder.MaxAhead - time.Second), want: clock},
	} {
		t.Run(name, func(t *testing.T) {
			o, by, owner, now := good, private, attest.OwnerKeys{public}, at
			if tt.order != nil {
				tt.order(&o)
			}
			if tt.by != nil {
				by = tt.by
			}
			if tt.owner != nil {
				owner = tt.owner
			}
			if !tt.now.IsZero() {
				now = tt.now
			}
			s, err := o.Sign(by)
			if err != nil {
				t.Fatal(err)
			}
			if tt.signed != nil {
				tt.signed(&s)
			}
			got, err := s.Genuine(owner, on)
			if err == nil {
				err = got.Timely(now)
			}
			if attest.ReasonOf(err) != tt.want {
				t.Fatalf("%v, want %s", err, attest.ReasonName(tt.want))
			}
			if err == nil && !reflect.DeepEqual(got, o) {
				t.Errorf("got %+v, want %+v", got, o)
			}
		})
	}
}

// What follows the order, and fields that this version does not know, could mean something to a reader that is less strict.
func TestAnOrderHasNothingButItsFields(t *testing.T) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	on := ownerorder.Addressee{Cluster: keys.ClusterID{1}, Machine: attest.MachineID{2}, Disk: "d", Node: "w1"}
	now := time.Now()
	o := ownerorder.MachineOrder{Cluster: on.Cluster.String(), Node: on.Node, Machine: on.Machine, Disk: on.Disk, Action: ownerorder.ActionDoctor, SignedAt: now, NotAfter: now.Add(time.Minute)}
	s, err := o.Sign(private)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{s.Text + "{}", strings.Replace(s.Text, "{", `{"arguments":"x",`, 1), "", "null", "[]"} {
		if _, err := (ownerorder.SignedMachineOrder{Text: text, Signature: ed25519.Sign(private, append([]byte("muster machine order v1\x00"), framed(text)...))}).Genuine(attest.OwnerKeys{public}, on); attest.ReasonOf(err) != attestv1.Reason_REASON_REQUEST_INVALID {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func framed(text string) []byte {
	n := len(text)
	return append([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, text...)
}

// A1: evidence for one order is for no other, however little they differ.
func TestEvidenceIsBoundToTheWholeOrder(t *testing.T) {
	s := ownerorder.SignedMachineOrder{Text: "text", Signature: make([]byte, ed25519.SignatureSize)}
	text, signature := s, s
	text.Text = "texs"
	signature.Signature = append(make([]byte, ed25519.SignatureSize-1), 1)
	if s.Binding() == text.Binding() || s.Binding() == signature.Binding() || s.Binding() == (attest.Binding{}) {
		t.Error("two orders have one binding")
	}
	// The formula of docs/attested-tls.md.
	order := sha256.Sum256(append([]byte(s.Text), s.Signature...))
	if s.Binding() != sha256.Sum256(append([]byte("muster machine order evidence v1\x00"), order[:]...)) {
		t.Error("the binding is another one than documented")
	}
}

func TestAChallengeIsReadFromArguments(t *testing.T) {
	want := &attestv1.Challenge{CredentialBlob: []byte{1, 2}, EncryptedSecret: []byte{3}}
	got, err := ownerorder.ParseChallenge(ownerorder.ChallengeArgs(want))
	if err != nil || !proto.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, arg := range []string{ownerorder.ArgCredential, ownerorder.ArgSecret} {
		args := ownerorder.ChallengeArgs(want)
		args[arg] = "?"
		if _, err := ownerorder.ParseChallenge(args); err == nil {
			t.Errorf("a %s that is no base64 is read", arg)
		}
	}
}

// The note survives its way through the API unchanged, and what is no note is none.
func TestANoteHasAnOrderAndItsSignature(t *testing.T) {
	_, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	want, err := ownerorder.MachineOrder{Node: "w1"}.Sign(private)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ownerorder.ParseMachineNote(want.Note())
	if err != nil || got.Text != want.Text || got.Digest() != want.Digest() {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	other := want
	other.Signature = make([]byte, ed25519.SignatureSize)
	if other.Digest() == want.Digest() {
		t.Error("the same text with another signature is the same order")
	}
	for _, note := range []string{"", " ", want.Text, strings.Replace(want.Note(), " ", "", 1), "AAAA " + want.Text, strings.Replace(want.Note(), " ", "\n ", 1), want.Note() + strings.Repeat(" ", ownerorder.MaxMachineOrder)} {
		if s, err := ownerorder.ParseMachineNote(note); err == nil {
			t.Errorf("%.40q is read as %+v", note, s)
		}
	}
}
