package verity

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/image/layout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func data(blocks int) []byte {
	b := make([]byte, blocks*layout.BlockSize)
	_, _ = rand.NewChaCha8([32]byte{byte(blocks)}).Read(b)
	return b
}

func TestCryptsetupMakesTheSameTree(t *testing.T) {
	for _, blocks := range []int{2, 127, 128, 129, 128*128 + 1} {
		t.Run(fmt.Sprint(blocks), func(t *testing.T) {
			b := data(blocks)
			root, tree, err := Tree(bytes.NewReader(b))
			if err != nil || root.Blocks != uint64(blocks) {
				t.Fatalf("%v, %v", root, err)
			}
			dir := t.TempDir()
			disk, hashes := filepath.Join(dir, "data"), filepath.Join(dir, "hashes")
			if err := os.WriteFile(disk, b, 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := exec.CommandContext(t.Context(), "/usr/sbin/veritysetup", "format", "--no-superblock", "--salt=-", "--hash=sha256", disk, hashes).CombinedOutput()
			if err != nil {
				t.Fatalf("veritysetup: %v: %s", err, out)
			}
			if !strings.Contains(string(out), fmt.Sprintf("%x", root.Hash)) {
				t.Errorf("root %x, veritysetup says %s", root.Hash, out)
			}
			want, err := os.ReadFile(hashes)
			if err != nil || !bytes.Equal(tree, want) {
				t.Errorf("the tree has %d bytes, veritysetup's %d, and they differ: %v", len(tree), len(want), err)
			}
		})
	}
}

func TestAChangedByteChangesTheRoot(t *testing.T) {
	b := data(300)
	before, _, err := Tree(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	after, _, err := Tree(bytes.NewReader(b))
	if err != nil || before.Hash == after.Hash {
		t.Errorf("%x, %v", after.Hash, err)
	}
}

func TestDataThatDmVerityCantUseAreRefused(t *testing.T) {
	for _, n := range []int{0, layout.BlockSize, 2*layout.BlockSize + 1} {
		if _, _, err := Tree(bytes.NewReader(make([]byte, n))); err == nil {
			t.Errorf("%d bytes were accepted", n)
		}
	}
}
