// Package refusaltest checks that a refusal has the same reason in every place where it can be observed: error detail,
// metric, log and audit record (R1).
//
// A test passes the service and the places of the refusal, and a function that causes it. The helper reads all places, and
// reports an error if one has no entry, or an entry with another reason.
//
// A test in docs looks for calls of [Refused] and [Reported], and fails if a reason has none.
package refusaltest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// patience is how long a place may take, on a machine that builds at the same time.
const patience = 5 * time.Minute

// Service is where a service reports its refusals.
type Service struct {
	// Families returns its metrics.
	Families func(t testing.TB) []*dto.MetricFamily
	// Log returns its log, JSON lines.
	Log func() []byte
	// Audit returns its audit log; nil if it keeps none.
	Audit func() []byte
}

// Places are the metric, log line and audit record of one refusal, without the reason.
type Places struct {
	// Metric is a name, followed by label, value, label, value.
	Metric []string
	// Log is attribute, value, attribute, value of a line; nil if there must be none, since unattested peers can cause any
	// number of these.
	Log []string
	// Audit is field, value, field, value of a record; nil if the service keeps no audit log, or if this kind of refusal is
	// not in it. docs/refusals.md lists those kinds.
	Audit []string
	// Beside lists reasons that may appear too, since the refusal is caused by a refusal of another service that was called
	// for it.
	Beside []attestv1.Reason
}

// Refused causes the refusal once, and returns the error. The reason must be in its detail; the metric must go up by one;
// there must be a line and a record; and none of them may have another reason.
func Refused(t testing.TB, s Service, want attestv1.Reason, p Places, do func() error) error {
	t.Helper()
	var err error
	watch(t, s, want, p, true, func() {
		if err = do(); rpc.ReasonFrom(err) != want {
			t.Errorf("the caller gets %v, want %s", err, attest.ReasonName(want))
		}
	})
	return err
}

// Reported is [Refused] for refusals without a caller, which may be repeated before the test checks: a ticket that a
// machine does not accept, a policy that is not signed.
func Reported(t testing.TB, s Service, want attestv1.Reason, p Places, do func()) {
	t.Helper()
	watch(t, s, want, p, false, do)
}

// Until repeats do until it is refused, as when an informer must first get a change. It returns when that refusal is
// counted: a connection's is counted after its peer knows it, and a [Refused] that follows would count it as a second one.
func Until(t testing.TB, s Service, want attestv1.Reason, p Places, do func() error) {
	t.Helper()
	name := attest.ReasonName(want)
	before, refused := look(t, s).count(name, p.Metric), false
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var err error
	for until := time.Now().Add(patience); ; <-tick.C {
		if !refused {
			err = do()
			refused = rpc.ReasonFrom(err) == want
		}
		if refused && look(t, s).count(name, p.Metric) > before {
			return
		}
		if time.Now().After(until) || t.Context().Err() != nil {
			t.Fatalf("%s: refused: %v, and the metric %v did not go up; the last answer: %v", name, refused, p.Metric, err)
		}
	}
}

func watch(t testing.TB, s Service, want attestv1.Reason, p Places, once bool, do func()) {
	t.Helper()
	before := look(t, s)
	do()
	name := attest.ReasonName(want)
	var missing []string
	var now observation
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(patience); ; <-tick.C {
		now = look(t, s)
		if missing = now.missing(before, s, name, p); len(missing) == 0 || time.Now().After(until) || t.Context().Err() != nil {
			break
		}
	}
	for _, m := range missing {
		t.Errorf("%s: %s", name, m)
	}
	if n := now.count(name, p.Metric) - before.count(name, p.Metric); once && n > 1 {
		t.Errorf("%s: the metric %v went up by %v", name, p.Metric, n)
	}
	now.contradict(t, before, name, p)
}

// observation is a snapshot of a service's metrics, log and audit log.
type observation struct {
	families   []*dto.MetricFamily
	log, audit []byte
}

func look(t testing.TB, s Service) observation {
	t.Helper()
	w := observation{families: s.Families(t), log: s.Log()}
	if s.Audit != nil {
		w.audit = s.Audit()
	}
	return w
}

