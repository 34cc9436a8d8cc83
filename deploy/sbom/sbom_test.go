package sbom

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
	"github.com/spdx/tools-golang/spdxlib"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func goTool(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Dir = filepath.Join("..", "..")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %v: %v", args, err)
	}
	return strings.TrimSpace(string(out))
}

func config(t *testing.T) Config {
	t.Helper()
	c, err := Local(t.Context(), time.Unix(1767225600, 0))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestADocumentHasEachModuleOfAProgramWithItsLicense(t *testing.T) {
	program := filepath.Join(t.TempDir(), "kms")
	goTool(t, "build", "-trimpath", "-buildvcs=false", "-o", program, "./cmd/kms")
	c := config(t)
	b, err := c.Of(program, "v0.1.0")
	if err != nil {
		t.Fatal(err)
	}
	again, err := c.Of(program, "v0.1.0")
	if err != nil || !bytes.Equal(b, again) {
		t.Errorf("the same program gives another document: %v", err)
	}
	d, err := json.Read(bytes.NewReader(b)) // it also checks the version's form
	if err != nil {
		t.Fatal(err)
	}
	if err := spdxlib.ValidateDocument(d); err != nil {
		t.Error(err)
	}
	binary, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	described, err := spdxlib.GetDescribedPackageIDs(d)
	if err != nil || len(described) != 1 {
		t.Fatalf("it describes %v: %v", described, err)
	}
	license, expression := map[string]string{}, regexp.MustCompile(`^[A-Za-z0-9.+-]+( AND [A-Za-z0-9.+-]+)*$`)
	for _, p := range d.Packages {
		license[p.PackageName+" "+p.PackageVersion] = p.PackageLicenseConcluded
		if !expression.MatchString(p.PackageLicenseConcluded) || p.PackageLicenseConcluded == unknown {
			t.Errorf("%s: license %q", p.PackageName, p.PackageLicenseConcluded)
		}
		if p.PackageSPDXIdentifier == described[0] && p.PackageChecksums[0].Value != fmt.Sprintf("%x", sha256.Sum256(binary)) {
			t.Error("the checksum is not the program's")
		}
	}
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	if len(info.Deps) < 20 {
		t.Fatalf("%d modules", len(info.Deps))
	}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		if license[m.Path+" "+m.Version] == "" {
			t.Errorf("%s %s is missing", m.Path, m.Version)
		}
	}
	for name, want := range map[string]string{"std " + info.GoVersion: "BSD-3-Clause", "kms v0.1.0": "Apache-2.0"} {
		if license[name] != want {
			t.Errorf("%s: %q, want %q", name, license[name], want)
		}
	}
	modulesHaveTheirSums(t, program, d)
	t.Logf("%d modules, %d bytes", len(info.Deps), len(b))
	c.ModuleCache = t.TempDir()
	if _, err := c.Of(program, "v1"); err == nil || !strings.Contains(err.Error(), "go mod download") {
		t.Errorf("%v: documents must not depend on what a cache lacks", err)
	}
}

// modulesHaveTheirSums checks that the document has the hash of each module of the program, as Go has recorded it, and no hash that nobody has set.
func modulesHaveTheirSums(t *testing.T, program string, d *spdx.Document) {
	t.Helper()
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]string{}
	for _, p := range d.Packages {
		for _, c := range p.PackageChecksums {
			if c.Value == strings.Repeat("0", 64) {
				t.Errorf("%s has the hash %s", p.PackageName, c.Value)
			}
			if c.Algorithm == common.SHA256 {
				sums[p.PackageName+" "+p.PackageVersion] = c.Value
			}
		}
	}
	checked := 0
	for _, m := range info.Deps {
		for m.Replace != nil {
			m = m.Replace
		}
		if m.Sum == "" { // one of the checkout
			continue
		}
		checked++
		sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:"))
		if got := sums[m.Path+" "+m.Version]; err != nil || len(sum) != sha256.Size || got != hex.EncodeToString(sum) {
			t.Errorf("%s %s has the hash %q, want that of %s (%v)", m.Path, m.Version, got, m.Sum, err)
		}
	}
	if checked < 20 {
		t.Errorf("%d modules have a hash", checked)
	}
}

func TestAProgramOfOthersIsRefused(t *testing.T) {
	if _, err := config(t).Of(filepath.Join(goTool(t, "env", "GOROOT"), "bin", "go"), "v1"); err == nil {
		t.Error("a document that says that the go command is Muster's")
	}
	if _, err := config(t).Of("sbom_test.go", "v1"); err == nil {
		t.Error("a document of a file that is no program")
	}
}
