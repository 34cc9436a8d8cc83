package main

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// ext4 is a file system with two files, in an image.
type ext4 struct {
	image string
	dir   string
}

// newExt4 makes a file system with more arguments of mkfs.ext4 than the image passes.
func newExt4(t *testing.T, files map[string][]byte, args ...string) ext4 {
	t.Helper()
	e := ext4{filepath.Join(t.TempDir(), "disk"), t.TempDir()}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(e.dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(e.image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(e.image, 32<<20); err != nil {
		t.Fatal(err)
	}
	command(t, "/usr/sbin/mkfs.ext4", append(args, "-q", "-d", e.dir, e.image)...)
	return e
}

func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
	return string(out)
}

// debugfs runs requests of debugfs(8), and returns what they print.
func (e ext4) debugfs(t *testing.T, requests ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/usr/sbin/debugfs", "-w", "-f", "-", e.image)
	cmd.Stdin = strings.NewReader(strings.Join(requests, "\n") + "\n")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("debugfs: %v", err)
	}
	return string(out)
}

func (e ext4) read(t *testing.T, name string) []byte {
	t.Helper()
	to := filepath.Join(t.TempDir(), name)
	e.debugfs(t, "dump /"+name+" "+to)
	b, err := os.ReadFile(to)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// blocks are the numbers of the file's blocks, as debugfs prints them.
func (e ext4) blocks(t *testing.T, name string) []string {
	t.Helper()
	out := e.debugfs(t, "blocks /"+name)
	_, numbers, _ := strings.Cut(out, "blocks /"+name+"\n")
	return strings.Fields(strings.ReplaceAll(numbers, "debugfs:", ""))
}

// share makes a file consist of another one's blocks, on the file system itself.
func (e ext4) share(t *testing.T, name, with string) {
	t.Helper()
	var raw []byte
	for line := range strings.Lines(e.debugfs(t, "inode_dump -b /"+with)) {
		words := strings.Fields(line)
		if len(words) < 2 {
			continue
		}
		for _, word := range words[1:] {
			b, err := hex.DecodeString(word)
			if err != nil || len(b) != 2 {
				break
			}
			raw = append(raw, b...)
		}
	}
	if len(raw) < 24 {
		t.Fatalf("the map of %s has %d bytes", with, len(raw))
	}
	raw = append(raw, make([]byte, 60)...)
	var requests []string
	for i := range 15 {
		requests = append(requests, fmt.Sprintf("set_inode_field /%s block[%d] 0x%x", name, i, binary.LittleEndian.Uint32(raw[4*i:])))
	}
	e.debugfs(t, requests...)
}

func (e ext4) check(t *testing.T) (repaired bool, err error) {
	t.Helper()
	return fsck(exec.CommandContext(t.Context(), e2fsck, e2fsckArgs(e.image)...), e.image)
}

// B8: a program that shares its blocks with a file of a pod has blocks of its own after the check.
func TestNoTwoFilesShareBlocksAfterTheCheck(t *testing.T) {
	program, other := bytes.Repeat([]byte("the kubelet\n"), 4000), bytes.Repeat([]byte("y"), 48000)
	e := newExt4(t, map[string][]byte{"kubelet": program, "volume": other})
	if repaired, err := e.check(t); repaired || err != nil {
		t.Fatalf("of a new file system: repaired %t, %v", repaired, err)
	}
	e.share(t, "volume", "kubelet")
	if !bytes.Equal(e.read(t, "volume"), program) {
		t.Fatal("the two files share no blocks")
	}
	if repaired, err := e.check(t); !repaired || err != nil {
		t.Fatalf("repaired %t, %v", repaired, err)
	}
	if !bytes.Equal(e.read(t, "kubelet"), program) {
		t.Error("the program is another one")
	}
	a, b := e.blocks(t, "kubelet"), e.blocks(t, "volume")
	if len(a) == 0 || len(b) == 0 {
		t.Fatalf("blocks %v and %v", a, b)
	}
	for _, block := range a {
		if strings.Contains(" "+strings.Join(b, " ")+" ", " "+block+" ") {
			t.Errorf("block %s is in both files", block)
		}
	}
	if repaired, err := e.check(t); repaired || err != nil {
		t.Errorf("once more: repaired %t, %v", repaired, err)
	}
}

func TestADiskThatCannotBeCheckedIsNotUsed(t *testing.T) {
	e := newExt4(t, nil)
	if err := os.Truncate(e.image, 1<<20); err != nil { // the superblock is right
		t.Fatal(err)
	}
	_, err := e.check(t)
	if exit, ended := errors.AsType[*exec.ExitError](err); !ended || exit.ExitCode()&^3 == 0 {
		t.Errorf("e2fsck can't check it, and it passes, or e2fsck was not asked: %v", err)
	}
	if _, err := fsck(exec.CommandContext(t.Context(), "/nonexistent"), newExt4(t, nil).image); err == nil {
		t.Error("without e2fsck, the check passes")
	}
}
