package main

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata/provider"
)

const machineDocument = "apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\nname: node1\nrole: worker\naddresses: [192.0.2.7]\n"

// sourcesOf returns those of a machine without any.
func sourcesOf(t *testing.T) sources {
	t.Helper()
	dir := t.TempDir()
	return sources{
		image: &metadata.Image{}, file: filepath.Join(dir, "metadata.yaml"), found: filepath.Join(dir, "found.yaml"),
		machine: provider.Machine{Sys: filepath.Join(dir, "sys"), Dev: filepath.Join(dir, "dev"), Credentials: dir}, log: slog.New(slog.DiscardHandler),
	}
}

func TestAMachineWithoutAFileFindsItsMetadataOnceInABoot(t *testing.T) {
	s := sourcesOf(t)
	load := s.each(t.Context())
	if _, err := load(); !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, provider.ErrAbsent) {
		t.Fatal(err)
	}
	credential := filepath.Join(s.machine.Credentials, "muster.machine")
	for wrong, want := range map[string]string{
		"hello": "YAML", strings.Replace(machineDocument, "role: worker", "role: x", 1): "role", machineDocument + "---\nkind: MachineNetwork\n": "MachineNetwork",
	} {
		write(t, credential, wrong)
		if m, err := load(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v", wrong, m, err)
		}
	}
	write(t, credential, machineDocument)
	if m, err := load(); err != nil || m.Name != "node1" || m.Source.Provider != metadata.ProviderCredential {
		t.Fatalf("%+v, %v", m, err)
	}
	if err := os.Remove(credential); err != nil {
		t.Fatal(err)
	}
	if m, err := load(); err != nil || m.Name != "node1" {
		t.Errorf("in the same boot: %+v, %v", m, err)
	}
	if m, err := metadata.LoadMachine(s.file, s.found); err != nil || m.Name != "node1" {
		t.Errorf("another program: %+v, %v", m, err)
	}
}

func TestAFileOfTheOperatorWinsAlsoIfItIsMalformed(t *testing.T) {
	s := sourcesOf(t)
	write(t, filepath.Join(s.machine.Credentials, "muster.machine"), machineDocument)
	write(t, s.file, "hello")
	if m, err := s.load(t.Context()); err == nil || !strings.Contains(err.Error(), s.file) {
		t.Errorf("%+v, %v", m, err)
	}
	write(t, s.file, strings.Replace(machineDocument, "node1", "node2", 1))
	if m, err := s.load(t.Context()); err != nil || m.Name != "node2" || m.Source != nil {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := os.Stat(s.found); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}
