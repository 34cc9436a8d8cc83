package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata/provider"
)

// mediumFolder is where a volume with metadata is mounted while it is read.
const mediumFolder = "/run/muster/medium"

// sources finds this machine's metadata if it has no file of them, once in a boot. Muster's own initramfs writes the file, so its machines have one.
type sources struct {
	image   *metadata.Image
	file    string // the operator's
	found   string // what was found in this boot
	machine provider.Machine
	log     *slog.Logger
}

func newSources(img *metadata.Image, file string, log *slog.Logger) sources {
	return sources{img, file, metadata.RunPath, provider.This(mediumFolder), log}
}

// load returns the machine's metadata, and looks for them only on a machine without a file: one that is malformed is for the operator to correct.
func (s sources) load(ctx context.Context) (*metadata.Machine, error) {
	m, err := metadata.LoadMachine(s.file, s.found)
	if !errors.Is(err, fs.ErrNotExist) {
		return m, err
	}
	local, cloud := s.machine.Choose(s.image.Metadata)
	f, ferr := s.machine.Find(ctx, append(local, cloud...))
	if errors.Is(ferr, provider.ErrAbsent) {
		return nil, errors.Join(err, ferr)
	}
	if ferr != nil {
		return nil, ferr
	}
	text, m, err := metadata.Complete(f.Document, f.Platform, f.Source)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.From, err)
	}
	if f.Network != nil {
		return nil, fmt.Errorf("%s: only Muster's own image reads a document of kind MachineNetwork: remove it", f.From)
	}
	s.log.InfoContext(ctx, "found this machine's metadata", "source", m.Source.String())
	return m, machine.WriteFile(s.found, text, 0o644, 0o755)
}

// each returns a function that loads the metadata until ctx ends.
func (s sources) each(ctx context.Context) func() (*metadata.Machine, error) {
	return func() (*metadata.Machine, error) { return s.load(ctx) }
}
