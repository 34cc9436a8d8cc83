package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/deploy/vm/internal/lock"
)

// site is a mirror with packages of this test, and a build's options that name it.
type site struct {
	t    *testing.T
	o    options
	pool string
	log  bytes.Buffer
}

func newSite(t *testing.T) *site {
	dir := t.TempDir()
	s := &site{t: t, pool: filepath.Join(dir, "mirror"), o: options{cache: filepath.Join(dir, "cache"), date: installed, lock: "packages.lock"}}
	s.o.sources = place(t, dir, "sources.list", "deb [trusted=yes] copy:"+s.pool+" ./\n")
	return s
}

// publish makes a package and puts it on the mirror.
func (s *site) publish(name, version, content string) lock.Package {
	s.t.Helper()
	dir := filepath.Join(s.t.TempDir(), name)
	place(s.t, dir, "DEBIAN/control", fmt.Sprintf("Package: %s\nVersion: %s\nArchitecture: amd64\nMaintainer: nobody\nDescription: test\n", name, version))
	place(s.t, dir, "usr/share/"+name, content)
	if err := os.MkdirAll(s.pool, 0o755); err != nil {
		s.t.Fatal(err)
	}
	p := lock.Package{Name: name, Version: version, Architecture: architecture}
	file := filepath.Join(s.pool, poolName(p))
	if err := tool(s.t.Context(), s.o, "dpkg-deb", "--root-owner-group", "-b", dir, file); err != nil {
		s.t.Fatal(err)
	}
	sum, err := sumOf(file)
	if err != nil {
		s.t.Fatal(err)
	}
	p.Sum = sum
	s.index()
	return p
}

// index writes the mirror's list of its packages.
func (s *site) index() {
	s.t.Helper()
	files, err := filepath.Glob(filepath.Join(s.pool, "*.deb"))
	if err != nil {
		s.t.Fatal(err)
	}
	var b bytes.Buffer
	for _, f := range files {
		control, err := toolOutput(s.t.Context(), s.o, "dpkg-deb", "-f", f)
		sum, serr := sumOf(f)
		info, ierr := os.Stat(f)
		if err != nil || serr != nil || ierr != nil {
			s.t.Fatal(err, serr, ierr)
		}
		fmt.Fprintf(&b, "%sFilename: ./%s\nSize: %d\nSHA256: %s\n\n", control, filepath.Base(f), info.Size(), sum)
	}
	place(s.t, s.pool, "Packages", b.String())
}

// take fetches packages as a build does, and returns their content.
func (s *site) take(want ...lock.Package) (map[string]string, error) {
	s.t.Helper()
	dir := s.t.TempDir()
	pool := filepath.Join(dir, "pool")
	if err := (cache{dir: s.o.cache, log: &s.log}).packages(s.t.Context(), s.o, want, pool); err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, p := range want {
		into := filepath.Join(dir, "root-of-"+p.Name) // dpkg-deb makes it
		if err := tool(s.t.Context(), s.o, "dpkg-deb", "-x", filepath.Join(pool, poolName(p)), into); err != nil {
			return nil, err
		}
		b, err := os.ReadFile(filepath.Join(into, "usr", "share", p.Name))
		if err != nil {
			return nil, err
		}
		out[p.Name] = string(b)
	}
	return out, nil
}

func (s *site) flip(file string, at int) {
	s.t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		s.t.Fatal(err)
	}
	b[(at+len(b))%len(b)] ^= 1
	if err := os.WriteFile(file, b, 0o644); err != nil {
		s.t.Fatal(err)
	}
}

