package floods

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"
)

// row is one flood against one listener.
type row struct {
	flood   string
	service string // whose listener is flooded, and whose memory is measured
	port    string
	sources int
	callers int // how many honest ones there are
}

func (r row) String() string { return fmt.Sprintf("%s/%s/%d", r.port, r.flood, r.sources) }

// result is the result of a row.
type result struct {
	row
	said    said
	limit   int64
	peak    int64 // of the cgroup, bytes
	sockets int64
	rss     int64
	killed  bool
	quiet   *outcome
	under   *outcome
	tickets bool // whether the honest clients ask for tickets
}

// Floods of the listeners that speak TLS.
var (
	all = []string{
		"half-bodies-http1", "half-bodies", "half-bodies-streams", "half-bodies-session", "reflection", "reflection-session", "watch",
		"slow-bodies", "slow-headers-http1", "slow-headers",
		"settings", "ping", "reset", "too-many-streams", "continuation", "window-update", "priority", "empty-data", "header-table", "header-bomb", "half-frame",
		"idle-tcp", "idle", "idle-session", "half-hello", "half-handshake", "handshakes", "half-offer", "half-evidence", "challenge", "challenge-useless",
	}
	// Those that need the most memory, for every listener.
	heavy   = []string{"half-bodies-streams", "half-bodies-session", "reflection", "half-frame", "half-hello", "half-offer", "half-evidence", "idle"}
	metrics = []string{"metrics-idle", "metrics-slow-headers", "metrics-half-headers", "metrics-slow-bodies", "metrics-requests", "metrics-unread"}
)

// rows are the rows that are run: a few of the worst in a short run, all of them in a long one.
func rows() (out []row) {
	add := func(service, port string, floods []string, sources ...int) {
		for _, f := range floods {
			for _, n := range sources {
				out = append(out, row{f, service, port, n, honest})
			}
		}
	}
	if !*long {
		add("joinservice", "joinservice", []string{"half-bodies-streams", "half-bodies-session"}, 1)
		add("init", "init", []string{"half-init"}, 1)
		add("unlock", "recover", []string{"half-bodies-session"}, 1)
		return out
	}
	add("joinservice", "joinservice", all, 1, 200)
	add("kms", "kms", heavy, 1, 200)
	add("init", "init", append(slices.Clone(all), "event-log", "half-init"), 1, 200)
	add("unlock", "recover", heavy, 1, 200)
	add("unlock", "unlock", append(slices.Clone(heavy), "event-log"), 1, 200)
	add("joinservice", "joinservice-metrics", metrics, 1, 200)
	add("kms", "kms-metrics", metrics, 200)
	add("attester", "attester-metrics", metrics, 1, 200)
	add("init", "init-metrics", metrics, 1, 200)
	return out
}

// A client without a TPM neither stops a service nor prevents machines from being served.
func TestFloods(t *testing.T) {
	member, alone := setUp(t), setUp(t)
	var results []*result
	defer func() { t.Logf("\n%s", table(results)) }()
	for _, r := range rows() {
		t.Run(r.String(), func(t *testing.T) {
			res := of(r.service, member, alone).run(t, r, *length)
			results = append(results, res)
			t.Logf("\n%s", table([]*result{res}))
			res.check(t)
		})
	}
}

// of returns the machine that runs a service: a member of a cluster, or one outside of any.
func of(service string, member, alone *fixture) *fixture {
	if service == "init" || service == "unlock" {
		return alone
	}
	return member
}

