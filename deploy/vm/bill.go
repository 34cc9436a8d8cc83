package main

import (
	"context"
	"crypto/sha256"
	"io"
	"os"
	"path/filepath"

	"github.com/muster-k8s/muster/deploy/sbom"
	"github.com/muster-k8s/muster/deploy/vm/internal/lock"
)

// writeBill writes the bill of materials of the image: packages of the lock file, and programs.
func writeBill(ctx context.Context, o options, packages []sbom.Debian, programs map[string]string) error {
	c, err := sbom.Local(ctx, o.date)
	if err != nil {
		return err
	}
	img := sbom.Image{Name: diskFile, Version: o.version, Debian: packages, Programs: programs}
	if img.SHA256, err = sumOf(filepath.Join(o.out, diskFile)); err != nil {
		return err
	}
	made, err := c.OfImage(img)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(o.out, billFile), made, 0o644)
}

func sumOf(file string) (sum lock.Sum, err error) {
	f, err := os.Open(file)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return sum, err
	}
	return lock.Sum(h.Sum(nil)), nil
}
