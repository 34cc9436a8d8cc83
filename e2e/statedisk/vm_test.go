package statedisk

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// programs of the guest, with their libraries.
var programs = []string{"/usr/sbin/cryptsetup", "/usr/sbin/mkfs.ext4"}

// modules that the guest's kernel needs, beside their dependencies. Ciphers are the kernel's own in C: QEMU without
// KVM has hung in the self-tests of those with vector instructions, on a busy machine.
var modules = []string{"virtio_pci", "virtio_blk", "dm_crypt", "dm_integrity", "xts", "ecb", "authenc"}

// machine is a virtual machine with a state disk, another small one, and nothing else.
type machine struct{ dir, kernel, disk, other string }

func newMachine(t *testing.T, diskSize int64) *machine {
	t.Helper()
	m := &machine{dir: t.TempDir()}
	m.disk, m.other = filepath.Join(m.dir, "disk"), filepath.Join(m.dir, "other")
	for disk, size := range map[string]int64{m.disk: diskSize, m.other: 2 << 20} {
		if err := os.WriteFile(disk, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(disk, size); err != nil {
			t.Fatal(err)
		}
	}
	root := debianKernel(t)
	kernels, err := filepath.Glob(filepath.Join(root, "boot/vmlinuz-*"))
	if err != nil || len(kernels) != 1 {
		t.Fatalf("kernels: %v, %v", kernels, err)
	}
	m.kernel = kernels[0]
	guest := filepath.Join(m.dir, "guest")
	run(t, "", []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-buildvcs=false", "-o", guest, "./guest")
	c := &cpio{seen: map[string]bool{}}
	for _, d := range []string{"proc", "sys", "dev", "run", "tmp", "etc"} {
		c.add(t, d, 0o40755, nil)
	}
	c.file(t, "init", guest)
	for _, p := range programs {
		c.file(t, p, p)
		for _, l := range libraries(t, p) {
			c.file(t, l, l)
		}
	}
	var order []string
	for _, f := range moduleFiles(t, root, strings.TrimPrefix(filepath.Base(m.kernel), "vmlinuz-")) {
		c.file(t, f, filepath.Join(root, f))
		order = append(order, "/"+f)
	}
	c.add(t, "modules", 0o100644, []byte(strings.Join(order, "\n")))
	c.add(t, "TRAILER!!!", 0, nil)
	if err := os.WriteFile(filepath.Join(m.dir, "initrd"), c.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return m
}

// boot runs the machine until it powers itself off, and returns the guest's output. If a line matches cut, the power
// is cut there.
func (m *machine) boot(t *testing.T, do string, cut *regexp.Regexp) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max,-avx,-avx2", "-smp", "2", "-m", "512",
		"-display", "none", "-monitor", "none", "-no-reboot", "-nodefaults", "-serial", "stdio",
		"-kernel", m.kernel, "-initrd", filepath.Join(m.dir, "initrd"), "-append", "console=ttyS0 panic=-1 quiet cryptomgr.notests=1 muster.do="+do,
		"-drive", "if=none,id=d,format=raw,file="+m.disk, "-device", "virtio-blk-pci,drive=d",
		"-drive", "if=none,id=o,format=raw,file="+m.other, "-device", "virtio-blk-pci,drive=o")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // the kernel sends the signal when the thread ends that started the machine
	defer runtime.UnlockOSThread()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var all, said []string
	wasCut := false
	for s := bufio.NewScanner(out); s.Scan(); {
		all = append(all, s.Text())
		_, line, ok := strings.Cut(strings.TrimRight(s.Text(), "\r"), "guest: ")
		if !ok {
			continue
		}
		t.Log(do + ": " + line)
		said = append(said, line)
		if cut != nil && cut.MatchString(line) && !wasCut {
			wasCut = true
			if err := cmd.Process.Kill(); err != nil {
				t.Error(err)
			}
		}
	}
	err = cmd.Wait()
	if cut != nil && wasCut {
		return said
	}
	if err != nil || cut != nil || !slices.Contains(said, "end") {
		t.Fatalf("the machine did not come to its end: %v\n%s", err, strings.Join(all, "\n"))
	}
	return said
}

// debianKernel returns a folder with Debian's kernel for virtual machines. It is fetched once and kept.
func debianKernel(t *testing.T) string {
	t.Helper()
	depends, err := exec.CommandContext(t.Context(), "apt-cache", "depends", "--important", "linux-image-cloud-amd64").Output()
	if err != nil {
		t.Fatal(err)
	}
	var name string
	for _, l := range strings.Split(string(depends), "\n") {
		if p, ok := strings.CutPrefix(strings.TrimSpace(l), "Depends: linux-image-"); ok {
			name = "linux-image-" + p
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil || name == "" {
		t.Fatalf("kernel package %q, %v", name, err)
	}
	dir := filepath.Join(cache, "muster", "kernel", name)
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".new-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp)
	run(t, tmp, nil, "apt-get", "download", name)
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil || len(debs) != 1 {
		t.Fatal(debs, err)
	}
	run(t, tmp, nil, "dpkg-deb", "-x", debs[0], "x")
	if err := os.Rename(filepath.Join(tmp, "x"), dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// moduleFiles returns the modules in the order in which they can be loaded.
func moduleFiles(t *testing.T, root, version string) []string {
	t.Helper()
	base := filepath.Join("lib/modules", version)
	// Debian's packages have no modules.dep: it is made where they are installed.
	run(t, "", nil, "depmod", "-b", root, version)
	b, err := os.ReadFile(filepath.Join(root, base, "modules.dep"))
	if err != nil {
		t.Fatal(err)
	}
	depends, byName := map[string][]string{}, map[string]string{}
	for _, l := range strings.Split(string(b), "\n") {
		if file, needs, ok := strings.Cut(l, ":"); ok {
			depends[file] = strings.Fields(needs)
			byName[strings.ReplaceAll(strings.TrimSuffix(filepath.Base(file), ".ko"), "_", "-")] = file
		}
	}
	var order []string
	var visit func(string)
	visit = func(file string) {
		f := filepath.Join(base, file)
		if slices.Contains(order, f) {
			return
		}
		for _, d := range depends[file] {
			visit(d)
		}
		order = append(order, f)
	}
	for _, m := range modules {
		file := byName[strings.ReplaceAll(m, "_", "-")]
		if file == "" {
			t.Fatalf("the kernel has no module %s", m)
		}
		visit(file)
	}
	return order
}

func libraries(t *testing.T, program string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ldd", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	var libs []string
	for _, w := range strings.Fields(string(out)) {
		if strings.HasPrefix(w, "/") {
			libs = append(libs, w)
		}
	}
	return libs
}

func run(t *testing.T, dir string, env []string, name string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, args, err, out)
	}
}

// cpio is an archive in the format newc (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).
type cpio struct {
	bytes.Buffer
	seen map[string]bool
}

func (c *cpio) file(t *testing.T, name, from string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	c.add(t, name, 0o100755, b)
}

func (c *cpio) add(t *testing.T, name string, mode int, content []byte) {
	t.Helper()
	name = strings.TrimPrefix(name, "/")
	if c.seen[name] {
		return
	}
	if dir := filepath.Dir(name); dir != "." {
		c.add(t, dir, 0o40755, nil)
	}
	c.seen[name] = true
	fmt.Fprintf(c, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X", len(c.seen), mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
	c.WriteString(name + "\x00")
	c.pad()
	c.Write(content)
	c.pad()
}

func (c *cpio) pad() { c.Write(make([]byte, (4-c.Len()%4)%4)) }
