package peerlimit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func source(i int) Source {
	var ip [4]byte
	binary.BigEndian.PutUint32(ip[:], uint32(i))
	return netip.PrefixFrom(netip.AddrFrom4(ip), 32)
}

// guests has a test's places by name.
type guests struct {
	t       *testing.T
	l       *Limiter[string]
	evicted []string
}

func newGuests(t *testing.T, capacity, perSource int64) (*guests, func(time.Duration)) {
	now := time.Unix(1000, 0)
	g := &guests{t: t, l: NewLimiter[string](capacity, perSource)}
	g.l.now = func() time.Time { return now }
	return g, func(d time.Duration) { now = now.Add(d) }
}

func (g *guests) take(source, name string, weight int64, want error) *Place[string] {
	g.t.Helper()
	p, err := g.l.Take(source, weight, func() { g.evicted = append(g.evicted, name) })
	if !errors.Is(err, want) || want == nil && err != nil {
		g.t.Fatalf("%s takes %d: %v, want %v", name, weight, err, want)
	}
	return p
}

func (g *guests) gone(want ...string) {
	g.t.Helper()
	if !slices.Equal(g.evicted, want) {
		g.t.Fatalf("%v gave way, want %v", g.evicted, want)
	}
	g.evicted = nil
}

func TestASourceHasItsShare(t *testing.T) {
	g, _ := newGuests(t, 10, 3)
	first := g.take("a", "a1", 2, nil)
	g.take("a", "a2", 1, nil)
	g.take("a", "a3", 1, ErrSourceFull)
	first.Release()
	first.Release()
	g.take("a", "a3", 2, nil)
	g.gone()
	if got := g.l.Used(); got != 3 {
		t.Errorf("%d used, want 3", got)
	}
}

func TestWhoHoldsTheMostGivesWay(t *testing.T) {
	g, pass := newGuests(t, 4, 4)
	for _, name := range []string{"a1", "a2", "a3"} {
		g.take("a", name, 1, nil)
		pass(time.Millisecond)
	}
	g.take("b", "b1", 1, nil)
	g.take("c", "c1", 1, nil) // a has three
	g.gone("a1")
	g.take("b", "b2", 1, ErrFull) // a and b would have two
	g.gone()
	pass(settle)
	g.take("b", "b2", 1, nil) // a's places are older than 2 s
	g.gone("a2")
	g.take("a", "a4", 1, nil) // b has two now, and the first is old
	g.gone("b1")
}

func TestAsManySourcesAsPlacesWaitUntilOneIsOld(t *testing.T) {
	g, pass := newGuests(t, 2, 2)
	g.take("a", "a1", 1, nil)
	pass(time.Second)
	g.take("b", "b1", 1, nil)
	g.take("c", "c1", 1, ErrFull)
	pass(time.Second)
	g.take("c", "c1", 1, nil)
	g.gone("a1")
}

