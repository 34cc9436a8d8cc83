package crash

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// setClock sets the offset of the machine's clock.
func (h *host) setClock(off time.Duration) {
	h.t.Helper()
	if err := machine.WriteFile(h.plan.beside("clock"), []byte(off.String()), 0o600, 0o700); err != nil {
		h.t.Fatal(err)
	}
}

// A machine or a cluster whose clock is three hours off. The attested sessions do not depend on it. If the machine's
// clock is behind, the certificates that the cluster makes are not valid yet: the machine logs both times before it
// locks itself, returns the ticket, and joins once the clock is right. If it is ahead, by less than the certificates'
// lifetime, it joins.
func TestAClockThatIsThreeHoursOffIsNamedOrHarmless(t *testing.T) {
	t.Parallel()
	const off = 3 * time.Hour
	b := newBench(t)
	for _, tt := range []struct {
		name             string
		machine, cluster time.Duration
		refused          bool
	}{
		{"the machine is behind", -off, 0, true},
		{"the machine is ahead", off, 0, false},
		{"the cluster is ahead", 0, off, true},
		{"the cluster is behind", 0, -off, false},
		{"both are ahead", off, off, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			j := newJoinservice(t, b)
			setCluster := func(by time.Duration) {
				j.mu.Lock()
				defer j.mu.Unlock()
				j.now = func() time.Time { return time.Now().Add(by) }
			}
			setCluster(tt.cluster)
			h := b.newHost(t, meta{Name: "node2", Role: "worker", JoinEndpoints: []string{j.addr}}, j.ownerKey)
			h.setClock(tt.machine)
			l := h.start(-1)
			if tt.refused {
				eventually(t, "the machine names its clock", func() bool { return strings.Contains(l.log.String(), `"reason":"CLOCK_SKEW"`) })
				text := l.log.String()
				if !strings.Contains(text, "this machine's clock is at "+time.Now().Add(tt.machine).UTC().Format("2006-01-02T15")) && time.Now().Minute() > 1 ||
					!strings.Contains(text, ", but the certificate that the cluster has just issued is valid from ") || !strings.Contains(text, "Set the clock") {
					t.Errorf("the log does not say both times, and what to do:\n%s", text)
				}
				eventually(t, "the ticket comes back", func() bool { j.mu.Lock(); defer j.mu.Unlock(); return j.returned > 0 })
				if h.record().Locked() || !bytes.Equal(h.lockValue(), make([]byte, 32)) {
					t.Error("the machine locked itself all the same")
				}
				h.setClock(0)
				setCluster(0)
			}
			if err := errors.Join(l.end(), h.isNode(journal.KindJoin, joinCluster)); err != nil {
				t.Errorf("%v\n%s", err, l.log)
			}
			if named := strings.Contains(l.log.String(), "CLOCK_SKEW"); named != tt.refused {
				t.Errorf("CLOCK_SKEW was said: %v, want %v", named, tt.refused)
			}
		})
	}
}
