package tpm2

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"

	"pgregory.net/rapid"

	"github.com/muster-k8s/muster/trust/attest"
)

// TestTreesOfTheVectors reads results of a second, independent program.
func TestTreesOfTheVectors(t *testing.T) {
	raw, err := os.ReadFile("../../atls/testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors struct {
		Trees []struct {
			Statements int
			Root       string
			Leaves     []struct {
				Index     int
				Statement string
				Path      []string
			}
		}
		Sessions []struct {
			Secret string `json:"activation_secret"`
			Sides  []struct {
				Binding  string
				Response string
			}
		}
	}
	if err := json.Unmarshal(raw, &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors.Trees) == 0 || len(vectors.Sessions) == 0 {
		t.Fatal("no vectors")
	}
	for _, tree := range vectors.Trees {
		for _, l := range tree.Leaves {
			var siblings []digest
			for _, h := range l.Path {
				siblings = append(siblings, digest(unhex(t, h)))
			}
			got, ok := rootFrom(leaf(attest.Statement(unhex(t, l.Statement))), uint32(l.Index), siblings)
			if !ok || hex.EncodeToString(got[:]) != tree.Root {
				t.Errorf("leaf %d of %d leads to %x (%v), want %s", l.Index, tree.Statements, got, ok, tree.Root)
			}
		}
	}
	for _, s := range vectors.Sessions {
		for _, side := range s.Sides {
			if got := hex.EncodeToString(ActivationMAC(unhex(t, s.Secret), attest.Binding(unhex(t, side.Binding)))); got != side.Response {
				t.Errorf("response %s, want %s", got, side.Response)
			}
		}
	}
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func leavesOf(n int) []digest {
	out := make([]digest, n)
	for i := range out {
		out[i] = leaf(attest.Statement{byte(i), byte(i >> 8), 1})
	}
	return out
}

func TestEveryLeafLeadsToTheRoot(t *testing.T) {
	for _, n := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 100, 511, 513, 1000, 1023, 1024} {
		leaves := leavesOf(n)
		want := root(leaves)
		step := 1 + n/50 // every leaf of a small tree; of a large one every step-th leaf and the last
		for i := n - 1; i >= 0; i -= step {
			p := path(leaves, i)
			if len(p) > maxPath {
				t.Fatalf("path of %d hashes", len(p))
			}
			if got, ok := rootFrom(leaves[i], uint32(i), p); !ok || got != want {
				t.Fatalf("leaf %d of %d leads elsewhere (%v)", i, n, ok)
			}
		}
	}
}

func TestNoOtherStatementOrPathLeadsToTheRoot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 70).Draw(t, "n")
		leaves := leavesOf(n)
		i := rapid.IntRange(0, n-1).Draw(t, "i")
		p, want := path(leaves, i), root(leaves)

		if got, ok := rootFrom(leaf(attest.Statement{0xFF}), uint32(i), p); ok && got == want {
			t.Fatal("another statement leads to the root")
		}
		if len(p) > 0 {
			changed := append([]digest(nil), p...)
			changed[rapid.IntRange(0, len(p)-1).Draw(t, "at")][rapid.IntRange(0, 31).Draw(t, "byte")] ^= 1
			if got, ok := rootFrom(leaves[i], uint32(i), changed); ok && got == want {
				t.Fatal("another path leads to the root")
			}
			// A node is not a leaf: an inner node has another prefix, so a path that starts from it
			// fails.
			if got, ok := rootFrom(leaves[i], uint32(i), p[:len(p)-1]); ok && got == want {
				t.Fatal("a shorter path leads to the root")
			}
		}
		if got, ok := rootFrom(leaves[i], uint32(i), append(append([]digest(nil), p...), digest{})); ok && got == want {
			t.Fatal("a longer path leads to the root")
		}
	})
}

func FuzzRootFrom(f *testing.F) {
	f.Add(uint32(0), []byte{})
	f.Add(uint32(1023), make([]byte, 320))
	f.Fuzz(func(t *testing.T, index uint32, raw []byte) {
		var siblings []digest
		for ; len(raw) >= 32; raw = raw[32:] {
			siblings = append(siblings, digest(raw[:32]))
		}
		_, ok := rootFrom(digest{}, index, siblings)
		if ok && (index >= maxLeaves || len(siblings) > maxPath) {
			t.Fatalf("leaf %d with %d siblings", index, len(siblings))
		}
	})
}