func TestAChangedPackageOfTheCacheIsFetchedAgain(t *testing.T) {
	s := newSite(t)
	a, b := s.publish("a", "1:1", "content of a"), s.publish("b", "2", "content of b")
	if got, err := s.take(a, b); err != nil || got["a"] != "content of a" || got["b"] != "content of b" {
		t.Fatal(got, err)
	}
	// A file in the cache needs no mirror.
	if err := os.Rename(s.pool, s.pool+"-away"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.take(a, b); err != nil {
		t.Fatal(err)
	}
	cached := filepath.Join(s.o.cache, packageName(a))
	s.flip(cached, -1)
	if got, err := s.take(a, b); err == nil {
		t.Errorf("%q went into the image", got)
	}
	if _, err := os.Stat(cached); err == nil {
		t.Error("the changed package stays in the cache")
	}
	if err := os.Rename(s.pool+"-away", s.pool); err != nil {
		t.Fatal(err)
	}
	if got, err := s.take(a, b); err != nil || got["a"] != "content of a" || !strings.Contains(s.log.String(), "fetching 1 of 2") {
		t.Errorf("%q, %v\n%s", got, err, &s.log)
	}
	// Nor does one that was replaced by another valid package, of the same size.
	other := s.publish("a", "1:2", "content of A")
	if err := os.Rename(filepath.Join(s.pool, poolName(other)), cached); err != nil {
		t.Fatal(err)
	}
	s.index()
	if got, err := s.take(a); err != nil || got["a"] != "content of a" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestAMovedMirrorIsNamedWithTheRepair(t *testing.T) {
	for name, tt := range map[string]struct {
		move func(s *site, p lock.Package)
		says string
	}{
		"a newer version": {func(s *site, p lock.Package) {
			if err := os.Remove(filepath.Join(s.pool, poolName(p))); err != nil {
				t.Fatal(err)
			}
			s.publish("a", "2", "new content")
		}, "a 1 amd64 with SHA-256 "},
		"another content of the same version":    {func(s *site, _ lock.Package) { s.publish("a", "1", "Content of a") }, "the mirror has: 1 with SHA-256 "},
		"a file that is not what its index says": {func(s *site, p lock.Package) { s.flip(filepath.Join(s.pool, poolName(p)), -1) }, "apt-get download"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			a := s.publish("a", "1", "content of a")
			tt.move(s, a)
			got, err := s.take(a)
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Fatalf("%q, %v", got, err)
			}
			if strings.Contains(tt.says, "SHA-256") && (!strings.Contains(err.Error(), "make vm-lock") || !strings.Contains(err.Error(), "-sources")) {
				t.Errorf("%v: it doesn't say what to do", err)
			}
		})
	}
}