// A machine that retries gets a place although silent connections come from more sources than there are places. The numbers are
// those of joinservice's handshakes; the sources are those of an attacker who has the addresses of a gateway's network.
func TestAMachineThatTriesAgainGetsIn(t *testing.T) {
	const places, attempts, again = 256, 40, 5 * time.Second
	for _, flood := range []struct {
		rate, sources int // connections a second
		takes         time.Duration
		want          int // of 40 attempts
	}{
		{60, 1000, 1400 * time.Millisecond, attempts}, {60, 4000, 1400 * time.Millisecond, attempts}, {120, 4000, 1400 * time.Millisecond, attempts},
		{300, 432, 1400 * time.Millisecond, attempts}, {300, 4000, 1400 * time.Millisecond, 8}, // 128 newcomers a second get in, so 17 attempts would
	} {
		t.Run(fmt.Sprintf("%d a second of %d", flood.rate, flood.sources), func(t *testing.T) {
			g, pass := newGuests(t, places, 64)
			rate, random := NewRate(16, 64, 128, g.l.now()), rand.New(rand.NewPCG(1, 2))
			type end struct {
				at    time.Time
				place *Place[string]
			}
			var ends []end // in order
			in, done := 0, 0
			var honest *Place[string]
			var out bool
			var until, next time.Time
			next = g.l.now().Add(time.Minute) // the flood began before
			for n := 0; done < attempts; n++ {
				pass(time.Duration(random.Int64N(2 * int64(time.Second) / int64(flood.rate))))
				now := g.l.now()
				for len(ends) > 0 && !ends[0].at.After(now) {
					ends[0].place.Release()
					ends = ends[1:]
				}
				switch {
				case honest != nil && !now.Before(until):
					if done++; !out {
						in++
					}
					honest.Release()
					honest = nil
				case honest == nil && !now.Before(next):
					next = now.Add(again)
					out, until = false, now.Add(flood.takes)
					p, err := (*Place[string])(nil), rate.Allow(source(1<<24), now)
					if err == nil {
						p, err = g.l.Take("honest", 1, func() { out = true })
					}
					if honest = p; err != nil {
						done++
					}
				}
				if id := n % flood.sources; rate.Allow(source(id), now) == nil {
					if p, err := g.l.Take(fmt.Sprint(id), 1, func() {}); err == nil {
						ends = append(ends, end{now.Add(5 * time.Second), p})
					}
				}
			}
			t.Logf("%d of %d attempts", in, attempts)
			if in < flood.want {
				t.Errorf("%d of %d attempts succeeded, want %d", in, attempts, flood.want)
			}
		})
	}
}

// Many honest machines that each do one thing do not interrupt each other; a machine that takes more loses its place.
func TestEqualsAreKept(t *testing.T) {
	g, pass := newGuests(t, 2, 2)
	g.l.KeepEqual()
	g.take("a", "a1", 1, nil)
	g.take("b", "b1", 1, nil)
	pass(time.Hour)
	g.take("c", "c1", 1, ErrFull)
	g.gone()
	g, pass = newGuests(t, 2, 2)
	g.l.KeepEqual()
	g.take("a", "a1", 1, nil)
	pass(time.Millisecond)
	g.take("a", "a2", 1, nil)
	g.take("c", "c1", 1, nil)
	g.gone("a1")
}

func TestNothingIsTakenBackInVain(t *testing.T) {
	g, _ := newGuests(t, 4, 4)
	g.take("a", "a1", 1, nil)
	g.take("a", "a2", 1, nil)
	g.take("b", "b1", 2, nil)
	g.take("c", "c1", 2, ErrFull) // would hold as much as either
	g.gone()
	if got := g.l.Used(); got != 4 {
		t.Errorf("%d used, want 4", got)
	}
}

func TestAPinnedPlaceStays(t *testing.T) {
	g, pass := newGuests(t, 2, 2)
	unpin := g.take("a", "a1", 1, nil).Pin()
	g.take("a", "a2", 1, nil)
	g.take("b", "b1", 1, nil)
	g.gone("a2")
	pass(time.Hour)
	g.take("c", "c1", 1, nil)
	g.gone("b1")
	pass(time.Hour)
	unpin()
	unpin()
	g.take("d", "d1", 1, nil)
	g.gone("c1") // a1 is as young as a new one
}

func TestAPlaceShrinks(t *testing.T) {
	g, _ := newGuests(t, 4, 4)
	p := g.take("a", "a1", 4, nil)
	p.Shrink(5)
	p.Shrink(1)
	g.take("b", "b1", 3, nil)
	g.gone()
	p.Release()
	p.Shrink(0)
	if got := g.l.Used(); got != 3 {
		t.Errorf("%d used, want 3", got)
	}
}

