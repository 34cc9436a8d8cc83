package bootstrapper_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/refusaltest"
)

// observations returns what this run of the bootstrapper reports. It keeps no audit log: it issues credentials only to the owner, who has its init
// secret.
func (w *fixture) observations(r *running) refusaltest.Service {
	return refusaltest.Service{
		Families: func(t testing.TB) []*dto.MetricFamily {
			families, err := r.metrics.Gather()
			if err != nil {
				t.Fatal(err)
			}
			return families
		},
		Log: func() []byte { return []byte(w.logged.String()) },
	}
}

// initRefused returns where the refusal of an init that is not begun is reported, initFailed that of an init that fails.
func initRefused() refusaltest.Places {
	return refusaltest.Places{Metric: []string{"muster_init_attempts_total"}, Log: []string{"msg", "call refused", "procedure", initv1connect.InitServiceInitProcedure}}
}

func initFailed() refusaltest.Places {
	return refusaltest.Places{Metric: []string{"muster_init_attempts_total"}, Log: []string{"msg", "init failed"}}
}

// refused sends an init that must be refused before it has any effect, and returns its error.
func (w *fixture) refused(t *testing.T, r *running, req *initv1.InitRequest, want attestv1.Reason) error {
	t.Helper()
	return refusaltest.Refused(t, w.observations(r), want, initRefused(), func() error { return w.init(t.Context(), r, req).err })
}

// start boots the bootstrapper, whose first attempts to join must fail with the reason; 0: they must not fail.
func (w *fixture) start(want attestv1.Reason) *running {
	w.t.Helper()
	r := w.boot()
	if want != attestv1.Reason_REASON_UNSPECIFIED {
		// The observation covers everything from the machine's start, since it starts to join by itself.
		s, begun := w.observations(r), false
		families, log := s.Families, s.Log
		s.Families = func(t testing.TB) []*dto.MetricFamily {
			if !begun {
				return nil
			}
			return families(t)
		}
		s.Log = func() []byte {
			if !begun {
				return nil
			}
			return log()
		}
		places := refusaltest.Places{Metric: []string{"muster_join_attempts_total"}, Log: []string{"msg", "not joined yet"}}
		refusaltest.Reported(w.t, s, want, places, func() { begun = true })
	}
	return r
}

func TestAnInitWantsASession(t *testing.T) {
	w := first(t)
	r := w.boot()
	defer r.kill(t)
	refusaltest.EveryProcedure(t, w.observations(r), refusaltest.Plain(t), "https://"+r.addr, attestv1.Reason_REASON_SESSION_REQUIRED, initv1connect.InitServiceName)
}

func TestMetadataThatCannotBeReadAllowNoInit(t *testing.T) {
	w := first(t)
	w.unreadable = errors.New("line 1: role is neither")
	r := w.boot()
	defer r.kill(t)
	places := initRefused()
	places.Beside = []attestv1.Reason{attestv1.Reason_REASON_MACHINE_CONFIG} // of the join, which runs all the time
	refusaltest.Refused(t, w.observations(r), attestv1.Reason_REASON_MACHINE_CONFIG, places, func() error { return w.init(t.Context(), r, w.request()).err })
}

func TestAStateDiskThatCannotBeUsedFailsTheInit(t *testing.T) {
	w := first(t)
	r := w.boot()
	defer r.kill(t)
	state := filepath.Join(w.root, w.image.StateDisk.Path)
	if err := errors.Join(os.RemoveAll(state), os.WriteFile(state, []byte("a file, where a folder was"), 0o600)); err != nil {
		t.Fatal(err)
	}
	refusaltest.Refused(t, w.observations(r), attestv1.Reason_REASON_STATE_DISK, initFailed(), func() error { return w.init(t.Context(), r, w.request()).err })
}

// Components come from an untrusted mirror: a component must have the owner's hash and stay in its folder, or it changes nothing.
func TestAComponentThatIsRefusedFailsTheInit(t *testing.T) {
	entry := func(h tar.Header) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: "harmless", Typeflag: tar.TypeReg, Mode: 0o755}), w.WriteHeader(&h), w.Close()); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	for name, tt := range map[string]struct {
		content []byte // of an archive; nil: the requested component
		change  func(*initv1.Component)
		want    attestv1.Reason
	}{
		"another hash":          {change: func(c *initv1.Component) { c.Sha256 = make([]byte, 32) }, want: attestv1.Reason_REASON_COMPONENT_HASH},
		"a mirror that is gone": {change: func(c *initv1.Component) { c.Url = "http://127.0.0.1:1/kubeadm" }, want: attestv1.Reason_REASON_COMPONENT_UNAVAILABLE},
		"a symbolic link":       {content: entry(tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}), want: attestv1.Reason_REASON_COMPONENT_PATH},
		"a hard link":           {content: entry(tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}), want: attestv1.Reason_REASON_COMPONENT_PATH},
		"a climbing name":       {content: entry(tar.Header{Name: "../evil", Typeflag: tar.TypeReg}), want: attestv1.Reason_REASON_COMPONENT_PATH},
		"an absolute name":      {content: entry(tar.Header{Name: "/etc/evil", Typeflag: tar.TypeReg}), want: attestv1.Reason_REASON_COMPONENT_PATH},
		"a device":              {content: entry(tar.Header{Name: "d", Typeflag: tar.TypeChar}), want: attestv1.Reason_REASON_COMPONENT_PATH},
	} {
		t.Run(name, func(t *testing.T) {
			w := first(t)
			r := w.boot()
			defer r.kill(t)
			req := w.request()
			if tt.content != nil {
				mirror := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(tt.content) }))
				defer mirror.Close()
				sum := sha256.Sum256(tt.content)
				req.Components = append(req.Components, &initv1.Component{Url: mirror.URL + "/cni", Sha256: sum[:], Path: "/opt/cni/bin", Extract: true})
			} else {
				tt.change(req.GetComponents()[0])
			}
			refusaltest.Refused(t, w.observations(r), tt.want, initFailed(), func() error { return w.init(t.Context(), r, req).err })
			for _, path := range []string{"/etc/evil", "/opt/cni/evil", "/opt/evil"} {
				if w.exists(path) {
					t.Errorf("%s is there", path)
				}
			}
			if left, _ := os.ReadDir(filepath.Join(w.root, "opt/cni/bin")); len(left) > 0 {
				t.Errorf("left %v", left)
			}
			if out := w.init(t.Context(), r, w.request()); out.err != nil {
				t.Errorf("repaired: %v", out.err)
			}
		})
	}
}

// A machine whose clock is behind reports that before it locks itself, and joins once the clock is right.
func TestAMachineWhoseClockIsBehindGivesItsTicketBack(t *testing.T) {
	w, j := worker(t)
	var off atomic.Int64
	off.Store(int64(-3 * time.Hour))
	w.now = func() time.Time { return time.Now().Add(time.Duration(off.Load())) }
	r := w.start(attestv1.Reason_REASON_CLOCK_SKEW)
	eventually(t, "given back", func() bool { return j.givenBack() > 0 })
	if w.record().Locked() || len(w.machine.Calls()) != 0 {
		t.Error("the machine was changed")
	}
	off.Store(0)
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	w.isNode(t)
}
