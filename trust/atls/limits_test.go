package atls

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"
)

func TestASourceGetsItsBurstThenItsRate(t *testing.T) {
	now := time.Unix(1000, 0)
	b := newBuckets(Limits{Rate: 2, Burst: 3}, now)
	a, other := netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32")
	take := func(p netip.Prefix, n int) (got int) {
		for range n {
			if b.allow(p, now) {
				got++
			}
		}
		return got
	}
	if got := take(a, 10); got != 3 {
		t.Errorf("%d at once, want 3", got)
	}
	if got := take(other, 1); got != 1 {
		t.Error("another source is held up")
	}
	now = now.Add(time.Second)
	if got := take(a, 10); got != 2 {
		t.Errorf("%d after a second, want 2", got)
	}
	now = now.Add(time.Hour)
	if got := take(a, 10); got != 3 {
		t.Errorf("%d after an hour, want 3", got)
	}
	now = now.Add(-time.Hour)
	if got := take(a, 1); got != 0 {
		t.Error("a clock that goes back gives tokens")
	}
}

func TestManySourcesTakeBoundedMemory(t *testing.T) {
	now := time.Unix(1000, 0)
	b := newBuckets(Limits{Rate: 1, Burst: 2}, now)
	source := func(i int) netip.Prefix {
		var ip [4]byte
		binary.BigEndian.PutUint32(ip[:], uint32(i))
		return netip.PrefixFrom(netip.AddrFrom4(ip), 32)
	}
	for i := range maxSources {
		if !b.allow(source(i), now) {
			t.Fatalf("source %d is refused", i)
		}
	}
	rest := 0
	for i := range 100 {
		if b.allow(source(maxSources+i), now) {
			rest++
		}
	}
	if len(b.sources) > maxSources {
		t.Errorf("%d sources are remembered", len(b.sources))
	}
	if rest != 2 {
		t.Errorf("%d of the sources that no longer fit got through, want their shared burst of 2", rest)
	}
	now = now.Add(time.Minute) // all have their tokens again and can be forgotten
	for i := range 200 {
		if !b.allow(source(2*maxSources+i), now) {
			t.Fatalf("source %d is refused though there is room", i)
		}
	}
}

// One source cannot take all places, and gives back what it took.
func TestASourceHasItsShareOfThePlaces(t *testing.T) {
	p := newPlaces(Limits{SetUp: 5, SetUpPerSource: 2, Open: 6, OpenPerSource: 4})
	a, b, c := netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32"), netip.MustParsePrefix("10.0.0.3/32")
	take := func(source netip.Prefix, want string) {
		t.Helper()
		if got := p.take(source); got != want {
			t.Fatalf("%s: %q, want %q", source, got, want)
		}
	}
	take(a, "")
	take(a, "")
	take(a, "source_setup_full")
	take(b, "")
	take(b, "")
	take(c, "")
	take(c, "setup_full")
	p.ready(a)
	p.ready(a)
	take(a, "")
	p.ready(a)
	take(a, "open_full")
	p.ready(c)
	p.gone(c)
	take(a, "")
	p.ready(a)
	take(a, "source_open_full")
	for range 4 {
		p.gone(a)
	}
	for range 2 {
		p.ready(b)
		p.gone(b)
	}
	if p.setUp != 0 || p.open != 0 || len(p.sources) != 0 {
		t.Errorf("%+v is left of nothing", p)
	}
}

func TestLimitsHaveDefaults(t *testing.T) {
	want := Limits{SetUp: 1024, SetUpPerSource: 64, Open: 4096, OpenPerSource: 512, Rate: 16, Burst: 64, Large: 32}
	if got := (Limits{}).withDefaults(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestSourceIsAnAddressOrAnIPv6Network(t *testing.T) {
	for in, want := range map[string]string{
		"192.0.2.7:4000":                "192.0.2.7/32",
		"[::ffff:192.0.2.7]:4000":       "192.0.2.7/32",
		"[2001:db8:1:2:3:4:5:6]:4000":   "2001:db8:1:2::/64",
		"[fe80::1:2%eth0]:4000":         "fe80::/64",
		"@muster":                       "invalid Prefix",
		"[2001:db8:1:2:ffff::1]:443":    "2001:db8:1:2::/64",
		"[2001:db8:1:3:ffff::1]:443":    "2001:db8:1:3::/64",
		"192.0.2.7 and something after": "invalid Prefix",
	} {
		if got := sourceOf(textAddr(in)).String(); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

type textAddr string

func (textAddr) Network() string  { return "tcp" }
func (a textAddr) String() string { return string(a) }

var _ net.Addr = textAddr("")