func TestAMirrorThatSendsOtherBytesThanTheLockNamesIsRefused(t *testing.T) {
	s := newSite(t)
	a := s.publish("a", "1", "content of a")
	m, err := mirror(t.Context(), s.o, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// apt trusts its index. The mirror's signer does not decide which packages go into the image.
	b := a
	b.Sum[0] ^= 1
	m.index["a"][0].Package = b
	if err := os.MkdirAll(filepath.Join(s.o.cache, "pool"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := (cache{dir: s.o.cache, log: &s.log}).download(t.Context(), m, []lock.Package{b}, filepath.Join(s.o.cache, "pool")); err == nil || !strings.Contains(err.Error(), "the lock file has") {
		t.Errorf("it is taken: %v", err)
	}
	if _, err := os.Stat(filepath.Join(s.o.cache, packageName(b))); err == nil {
		t.Error("the cache has it")
	}
}

func TestAChangedRootOfTheCacheIsThrownAway(t *testing.T) {
	s := newSite(t)
	c := cache{dir: s.o.cache, log: &s.log}
	root := place(t, t.TempDir(), "root.tar", "root")
	sum, err := sumOf(root)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.put(root, rootName(sum)); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "root.tar")
	if ok, err := c.take(rootName(sum), to, sum); !ok || err != nil {
		t.Fatal(ok, err)
	}
	s.flip(filepath.Join(s.o.cache, rootName(sum)), 0)
	if ok, err := c.take(rootName(sum), to, sum); ok || err != nil {
		t.Errorf("a changed root is used: %v, %v", ok, err)
	}
	for _, file := range []string{to, filepath.Join(s.o.cache, rootName(sum))} {
		if _, err := os.Stat(file); err == nil {
			t.Errorf("%s is still there", file)
		}
	}
}

func TestTheLockNamesWhatIsInstalledAndNoMore(t *testing.T) {
	status := []byte("Package: a\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1\n\nPackage: b\nStatus: install ok installed\nArchitecture: all\nVersion: 2\n")
	good := []lock.Package{
		{Name: "a", Version: "1", Architecture: "amd64", Sum: lock.Sum{1}}, {Name: "b", Version: "2", Architecture: "all", Sum: lock.Sum{2}},
		{Name: "linux-image-6.1.0-1-cloud-amd64", Version: "6", Architecture: "amd64", Sum: lock.Sum{3}}, {Name: loaderPackage, Version: "252", Architecture: "amd64", Sum: lock.Sum{4}},
	}
	packages, err := billed(lock.Lock{Packages: good}, status)
	if err != nil || len(packages) != 4 || packages[1].SHA256 != [32]byte{2} {
		t.Fatalf("%v, %v", packages, err)
	}
	for name, tt := range map[string]struct {
		change func(p []lock.Package) []lock.Package
		says   string
	}{
		"one more": {func(p []lock.Package) []lock.Package {
			return append(p, lock.Package{Name: "zsh", Version: "1", Architecture: "amd64"})
		}, "zsh 1 amd64, which is not in the image"},
		"one less":        {func(p []lock.Package) []lock.Package { return p[1:] }, "a 1 amd64, which the lock file doesn't name"},
		"another version": {func(p []lock.Package) []lock.Package { p[1].Version = "3"; return p }, "b 2 all, which the lock file doesn't name"},
	} {
		if _, err := billed(lock.Lock{Packages: tt.change(slices.Clone(good))}, status); err == nil || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), "make vm-lock") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// lockOf writes a lock file whose tools are those of this machine.
func lockOf(t *testing.T, change func(*lock.Lock)) options {
	t.Helper()
	o := options{source: filepath.Join("..", ".."), date: installed}
	l, err := toolchain(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range lockedPrograms {
		l.Programs = append(l.Programs, lock.Program{Name: name, Sum: lock.Sum{1}})
	}
	l.Root, l.Packages = lock.Sum{1}, []lock.Package{{Name: "a", Version: "1", Architecture: "all", Sum: lock.Sum{1}}}
	change(&l)
	o.lock = place(t, t.TempDir(), lockFile, string(l.Format()))
	return o
}

func TestOtherToolsThanTheLocksAreRefused(t *testing.T) {
	if _, err := readLock(t.Context(), lockOf(t, func(*lock.Lock) {})); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		change func(*lock.Lock)
		says   string
	}{
		"another compiler":   {func(l *lock.Lock) { l.Go = "go1.26.0" }, "GOTOOLCHAIN=go1.26.0"},
		"another mksquashfs": {func(l *lock.Lock) { l.Tools[len(l.Tools)-1].Version = "1:4.6" }, "1:4.6"},
		"a tool less":        {func(l *lock.Lock) { l.Tools = l.Tools[1:] }, "is for the tools"},
		"no ctr":             {func(l *lock.Lock) { l.Programs = l.Programs[:2] }, "ctr"},
	} {
		if _, err := readLock(t.Context(), lockOf(t, tt.change)); err == nil || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), "make vm-lock") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOtherProgramsThanTheLocksAreRefused(t *testing.T) {
	dir := t.TempDir()
	l := lock.Lock{Go: runtime.Version()}
	for _, name := range lockedPrograms {
		sum, err := sumOf(place(t, dir, name, "program "+name))
		if err != nil {
			t.Fatal(err)
		}
		l.Programs = append(l.Programs, lock.Program{Name: name, Sum: sum})
	}
	o := options{source: filepath.Join("..", ".."), containerd: dir, bin: dir}
	build := func(flags ...string) {
		t.Helper()
		if _, err := goTool(t.Context(), o, append(append([]string{"build", "-o", filepath.Join(dir, "bootstrapper")}, flags...), "./deploy/vm/initramfs")...); err != nil {
			t.Fatal(err)
		}
	}
	build("-trimpath", "-buildvcs=false")
	got, err := programs(o, l, t.TempDir())
	if err != nil || len(got) != 4 || !strings.HasSuffix(got["usr/bin/ctr"], "/ctr") {
		t.Fatal(got, err)
	}
	other := l
	other.Go = "go1.26.0"
	if _, err := programs(o, other, t.TempDir()); err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("a bootstrapper of another compiler: %v", err)
	}
	build("-buildvcs=false")
	if _, err := programs(o, l, t.TempDir()); err == nil || !strings.Contains(err.Error(), "-trimpath") {
		t.Errorf("a bootstrapper with paths of this machine: %v", err)
	}
	for flag, says := range map[string]string{"-gcflags=-N": "-gcflags", "-tags=other": "-tags", "-buildmode=pie": "-buildmode"} {
		build("-trimpath", "-buildvcs=false", flag)
		if _, err := programs(o, l, t.TempDir()); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("a bootstrapper built with %s: %v", flag, err)
		}
	}
	build("-trimpath", "-buildvcs=false")
	place(t, dir, "ctr", "Program ctr")
	if _, err := programs(o, l, t.TempDir()); err == nil || !strings.Contains(err.Error(), "make kube") {
		t.Errorf("another ctr: %v", err)
	}
}

