package discovery

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/attest"
)

// image has the owner's keys of an image: those of the owners 1 and 2 of [policyOf].
var image = attest.OwnerKeys{bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)}

// policyOf returns the policy of an owner with that serial; 0: none.
func policyOf(owner byte, serial uint64, digest byte) *journal.Policy {
	if serial == 0 {
		return nil
	}
	return &journal.Policy{OwnerKey: bytes.Repeat([]byte{owner}, 32), Serial: serial, Digest: bytes.Repeat([]byte{digest}, 32)}
}

// A state disk is refused if it was opened under a policy that is older than an accepted one, in any of the files; else the machine knows the newest of
// all.
func TestADiskThatWasOpenedUnderAnOlderPolicyIsNotUsed(t *testing.T) {
	for name, tt := range map[string]struct {
		journaled, attested, unlocked *journal.Policy
		want                          uint64 // 0: refused
	}{
		"older than the journal's":                {policyOf(1, 5, 1), nil, policyOf(1, 4, 1), 0},
		"older than the attester's":               {policyOf(1, 3, 1), policyOf(1, 5, 1), policyOf(1, 4, 1), 0},
		"older than the attester's, no journal's": {nil, policyOf(1, 5, 1), policyOf(1, 4, 1), 0},
		"the same serial with other bytes":        {policyOf(1, 5, 1), nil, policyOf(1, 5, 2), 0},
		"the same":                                {policyOf(1, 5, 1), policyOf(1, 5, 1), policyOf(1, 5, 1), 5},
		"newer":                                   {policyOf(1, 5, 1), policyOf(1, 6, 1), policyOf(1, 7, 1), 7},
		"opened by a recovery":                    {policyOf(1, 5, 1), policyOf(1, 6, 1), nil, 6},
		"a machine that accepted none":            {nil, nil, policyOf(1, 2, 1), 2},
		"another owner's serials":                 {policyOf(3, 5, 1), nil, policyOf(2, 1, 1), 1},
		"older, by the image's other key":         {policyOf(2, 5, 1), nil, policyOf(1, 4, 1), 0},
		"older than the attester's other key's":   {policyOf(1, 3, 1), policyOf(2, 5, 1), policyOf(1, 4, 1), 0},
		"the same serial, by the other key":       {policyOf(2, 5, 1), nil, policyOf(1, 5, 2), 0},
		"newer, by the image's other key":         {policyOf(1, 5, 1), policyOf(1, 6, 1), policyOf(2, 7, 1), 7},
		"a key that the image has dropped":        {policyOf(3, 9, 1), policyOf(1, 6, 1), policyOf(2, 7, 1), 7},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for path, p := range map[string]*journal.Policy{journal.AttesterPolicy: tt.attested, journal.UnlockPolicy: tt.unlocked} {
				if err := journal.Open(filepath.Join(root, path)).Save(journal.Record{Policy: p}); err != nil {
					t.Fatal(err)
				}
			}
			err := Accepted(root, tt.journaled, image)
			if tt.want == 0 {
				if attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
					t.Errorf("got %v", err)
				}
				return
			}
			got, rerr := Recall(root, tt.journaled, image)
			if err = errors.Join(err, rerr); err != nil || got.Serial != tt.want {
				t.Errorf("got %+v, %v, want serial %d", got, err, tt.want)
			}
		})
	}
	root := t.TempDir()
	if got, err := Recall(root, nil, image); got != nil || err != nil || Accepted(root, nil, image) != nil {
		t.Errorf("nothing was accepted: %+v, %v", got, err)
	}
	for _, path := range []string{journal.AttesterPolicy, journal.UnlockPolicy} {
		at := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Recall(root, nil, image)
		for _, err := range []error{err, Accepted(root, nil, image)} {
			if attest.ReasonOf(err) != attestv1.Reason_REASON_NODE_LOCKED {
				t.Errorf("%s is damaged: %v", path, err)
			}
		}
		if err := os.Remove(at); err != nil {
			t.Fatal(err)
		}
	}
}

// Over any number of restarts, no policy is accepted that is older than the kept one, or than the other process's.
func TestAFloorOutlivesItsProcess(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		file := journal.Open(filepath.Join(dir, "policy"))
		if err := os.RemoveAll(file.Path()); err != nil {
			rt.Fatal(err)
		}
		known := rapid.Uint64Range(0, 3).Draw(rt, "known")
		newest, digest := known, byte(1)
		for range rapid.IntRange(1, 30).Draw(rt, "policies") {
			f := Floor{File: journal.Open(file.Path()), Known: policyOf(1, known, 1)}
			serial, d, keep := rapid.Uint64Range(1, 5).Draw(rt, "serial"), rapid.ByteRange(1, 2).Draw(rt, "digest"), rapid.Bool().Draw(rt, "keep")
			owner := rapid.ByteRange(1, 2).Draw(rt, "key") // whichever key of the image signs
			err := f.Newest(*policyOf(owner, serial, d), image, keep)
			fits := serial > newest || serial == newest && d == digest
			if (err == nil) != fits || err != nil && attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
				rt.Fatalf("serial %d, digest %d after %d, %d: %v", serial, d, newest, digest, err)
			}
			if fits && keep {
				newest, digest = serial, d
			}
		}
	})
}
