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
	"time"

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

// orderOf returns the endpoints of one attempt.
func orderOf(t *testing.T, lookup lookupSRV, endpoints ...string) ([]string, error) {
	t.Helper()
	var o Order
	err := o.update(t.Context(), named(endpoints...), nil, lookup, quiet())
	return o.List(), err
}

func TestJoinservicesAreFoundByTheirServiceRecords(t *testing.T) {
	records := zoneOf(srv(20, 0, 30091, "cp3.example.org."), srv(10, 0, 30090, "CP1.example.org."), srv(30, 0, 443, "lb.example.org."))
	lookup := nameserver(t, records)
	var o Order
	meta := named("192.0.2.1:30090", "srv:"+service, "cp1.example.org:30090", "last.example.org:1")
	err := o.update(t.Context(), meta, nil, lookup, quiet())
	want := []string{"192.0.2.1:30090", "cp1.example.org:30090", "last.example.org:1", "cp3.example.org:30091", "lb.example.org:443"}
	if err != nil || !slices.Equal(o.List(), want) || !strings.HasPrefix(meta.JoinEndpoints[1], "srv:") {
		t.Errorf("%+v, %v, want %v", o, err, want)
	}
	// In the next round, whatever the records' time to live.
	records.set(records.list()[:1]...)
	if err := o.update(t.Context(), named("srv:"+service), nil, lookup, quiet()); err != nil || !slices.Equal(o.List(), []string{"cp3.example.org:30091"}) {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestEqualRecordsAreSpreadOverMachinesByWeight(t *testing.T) {
	records := zoneOf(srv(0, 1, 1, "light.example.org."), srv(0, 1000, 1, "heavy.example.org."))
	lookup := nameserver(t, records)
	first := map[string]int{}
	for range 40 {
		list, err := orderOf(t, lookup, "srv:"+service)
		if err != nil || len(list) != 2 {
			t.Fatalf("%v, %v", list, err)
		}
		first[list[0]]++
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
	list, err := orderOf(t, lookup, "srv:"+service, "192.0.2.1:30090")
	if err != nil || len(list) != metadata.MaxEndpoints || list[0] != "192.0.2.1:30090" || list[63] != "victim.example.org:63" {
		t.Errorf("%d endpoints, %v", len(list), err)
	}
	if found, err := lookupAll(t.Context(), service, lookup); err != nil || len(found) != metadata.MaxEndpoints {
		t.Errorf("%d endpoints of one name, %v", len(found), err)
	}
}

// 64 records with 64 ports: neither the machine's own joinservice nor those of its metadata lose their place.
func TestAHostileNameServerCrowdsOutNoKnownJoinservice(t *testing.T) {
	var records []dnsmessage.SRVResource
	for i := range metadata.MaxEndpoints {
		records = append(records, srv(0, 0, uint16(1+i), "victim.example.org."))
	}
	lookup := nameserver(t, zoneOf(records...))
	meta := named("srv:"+service, "192.0.2.99:31000")
	addresses := []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")}
	var o Order
	err := o.update(t.Context(), meta, addresses, lookup, quiet())
	known := []string{"192.0.2.11:30090", "[2001:db8::11]:30090", "192.0.2.11:31000", "[2001:db8::11]:31000", "192.0.2.99:31000"}
	if err != nil || len(o.List()) != metadata.MaxEndpoints || !slices.Equal(o.List()[:5], known) {
		t.Fatalf("%v, %v", o.List(), err)
	}
	own := 0
	for _, e := range o.List() {
		if strings.HasPrefix(e, "192.0.2.11:") {
			own++
		}
	}
	if own != 2+maxPortsOfDNS {
		t.Errorf("%d endpoints at the machine's first address: %v", own, o.List())
	}
	// Each known one fails once, as do DNS's after it: the known ones are asked in every second attempt.
	for i := range known {
		if o.List()[0] != known[i] {
			t.Fatalf("attempt %d begins with %s: %v", i, o.List()[0], o.List())
		}
		o.Failed(known[i])
		if err := o.update(t.Context(), meta, addresses, lookup, quiet()); err != nil {
			t.Fatal(err)
		}
		first := slices.IndexFunc(o.List(), func(e string) bool { return strings.HasPrefix(e, "victim") })
		o.Failed(o.List()[first]) // it answered first
		if err := o.update(t.Context(), meta, addresses, lookup, quiet()); err != nil {
			t.Fatal(err)
		}
	}
	if o.List()[0] != known[0] {
		t.Errorf("after all have failed: %v", o.List())
	}
	// What served stays, also if DNS names others, until it fails.
	o.Served("good.example.org:30090")
	if err := o.update(t.Context(), meta, addresses, lookup, quiet()); err != nil || o.List()[5] != "good.example.org:30090" || len(o.List()) != metadata.MaxEndpoints {
		t.Errorf("%v, %v", o.List(), err)
	}
	o.Failed("good.example.org:30090")
	if err := o.update(t.Context(), meta, addresses, lookup, quiet()); err != nil || slices.Contains(o.List(), "good.example.org:30090") {
		t.Errorf("%v, %v", o.List(), err)
	}
}

func TestEndpointsOfManyAddressesAndPortsAreBounded(t *testing.T) {
	var addresses []netip.Addr
	var static []string
	for i := range 16 {
		addresses = append(addresses, netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}))
	}
	for i := range metadata.MaxEndpoints {
		static = append(static, fmt.Sprintf("198.51.100.1:%d", 1+i))
	}
	var o Order
	if err := o.update(t.Context(), named(static...), addresses, nil, quiet()); err != nil || len(o.List()) != metadata.MaxEndpoints || o.List()[15] != "192.0.2.15:30090" || o.List()[16] != "192.0.2.0:1" {
		t.Errorf("%v, %v", o.List(), err)
	}
}

func TestRecordsThatNameNoServiceAreLeftOut(t *testing.T) {
	for name, r := range map[string]dnsmessage.SRVResource{
		"no service": srv(0, 0, 1, "."), "port 0": srv(0, 0, 0, "cp1.example.org."), "a name with a space": srv(0, 0, 1, "a b.example.org."),
		"a name that ends the line": srv(0, 0, 1, "a\nb.example.org."), "a name with a port": srv(0, 0, 1, "a:1.example.org."),
	} {
		records := zoneOf(r)
		lookup := nameserver(t, records)
		if list, err := orderOf(t, lookup, "srv:"+service); !errors.Is(err, ErrUnreachable) {
			t.Errorf("%s: %v, %v", name, list, err)
		}
		records.set(r, srv(9, 0, 1, "right.example.org."))
		if list, err := orderOf(t, lookup, "srv:"+service); err != nil || !slices.Equal(list, []string{"right.example.org:1"}) {
			t.Errorf("%s, beside a right one: %v, %v", name, list, err)
		}
	}
}

func TestAnOutageOfDNSKeepsWhatIsKnown(t *testing.T) {
	records := zoneOf(srv(0, 0, 1, "cp1.example.org."))
	lookup := nameserver(t, records)
	const other = "srv:_muster-join._tcp.other.example"
	if list, err := orderOf(t, lookup, other); !errors.Is(err, ErrUnreachable) || !strings.Contains(fmt.Sprint(err), "other.example") {
		t.Errorf("a name without records: %v, %v", list, err)
	}
	if list, err := orderOf(t, lookup, other, "192.0.2.1:1"); err != nil || !slices.Equal(list, []string{"192.0.2.1:1"}) {
		t.Errorf("with one that is known: %v, %v", list, err)
	}
	if list, err := orderOf(t, nil, "192.0.2.1:1"); err != nil || !slices.Equal(list, []string{"192.0.2.1:1"}) {
		t.Errorf("no name: %v, %v", list, err)
	}
	var o Order
	for _, names := range [][]string{{"srv:" + service}, {other}, {other, "srv:" + service}} {
		if err := o.update(t.Context(), named(names...), nil, lookup, quiet()); err != nil || !slices.Equal(o.List(), []string{"cp1.example.org:1"}) {
			t.Errorf("%v: %v, %v", names, o.List(), err)
		}
	}
}

func TestASlowNameServerCostsABoundedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		_, err := orderOf(t, func(ctx context.Context, _, _, _ string) (string, []*net.SRV, error) {
			<-ctx.Done()
			return "", nil, ctx.Err()
		}, "srv:"+service, "srv:_b._tcp.example.org")
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took != lookupTime {
			t.Errorf("%v after %s", err, took)
		}
	})
}

