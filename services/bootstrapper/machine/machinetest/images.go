package machinetest

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// Pull implements [machine.Machine].
func (m *Machine) Pull(ctx context.Context, _, image string) error {
	m.note("pull " + image)
	if _, err := versions.ParseImages([]string{image}); err != nil && !strings.Contains(err.Error(), "not listed") {
		return fmt.Errorf("an image without a digest was asked for: %w", err)
	}
	return m.step(ctx, "an image is pulled")
}

// ImageNames implements [machine.Machine]: containerd lists what was imported, if it runs.
func (m *Machine) ImageNames(ctx context.Context, _ string) ([]string, error) {
	m.note("list images")
	if err := m.step(ctx, "images are listed"); err != nil {
		return nil, err
	}
	names, err := os.ReadFile(m.on(imageNames))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return strings.Fields(string(names)), err
}

// ImportImages implements [machine.Machine].
func (m *Machine) ImportImages(ctx context.Context, _ string, archive io.Reader) error {
	m.note("import images")
	if err := m.step(ctx, "images are imported"); err != nil {
		return err
	}
	if !m.Running(machine.UnitContainerd) {
		return errors.New("containerd does not run")
	}
	files := map[string][]byte{}
	for t := tar.NewReader(archive); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if files[h.Name], err = io.ReadAll(t); err != nil {
			return err
		}
	}
	var index struct {
		Manifests []struct {
			MediaType, Digest string
			Annotations       map[string]string
		}
	}
	if err := json.Unmarshal(files["index.json"], &index); err != nil {
		return fmt.Errorf("index.json: %w", err)
	}
	has, err := os.ReadFile(m.on(imageNames))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	names := strings.Fields(string(has))
	for _, d := range index.Manifests {
		blob, ok := files["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
		if sum := sha256.Sum256(blob); !ok || d.MediaType == "" || "sha256:"+hex.EncodeToString(sum[:]) != d.Digest {
			return fmt.Errorf("image %s of type %q does not match its digest", d.Digest, d.MediaType)
		}
		names = append(names, d.Annotations["io.containerd.image.name"])
	}
	for name, content := range files {
		if hexSum, ok := strings.CutPrefix(name, "blobs/sha256/"); ok && hexSum != "" && len(content) > 0 {
			if err := machine.WriteFile(m.on("/var/lib/containerd/io.containerd.content.v1.content/"+name), content, 0o600, 0o700); err != nil {
				return err
			}
		}
	}
	return machine.WriteFile(m.on(imageNames), []byte(strings.Join(names, "\n")), 0o600, 0o700)
}

// imageNames stands for containerd's database.
const imageNames = "/var/lib/containerd/io.containerd.metadata.v1.bolt/meta.db"
