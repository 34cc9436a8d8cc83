package main

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata/provider"
)

// booting returns a boot whose file of metadata is in a folder of the test, and its console.
func booting(t *testing.T) (*boot, *bytes.Buffer) {
	t.Helper()
	var console bytes.Buffer
	return &boot{console: &console, metadata: filepath.Join(t.TempDir(), "metadata.yaml"), settle: time.Millisecond}, &console
}

func TestMetadataAreTakenFromACredential(t *testing.T) {
	b, console := booting(t)
	at := provider.Machine{Sys: t.TempDir(), Dev: t.TempDir(), Credentials: t.TempDir()}
	place(t, at.Credentials, "muster.machine", machine+"---\n"+static)
	m, n, err := b.config(t.Context(), &metadata.Image{}, at)
	if err != nil || m.Name != "node1" || n == nil || n.Interfaces[0].MTU != 1400 {
		t.Fatalf("%+v, %+v, %v", m, n, err)
	}
	written, err := metadata.LoadMachine(b.metadata)
	if err != nil || written.Name != "node1" || written.Source.Provider != metadata.ProviderCredential {
		t.Errorf("%+v, %v", written, err)
	}
	if !strings.Contains(console.String(), "its metadata are from credential (credential muster.machine") {
		t.Errorf("%s", console)
	}
}

// A pod of the cluster may have written the disk before the machine restarted.
func TestADiskIsReadOnlyAfterSourcesThatPodsCannotWrite(t *testing.T) {
	for name, tt := range map[string]struct {
		vendor string
		later  string // the credential is there after this time; empty: never
		want   string
	}{
		"a disk alone":         {"QEMU", "", metadata.ProviderMedium},
		"a credential, late":   {"QEMU", "4s", metadata.ProviderCredential},
		"in a cloud":           {"Amazon EC2", "10m", metadata.ProviderCredential},
		"in a cloud, at start": {"Amazon EC2", "1s", metadata.ProviderCredential},
	} {
		synctest.Test(t, func(t *testing.T) {
			b, console := booting(t)
			b.settle = settle
			b.connect = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
			files := t.TempDir()
			at := provider.Machine{Sys: t.TempDir(), Dev: t.TempDir(), Credentials: t.TempDir(), Mount: func(string) (string, func(), error) { return files, func() {}, nil }}
			place(t, at.Sys, "class/dmi/id/sys_vendor", tt.vendor)
			place(t, at.Sys, "class/block/vdc/dev", "")
			sector := make([]byte, 512)
			copy(sector[43:], layout.ConfigLabel+"FAT12   ")
			sector[510], sector[511] = 0x55, 0xaa
			place(t, at.Dev, "vdc", string(sector))
			place(t, files, layout.MetadataFile, machine)
			if tt.later != "" {
				after, err := time.ParseDuration(tt.later)
				if err != nil {
					t.Fatal(err)
				}
				time.AfterFunc(after, func() { place(t, at.Credentials, "muster.machine", machine) })
			}
			m, _, err := b.config(t.Context(), &metadata.Image{}, at)
			if err != nil || m.Source.Provider != tt.want {
				t.Errorf("%s: %+v, %v\n%s", name, m, err, console)
			}
		})
	}
}

func TestAMachineWithoutUsableMetadataWaitsAndLooksAgain(t *testing.T) {
	for name, tt := range map[string]struct{ wrong, want string }{
		"nothing":                {"", "waiting for this machine's metadata"},
		"text":                   {"hello", "no usable metadata"},
		"no role":                {strings.Replace(machine, "role: worker\n", "", 1), "role"},
		"a network of no kind":   {machine + "---\nkind: MachineNetwork\n", "MachineNetwork: want apiVersion"},
		"a name with characters": {strings.Replace(machine, "node1", `"a\e[2J\n"`, 1), "name"},
	} {
		synctest.Test(t, func(t *testing.T) {
			b, console := booting(t)
			at := provider.Machine{Sys: t.TempDir(), Dev: t.TempDir(), Credentials: t.TempDir()}
			if tt.wrong != "" {
				place(t, at.Credentials, "muster.machine", tt.wrong)
			}
			time.AfterFunc(devices+before, func() { place(t, at.Credentials, "muster.machine", machine) })
			m, _, err := b.config(t.Context(), &metadata.Image{}, at)
			if err != nil || m.Name != "node1" {
				t.Fatalf("%s: %+v, %v", name, m, err)
			}
			if out := console.String(); !strings.Contains(out, tt.want) || strings.ContainsAny(strings.ReplaceAll(out, "\n", ""), "\x1b\r\x00") {
				t.Errorf("%s: %q", name, out)
			}
		})
	}
}

