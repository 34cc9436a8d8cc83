package nodeaccess

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestWhatIsWrittenIsReadAgain(t *testing.T) {
	l := New(true)
	for i, e := range []Entry{
		{Suspended: true}, {ControlPlane: true, Member: true}, {Unattested: true, Member: true}, {Paused: true}, {Addresses: "192.0.2.1 2001:db8::1", Suspended: true},
		{Revoked: &Revocation{Until: now}}, {Suspended: true, Revoked: &Revocation{Until: now, Allowed: []string{"X509SHA256=01", "X509SHA256=02"}}},
	} {
		l.Set(fmt.Sprintf("n%d", i), e)
	}
	data, err := l.Data()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if !again.MembersOnly || !slices.Equal(again.Nodes(), l.Nodes()) {
		t.Fatalf("%v, members only %v", again.Nodes(), again.MembersOnly)
	}
	for _, n := range l.Nodes() {
		if !again.Entry(n).Equal(l.Entry(n)) {
			t.Errorf("%s: %+v, want %+v", n, again.Entry(n), l.Entry(n))
		}
	}
	if second, err := again.Data(); err != nil || !maps.Equal(second, data) {
		t.Errorf("%q, %v; want %q", second, err, data)
	}
}

func TestAnEmptyListHasNoKeys(t *testing.T) {
	l := New(false)
	l.Set("w1", Entry{Suspended: true})
	l.Set("w1", Entry{})
	if data, err := l.Data(); err != nil || len(data) > 0 {
		t.Errorf("%v, %v", data, err)
	}
	if data, err := New(true).Data(); err != nil || data[KeyMembers] == "" {
		t.Errorf("%q, %v: without the key every node could write", data, err)
	}
}

// Without the key, admission lets any node run the key service: it stays when the last control plane is removed from a list that has had one.
func TestAListOfControlPlanesStaysOneWhenItIsEmpty(t *testing.T) {
	for _, clone := range []bool{false, true} {
		l, err := Parse(map[string]string{KeyControlPlanes: "\ncp1\n"})
		if err != nil {
			t.Fatal(err)
		}
		if clone {
			l = l.Clone()
		}
		l.Set("cp1", Entry{})
		if data, err := l.Data(); err != nil || data[KeyControlPlanes] != "\n" {
			t.Errorf("%q, %v", data, err)
		}
	}
	l, err := Parse(map[string]string{KeyControlPlanes: "\n"})
	if err != nil {
		t.Fatal(err)
	}
	if data, err := l.Data(); err != nil || len(data) != 1 {
		t.Errorf("%q, %v", data, err)
	}
}

func TestALineThatIsNoneIsAnError(t *testing.T) {
	for name, data := range map[string]map[string]string{
		"a name with a space": {KeySuspended: "\nw1 w2\n"},
		"no addresses":        {KeyAddresses: "\nw1\n"},
		"no time":             {KeyRevoked: "\nw1\n"},
		"a wrong time":        {KeyRevoked: "\nw1 tomorrow\n"},
	} {
		if _, err := Parse(data); err == nil || !strings.Contains(err.Error(), "line 1") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestARevocationEndsAllCertificatesSoFar(t *testing.T) {
	r := Entry{}.Revoke(now)
	if r.Revoked.Until.Before(now.Add(CertificateLife)) || len(r.Revoked.Allowed) > 0 {
		t.Fatalf("%+v", r.Revoked)
	}
	allowed := r.Allow("a").Allow("b").Allow("a")
	if !slices.Equal(allowed.Revoked.Allowed, []string{"a", "b"}) || len(r.Revoked.Allowed) > 0 {
		t.Errorf("%v, and the one before %v", allowed.Revoked.Allowed, r.Revoked.Allowed)
	}
	if again := allowed.Revoke(now.Add(-time.Hour)); len(again.Revoked.Allowed) > 0 || !again.Revoked.Until.Equal(r.Revoked.Until) {
		t.Errorf("revoked again: %+v", again.Revoked)
	}
	if foreign := (Entry{Unattested: true, Member: true}).Revoke(now); foreign.Unattested || foreign.Member || foreign.Revoked.Until.Before(now.Add(ForeignLife)) {
		t.Errorf("of a node without attestation: %+v", foreign)
	}
	if e := (Entry{}).Allow("a"); !e.Equal(Entry{}) {
		t.Errorf("nothing is revoked, and %+v", e)
	}
	many := r
	for i := range 100 {
		many = many.Allow(fmt.Sprint(i))
	}
	if got := many.Revoked.Allowed; len(got) != maxCertificates || got[len(got)-1] != "99" {
		t.Errorf("%v", got)
	}
}

// TestTheListHasRoomForTenThousandNodes reaches the bound of docs/performance.md with the longest names that nodes have; a ban can be written even then.
func TestTheListHasRoomForTenThousandNodes(t *testing.T) {
	l := New(false)
	for i := range 10_000 {
		l.Set(fmt.Sprintf("%063d", i), Entry{}.Revoke(now))
	}
	if _, err := l.Data(); err != nil {
		t.Fatal(err)
	}
	for i := range 2000 {
		l.Set(fmt.Sprintf("%063d", 20_000+i), Entry{}.Revoke(now))
	}
	if _, err := l.Data(); err == nil {
		t.Fatal("12,000 entries were taken")
	}
	for i := range 2000 {
		l.Set(fmt.Sprintf("%063d", 20_000+i), Entry{})
	}
	for i := range 1000 {
		l.Set(fmt.Sprintf("b%062d", i), Entry{Suspended: true})
	}
	data, err := l.Data()
	if err != nil {
		t.Fatal(err)
	}
	size := 0
	for _, v := range data {
		size += len(v)
	}
	if size > 1<<20 {
		t.Errorf("%d bytes, and Kubernetes takes 1 MiB", size)
	}
}
