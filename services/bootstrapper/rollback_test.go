package bootstrapper_test

import (
	"bytes"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// A joiner keeps what it accepted, also across restarts, and refuses what is older.
func TestAJoinerGoesBackToNoOlderPolicy(t *testing.T) {
	type presented struct {
		serial uint64
		other  bool // other bytes
	}
	for name, tt := range map[string]struct {
		then presented
		want string // empty: accepted
	}{
		"a lower serial":                   {presented{4, false}, "POLICY_INVALID"},
		"the same serial with other bytes": {presented{5, true}, "POLICY_INVALID"},
		"the same policy":                  {presented{5, false}, ""},
		"a higher serial":                  {presented{6, true}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "node2")
			w.meta.Role = "worker"
			pub, priv := ownerKey(t)
			w.image.OwnerKey = pub
			j := newJoinservice(t, w, attesttest.NewMachine(t, w.ca, attesttest.Options{}), priv)
			present := func(p presented) {
				json := attesttest.Policy(t, w.ca, []*attesttest.Machine{w.tpm}, func(m *attestv1.Policy) { m.Serial = p.serial })
				if p.other {
					json = append(bytes.Clone(json), ' ')
				}
				j.signed = attest.SignPolicy(priv, json)
			}
			w.meta.JoinEndpoints = []string{j.addr}
			// Accepted, and then the machine dies before it has the lock.
			present(presented{serial: 5})
			w.dieAfter(2)
			if err := w.boot().end(t); err == nil {
				t.Fatal("it lives")
			}
			if rec := w.record(); rec.Policy == nil || rec.Policy.Serial != 5 || rec.Locked() {
				t.Fatalf("journal %+v", rec)
			}
			present(tt.then)
			w.dieAfter(-1)
			r := w.boot()
			defer r.kill(t)
			asked := j.asked()
			if tt.want != "" {
				eventually(t, "refused with "+tt.want, func() bool { return counter(t, r.metrics, "muster_join_attempts_total", tt.want) > 0 })
				if rec := w.record(); rec.Locked() || rec.Policy.Serial != 5 || j.asked() != asked {
					t.Errorf("something was sent, or done: %+v", rec)
				}
				return
			}
			eventually(t, "joined", func() bool { return w.record().Step == journal.StepDone })
			if got := w.record().Policy; got == nil || got.Serial != tt.then.serial {
				t.Errorf("remembered %+v", got)
			}
		})
	}
}
