package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/muster-k8s/muster/deploy/sbom"
)

// writeBill says what the image is made of.
func writeBill(ctx context.Context, o options, b base, status []byte, program string) error {
	packages, err := sbom.ParseStatus(status)
	if err != nil {
		return err
	}
	// The kernel and the loader are no installed packages of the root.
	more, err := filepath.Glob(filepath.Join(b.dir, "deb", "*.deb"))
	if err != nil {
		return err
	}
	for _, file := range more {
		p, err := debianFile(filepath.Base(file))
		if err != nil {
			return err
		}
		packages = append(packages, p)
	}
	c, err := sbom.Local(ctx, o.date)
	if err != nil {
		return err
	}
	img := sbom.Image{Name: diskFile, Version: o.version, Debian: packages, Programs: programs(o)}
	img.Programs["init"] = program // of the initramfs
	if img.SHA256, err = sumOf(filepath.Join(o.out, diskFile)); err != nil {
		return err
	}
	made, err := c.OfImage(img)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(o.out, billFile), made, 0o644)
}

// debianFile reads NAME_VERSION_ARCHITECTURE.deb, as apt names what it downloads.
func debianFile(name string) (sbom.Debian, error) {
	part := strings.Split(strings.TrimSuffix(name, ".deb"), "_")
	if len(part) != 3 {
		return sbom.Debian{}, fmt.Errorf("%s is not named as apt names packages", name)
	}
	version, err := url.PathUnescape(part[1])
	return sbom.Debian{Name: part[0], Version: version, Architecture: part[2]}, err
}

func sumOf(file string) (sum [sha256.Size]byte, err error) {
	f, err := os.Open(file)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return sum, err
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}
