package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/lab/driver"
)

// Usage is what a process has used.
type Usage struct {
	CPU float64 `json:"cpuSeconds"` // user and system, since it started
	RSS float64 `json:"maxRSSMiB"`  // most resident memory that it had at a time
}

// services are the long-running processes on the first machine, by their first argument. The first machine's
// bootstrapper still runs for an owner whose connection broke.
var services = map[string]string{"joinservice": "/joinservice", "kms": "/kms", "attester": "/usr/bin/bootstrapper attester", "bootstrapper, init": "/usr/bin/bootstrapper run"}

// usage reads what Muster's processes have used: those that run from /proc of the first
// machine, the joiner's bootstrapper, which has ended, from what PID 1 noted.
func (r *run) usage(ctx context.Context, s *Sample) error {
	out, err := r.at(ctx, "node1", nil, "sh", "-c", `for p in /proc/[0-9]*; do
		printf 'args %s\n' "$(tr '\0' ' ' <$p/cmdline)"; cat $p/stat; grep VmHWM $p/status; done 2>/dev/null; getconf CLK_TCK`)
	if err != nil {
		return err
	}
	if s.Resources, err = parseUsage(out); err != nil {
		return err
	}
	s.Resources["bootstrapper, join"], err = r.ended("node2", "muster-bootstrapper")
	return err
}

func parseUsage(out []byte) (map[string]Usage, error) {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	ticks, err := strconv.ParseFloat(lines[len(lines)-1], 64)
	if err != nil || ticks <= 0 {
		return nil, fmt.Errorf("clock ticks per second: %q", lines[len(lines)-1])
	}
	found := map[string]Usage{}
	name := ""
	for _, l := range lines {
		if args, ok := strings.CutPrefix(l, "args "); ok {
			name = ""
			for n, prefix := range services {
				if strings.HasPrefix(args+" ", prefix+" ") {
					name = n
				}
			}
			continue
		}
		if name == "" {
			continue
		}
		u := found[name]
		if kib, ok := strings.CutPrefix(l, "VmHWM:"); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(kib, "kB")), 64)
			if err != nil {
				return nil, fmt.Errorf("%q: %w", l, err)
			}
			u.RSS = n / 1024
		} else if i := strings.LastIndex(l, ") "); i >= 0 { // proc_pid_stat(5): utime is field 14, stime 15
			f := strings.Fields(l[i+2:])
			if len(f) < 13 {
				return nil, fmt.Errorf("%q has %d fields", l, len(f))
			}
			user, uerr := strconv.ParseFloat(f[11], 64)
			system, serr := strconv.ParseFloat(f[12], 64)
			if uerr != nil || serr != nil {
				return nil, fmt.Errorf("%q has no times", l)
			}
			u.CPU = (user + system) / ticks
		}
		found[name] = u
	}
	for n := range services {
		if u := found[n]; u.CPU == 0 || u.RSS == 0 {
			return nil, fmt.Errorf("no process of %s was found on the first machine", n)
		}
	}
	return found, nil
}

var endedLine = regexp.MustCompile(`msg=ended unit=(\S+) result="[^"]*" cpu_seconds=(\S+) max_rss_kib=(\d+)`)

// ended reads the record of PID 1 of a machine about a unit that has ended.
func (r *run) ended(node, unit string) (Usage, error) {
	b, err := os.ReadFile(r.Lab.InitLog(node))
	if err != nil {
		return Usage{}, err
	}
	for _, m := range endedLine.FindAllSubmatch(b, -1) {
		if string(m[1]) != unit {
			continue
		}
		cpu, cerr := strconv.ParseFloat(string(m[2]), 64)
		kib, kerr := strconv.ParseFloat(string(m[3]), 64)
		if cerr != nil || kerr != nil {
			return Usage{}, fmt.Errorf("%q: no numbers", m[0])
		}
		return Usage{CPU: cpu, RSS: kib / 1024}, nil
	}
	return Usage{}, fmt.Errorf("PID 1 of %s did not see %s end", node, unit)
}

// requests counts the requests to the API server while the last ticket was made: from the audit record "ticket
// decided" to "ticket issued".
func (r *run) requests(ctx context.Context) (map[string]int, error) {
	records, err := r.at(ctx, "node1", nil, "cat", "/var/log/muster/audit.jsonl")
	if err != nil {
		return nil, err
	}
	var from, to time.Time
	var ticket string
	for line := range bytes.Lines(records) {
		var rec struct {
			Time                           time.Time
			Service, Event, Ticket, Reason string
		}
		if err := json.Unmarshal(line, &rec); err != nil {
			return nil, fmt.Errorf("audit record: %w", err)
		}
		switch rec.Event {
		case "ticket decided":
			from, ticket = rec.Time, rec.Ticket
		case "ticket issued":
			if rec.Ticket == ticket {
				to = rec.Time
			}
		}
	}
	if from.IsZero() || !to.After(from) {
		return nil, fmt.Errorf("the joinservice's audit log has no ticket that was issued")
	}
	log, err := r.at(ctx, "node1", nil, "cat", driver.AuditLog)
	if err != nil {
		return nil, err
	}
	return countRequests(log, from, to)
}

// user names of the cluster whose requests belong to a ticket.
var requesters = map[string]string{
	"system:serviceaccount:muster-system:joinservice": "joinservice",
	"system:serviceaccount:muster-system:kms":         "kms",
}

// countRequests counts requests of Muster's services that arrived between two moments, by
// "service verb resource". The key service reviews a token before the ticket is decided, so its reviews of
// the second before count too. Watches that were open all along do not.
func countRequests(log []byte, from, to time.Time) (map[string]int, error) {
	out := map[string]int{}
	scan := bufio.NewScanner(bytes.NewReader(log))
	scan.Buffer(nil, 1<<20)
	for scan.Scan() {
		var e struct {
			Stage, Verb string
			User        struct{ Username string }
			ObjectRef   struct{ Resource, Subresource string }
			At          time.Time `json:"requestReceivedTimestamp"`
		}
		if err := json.Unmarshal(scan.Bytes(), &e); err != nil {
			return nil, fmt.Errorf("the API server's audit log: %w", err)
		}
		service, ours := requesters[e.User.Username]
		early := from
		if service == "kms" {
			early = from.Add(-time.Second)
		}
		if !ours || e.Stage != "ResponseComplete" || e.Verb == "watch" || e.At.Before(early) || e.At.After(to) {
			continue
		}
		what := e.ObjectRef.Resource
		if e.ObjectRef.Subresource != "" {
			what += "/" + e.ObjectRef.Subresource
		}
		out[service+" "+e.Verb+" "+what]++
	}
	return out, scan.Err()
}

// describe describes place and time of a run.
func describe() (Results, error) {
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return Results{}, err
	}
	mem, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return Results{}, err
	}
	var kib int
	if _, err := fmt.Sscanf(string(mem), "MemTotal: %d kB", &kib); err != nil {
		return Results{}, fmt.Errorf("/proc/meminfo: %w", err)
	}
	return Results{
		Version: buildinfo.Read().Version, Time: time.Now().UTC().Truncate(time.Second),
		Machine: fmt.Sprintf("%d processors, %d GiB", runtime.NumCPU(), (kib+1<<19)>>20),
		Load:    strings.Join(strings.Fields(string(load))[:3], " "),
	}, nil
}