// The resolver's search domains have no part in it.
func TestNamesAreLookedUpAsTheyAreWritten(t *testing.T) {
	asked := ""
	if _, err := orderOf(t, func(_ context.Context, _, _, name string) (string, []*net.SRV, error) {
		asked = name
		return "", []*net.SRV{{Target: "a.example.org.", Port: 1}}, nil
	}, "srv:"+service); err != nil || asked != service+"." {
		t.Errorf("%q, %v", asked, err)
	}
}

func TestAControlPlaneAttestsToItsOwnJoinserviceWithoutDNS(t *testing.T) {
	meta := named("srv:_muster-join._tcp.invalid")
	meta.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.11")}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // each look-up fails at once
	var worker, plane Order
	if err := worker.Update(ctx, meta, Own(meta), quiet()); !errors.Is(err, ErrUnreachable) {
		t.Errorf("a worker: %v, %v", worker, err)
	}
	meta.Role = metadata.RoleControlPlane
	if err := plane.Update(ctx, meta, Own(meta), quiet()); err != nil || !slices.Equal(plane.List(), []string{"192.0.2.11:30090"}) {
		t.Errorf("%v, %v", plane, err)
	}
	meta.JoinEndpoints = []string{"192.0.2.11:31000", "192.0.2.12:31000"}
	plane.Served("gone:1") // the operator has written a list without it
	if err := plane.Update(ctx, meta, Own(meta), quiet()); err != nil || !slices.Equal(plane.List(), []string{"192.0.2.11:30090", "192.0.2.11:31000", "192.0.2.12:31000"}) {
		t.Errorf("%v, %v", plane, err)
	}
}