// Whatever sources do, the held units stay within the capacity, each source stays within its share, and a source without a place
// gets one as soon as another source holds more than it would.
func TestALimiterKeepsItsBounds(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		now := time.Unix(1000, 0)
		capacity, share := rapid.Int64Range(1, 20).Draw(rt, "capacity"), rapid.Int64Range(1, 20).Draw(rt, "share")
		l := NewLimiter[string](capacity, share)
		l.now = func() time.Time { return now }
		held := map[*Place[string]]string{}
		weight := map[*Place[string]]int64{}
		of := func(source string) (sum int64) {
			for p, s := range held {
				if s == source {
					sum += weight[p]
				}
			}
			return sum
		}
		rt.Repeat(map[string]func(*rapid.T){
			"take": func(rt *rapid.T) {
				s, w := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, "source"), rapid.Int64Range(1, 4).Draw(rt, "weight")
				var p *Place[string]
				before, most := of(s), int64(0)
				for _, other := range []string{"a", "b", "c"} {
					if other != s {
						most = max(most, of(other))
					}
				}
				free := capacity - of("a") - of("b") - of("c")
				p, err := l.Take(s, w, func() {
					for v := range held {
						if v.gone {
							delete(held, v)
						}
					}
				})
				if err == nil {
					held[p], weight[p] = s, w
				} else if before+w <= min(share, capacity) && (free >= w || w == 1 && most > before+w) {
					rt.Fatalf("%s holds %d of %d, %d free, another holds %d, and gets nothing: %v", s, before, capacity, free, most, err)
				}
			},
			"release": func(rt *rapid.T) {
				for p := range held {
					p.Release()
					delete(held, p)
					return
				}
			},
			"time": func(rt *rapid.T) { now = now.Add(time.Second) },
			"": func(rt *rapid.T) {
				sum := of("a") + of("b") + of("c")
				if l.Used() != sum || sum > capacity || max(of("a"), of("b"), of("c")) > share {
					rt.Fatalf("%d used, %d held of %d, share %d", l.Used(), sum, capacity, share)
				}
			},
		})
	})
}

func TestASourceGetsItsBurstThenItsRate(t *testing.T) {
	now := time.Unix(1000, 0)
	r := NewRate(2, 3, 1000, now)
	take := func(s Source, n int) (got int) {
		for range n {
			if r.Allow(s, now) == nil {
				got++
			}
		}
		return got
	}
	if got := take(source(1), 10); got != 3 {
		t.Errorf("%d at once, want 3", got)
	}
	if got := take(source(2), 1); got != 1 {
		t.Error("another source is held up")
	}
	now = now.Add(time.Second)
	if got := take(source(1), 10); got != 2 {
		t.Errorf("%d after a second, want 2", got)
	}
	now = now.Add(time.Hour)
	if got := take(source(1), 10); got != 3 {
		t.Errorf("%d after an hour, want 3", got)
	}
	now = now.Add(-time.Hour)
	if got := take(source(1), 1); got != 0 {
		t.Error("a clock that goes back gives tokens")
	}
}

func TestSourcesThatComeOftenLeaveRoomForThoseThatDoNot(t *testing.T) {
	now := time.Unix(1000, 0)
	r := NewRate(4, 8, 10, now)
	passed := 0
	for range 100 {
		for i := range 50 {
			if r.Allow(source(i), now) == nil {
				passed++
			}
		}
		now = now.Add(10 * time.Millisecond)
	}
	// 50 came for the first time, and all together have 10 at once and 10 a second.
	if passed < 50 || passed > 50+10+10+1 {
		t.Errorf("%d passed in a second, want 50 to 71", passed)
	}
	if err := r.Allow(source(0), now); err == nil {
		t.Error("a source that comes often passes when all tokens are used up")
	} else if !errors.Is(err, ErrFull) && !errors.Is(err, ErrSourceFull) {
		t.Error(err)
	}
	if err := r.Allow(source(77), now); err != nil {
		t.Errorf("a source that comes for the first time: %v", err)
	}
}

