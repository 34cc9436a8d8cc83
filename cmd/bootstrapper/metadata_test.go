package main

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata/provider"
)

const machineDocument = "apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\nname: node1\nrole: worker\naddresses: [192.0.2.7]\n"

// sourcesOf returns those of a machine without any.
func sourcesOf(t *testing.T) *sources {
	t.Helper()
	dir := t.TempDir()
	return &sources{
		image: &metadata.Image{}, file: filepath.Join(dir, "metadata.yaml"), found: filepath.Join(dir, "found.yaml"),
		machine: provider.Machine{Sys: filepath.Join(dir, "sys"), Dev: filepath.Join(dir, "dev"), Credentials: dir}, log: slog.New(slog.DiscardHandler),
	}
}

func TestAMachineWithoutAFileFindsItsMetadataOnceInABoot(t *testing.T) {
	s := sourcesOf(t)
	load := func() (*metadata.Machine, error) {
		s.look(t.Context())
		return s.load()
	}
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
	s.look(t.Context())
	if m, err := s.load(); err == nil || !strings.Contains(err.Error(), s.file) {
		t.Errorf("%+v, %v", m, err)
	}
	write(t, s.file, strings.Replace(machineDocument, "node1", "node2", 1))
	s.look(t.Context())
	if m, err := s.load(); err != nil || m.Name != "node2" || m.Source != nil {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := os.Stat(s.found); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// GetStatus and init, which unauthenticated peers call, load the metadata too.
func TestLoadingTheMetadataStartsNoSearch(t *testing.T) {
	var asked atomic.Int32
	arrived := make(chan struct{}, 100)
	cloud := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		arrived <- struct{}{}
		<-r.Context().Done()
	}))
	defer cloud.Close()
	s := sourcesOf(t)
	s.image.Metadata.Providers = []string{metadata.ProviderOpenStack}
	s.machine.Clouds, s.machine.Timeout = map[string]string{metadata.ProviderOpenStack: cloud.URL}, time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	var search, loads sync.WaitGroup
	search.Go(func() { s.look(ctx) })
	<-arrived
	for range 20 { // the search waits for its answer until it is canceled, so a load that waits for it never ends
		loads.Go(func() {
			if m, err := s.load(); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%+v, %v", m, err)
			}
		})
	}
	loads.Wait()
	cancel()
	search.Wait()
	if m, err := s.load(); !errors.Is(err, context.Canceled) || asked.Load() != 1 {
		t.Errorf("%+v, %v, after %d requests", m, err, asked.Load())
	}
}

func TestMetadataAreSearchedAgainUntilTheyAreThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := sourcesOf(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		load := s.start(ctx)
		if m, err := load(); !errors.Is(err, provider.ErrAbsent) {
			t.Errorf("%+v, %v", m, err)
		}
		write(t, filepath.Join(s.machine.Credentials, "muster.machine"), machineDocument)
		if m, err := load(); !errors.Is(err, provider.ErrAbsent) {
			t.Errorf("before the next search: %+v, %v", m, err)
		}
		<-time.After(lookAgain)
		synctest.Wait()
		if m, err := load(); err != nil || m.Name != "node1" {
			t.Errorf("%+v, %v", m, err)
		}
	})
}
