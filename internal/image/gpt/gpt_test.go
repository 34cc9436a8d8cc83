package gpt

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	disk = "a6f2e0c1-7d5b-4c39-9e11-6d7573746572"
	kind = "4f68bce3-e8cd-4db1-96e7-fbcaf984b709"
	one  = "a6f2e0c1-7d5b-4c39-9e12-6d7573746572"
	two  = "a6f2e0c1-7d5b-4c39-9e13-6d7573746572"
)

func sample() []Partition {
	return []Partition{
		{Type: kind, GUID: one, Name: "first", Content: strings.NewReader("hello"), Size: 5},
		{Type: kind, GUID: two, Name: "second ü", Content: bytes.NewReader(bytes.Repeat([]byte{7}, 3<<20)), Size: 3 << 20},
	}
}

func write(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	size, err := Write(f, disk, sample())
	if err != nil {
		t.Fatal(err)
	}
	if st, err := f.Stat(); err != nil || st.Size() != size || size != 6<<20 {
		t.Errorf("%d bytes were announced: %v, %v", size, st.Size(), err)
	}
	return path
}

func TestSfdiskReadsTheTable(t *testing.T) {
	path := write(t)
	out, err := exec.CommandContext(t.Context(), "sfdisk", "--json", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		PartitionTable struct {
			Label, ID  string
			Partitions []struct {
				Type, UUID, Name string
				Start, Size      int64
			}
		}
	}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatal(err)
	}
	p := got.PartitionTable
	if p.Label != "gpt" || !strings.EqualFold(p.ID, disk) || len(p.Partitions) != 2 {
		t.Fatalf("sfdisk read %s", out)
	}
	for i, want := range []struct {
		uuid, name  string
		start, size int64
	}{{one, "first", 2048, 1}, {two, "second ü", 4096, 6144}} {
		g := p.Partitions[i]
		if !strings.EqualFold(g.UUID, want.uuid) || !strings.EqualFold(g.Type, kind) || g.Name != want.name || g.Start != want.start || g.Size != want.size {
			t.Errorf("partition %d: %+v", i, g)
		}
	}
	// sfdisk reads the second table too, and reports if it or a checksum is bad.
	if out, err := exec.CommandContext(t.Context(), "sfdisk", "--verify", path).CombinedOutput(); err != nil || !strings.Contains(string(out), "No errors detected") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestTheSamePartitionsGiveTheSameBytes(t *testing.T) {
	a, err := os.ReadFile(write(t))
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(write(t))
	if err != nil || !bytes.Equal(a, b) {
		t.Errorf("they differ: %v", err)
	}
	if string(a[oneMiB:oneMiB+5]) != "hello" || a[2*oneMiB] != 7 {
		t.Error("the content is elsewhere")
	}
}

func TestPartitionsThatDontFitAreRefused(t *testing.T) {
	for name, change := range map[string]func(*[]Partition){
		"none":              func(p *[]Partition) { *p = nil },
		"too many":          func(p *[]Partition) { *p = make([]Partition, 129) },
		"a bad GUID":        func(p *[]Partition) { (*p)[0].GUID = "x" },
		"a bad type":        func(p *[]Partition) { (*p)[0].Type = strings.ReplaceAll(kind, "-", "") },
		"no name":           func(p *[]Partition) { (*p)[0].Name = "" },
		"a long name":       func(p *[]Partition) { (*p)[0].Name = strings.Repeat("x", 37) },
		"empty":             func(p *[]Partition) { (*p)[0].Size = 0 },
		"more than it says": func(p *[]Partition) { (*p)[0].Size = 4 },
		"less than it says": func(p *[]Partition) { (*p)[0].Size = 6 },
	} {
		t.Run(name, func(t *testing.T) {
			parts := sample()
			change(&parts)
			f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := Write(f, disk, parts); err == nil {
				t.Error("it was written")
			}
		})
	}
}