// The cloud is asked after the network is up, and its document configures no network.
func TestMetadataOfACloudConfigureNoNetwork(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/openstack/latest/user_data":
			_, _ = w.Write([]byte(machine))
		case "/openstack/latest/meta_data.json":
			_, _ = w.Write([]byte("{}"))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer s.Close()
	img := &metadata.Image{Metadata: metadata.Sources{Providers: []string{metadata.ProviderOpenStack}}}
	at := provider.Machine{Sys: t.TempDir(), Dev: t.TempDir(), Clouds: map[string]string{metadata.ProviderOpenStack: s.URL}, Timeout: time.Second}
	b, console := booting(t)
	b.servers = &servers{} // DHCP has configured it
	m, n, err := b.config(t.Context(), img, at)
	if err != nil || m.Name != "node1" || n != nil || m.Source.From != s.URL {
		t.Fatalf("%+v, %+v, %v", m, n, err)
	}
	found, err := at.Find(t.Context(), []string{metadata.ProviderOpenStack})
	if err != nil {
		t.Fatal(err)
	}
	found.Network = []byte(static)
	if m, _, err := b.use(found); err == nil || !strings.Contains(err.Error(), networkKind) {
		t.Errorf("%+v, %v: %s", m, err, console)
	}
	b.servers = nil
	if _, n, err := b.use(found); err != nil || n == nil {
		t.Errorf("before the network is up: %v, %v", n, err)
	}
}

// On a machine of a cloud that gets no address, the operator can still give it a credential, also much later.
func TestWhileNoDHCPServerAnswersTheOtherSourcesAreLookedAt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, console := booting(t)
		asked := 0
		b.connect = func(ctx context.Context) error {
			asked++
			<-ctx.Done()
			return ctx.Err()
		}
		img := &metadata.Image{Metadata: metadata.Sources{Providers: []string{metadata.ProviderCredential, metadata.ProviderOpenStack}}}
		at := provider.Machine{Sys: t.TempDir(), Dev: t.TempDir(), Credentials: t.TempDir(), Clouds: map[string]string{metadata.ProviderOpenStack: "http://192.0.2.1"}, Timeout: time.Second}
		time.AfterFunc(10*time.Minute, func() { place(t, at.Credentials, "muster.machine", machine+"---\n"+static) })
		began := time.Now()
		m, n, err := b.config(t.Context(), img, at)
		if err != nil || m.Name != "node1" || n == nil {
			t.Fatalf("%+v, %+v, %v", m, n, err)
		}
		if took := time.Since(began); took > 12*time.Minute || asked < 5 {
			t.Errorf("after %s, and %d attempts by DHCP", took, asked)
		}
		if !strings.Contains(console.String(), "no network for the cloud's metadata service within 1m0s") {
			t.Errorf("%s", console)
		}
	})
}

func TestLinesForTheConsoleAreShortAndPlain(t *testing.T) {
	b, console := booting(t)
	b.print("%s", "a\x1b[2J\nmuster: b"+strings.Repeat("ü", maxLine))
	if out := console.String(); strings.Count(out, "\n") != 1 || strings.Contains(out, "\x1b") || len(out) > maxLine+1 || !strings.HasPrefix(out, "muster: a [2J muster: b") {
		t.Errorf("%q", out)
	}
}
