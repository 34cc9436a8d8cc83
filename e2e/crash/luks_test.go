package crash

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
)

// ledger counts power cuts by the point, the disk's state after it, and the result.
type ledger struct {
	mu   sync.Mutex
	rows []string
	ends map[string]int
}

func (l *ledger) add(point, state, end string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rows = append(l.rows, fmt.Sprintf("%-52s | %-6s | %s", point, state, end))
	if l.ends == nil {
		l.ends = map[string]int{}
	}
	l.ends[end]++
}

func (l *ledger) log(t *testing.T) {
	t.Helper()
	t.Logf("power cut at, disk after it, what became of it:\n%s\n%v", strings.Join(l.rows, "\n"), l.ends)
}

// The ends of B3 for a machine with an encrypted disk: each of these became a node afterwards.
const (
	endAgain    = "retryable: formatted again, joined or initialized anew"
	endRejoin   = "node: got its key from a joinservice"
	endRecovery = "locked: waited for `muster recover`, which opened it"
)

// kind makes machines for power cuts.
type kind struct {
	name string
	j    *joinservice // nil: init
	make func(t *testing.T) *encrypted
}

func kinds(t *testing.T) []kind {
	b := newBench(t)
	_, id := request(b.mirror)
	out := []kind{{"init", nil, func(t *testing.T) *encrypted { return b.newEncrypted(t, journal.KindInit, id, first(), nil) }}}
	for _, role := range []string{"worker", "control-plane"} {
		b := newBench(t)
		j := newEnroller(t, b)
		out = append(out, kind{role, j, func(t *testing.T) *encrypted {
			j.forget()
			return b.newEncrypted(t, journal.KindJoin, joinCluster, meta{Name: "node2", Role: role, JoinEndpoints: []string{j.addr}}, j.ownerKey)
		}})
	}
	return out
}

// pointAt names an effect so that it differs from others of its name.
func pointAt(points []string, at int) string {
	if points[at] == "the journal is half written" {
		return points[at] + strings.TrimPrefix(points[at-1], "the journal is about to say")
	}
	return points[at]
}

// off boots the machine, which has to die in that boot, and returns the disk's state after that.
func (e *encrypted) off(b boot) (state string) {
	e.t.Helper()
	if err := e.boots(b); !errors.Is(err, errCut) {
		e.t.Fatalf("%+v: want a power cut, got %v", b, err)
	}
	state = e.state()
	if !slices.Contains([]string{disk.StateBlank.String(), disk.StateNew.String(), disk.StateLocked.String()}, state) {
		e.t.Fatalf("%+v left a disk that is neither: %s", b, state)
	}
	return state
}

// on boots the machine, which has to become a node, and returns by which way.
func (e *encrypted) on(state string) (end string) {
	e.t.Helper()
	before := e.recovered
	if err := e.boots(boot{killAt: -1}); err != nil {
		e.t.Fatalf("not a node: %v\n%s", err, strings.Join(e.effects(), "\n"))
	}
	if err := e.isNode(e.kind, e.id); err != nil {
		e.t.Fatalf("%v\n%s", err, strings.Join(e.effects(), "\n"))
	}
	if got := e.state(); got != disk.StateLocked.String() {
		e.t.Fatalf("a node's disk is %s", got)
	}
	if _, err := os.Stat(filepath.Join(e.plan.Root, disk.FirstKeyFile)); err == nil {
		e.t.Fatal("a node has its disk's first key")
	}
	switch {
	case state != disk.StateLocked.String():
		return endAgain
	case e.recovered > before:
		return endRecovery
	}
	return endRejoin
}

// B3: the power fails at random points of a first boot: in the initramfs while the disk is formatted, while the
// cluster's key replaces the first one, and at each write of the journal, of an init and of a join. The next boot
// finds a disk that never became the cluster's, and formats it again, or one that opens with the cluster's key, and
// goes on by the journal.
func TestAPowerCutInAFirstBootLosesNoMachine(t *testing.T) {
	chance := seeded(t)
	var book ledger
	t.Cleanup(func() { book.log(t) })
	for _, k := range kinds(t) {
		chance := rand.New(rand.NewPCG(chance.Uint64(), 2))
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			e := k.make(t)
			if end := e.on(""); end != endAgain {
				t.Fatal(end)
			}
			points := e.effects()
			every := runs(8, 1)
			for at := chance.IntN(every); at < len(points); at += every {
				e := k.make(t)
				state := e.off(boot{killAt: at})
				book.add(k.name+": "+pointAt(points, at), state, e.on(state))
			}
			// Again and again, until it gets through.
			for range runs(1, 20) {
				e := k.make(t)
				var state string
				var names []string
				for range 2 + chance.IntN(4) {
					name := "when it was a node"
					switch err := e.boots(boot{killAt: chance.IntN(len(points))}); {
					case errors.Is(err, errCut):
						all := e.effects()
						name = pointAt(all, len(all)-1)
					case err == nil: // it had fewer effects
						e.cut()
					default:
						t.Fatal(err)
					}
					names, state = append(names, name), e.state()
				}
				book.add(k.name+": "+strings.Join(names, ", then "), state, e.on(state))
			}
		})
	}
}

