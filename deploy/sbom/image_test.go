package sbom

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"
)

const status = `Package: zlib1g
Status: install ok installed
Architecture: amd64
Version: 1:1.2.13.dfsg-1
Description: compression
 Version: in a description

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: bash
Status: install ok installed
Architecture: amd64
Version: 5.2.15-2+b13
`

func TestAnImagesDocumentHasDebiansPackagesAndEachProgram(t *testing.T) {
	packages, err := ParseStatus([]byte(status))
	if err != nil || !slices.Equal(packages, []Debian{{Name: "bash", Version: "5.2.15-2+b13", Architecture: "amd64"}, {Name: "zlib1g", Version: "1:1.2.13.dfsg-1", Architecture: "amd64"}}) {
		t.Fatalf("%v, %v", packages, err)
	}
	packages[0].SHA256 = sha256.Sum256([]byte("bash's .deb"))
	unknown := Image{Name: "disk.raw", SHA256: sha256.Sum256(nil), Debian: slices.Clone(packages)}
	packages[1].SHA256 = sha256.Sum256([]byte("zlib1g's .deb"))
	program := filepath.Join(t.TempDir(), "kms")
	goTool(t, "build", "-trimpath", "-buildvcs=false", "-o", program, "./cmd/kms")
	gofmt := filepath.Join(goTool(t, "env", "GOROOT"), "bin", "gofmt")
	img := Image{Name: "disk.raw", Version: "v0.1.0", SHA256: sha256.Sum256(nil), Debian: packages, Programs: map[string]string{"usr/bin/kms": program, "usr/bin/kms2": program, "usr/bin/gofmt": gofmt}}
	c := config(t)
	c.ModuleCache = t.TempDir() // an incomplete cache must not change the document
	b, err := c.OfImage(img)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := c.OfImage(img); err != nil || !bytes.Equal(b, again) {
		t.Errorf("the same image gives another document: %v", err)
	}
	if _, err := c.OfImage(unknown); err == nil || !strings.Contains(err.Error(), "zlib1g") {
		t.Errorf("%v: a package whose hash nobody has set is in the document", err)
	}
	d, err := json.Read(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if err := spdxlib.ValidateDocument(d); err != nil {
		t.Error(err)
	}
	modulesHaveTheirSums(t, program, d)
	have := map[string]string{}
	for _, p := range d.Packages {
		have[p.PackageName] = p.PackageVersion + " " + p.PackageFileName
		if want := fmt.Sprintf("%x", packages[0].SHA256); p.PackageName == "bash" && p.PackageChecksums[0].Value != want {
			t.Errorf("bash has the checksum %s, want %s", p.PackageChecksums[0].Value, want)
		}
		if p.PackageName == "zlib1g" && p.PackageExternalReferences[0].Locator != "pkg:deb/debian/zlib1g@1%3A1.2.13.dfsg-1?arch=amd64" {
			t.Errorf("zlib1g is %s", p.PackageExternalReferences[0].Locator)
		}
	}
	for name, want := range map[string]string{"disk.raw": "v0.1.0 disk.raw", "bash": "5.2.15-2+b13 ", "kms": "v0.1.0 /usr/bin/kms"} {
		if have[name] != want {
			t.Errorf("%s: %q, want %q", name, have[name], want)
		}
	}
	if have["connectrpc.com/connect"] == "" || have["std"] == "" || strings.HasPrefix(have["gofmt"], "v0.1.0") {
		t.Errorf("connect %q, std %q, gofmt %q", have["connectrpc.com/connect"], have["std"], have["gofmt"])
	}
}

func TestAListThatIsNotDpkgsIsRefused(t *testing.T) {
	for _, s := range []string{"", "x", "Package: a\nStatus: install ok installed\nArchitecture: all\n"} {
		if p, err := ParseStatus([]byte(s)); err == nil {
			t.Errorf("%q: %v", s, p)
		}
	}
}
