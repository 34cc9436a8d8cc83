// Package imagetest makes small disk images with the partitions of Muster's build.
package imagetest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/muster-k8s/muster/internal/image/gpt"
	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/internal/image/uki"
	"github.com/muster-k8s/muster/internal/image/uki/ukitest"
	"github.com/muster-k8s/muster/internal/image/verity"
)

// Parts are the contents of an image. Each may be changed before [Parts.Write].
type Parts struct {
	Root, Tree []byte
	Cmdline    string
	// Folder and File are the path of the program.
	Folder, File string
	// More is another file beside it, if it is not empty.
	More       string
	Partitions []gpt.Partition // without content
}

// New returns the parts of a valid image.
func New(t testing.TB) *Parts {
	t.Helper()
	p := &Parts{Root: bytes.Repeat([]byte("root"), 300*layout.BlockSize/4), Folder: "BOOT", File: "BOOTX64.EFI", Partitions: []gpt.Partition{
		{Type: layout.ESPType, GUID: layout.ESPGUID, Name: layout.ESPName},
		{Type: layout.RootType, GUID: layout.RootGUID, Name: layout.RootName},
		{Type: layout.TreeType, GUID: layout.TreeGUID, Name: layout.TreeName},
	}}
	root, tree, err := verity.Tree(bytes.NewReader(p.Root))
	if err != nil {
		t.Fatal(err)
	}
	p.Tree, p.Cmdline = tree, "quiet "+layout.VerityKey+root.String()
	return p
}

// Program returns the program that firmware starts.
func (p *Parts) Program(t testing.TB) []byte {
	t.Helper()
	b, err := uki.Build(ukitest.Program(1024), []uki.Section{
		{Name: ".osrel", Data: []byte("ID=muster\nIMAGE_VERSION=\"v1.2.3\"\n")}, {Name: ".cmdline", Data: append([]byte(p.Cmdline), 0)},
		{Name: ".linux", Data: ukitest.Program(512)}, {Name: ".initrd", Data: []byte("ram")},
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Write writes the disk into a file, with mkfs.vfat and mtools.
func (p *Parts) Write(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	esp, program := filepath.Join(dir, "esp"), filepath.Join(dir, "program")
	if err := os.WriteFile(program, p.Program(t), 0o600); err != nil {
		t.Fatal(err)
	}
	const size = 40 << 20 // FAT32 has at least 65,525 clusters; these have 512 bytes
	if err := os.WriteFile(esp, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	commands := [][]string{
		{"mkfs.vfat", "-F", "32", "-s", "1", "-n", "MUSTER-ESP", esp},
		{"mmd", "-i", esp, "::/EFI", "::/EFI/" + p.Folder},
		{"mcopy", "-i", esp, program, "::/EFI/" + p.Folder + "/" + p.File},
	}
	if p.More != "" {
		commands = append(commands, []string{"mcopy", "-i", esp, program, "::/" + p.More})
	}
	for _, c := range commands {
		cmd := exec.CommandContext(t.Context(), c[0], c[1:]...)
		cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", c, err, out)
		}
	}
	b, err := os.ReadFile(esp)
	if err != nil {
		t.Fatal(err)
	}
	for i, content := range [][]byte{b, p.Root, p.Tree} {
		if i < len(p.Partitions) {
			p.Partitions[i].Content, p.Partitions[i].Size = bytes.NewReader(content), int64(len(content))
		}
	}
	disk := filepath.Join(dir, "muster.raw")
	f, err := os.Create(disk)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := gpt.Write(f, layout.DiskGUID, p.Partitions); err != nil {
		t.Fatal(err)
	}
	return disk
}
