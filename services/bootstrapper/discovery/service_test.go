package discovery

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

const service = "_muster-join._tcp.example.org"

func srv(priority, weight, port uint16, target string) dnsmessage.SRVResource {
	return dnsmessage.SRVResource{Priority: priority, Weight: weight, Port: port, Target: dnsmessage.MustNewName(target)}
}

// answer is a DNS server's answer to a query, with the records of the name in example.org.
func answer(query []byte, records []dnsmessage.SRVResource, most int) []byte {
	var p dnsmessage.Parser
	h, err := p.Start(query)
	if err != nil {
		return nil
	}
	q, err := p.Question()
	if err != nil {
		return nil
	}
	h.Response, h.RecursionAvailable = true, true
	m := dnsmessage.Message{Header: h, Questions: []dnsmessage.Question{q}}
	if q.Name.String() != service+"." || q.Type != dnsmessage.TypeSRV {
		m.RCode = dnsmessage.RCodeNameError
	}
	for i := range records {
		m.Answers = append(m.Answers, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 86400}, Body: &records[i]})
	}
	out, err := m.Pack()
	if err != nil {
		return nil
	}
	if len(out) > most {
		m.Truncated, m.Answers = true, nil
		out, _ = m.Pack()
	}
	return out
}

// zone has the records that a name server answers with.
type zone struct {
	mu      sync.Mutex
	records []dnsmessage.SRVResource
}

func zoneOf(records ...dnsmessage.SRVResource) *zone { return &zone{records: records} }

func (z *zone) list() []dnsmessage.SRVResource {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.records
}

func (z *zone) set(records ...dnsmessage.SRVResource) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.records = records
}

// nameserver serves records over UDP and TCP, and returns a look-up that asks it alone.
func nameserver(t *testing.T, records *zone) lookupSRV {
	t.Helper()
	udp, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	t.Cleanup(func() { _, _ = udp.Close(), tcp.Close(); served.Wait() })
	served.Go(func() {
		for b := make([]byte, 4096); ; {
			n, from, err := udp.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(answer(b[:n], records.list(), 512), from)
		}
	})
	served.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			var size [2]byte
			if _, err := io.ReadFull(c, size[:]); err == nil {
				b := make([]byte, binary.BigEndian.Uint16(size[:]))
				if _, err := io.ReadFull(c, b); err == nil {
					out := answer(b, records.list(), 1<<16)
					_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...))
				}
			}
			_ = c.Close()
		}
	})
	r := &net.Resolver{PreferGo: true, StrictErrors: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		at := udp.LocalAddr()
		if strings.HasPrefix(network, "tcp") {
			at = tcp.Addr()
		}
		return (&net.Dialer{}).DialContext(ctx, network, at.String())
	}}
	return r.LookupSRV
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func named(endpoints ...string) *metadata.Machine {
	return &metadata.Machine{Name: "a", Role: metadata.RoleWorker, JoinEndpoints: endpoints}
}