func TestManySourcesTakeBoundedMemory(t *testing.T) {
	now := time.Unix(1000, 0)
	r := NewRate(1, 2, 1e9, now)
	for i := range maxSources {
		if err := r.Allow(source(i), now); err != nil {
			t.Fatalf("source %d: %v", i, err)
		}
	}
	rest := 0
	for i := range 100 {
		if r.Allow(source(maxSources+i), now) == nil {
			rest++
		}
	}
	if len(r.sources) > maxSources {
		t.Errorf("%d sources are remembered", len(r.sources))
	}
	if rest != 2 {
		t.Errorf("%d of the sources that no longer fit got through, want their shared burst of 2", rest)
	}
	now = now.Add(time.Minute) // all have their tokens again and can be forgotten
	for i := range 200 {
		if err := r.Allow(source(2*maxSources+i), now); err != nil {
			t.Fatalf("source %d though there is room: %v", i, err)
		}
	}
}

// The memory of the remembered sources, as counted in limits.md.
func TestRememberedSourcesFitTheirMemory(t *testing.T) {
	ipv6 := func(i int) Source {
		ip := [16]byte{0x20, 0x01}
		binary.BigEndian.PutUint32(ip[4:], uint32(i))
		return netip.PrefixFrom(netip.AddrFrom16(ip), 64)
	}
	for name, remember := range map[string]func() (any, func(Source)){
		"Rate": func() (any, func(Source)) {
			r := NewRate(1, 2, 1e9, time.Now())
			return r, func(s Source) { _ = r.Allow(s, time.Now()) }
		},
		"Queue": func() (any, func(Source)) {
			q := NewQueue(QueueConfig{Slots: 1, Waiting: 1, PerSource: 1})
			return q, func(s Source) { _ = q.Do(t.Context(), s, func() error { return nil }) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			heap := func() int64 {
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return int64(m.HeapAlloc)
			}
			before, most := heap(), int64(0)
			table, source := remember()
			for i := range 2*maxSources + 2 {
				source(ipv6(i))
				if i%(maxSources/4) == 0 || i == maxSources-1 {
					most = max(most, heap()-before)
				}
			}
			runtime.KeepAlive(table)
			if most > SourcesMemory || most < maxSources*8 {
				t.Errorf("%d bytes for %d sources, want at most %d", most, maxSources, SourcesMemory)
			}
		})
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
		if got := SourceOf(textAddr(in)).String(); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

type textAddr string

func (textAddr) Network() string  { return "tcp" }
func (a textAddr) String() string { return string(a) }

var _ net.Addr = textAddr("")

func TestAListenerKeepsRoomForOtherSources(t *testing.T) {
	inner, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := NewListener(inner, 4, 3)
	accepted := make(chan net.Conn, 16)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	})
	dial := func(ip string) net.Conn {
		t.Helper()
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).DialContext(t.Context(), "tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	isClosed := func(c net.Conn) bool {
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		_, err := c.Read(make([]byte, 1))
		var n net.Error
		return err != nil && (!errors.As(err, &n) || !n.Timeout())
	}
	var held []net.Conn
	first := dial("127.0.0.2")
	held = append(held, <-accepted)
	for range 2 {
		dial("127.0.0.2")
		held = append(held, <-accepted)
	}
	if fourth := dial("127.0.0.2"); !isClosed(fourth) {
		t.Error("a source has four places of its three")
	}
	dial("127.0.0.3")
	held = append(held, <-accepted)
	dial("127.0.0.4") // all places are taken, and 127.0.0.2 has three
	held = append(held, <-accepted)
	if !isClosed(first) {
		t.Error("no source lost a place")
	}
	for _, c := range held {
		_ = c.Close()
		_ = c.Close()
	}
	if got := l.limiter.Used(); got != 0 {
		t.Errorf("%d places are still taken", got)
	}
	_ = l.Close()
	wg.Wait()
}
