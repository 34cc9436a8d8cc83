package sbom

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
)

// Image is a disk image: Debian's packages and programs of Go.
type Image struct {
	Name, Version string
	SHA256        [sha256.Size]byte
	Debian        []Debian
	// Programs maps paths in the image to files here.
	Programs map[string]string
}

// Debian is a package that is installed in an image.
type Debian struct {
	Name, Version, Architecture string
	SHA256                      [sha256.Size]byte // of its .deb; dpkg's list does not contain it
}

// ParseStatus reads dpkg's list of packages (/var/lib/dpkg/status, deb-control(5)), and returns those that are
// installed.
func ParseStatus(status []byte) ([]Debian, error) {
	var out []Debian
	for block := range bytes.SplitSeq(bytes.TrimSpace(status), []byte("\n\n")) {
		field := map[string]string{}
		for line := range strings.Lines(string(block)) {
			if name, value, ok := strings.Cut(line, ":"); ok && !strings.HasPrefix(line, " ") {
				field[name] = strings.TrimSpace(value)
			}
		}
		p := Debian{Name: field["Package"], Version: field["Version"], Architecture: field["Architecture"]}
		if p.Name == "" || p.Version == "" || p.Architecture == "" {
			return nil, errors.New("dpkg's status: an entry lacks Package, Version or Architecture")
		}
		if strings.HasSuffix(field["Status"], " installed") {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b Debian) int { return cmp.Compare(a.Name+a.Architecture, b.Name+b.Architecture) })
	return out, nil
}

// OfImage returns the document of an image, in JSON. It contains licenses only of the Go programs: Debian's are in
// each package's copyright file.
func (c Config) OfImage(img Image) ([]byte, error) {
	d := c.document("image", img.Name, img.SHA256)
	d.add(&spdx.Package{
		PackageName: img.Name, PackageSPDXIdentifier: d.root, PackageVersion: img.Version, PackageFileName: img.Name, PrimaryPackagePurpose: "OPERATING-SYSTEM",
		PackageLicenseConcluded: unknown, PackageLicenseDeclared: unknown,
		PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: hex.EncodeToString(img.SHA256[:])}},
	})
	d.relate("DOCUMENT", "DESCRIBES", d.root)
	for _, p := range img.Debian {
		if p.SHA256 == [sha256.Size]byte{} {
			return nil, fmt.Errorf("the SHA-256 of Debian's package %s %s is unknown", p.Name, p.Version)
		}
		d.debian(p)
	}
	seen := map[common.ElementID]bool{}
	for _, at := range sortedKeys(img.Programs) {
		if err := d.program(at, img.Programs[at], img.Version, seen); err != nil {
			return nil, err
		}
	}
	return d.bytes()
}

func (d *document) debian(p Debian) {
	id := ref("debian", p.Name+"-"+p.Architecture)
	d.add(&spdx.Package{
		PackageName: p.Name, PackageVersion: p.Version, PackageSPDXIdentifier: id, PrimaryPackagePurpose: "LIBRARY",
		PackageLicenseConcluded: unknown, PackageLicenseDeclared: unknown,
		PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: hex.EncodeToString(p.SHA256[:])}},
		PackageExternalReferences: []*spdx.PackageExternalReference{{
			Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL,
			Locator: fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", p.Name, strings.NewReplacer("+", "%2B", ":", "%3A", "~", "~").Replace(p.Version), p.Architecture),
		}},
	})
	d.relate(d.root, "CONTAINS", id)
}

// program adds a program, and those of its modules that are not in the document yet.
func (d *document) program(at, file, version string, seen map[common.ElementID]bool) error {
	binary, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	info, err := buildinfo.Read(bytes.NewReader(binary))
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	sum, license := sha256.Sum256(binary), unknown
	ours := isOwn(info.Main.Path)
	if ours {
		license = ownLicense
	} else {
		version = info.Main.Version
	}
	id := ref("program", at)
	d.add(&spdx.Package{
		PackageName: path.Base(at), PackageSPDXIdentifier: id, PackageVersion: version, PackageFileName: "/" + at, PrimaryPackagePurpose: "APPLICATION",
		PackageLicenseConcluded: license, PackageLicenseDeclared: license,
		PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: hex.EncodeToString(sum[:])}},
	})
	d.relate(d.root, "CONTAINS", id)
	modules := append([]*debug.Module{{Path: "std", Version: strings.Fields(info.GoVersion)[0]}}, info.Deps...)
	if !ours {
		modules = append(modules, &info.Main)
	}
	for _, m := range modules {
		for m.Replace != nil {
			m = m.Replace
		}
		id := ref("module", m.Path+"-"+m.Version)
		if !seen[id] {
			seen[id] = true
			d.add(modulePackage(id, m, unknown))
		}
		d.relate(ref("program", at), "CONTAINS", id)
	}
	return nil
}

func sortedKeys(m map[string]string) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}