// missing returns the places without a new entry.
func (w observation) missing(before observation, s Service, reason string, p Places) (out []string) {
	if w.count(reason, p.Metric) <= before.count(reason, p.Metric) {
		out = append(out, fmt.Sprintf("the metric %v did not go up", p.Metric))
	}
	if found := HasLine(since(w.log, before.log), append([]string{"reason", reason}, p.Log...)...); p.Log == nil && found {
		out = append(out, "there is a line in the log")
	} else if p.Log != nil && !found {
		out = append(out, fmt.Sprintf("no line of the log has %v; it has\n%s", p.Log, since(w.log, before.log)))
	}
	if p.Audit == nil {
		return out
	}
	if s.Audit == nil || !HasLine(since(w.audit, before.audit), append([]string{"reason", reason}, p.Audit...)...) {
		out = append(out, fmt.Sprintf("no audit record has %v; there are\n%s", p.Audit, since(w.audit, before.audit)))
	}
	return out
}

// contradict reports new lines, records and counts with another reason.
func (w observation) contradict(t testing.TB, before observation, reason string, p Places) {
	t.Helper()
	fine := []string{"", attest.ReasonName(attestv1.Reason_REASON_ACCEPTED), reason}
	for _, r := range p.Beside {
		fine = append(fine, attest.ReasonName(r))
	}
	for where, text := range map[string][]byte{"log": since(w.log, before.log), "audit log": since(w.audit, before.audit)} {
		for line := range bytes.Lines(text) {
			var has struct{ Reason string }
			if json.Unmarshal(line, &has) == nil && !slices.Contains(fine, has.Reason) {
				t.Errorf("%s: the %s also has %s: %s", reason, where, has.Reason, line)
			}
		}
	}
	old := before.counters()
	for series, n := range w.counters() {
		if r, _, _ := strings.Cut(series, " "); n > old[series] && !slices.Contains(fine, r) {
			t.Errorf("%s: a metric also has another reason: %s", reason, series)
		}
	}
}

// count returns the metric's value for the reason.
func (w observation) count(reason string, metric []string) float64 {
	if len(metric) == 0 {
		return 0
	}
	return Sum(w.families, metric[0], append([]string{"reason", reason}, metric[1:]...)...)
}

// Sum returns the sum of a metric's series that have all of the labels, given as name, value, name, value; for a histogram
// it counts the samples.
func Sum(families []*dto.MetricFamily, name string, want ...string) (sum float64) {
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			has, fits := labels(m), true
			for i := 0; i+1 < len(want); i += 2 {
				fits = fits && has[want[i]] == want[i+1]
			}
			if fits {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// counters returns all metrics that count by reason, each under its reason, name and labels. Those that a service counts as
// a client are excluded: they are about other connections.
func (w observation) counters() map[string]float64 {
	out := map[string]float64{}
	for _, f := range w.families {
		for _, m := range f.GetMetric() {
			if has := labels(m); m.GetCounter() != nil && has["side"] != "client" {
				out[fmt.Sprintf("%s %s%v", has["reason"], f.GetName(), has)] = m.GetCounter().GetValue()
			}
		}
	}
	return out
}

func labels(m *dto.Metric) map[string]string {
	out := map[string]string{}
	for _, l := range m.GetLabel() {
		out[l.GetName()] = l.GetValue()
	}
	return out
}

// since returns what was written after the earlier text.
func since(now, before []byte) []byte {
	if len(now) < len(before) {
		return now
	}
	return now[len(before):]
}

// HasLine reports whether one of the JSON lines has all of the string fields, given as name, value, name, value.
func HasLine(lines []byte, fields ...string) bool {
	for line := range bytes.Lines(lines) {
		var has map[string]any
		if json.Unmarshal(line, &has) != nil {
			continue
		}
		fits := true
		for i := 0; i+1 < len(fields); i += 2 {
			fits = fits && has[fields[i]] == fields[i+1]
		}
		if fits {
			return true
		}
	}
	return false
}
