// Package provider finds a machine's metadata where its platform has them: a volume, the firmware's tables, or a cloud's metadata service.
//
// None of these sources is authenticated, and each is read as an attacker's: answers and files have a bounded size, a provider has a bounded time, and what it
// returns is only text for package metadata, which refuses what it does not know. False metadata can give the machine another name or keep it from joining,
// and nothing else (docs/threat-model.md).
//
// The first existing source decides. A malformed one is an error, and the next one is not tried: otherwise the machine could start with metadata that
// its operator did not intend.
package provider

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

const (
	// MaxDocument bounds a document of an operator, in bytes: what AWS and Azure allow for user data is less, Google's limit is higher.
	MaxDocument = 64 << 10
	// maxMedium bounds a file of the config medium, in bytes.
	maxMedium = 256 << 10
	// Timeout bounds all requests to a cloud's metadata service together.
	Timeout = 10 * time.Second
)

// ErrAbsent means that no source is there. Another error means that a source is there, and can't be used.
var ErrAbsent = errors.New("no source of metadata is there")

// Found is what a provider has for this machine.
type Found struct {
	metadata.Source
	metadata.Platform
	// Document is the operator's MachineMetadata (YAML).
	Document []byte
	// Network is the operator's MachineNetwork (YAML); nil if there is none.
	Network []byte
}

// Machine is where a machine's sources are. The zero value has none.
type Machine struct {
	// Sys is sysfs, Dev the folder of devices, Credentials that of the credentials which systemd has imported; empty: it does not run.
	Sys, Dev, Credentials string
	// Disks makes volumes count wherever they are. Otherwise only those in optical drives do: users of a cluster can write volumes on disks, see [Machine.Choose].
	Disks bool
	// Mount mounts a vfat volume read-only without devices and programs, and returns its folder and the function that unmounts it.
	Mount func(device string) (dir string, unmount func(), err error)
	// Clouds are the addresses of the clouds' metadata services, by the provider's name.
	Clouds map[string]string
	// Timeout bounds all requests to one of them together.
	Timeout time.Duration
}

// This returns the sources of this program's machine. Volumes are mounted at the folder at.
func This(at string) Machine {
	return Machine{
		Sys: "/sys", Dev: "/dev", Credentials: systemCredentials, Timeout: Timeout, Clouds: clouds(),
		Mount: func(device string) (string, func(), error) { return mount(device, at) },
	}
}

// Choose returns the providers in which the machine looks, each in order: first those of the machine itself, then, with [Machine.Disks], volumes on disks, then
// clouds. By default a cloud is asked only if the firmware's tables name it: on other machines, any neighbor could answer for its address.
//
// A pod with a PersistentVolume of mode Block writes it as it likes, and a volume can stay attached while its node restarts. So a machine reads a volume on a disk
// only if nothing is found that such a pod can't write, and on a machine of a cloud only if the image names its provider.
func (m Machine) Choose(s metadata.Sources) (local, disks, cloud []string) {
	names, here := s.Providers, ""
	if len(names) == 0 {
		here = m.Cloud()
		names = slices.DeleteFunc(metadata.ProviderNames(), func(n string) bool { return isCloud(n) && n != here })
	}
	for _, n := range names {
		if isCloud(n) {
			cloud = append(cloud, n)
			continue
		}
		local = append(local, n)
		if here == "" && n != metadata.ProviderCredential {
			disks = append(disks, n)
		}
	}
	return local, disks, cloud
}

// Find returns the metadata of the first of these providers that is there, or [ErrAbsent].
func (m Machine) Find(ctx context.Context, names []string) (*Found, error) {
	var unread error
	for _, n := range names {
		f, err := m.find(ctx, n)
		if err == nil {
			f.Provider = n
			return f, nil
		}
		if !errors.Is(err, ErrAbsent) {
			return nil, fmt.Errorf("metadata of the provider %s: %w", n, err)
		}
		if errors.Is(err, unix.EIO) {
			unread = err
		}
	}
	err := fmt.Errorf("%w (%s)", ErrAbsent, strings.Join(names, ", "))
	if unread != nil {
		err = fmt.Errorf("%w: %w", err, unread)
	}
	return nil, err
}

func (m Machine) find(ctx context.Context, name string) (*Found, error) {
	switch name {
	case metadata.ProviderMedium:
		return m.medium()
	case metadata.ProviderCredential:
		return m.credential()
	case metadata.ProviderNoCloud:
		return m.noCloud()
	case metadata.ProviderConfigDrive:
		return m.configDrive()
	}
	ask, ok := services[name]
	if !ok {
		return nil, fmt.Errorf("there is no provider %q", name)
	}
	ctx, cancel := context.WithTimeout(ctx, m.Timeout)
	defer cancel()
	c := newClient(m.Clouds[name])
	defer c.close()
	f, err := ask(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.base, err)
	}
	f.From = c.base
	return f, nil
}

// isCloud reports whether a provider needs the network.
func isCloud(name string) bool { return services[name] != nil }

// setDocuments takes the operator's documents: a YAML stream with one MachineMetadata and at most one MachineNetwork.
func (f *Found) setDocuments(b []byte) error {
	if len(b) > MaxDocument {
		return fmt.Errorf("the document is longer than %d bytes", MaxDocument)
	}
	if bytes.HasPrefix(b, []byte{0x1f, 0x8b}) {
		return errors.New("the document is compressed: write it as it is")
	}
	docs, err := metadata.Documents(b)
	if err != nil {
		return fmt.Errorf("the document is no YAML of kind MachineMetadata: %w", err)
	}
	for _, doc := range docs {
		kind, err := metadata.Field(doc, "kind")
		if err != nil {
			return fmt.Errorf("the document is no YAML of kind MachineMetadata: %w", err)
		}
		var into *[]byte
		switch kind {
		case "MachineMetadata":
			into = &f.Document
		case "MachineNetwork":
			into = &f.Network
		default:
			return fmt.Errorf("want documents of kind MachineMetadata and MachineNetwork, not %.40q", kind)
		}
		if *into != nil {
			return fmt.Errorf("want one document of kind %s", kind)
		}
		if *into, err = metadata.Text(doc); err != nil {
			return err
		}
	}
	if f.Document == nil {
		return errors.New("there is no document of kind MachineMetadata")
	}
	return nil
}

// readFile reads a file of at most limit bytes from a folder that others have written. No link leads out of the folder.
func readFile(dir *os.Root, name string, limit int64) ([]byte, error) {
	f, err := dir.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readBounded(f, filepath.Base(name), limit)
}

func readBounded(r io.Reader, name string, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("%s: longer than %d bytes", name, limit)
	}
	return b, nil
}

// missing reports whether a file is not there.
func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