// run starts the services, measures honest clients without a flood, and then during the flood.
func (s *fixture) run(t *testing.T, r row, d time.Duration) *result {
	t.Helper()
	var victim *process
	one, tickets := s.joiner, false
	switch r.service {
	case "init", "unlock":
		if r.service == "init" {
			victim = s.bootstrapper(t)
		} else {
			victim = s.unlock(t)
		}
		one = s.owner(strings.TrimSuffix(r.port, "-metrics"))
	default:
		tickets = true
		s.inCluster(t)
		running := map[string]*process{"attester": s.attester(t)}
		running["kms"] = s.kms(t)
		running["joinservice"] = s.joinservice(t)
		victim = running[r.service]
	}
	if strings.HasPrefix(r.flood, "metrics-") && r.service == "init" {
		one = s.scraper(r.port)
	}
	if r.flood == "half-init" {
		one = s.initializer
	}
	res := &result{row: r, tickets: tickets, quiet: &outcome{}, limit: victim.memory.number(t, limitFile(victim.memory))}
	if *long {
		res.quiet = s.ask(t, victim, r.callers, min(r.apart(time.Duration(s.slow.delay.Load())), d/time.Duration(r.callers)), one)
		if res.quiet.served != r.callers {
			t.Fatalf("without a flood %d of %d were served: %v", res.quiet.served, r.callers, res.quiet.last)
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { res.said = flood(t, r.flood, s.ports[r.port], r.sources, d) })
	res.under = s.ask(t, victim, r.callers, d/time.Duration(r.callers), one)
	wg.Wait()
	res.peak, res.sockets = victim.memory.usage(t)
	res.rss = victim.peakRSS()
	res.killed = !victim.alive() || victim.memory.kills(t) > 0
	return res
}

func limitFile(m *memory) string {
	if m.unified {
		return "memory.max"
	}
	return "memory.limit_in_bytes"
}

// slower is how much longer the slowest took than without a flood.
func (r *result) slower() float64 {
	return r.under.p99().Seconds() / r.quiet.p99().Seconds()
}

func (r *result) check(t *testing.T) {
	t.Helper()
	if r.killed {
		t.Errorf("%s was killed", r.service)
	}
	if r.under.served != r.callers {
		t.Errorf("%d of %d honest machines were served: %v", r.under.served, r.callers, r.under.last)
	}
	// Other programs' use of the computer in a short run is not measured. An owner's session takes 20 ms without a
	// flood and a scrape 2 ms: three times that is what the scheduler of two cores makes of any load.
	if *long && r.slower() > 3 && (r.tickets || r.under.p99() > unnoticed) {
		t.Errorf("the slowest took %s, %.1f times what it took in peace", r.under.p99(), r.slower())
	}
	if r.said.Opened == 0 {
		t.Error("the flood has not opened a connection")
	}
}

func table(results []*result) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "flood\tlistener\tsources\topened\tat once\tsent MiB\tlimit MiB\tpeak MiB\tsockets MiB\tRSS MiB\tkilled\tserved\ttries\tp99 quiet\tp99 under\tratio\t")
	for _, r := range results {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%t\t%d/%d\t%d\t%s\t%s\t%.1f\t\n", r.flood, r.port, r.sources, r.said.Opened, r.said.Most, r.said.Sent>>20,
			r.limit>>20, r.peak>>20, r.sockets>>20, r.rss>>20, r.killed, r.under.served, r.callers, r.under.attempts,
			r.quiet.p99().Round(time.Millisecond), r.under.p99().Round(time.Millisecond), r.slower())
	}
	_ = w.Flush()
	return b.String()
}

// A peer that presents no evidence gets no share of the TPM: machines and owners are served also where the TPM is
// slow.
func TestChallengesOfASlowTPM(t *testing.T) {
	delays, sources, floods, services := []time.Duration{40 * time.Millisecond, 150 * time.Millisecond}, []int{1, 4, 50}, []string{"challenge", "challenge-useless"}, []string{"joinservice", "init", "unlock"}
	if !*long {
		delays, sources, floods, services = delays[:1], []int{4}, floods[:1], services[:1]
	}
	member, alone := setUp(t), setUp(t)
	var results []*result
	defer func() { t.Logf("\n%s", table(results)) }()
	for _, delay := range delays {
		for _, service := range services {
			for _, f := range floods {
				for _, n := range sources {
					t.Run(fmt.Sprintf("%s/%s/%s/%d", delay, service, f, n), func(t *testing.T) {
						s := of(service, member, alone)
						s.slow.delay.Store(int64(delay))
						r := row{f, service, service, n, honest}
						if of(service, member, alone) == alone {
							r.callers = owners
						}
						res := s.run(t, r, max(*length, time.Duration(r.callers)*r.apart(delay)))
						results = append(results, res)
						t.Logf("%s a command:\n%s", delay, table([]*result{res}))
						if res.killed || res.under.served != r.callers {
							t.Errorf("%d of %d honest callers were served, killed: %t; %v", res.under.served, r.callers, res.killed, res.under.last)
						}
					})
				}
			}
		}
	}
}

// apart is the interval between clients that a TPM of this delay can serve one after the other: evidence and the
// answer to a challenge take about 16 commands. Owners, who present no evidence, use the TPM for half of the time.
func (r row) apart(delay time.Duration) time.Duration {
	if r.callers == owners {
		delay *= 2
	}
	return max(quietApart, 20*delay)
}
