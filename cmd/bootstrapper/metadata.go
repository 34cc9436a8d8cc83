package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata/provider"
)

// mediumFolder is where a volume with metadata is mounted while it is read.
const mediumFolder = "/run/muster/medium"

// lookAgain is the pause between two searches for metadata.
const lookAgain = 30 * time.Second

// sources finds this machine's metadata once in a boot, if there is no metadata file. Muster's own initramfs writes that file.
//
// Only one goroutine searches, and no request of a peer starts a search, because each search reads all disks and may query a
// cloud for [provider.Timeout].
type sources struct {
	image   *metadata.Image
	file    string // written by the operator
	found   string // what was found in this boot
	machine provider.Machine
	log     *slog.Logger

	mu     sync.Mutex
	failed error // of the latest search
}

func newSources(img *metadata.Image, file string, log *slog.Logger) *sources {
	return &sources{image: img, file: file, found: metadata.RunPath, machine: provider.This(mediumFolder), log: log, failed: errors.New("the machine searches for its metadata")}
}

// start searches once, so that a machine with metadata starts with them, and then every 30 seconds until ctx ends. It returns a function that returns
// the metadata, or the error of the latest search, without waiting.
func (s *sources) start(ctx context.Context) func() (*metadata.Machine, error) {
	s.look(ctx)
	go func() {
		for retry.Wait(ctx, lookAgain) == nil {
			s.look(ctx)
		}
	}()
	return s.load
}

// load returns the metadata of the file, or of this boot.
func (s *sources) load() (*metadata.Machine, error) {
	m, err := metadata.LoadMachine(s.file, s.found)
	if errors.Is(err, fs.ErrNotExist) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return nil, errors.Join(err, s.failed)
	}
	return m, err
}

// look searches only if there is no file: the operator has to correct a malformed one.
func (s *sources) look(ctx context.Context) {
	if _, err := metadata.LoadMachine(s.file, s.found); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	err := s.search(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = err
}

// search writes the metadata that it finds to the file.
func (s *sources) search(ctx context.Context) error {
	local, disks, cloud := s.machine.Choose(s.image.Metadata)
	f, err := s.machine.Find(ctx, local)
	if errors.Is(err, provider.ErrAbsent) && len(disks) > 0 {
		every := s.machine
		every.Disks = true
		f, err = every.Find(ctx, disks)
	}
	if errors.Is(err, provider.ErrAbsent) && len(cloud) > 0 {
		f, err = s.machine.Find(ctx, cloud)
	}
	if err != nil {
		return err
	}
	text, m, err := metadata.Complete(f.Document, f.Platform, f.Source)
	if err != nil {
		return fmt.Errorf("%s: %w", f.From, err)
	}
	if f.Network != nil {
		return fmt.Errorf("%s: only Muster's own image reads a document of kind MachineNetwork: remove it", f.From)
	}
	s.log.InfoContext(ctx, "found this machine's metadata", "source", m.Source.String())
	return machine.WriteFile(s.found, text, 0o644, 0o755)
}