func TestJoinservicesAreFoundByTheirServiceRecords(t *testing.T) {
	records := zoneOf(srv(20, 0, 30091, "cp3.example.org."), srv(10, 0, 30090, "CP1.example.org."), srv(30, 0, 443, "lb.example.org."))
	lookup := nameserver(t, records)
	meta := named("192.0.2.1:30090", "srv:"+service, "cp1.example.org:30090", "last.example.org:1")
	m, err := resolve(t.Context(), meta, nil, lookup, quiet())
	want := []string{"192.0.2.1:30090", "cp1.example.org:30090", "cp3.example.org:30091", "lb.example.org:443", "last.example.org:1"}
	if err != nil || !slices.Equal(m.JoinEndpoints, want) || m.Name != "a" || !strings.HasPrefix(meta.JoinEndpoints[1], "srv:") {
		t.Errorf("%+v, %v, want %v", m, err, want)
	}
	// In the next round, whatever the records' time to live.
	records.set(records.list()[:1]...)
	if m, err := resolve(t.Context(), named("srv:"+service), m.JoinEndpoints, lookup, quiet()); err != nil || !slices.Equal(m.JoinEndpoints, []string{"cp3.example.org:30091"}) {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestEqualRecordsAreSpreadOverMachinesByWeight(t *testing.T) {
	records := zoneOf(srv(0, 1, 1, "light.example.org."), srv(0, 1000, 1, "heavy.example.org."))
	lookup := nameserver(t, records)
	first := map[string]int{}
	for range 40 {
		m, err := resolve(t.Context(), named("srv:"+service), nil, lookup, quiet())
		if err != nil || len(m.JoinEndpoints) != 2 {
			t.Fatalf("%+v, %v", m, err)
		}
		first[m.JoinEndpoints[0]]++
	}
	if first["heavy.example.org:1"] < 20 {
		t.Errorf("%v", first)
	}
}

func TestAHostileNameServerNamesABoundedNumberOfHosts(t *testing.T) {
	var records []dnsmessage.SRVResource
	for i := range 500 {
		records = append(records, srv(uint16(i), 0, uint16(1+i), "victim.example.org."))
	}
	lookup := nameserver(t, zoneOf(records...))
	m, err := resolve(t.Context(), named("192.0.2.1:30090", "srv:"+service), nil, lookup, quiet())
	if err != nil || len(m.JoinEndpoints) != metadata.MaxEndpoints || m.JoinEndpoints[0] != "192.0.2.1:30090" || m.JoinEndpoints[63] != "victim.example.org:63" {
		t.Errorf("%d endpoints, %v", len(m.JoinEndpoints), err)
	}
	if m, err := resolve(t.Context(), named("srv:"+service), slices.Repeat([]string{"x:1"}, 2*metadata.MaxEndpoints), func(context.Context, string, string, string) (string, []*net.SRV, error) {
		return "", nil, errors.New("down")
	}, quiet()); err != nil || len(m.JoinEndpoints) != 1 {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestRecordsThatNameNoServiceAreLeftOut(t *testing.T) {
	for name, r := range map[string]dnsmessage.SRVResource{
		"no service": srv(0, 0, 1, "."), "port 0": srv(0, 0, 0, "cp1.example.org."), "a name with a space": srv(0, 0, 1, "a b.example.org."),
		"a name that ends the line": srv(0, 0, 1, "a\nb.example.org."), "a name with a port": srv(0, 0, 1, "a:1.example.org."),
	} {
		records := zoneOf(r)
		lookup := nameserver(t, records)
		if m, err := resolve(t.Context(), named("srv:"+service), nil, lookup, quiet()); !errors.Is(err, ErrUnreachable) {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
		records.set(r, srv(9, 0, 1, "right.example.org."))
		if m, err := resolve(t.Context(), named("srv:"+service), nil, lookup, quiet()); err != nil || !slices.Equal(m.JoinEndpoints, []string{"right.example.org:1"}) {
			t.Errorf("%s, beside a right one: %+v, %v", name, m, err)
		}
	}
}

func TestAnOutageOfDNSKeepsWhatIsKnown(t *testing.T) {
	records := zoneOf(srv(0, 0, 1, "cp1.example.org."))
	lookup := nameserver(t, records)
	other := "srv:_muster-join._tcp.other.example"
	if m, err := resolve(t.Context(), named(other), nil, lookup, quiet()); !errors.Is(err, ErrUnreachable) || !strings.Contains(fmt.Sprint(err), "other.example") {
		t.Errorf("a name without records: %+v, %v", m, err)
	}
	if m, err := resolve(t.Context(), named(other), []string{"known:1"}, lookup, quiet()); err != nil || !slices.Equal(m.JoinEndpoints, []string{"known:1"}) {
		t.Errorf("with a known joinservice: %+v, %v", m, err)
	}
	if m, err := resolve(t.Context(), named(other, "srv:"+service), []string{"known:1"}, lookup, quiet()); err != nil || !slices.Equal(m.JoinEndpoints, []string{"cp1.example.org:1", "known:1"}) {
		t.Errorf("one of two names: %+v, %v", m, err)
	}
	if m, err := resolve(t.Context(), named("192.0.2.1:1"), []string{"known:1"}, nil, quiet()); err != nil || !slices.Equal(m.JoinEndpoints, []string{"192.0.2.1:1"}) {
		t.Errorf("no name: %+v, %v", m, err)
	}
}

func TestASlowNameServerCostsABoundedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, err := resolve(t.Context(), named("srv:"+service, "srv:_b._tcp.example.org"), nil, func(ctx context.Context, _, _, _ string) (string, []*net.SRV, error) {
			<-ctx.Done()
			return "", nil, ctx.Err()
		}, quiet())
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
	})
}

func TestAControlPlaneAttestsToItsOwnJoinserviceWithoutDNS(t *testing.T) {
	meta := named("srv:_muster-join._tcp.invalid")
	meta.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.11")}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // each look-up fails at once
	if got, err := Endpoints(ctx, meta, nil, quiet()); !errors.Is(err, ErrUnreachable) {
		t.Errorf("a worker: %v, %v", got, err)
	}
	meta.Role = metadata.RoleControlPlane
	if got, err := Endpoints(ctx, meta, nil, quiet()); err != nil || !slices.Equal(got, []string{"192.0.2.11:30090"}) {
		t.Errorf("%v, %v", got, err)
	}
	meta.JoinEndpoints = []string{"192.0.2.11:31000", "192.0.2.12:31000"}
	if got, err := Endpoints(ctx, meta, []string{"192.0.2.12:31000", "gone:1"}, quiet()); err != nil || !slices.Equal(got, []string{"192.0.2.12:31000", "192.0.2.11:31000", "192.0.2.11:30090"}) {
		t.Errorf("%v, %v", got, err)
	}
}
