package buildinfo

import (
	"runtime"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAnUnstampedBuildSaysSo(t *testing.T) {
	if got := Read(); got.Version != "dev" || got.Go != runtime.Version() {
		t.Errorf("%+v", got)
	}
}

func TestAStampedBuildIsNamed(t *testing.T) {
	version, commit = "v1.2.3", "0123456789abcdef0123"
	t.Cleanup(func() { version, commit = "", "" })
	if got := Read().String(); !strings.HasPrefix(got, "v1.2.3 (0123456789ab) go") {
		t.Error(got)
	}
	if got := (Info{Version: "v1", Commit: "abc", Modified: true, Go: "go1", Platform: "p"}).String(); got != "v1 (abc, modified) go1 p" {
		t.Error(got)
	}
}