// B3: the power fails at points of the boots of a node. Its disk stays its cluster's, and nothing is lost from it.
func TestAPowerCutInARejoinLosesNoNode(t *testing.T) {
	chance := seeded(t)
	var book ledger
	t.Cleanup(func() { book.log(t) })
	for _, k := range kinds(t) {
		at := chance.IntN(runs(5, 1))
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			e := k.make(t)
			e.on("")
			e.cut()
			before := len(e.effects())
			e.on(e.state())
			points := e.effects()[before:]
			e.cut()
			for ; at < len(points); at += runs(5, 1) {
				state := e.off(boot{killAt: at})
				if state != disk.StateLocked.String() {
					t.Fatalf("%s: a node's disk is %s", points[at], state)
				}
				book.add(k.name+": "+points[at], state, "power fails again")
			}
			end := e.on(e.state())
			if book.add(k.name+": then none", e.state(), end); end == endAgain || len(e.markers) == 0 {
				t.Errorf("%s; %d markers", end, len(e.markers))
			}
		})
	}
}

// B3: the power fails while the bootstrapper itself writes: the first key, the header of a new disk, and the header
// that makes the disk the cluster's. The kill comes from outside, as soon as something was written, so it may come
// later than in the middle; a bootstrapper that is faster waits for it at the end of that work.
func TestAPowerCutWhileTheHeaderIsWritten(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	j := newEnroller(t, b)
	const formatted = "the state disk is formatted"
	var book ledger
	for range runs(1, 20) {
		j.forget()
		e := b.newEncrypted(t, journal.KindJoin, joinCluster, meta{Name: "node2", Role: "worker", JoinEndpoints: []string{j.addr}}, j.ownerKey)
		for _, tt := range []struct {
			what string
			boot boot
			hold string // where the process waits for the kill, if it gets there before
			want string // or later
		}{
			{"the first key is written", boot{inUnlock: filepath.Join(e.plan.Root, filepath.Dir(disk.FirstKeyFile))}, formatted, "blank"},
			{"the header of a blank disk is written", boot{inUnlock: e.header}, formatted, "new"},
			{"the header of a new disk is written again", boot{inUnlock: e.header}, formatted, "new"},
			{"the cluster's header is written", boot{inRun: e.header}, "the journal says disk", "new"},
		} {
			e.hold(tt.hold)
			state := e.off(tt.boot)
			e.plan.Hold = nil
			book.add(tt.what, state, "power fails again")
			if order := []string{"blank", "new", "locked"}; slices.Index(order, state) < slices.Index(order, tt.want) {
				t.Fatalf("%s: the disk is %s", tt.what, state)
			}
		}
		state := e.state()
		book.add("then none", state, e.on(state))
	}
	book.log(t)
}

// B3: a machine that cannot get its key shows the reason on its screen, and the shown remedy works: unreachable
// joinservices come back; a disk whose enrollment was deleted is erased; a machine whose initramfs was killed is
// rebooted.
func TestAMachineThatIsLockedNamesTheWayOut(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	j := newEnroller(t, b)
	e := b.newEncrypted(t, journal.KindJoin, joinCluster, meta{Name: "node2", Role: "worker", JoinEndpoints: []string{j.addr}}, j.ownerKey)
	shows := func(words string, off bool, then func()) func(string) bool {
		return func(line string) bool {
			if !strings.Contains(line, words) {
				t.Errorf("the screen shows %q, without %q", line, words)
			}
			then()
			return off
		}
	}
	dies := func(b boot, in string) {
		t.Helper()
		e.plan.KillIn = in
		err := e.boots(b)
		if e.plan.KillIn = ""; !errors.Is(err, errCut) {
			t.Fatalf("%s: %v", in, err)
		}
	}
	dies(boot{killAt: -1}, "the journal says disk")

	e.setEndpoints("127.0.0.1:1")
	if err := e.boots(boot{killAt: -1, whileLocked: shows("no joinservice can be reached at 127.0.0.1:1", false, func() { e.setEndpoints(j.addr) })}); err != nil {
		t.Fatal(err)
	}
	if err := e.isNode(e.kind, e.id); err != nil {
		t.Fatal(err)
	}
	e.cut()

	// The initramfs is killed, and starts again without a reboot: the disk is open, and the machine is locked to its
	// cluster.
	dies(boot{killAt: -1, goesOn: true}, "PCR 15 is extended")
	if err := errors.Join(e.boots(boot{killAt: -1}), e.isNode(e.kind, e.id)); err != nil {
		t.Fatal(err)
	}
	e.cut()

	j.forget()
	if err := e.boots(boot{killAt: -1, whileLocked: shows("one that was forgotten starts over with an empty state disk", true, func() {})}); !errors.Is(err, errCut) {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(e.header, nil, 0o600), os.Truncate(e.header, 32<<20)); err != nil {
		t.Fatal(err)
	}
	e.markers = nil
	if end := e.on(e.state()); end != endAgain {
		t.Error(end)
	}
}