// S1: neither the environment nor the file of `go env -w` changes what is built.
func TestNoSettingOfTheBuildMachineChangesPrograms(t *testing.T) {
	settings := place(t, t.TempDir(), "env", "GOFLAGS=-gcflags=-N\n")
	t.Setenv("GOENV", settings)
	t.Setenv("GOFLAGS", "") // as in pinnedGo
	if own, err := exec.CommandContext(t.Context(), "go", "env", "GOFLAGS").Output(); err != nil || !strings.Contains(string(own), "-N") {
		t.Fatalf("the file does not count here: %s, %v", own, err)
	}
	o, dir := options{source: filepath.Join("..", "..")}, t.TempDir()
	program := filepath.Join(dir, "bootstrapper")
	if err := compileInit(t.Context(), o, program); err != nil {
		t.Fatal(err)
	}
	if err := builtHere(program, runtime.Version()); err != nil {
		t.Error(err)
	}
	// What make build runs, without what make itself sets.
	line, err := exec.CommandContext(t.Context(), "make", "-s", "-n", "-C", o.source, "build", "BIN="+dir, "COMMANDS=probe").Output()
	if err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "bash", "-c", string(line))
	build.Dir = o.source
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := builtHere(filepath.Join(dir, "probe"), runtime.Version()); err != nil {
		t.Error(err)
	}
}

// S1: when the lock file is written, the cache's content is compared at that time.
func TestOnlyPinnedProgramsAreWrittenIntoTheLock(t *testing.T) {
	o := options{source: t.TempDir(), containerd: t.TempDir()}
	var pin []string
	for _, name := range lockedPrograms {
		sum, err := sumOf(place(t, o.containerd, name, "program "+name))
		if err != nil {
			t.Fatal(err)
		}
		pin = append(pin, fmt.Sprintf("%q: %q", name, sum))
	}
	place(t, o.source, "tools/kube/sha256sums.json", `{"id": "1", "go": "go1.26.0", "sums": {`+strings.Join(pin, ", ")+`}}`)
	got, err := pinnedPrograms(o, "go1.26.0")
	if err != nil || len(got) != len(lockedPrograms) || !strings.Contains(strings.Join(pin, " "), fmt.Sprintf("%q: %q", got[2].Name, got[2].Sum)) {
		t.Fatal(got, err)
	}
	if got, err := pinnedPrograms(o, "go1.26.1"); err == nil || !strings.Contains(err.Error(), "go1.26.1") {
		t.Errorf("of another compiler: %v, %v", got, err)
	}
	for _, name := range lockedPrograms {
		place(t, o.containerd, name, "evil")
		if got, err := pinnedPrograms(o, "go1.26.0"); err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "make kube") {
			t.Errorf("another %s: %v, %v", name, got, err)
		}
		// The same when a lock file is written.
		if err := writeLock(t.Context(), options{source: filepath.Join("..", ".."), containerd: o.containerd, lock: filepath.Join(t.TempDir(), lockFile)}, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), "sha256sums.json") {
			t.Errorf("a lock file with other programs: %v", err)
		}
		place(t, o.containerd, name, "program "+name)
	}
	if _, err := pinnedPrograms(o, "go1.26.0"); err != nil {
		t.Error(err)
	}
	place(t, o.source, "tools/kube/sha256sums.json", `{"go": "go1.26.0"}`)
	if got, err := pinnedPrograms(o, "go1.26.0"); err == nil {
		t.Errorf("a pin of nothing: %v", got)
	}
}

func TestTheCommittedLockFitsThisCheckout(t *testing.T) {
	b, err := os.ReadFile(lockFile)
	if err != nil {
		t.Fatal(err)
	}
	l, err := lock.Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kernelOf(l); err != nil {
		t.Error(err)
	}
	for _, name := range append(slices.Clone(debianPackages), loaderPackage, mergedPackage) {
		if _, ok := l.Package(name); !ok {
			t.Errorf("%s is not in it: run `make vm-lock`", name)
		}
	}
	for _, file := range []string{"go.mod", "go.work"} {
		b, err := os.ReadFile(filepath.Join("..", "..", file))
		if err != nil {
			t.Fatal(err)
		}
		if m := regexp.MustCompile(`(?m)^toolchain (\S+)$`).FindSubmatch(b); m == nil || string(m[1]) != l.Go {
			t.Errorf("%s names the toolchain %s, and the lock file %s", file, m, l.Go)
		}
	}
	pin, err := os.ReadFile(filepath.Join("..", "..", "tools", "kube", "sha256sums.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Programs {
		if !strings.Contains(string(pin), fmt.Sprintf("%q: %q", p.Name, p.Sum)) {
			t.Errorf("tools/kube/sha256sums.json has another %s: run `make vm-lock`", p.Name)
		}
	}
}
