// Package sbom describes the parts of a Go program: the modules that the linker recorded in it, with their hashes and
// licenses, as an SPDX 2.3 document in JSON.
//
// The same program results in the same document, independent of place and time.
package sbom

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
	"github.com/spdx/tools-golang/spdxlib"
)

const (
	own         = "github.com/muster-k8s/muster"
	ownLicense  = "Apache-2.0"
	unknown     = "NOASSERTION"
	purlPattern = "pkg:golang/%s@%s"
)

// Config is where licenses are read.
type Config struct {
	// ModuleCache is the output of `go env GOMODCACHE`, GOROOT that of `go env GOROOT`.
	ModuleCache, GOROOT string
	// Created is the time in the documents: that of the source, not of the build.
	Created time.Time
}

// Local returns the configuration of this machine's Go.
func Local(ctx context.Context, created time.Time) (Config, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMODCACHE", "GOROOT").Output()
	if err != nil {
		return Config{}, fmt.Errorf("go env: %w", err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != 2 {
		return Config{}, fmt.Errorf("go env printed %q", out)
	}
	return Config{ModuleCache: lines[0], GOROOT: lines[1], Created: created}, nil
}

// Of returns the document of a program, in JSON. version is the program's.
func (c Config) Of(program, version string) ([]byte, error) {
	binary, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	info, err := buildinfo.Read(bytes.NewReader(binary))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program, err)
	}
	if info.Main.Path != own {
		return nil, fmt.Errorf("%s: it was built from the module %q, want %s", program, info.Main.Path, own)
	}
	name, sum := filepath.Base(program), sha256.Sum256(binary)
	d := c.document("program", name, sum)
	d.add(&spdx.Package{
		PackageName: name, PackageSPDXIdentifier: d.root, PackageVersion: version, PackageFileName: name, PrimaryPackagePurpose: "APPLICATION",
		PackageLicenseConcluded: ownLicense, PackageLicenseDeclared: ownLicense,
		PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: hex.EncodeToString(sum[:])}},
	})
	d.relate("DOCUMENT", "DESCRIBES", d.root)
	if err := d.module(&debug.Module{Path: "std", Version: strings.Fields(info.GoVersion)[0]}); err != nil {
		return nil, err
	}
	for _, m := range info.Deps {
		if err := d.module(m); err != nil {
			return nil, err
		}
	}
	return d.bytes()
}

// document begins the document of an object whose content has this hash.
func (c Config) document(kind, name string, sum [sha256.Size]byte) *document {
	return &document{licenses: licenses{cache: c.ModuleCache, goroot: c.GOROOT}, root: ref(kind, name), Document: spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT", DocumentName: name,
		// Unique by content, as SPDX requires it; the address is not served.
		DocumentNamespace: fmt.Sprintf("https://%s/spdx/%s-%x", own, name, sum),
		CreationInfo:      &spdx.CreationInfo{Created: c.Created.UTC().Format(time.RFC3339), Creators: []common.Creator{{CreatorType: "Tool", Creator: "muster-sbom"}}},
	}}
}

func (d *document) bytes() ([]byte, error) {
	if err := spdxlib.ValidateDocument(&d.Document); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err := json.Write(&d.Document, &out, json.Indent(" "), json.EscapeHTML(false))
	return out.Bytes(), err
}

type document struct {
	spdx.Document
	licenses licenses
	root     common.ElementID
}

func (d *document) add(p *spdx.Package) {
	p.PackageDownloadLocation, p.PackageCopyrightText = unknown, unknown
	d.Packages = append(d.Packages, p)
}

func (d *document) relate(a common.ElementID, how string, b common.ElementID) {
	d.Relationships = append(d.Relationships, &spdx.Relationship{RefA: common.DocElementID{ElementRefID: a}, Relationship: how, RefB: common.DocElementID{ElementRefID: b}})
}

// module adds one that the program contains.
func (d *document) module(m *debug.Module) error {
	for m.Replace != nil {
		m = m.Replace
	}
	license, err := d.licenses.of(m)
	if err != nil {
		return err
	}
	p := modulePackage(ref("module", m.Path), m, license)
	d.add(p)
	d.relate(d.root, "CONTAINS", p.PackageSPDXIdentifier)
	return nil
}

// modulePackage describes a module that is not replaced.
func modulePackage(id common.ElementID, m *debug.Module, license string) *spdx.Package {
	p := &spdx.Package{
		PackageName: m.Path, PackageVersion: m.Version, PackageSPDXIdentifier: id, PrimaryPackagePurpose: "LIBRARY",
		PackageLicenseConcluded: license, PackageLicenseDeclared: license,
	}
	if m.Sum != "" {
		// "h1:" and the SHA-256 of the module's file list (golang.org/x/mod/sumdb/dirhash) in base64, as go.sum pins
		// it.
		if b, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:")); err == nil {
			p.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: hex.EncodeToString(b)}}
			p.PackageComment = "The checksum is Go's module hash h1, as in go.sum."
		}
	}
	if m.Version != "" && !isOwn(m.Path) {
		p.PackageExternalReferences = []*spdx.PackageExternalReference{{
			Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL, Locator: fmt.Sprintf(purlPattern, m.Path, m.Version),
		}}
	}
	return p
}

func isOwn(path string) bool { return path == own || strings.HasPrefix(path, own+"/") }

var notInRef = regexp.MustCompile(`[^A-Za-z0-9.-]`)

// ref returns an element's ID, which SPDX restricts to letters, digits, dots and dashes.
func ref(kind, name string) common.ElementID {
	return common.ElementID(kind + "-" + notInRef.ReplaceAllString(name, "-"))
}
