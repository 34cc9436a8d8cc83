package enrolled

import (
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestARetirementIsReadAsItWasWritten(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	r := Retire(now)
	if r.Admits("X509SHA256=aa") || r.Admits() || r.Admits("") {
		t.Error("a new one admits somebody")
	}
	if r.Lapsed(now.Add(CertificateLife)) || !r.Lapsed(now.Add(CertificateLife+time.Hour)) {
		t.Errorf("it lasts until %s", r.Until)
	}
	r = r.With("X509SHA256=aa").With("X509SHA256=bb")
	got, err := ParseRetirement(r.String())
	if err != nil || got.String() != r.String() || !got.Until.Equal(r.Until) || !got.Admits("X509SHA256=cc", "X509SHA256=bb") {
		t.Errorf("%s, %v", got, err)
	}
	if got.Admits("X509SHA256=a") || got.Admits(r.Until.Format(time.RFC3339)) {
		t.Error("a part of a word, or the time, is taken for a certificate")
	}
	for i := range 20 {
		got = got.With(fmt.Sprint(i))
	}
	if len(got.Certificates) != maxCertificates || !got.Admits("19") || got.Admits("11") {
		t.Errorf("%v", got.Certificates)
	}
	for _, s := range []string{"", " ", "tomorrow X509SHA256=aa"} {
		if r, err := ParseRetirement(s); err == nil || r.Admits("X509SHA256=aa") {
			t.Errorf("%q was read as %v", s, r)
		}
	}
}

func TestNoNodeHasTheKeyOfARetirement(t *testing.T) {
	if IsNode(Key("node1")) || !IsNode("node1") || !IsNode("certificates") {
		t.Error("keys are mixed up")
	}
}
