// Package image reads the disk image of machines, and predicts from it alone the measurements of their TPMs.
//
// It trusts no data of the image about itself: each hash is computed from the bytes that a machine would read.
package image

import (
	"bytes"
	"crypto"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/muster-k8s/muster/internal/explain"
	"github.com/muster-k8s/muster/internal/image/fat"
	"github.com/muster-k8s/muster/internal/image/gpt"
	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/internal/image/measure"
	"github.com/muster-k8s/muster/internal/image/uki"
	"github.com/muster-k8s/muster/internal/image/verity"
	"github.com/muster-k8s/muster/internal/policyfile"
)

// ReadProgram returns the program of a disk image of size bytes that firmware starts. It reads every byte of the root, and
// compares it with the hash in the program's command line and with the hash tree on the disk.
func ReadProgram(r io.ReaderAt, size int64) ([]byte, error) {
	id, parts, err := gpt.Read(r, size)
	if err != nil {
		return nil, err
	}
	want := []gpt.Found{
		{Type: layout.ESPType, GUID: layout.ESPGUID, Name: layout.ESPName},
		{Type: layout.RootType, GUID: layout.RootGUID, Name: layout.RootName},
		{Type: layout.TreeType, GUID: layout.TreeGUID, Name: layout.TreeName},
	}
	if id != layout.DiskGUID || len(parts) != len(want) {
		return nil, fmt.Errorf("the disk %s has %d partitions, want %s with %d: it is no image of Muster's build", id, len(parts), layout.DiskGUID, len(want))
	}
	for i, p := range parts {
		if w := want[i]; p.Type != w.Type || p.GUID != w.GUID || p.Name != w.Name {
			return nil, fmt.Errorf("partition %d is %q (%s, %s), want %q: it is no image of Muster's build", i+1, p.Name, p.Type, p.GUID, w.Name)
		}
	}
	esp, root, tree := parts[0], parts[1], parts[2]
	program, err := fat.OnlyFile(esp, esp.Size(), "EFI", "BOOT", "BOOTX64.EFI")
	if err != nil {
		return nil, fmt.Errorf("partition %s: %w", layout.ESPName, err)
	}
	line, err := section(program, ".cmdline")
	if err != nil {
		return nil, err
	}
	promised, err := layout.RootOf(strings.TrimRight(string(line), "\x00"))
	if err != nil {
		return nil, err
	}
	got, hashes, err := verity.Tree(root)
	if err != nil {
		return nil, fmt.Errorf("partition %s: %w", layout.RootName, err)
	}
	if got != promised { // S2
		return nil, fmt.Errorf("partition %s has the root %s, but the kernel's command line has %s: the image was altered, and a machine would stop when it reads the altered block", layout.RootName, got, promised)
	}
	stored, err := io.ReadAll(tree)
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(stored, hashes) { // S2
		return nil, fmt.Errorf("partition %s is not the hash tree of %s: the image was altered", layout.TreeName, layout.RootName)
	}
	return program, nil
}

// Measurements predicts PCRs of a bank from the program that firmware starts. Firmware with Secure Boot on leads to other values.
func Measurements(program []byte, bank crypto.Hash, secureBoot bool) (policyfile.Measurements, error) {
	version, err := versionOf(program)
	if err != nil {
		return policyfile.Measurements{}, err
	}
	name := "muster " + version
	if secureBoot {
		name += ", Secure Boot"
	}
	return measure.Boot{UKI: program, SecureBoot: secureBoot, Bank: bank}.Predict(name)
}

// Steps returns the measurements of which [Measurements] predicts the results.
func Steps(program []byte, bank crypto.Hash, secureBoot bool) ([]explain.Step, error) {
	return measure.Boot{UKI: program, SecureBoot: secureBoot, Bank: bank}.Steps()
}

// versionOf returns the image's version (os-release(5)).
func versionOf(program []byte) (string, error) {
	release, err := section(program, ".osrel")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(release)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "IMAGE_VERSION="); ok {
			return strconv.Unquote(v)
		}
	}
	return "", errors.New("the image's os-release has no IMAGE_VERSION")
}

func section(program []byte, name string) ([]byte, error) {
	found, err := uki.Sections(program, name)
	if err != nil {
		return nil, fmt.Errorf("the program that firmware starts: %w", err)
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("the program that firmware starts has %d sections %s, want one", len(found), name)
	}
	return found[0].Data, nil
}
