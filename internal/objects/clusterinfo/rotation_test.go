package clusterinfo

import (
	"strings"
	"testing"
)

func TestARotationIsRead(t *testing.T) {
	id := strings.Repeat("ab", 32)
	for name, tt := range map[string]struct {
		wrong, right Rotation
	}{
		"an unknown key":                     {Rotation{Key: "cluster-ca", Phase: RotationAccept}, Rotation{Key: ServiceAccountKey, Phase: RotationAccept}},
		"an unknown phase":                   {Rotation{Key: EncryptionKey, Phase: "drop", ID: id}, Rotation{Key: EncryptionKey, Phase: RotationFinish, ID: id}},
		"a phase that needs a key":           {Rotation{Key: EncryptionKey, Phase: RotationUse}, Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id}},
		"an ID in capitals":                  {Rotation{Key: EncryptionKey, Phase: RotationUse, ID: strings.ToUpper(id)}, Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id}},
		"an ID of another size":              {Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id[2:]}, Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id}},
		"no public part of a key that has":   {Rotation{Key: FrontProxyCA, Phase: RotationUse, ID: id}, Rotation{Key: FrontProxyCA, Phase: RotationUse, ID: id, Public: "x"}},
		"a public part of a key without one": {Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id, Public: "x"}, Rotation{Key: EncryptionKey, Phase: RotationUse, ID: id}},
	} {
		if err := tt.wrong.check(); err == nil {
			t.Errorf("%s is accepted", name)
		}
		if err := tt.right.check(); err != nil {
			t.Errorf("%s, repaired: %v", name, err)
		}
	}
	if !(*Rotation)(nil).Joins() || (*Rotation)(nil).check() != nil {
		t.Error("no rotation keeps control planes out")
	}
}

func TestAPhaseIsReachedByWhatAControlPlaneReports(t *testing.T) {
	id, old := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
	r := &Rotation{Key: ServiceAccountKey, ID: id}
	for name, tt := range map[string]struct {
		s    KeyState
		want string // of accept, use and finish
	}{
		"nothing":                    {KeyState{}, ""},
		"the old key":                {KeyState{Accepts: []string{old}, Uses: old}, ""},
		"staged, not accepted":       {KeyState{Accepts: []string{old}, Uses: old, Staged: []string{id}}, ""},
		"accepted, not staged":       {KeyState{Accepts: []string{old, id}, Uses: old}, ""},
		"accepted":                   {KeyState{Accepts: []string{old, id}, Uses: old, Staged: []string{id}}, "accept"},
		"used":                       {KeyState{Accepts: []string{id, old}, Uses: id, Staged: []string{id}}, "accept use"},
		"joined with it":             {KeyState{Accepts: []string{id, old}, Uses: id}, "accept use"},
		"used and not accepted":      {KeyState{Accepts: []string{old}, Uses: id}, ""},
		"the only one, still staged": {KeyState{Accepts: []string{id}, Uses: id, Staged: []string{id}}, "accept use"},
		"the only one":               {KeyState{Accepts: []string{id}, Uses: id}, "accept use finish"},
	} {
		var got []string
		for _, p := range []RotationPhase{RotationAccept, RotationUse, RotationFinish} {
			if r.Reached(p, tt.s) {
				got = append(got, string(p))
			}
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
		if (&Rotation{Key: ServiceAccountKey}).Reached(RotationAccept, tt.s) {
			t.Errorf("%s: a phase without a key is reached", name)
		}
	}
}
