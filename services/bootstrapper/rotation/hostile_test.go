package rotation

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// Somebody with root rights on the control plane that makes the key must not choose it beforehand, nor have every rotation fail.
func TestAKeyThatWasStagedBeforeTheOrderIsNotTaken(t *testing.T) {
	for _, key := range clusterinfo.RotatedKeys() {
		for name, stage := range map[string]func(p *plane, id string, content []byte) error{
			"a key": func(p *plane, id string, content []byte) error { return p.stage(key, id, content) },
			"a key that an earlier order has made": func(p *plane, id string, content []byte) error {
				return errors.Join(p.stage(key, id, content), machine.WriteFile(p.on(made), []byte(strings.Repeat("0b", 32)+" "+id), 0o600, 0o700))
			},
			"a key that an invented record names": func(p *plane, id string, content []byte) error {
				return errors.Join(p.stage(key, id, content), machine.WriteFile(p.on(made), []byte(" "+id), 0o600, 0o700))
			},
			"what is no key": func(p *plane, id string, _ []byte) error { return p.stage(key, id, []byte("x")) },
			"what is no key, of this order": func(p *plane, id string, _ []byte) error {
				return errors.Join(p.stage(key, id, []byte("x")), machine.WriteFile(p.on(made), []byte(p.order+" "+id), 0o600, 0o700))
			},
			"a folder": func(p *plane, id string, content []byte) error {
				return machine.WriteFile(filepath.Join(p.pki(), StagedFile(key, id), "file"), content, 0o600, 0o700)
			},
		} {
			p := newPlanes(t, 1)[0]
			content, err := kinds[key].create(ecdsa, time.Now())
			if err != nil {
				t.Fatal(err)
			}
			known, _, err := kinds[key].identify(content)
			if err != nil {
				t.Fatal(err)
			}
			if err := stage(p, known, content); err != nil {
				t.Fatal(err)
			}
			out := p.must(key, clusterinfo.RotationAccept, "")
			if accepts := p.disk()[key].Accepts; out.ID == known || slices.Contains(accepts, known) || !slices.Contains(accepts, out.ID) {
				t.Errorf("%s, %s: staged was %s, made is %s, accepted are %s", key, name, known, out.ID, accepts)
			}
			if ids, err := stagedIDs(p.pki(), key); err != nil || !slices.Equal(ids, []string{out.ID}) {
				t.Errorf("%s, %s: staged are %s, %v", key, name, ids, err)
			}
			// The same order goes on with the key that it has made, and with no other.
			if again := p.must(key, clusterinfo.RotationAccept, ""); again.ID != out.ID {
				t.Errorf("%s, %s: repeated, the same order makes %s", key, name, again.ID)
			}
			p.order = strings.Repeat("0c", 32)
			if next := p.must(key, clusterinfo.RotationAccept, ""); next.ID == out.ID {
				t.Errorf("%s, %s: another order takes the key of the one before", key, name)
			}
		}
	}
}

// Whoever answers for another control plane can't choose the key: the order names it (J6).
func TestAFetchedKeyIsTheOneOfTheOrder(t *testing.T) {
	for _, key := range clusterinfo.RotatedKeys() {
		t.Run(string(key), func(t *testing.T) {
			planes := newPlanes(t, 2)
			right := planes[0].must(key, clusterinfo.RotationAccept, "")
			forged, err := kinds[key].create(ecdsa, time.Now())
			if err != nil {
				t.Fatal(err)
			}
			for name, content := range map[string][]byte{"another key": forged, "no key": []byte("x"), "nothing": nil} {
				planes[1].Fetch = func(context.Context, clusterinfo.RotatedKey, string) ([]byte, error) { return content, nil }
				if _, err := planes[1].do(key, clusterinfo.RotationAccept, right.ID); err == nil {
					t.Errorf("%s was accepted", name)
				}
				if s := planes[1].disk()[key]; len(s.Accepts) != 1 {
					t.Errorf("%s: it accepts %v", name, s.Accepts)
				}
			}
			planes[1].Fetch = planes[1].fetch
			planes[1].must(key, clusterinfo.RotationAccept, right.ID)
		})
	}
}
