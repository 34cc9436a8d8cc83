package firmware

import (
	"crypto"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-attestation/attest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var files = []File{
	{Path: "/usr/bin/bootstrapper", PCR: PCRBoot, SHA256: strings.Repeat("ab", 32), Size: 7},
	{Path: "/usr/local/bin/kubelet", PCR: PCRLoaded, SHA256: strings.Repeat("cd", 32), Size: 8},
	{Path: "/usr/local/bin/containerd", PCR: PCRLoaded, SHA256: strings.Repeat("ce", 32), Size: 9},
	{Path: "/etc/muster/image.yaml", PCR: PCRConfig, SHA256: strings.Repeat("ef", 32), Size: 9},
}

func TestTheLogReplaysToTheExpectedValuesInAnotherImplementation(t *testing.T) {
	events, err := Events(files)
	if err != nil {
		t.Fatal(err)
	}
	log, err := attest.ParseEventLog(Log(events))
	if err != nil {
		t.Fatal(err)
	}
	values := Replay(events)
	var pcrs []attest.PCR
	for i, v := range values {
		pcrs = append(pcrs, attest.PCR{Index: i, Digest: v[:], DigestAlg: crypto.SHA256})
	}
	replayed, err := log.Verify(pcrs)
	if err != nil {
		t.Fatal(err)
	}
	if len(replayed) != len(events) {
		t.Errorf("%d events came out of %d", len(replayed), len(events))
	}
	state, err := attest.ParseSecurebootState(replayed)
	if err != nil {
		t.Fatal(err)
	}
	if state.Enabled {
		t.Error("the log claims Secure Boot")
	}
}

func TestEachFileMovesItsOwnPCRAndNoOther(t *testing.T) {
	want, err := Expected("image", files)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range files {
		changed := append([]File{}, files...)
		changed[i].SHA256 = strings.Repeat("00", 32)
		got, err := Expected("image", changed)
		if err != nil {
			t.Fatal(err)
		}
		for pcr, v := range got.PCRs {
			moved := v != want.PCRs[pcr]
			if own := pcr == map[int]string{PCRBoot: "4", PCRLoaded: "9", PCRConfig: "11"}[f.PCR]; moved != own {
				t.Errorf("%s changed: PCR %s moved: %t", f.Path, pcr, moved)
			}
		}
	}
	for _, pcr := range []string{"8", "12", "13", "14"} {
		if want.PCRs[pcr] != strings.Repeat("0", 64) {
			t.Errorf("PCR %s is %s", pcr, want.PCRs[pcr])
		}
	}
}

func TestTheOrderOfAManifestDoesNotMatter(t *testing.T) {
	a, err := Expected("image", files)
	if err != nil {
		t.Fatal(err)
	}
	b, err := Expected("image", []File{files[3], files[2], files[0], files[1]})
	if err != nil {
		t.Fatal(err)
	}
	for pcr := range a.PCRs {
		if a.PCRs[pcr] != b.PCRs[pcr] {
			t.Errorf("PCR %s depends on the order", pcr)
		}
	}
}

func TestHashMeasuresWhatIsThereWhateverTheManifestSays(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "usr/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "usr/bin/bootstrapper"), []byte("changed"), 0o755); err != nil {
		t.Fatal(err)
	}
	got, err := Hash(root, files)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte("changed"))
	if len(got) != 1 || got[0].SHA256 != hex.EncodeToString(sum[:]) || got[0].Size != 7 || got[0].PCR != PCRBoot {
		t.Errorf("%+v", got)
	}
}

func TestAManifestThatMakesNoSenseIsRefused(t *testing.T) {
	for name, f := range map[string]File{
		"a PCR that isn't the lab's to extend": {Path: "/x", PCR: 15, SHA256: strings.Repeat("ab", 32)},
		"a short digest":                       {Path: "/x", PCR: 4, SHA256: "ab"},
		"no digest":                            {Path: "/x", PCR: 4},
	} {
		if m, err := Expected("image", []File{f}); err == nil {
			t.Errorf("%s: %v", name, m)
		}
	}
}
