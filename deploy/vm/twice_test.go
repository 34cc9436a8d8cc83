//go:build image

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"
)

// It takes minutes, so it has a target of its own: make test-image.
func TestTwoBuildsFromNothingButPackagesAreTheSameBytes(t *testing.T) {
	containerd := os.Getenv("MUSTER_VM_CONTAINERD")
	if containerd == "" {
		t.Fatal("MUSTER_VM_CONTAINERD is not set: run `make test-image`")
	}
	var (
		printed [2]bytes.Buffer
		out     string
	)
	for i := range printed {
		out = filepath.Join(t.TempDir(), "out")
		args := []string{"-source", "../..", "-bin", "../../bin", "-containerd", containerd, "-version", "v0.0.0-test", "-allow-no-owner-key", "-cache", t.TempDir(), "-o", out}
		if err := run(t.Context(), args, &printed[i], t.Output()); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(printed[0].Bytes(), printed[1].Bytes()) {
		t.Errorf("the first build made\n%s\nthe second\n%s", &printed[0], &printed[1])
	}
	t.Logf("\n%s", &printed[0])
	b, err := os.ReadFile(filepath.Join(out, billFile))
	if err != nil {
		t.Fatal(err)
	}
	bill, err := json.Read(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if err := spdxlib.ValidateDocument(bill); err != nil {
		t.Error(err)
	}
}
