package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const source = "../.."

// programs builds the packaged programs.
func programs(t *testing.T) string {
	t.Helper()
	bin := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", bin+"/", "./cmd/muster", "./cmd/bootstrapper")
	cmd.Dir, cmd.Env = source, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return bin
}

func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

func TestPackages(t *testing.T) {
	bin, dirs := programs(t), []string{t.TempDir(), t.TempDir()}
	for _, dir := range dirs {
		if err := run(t.Context(), []string{"-source", source, "-bin", bin, "-version", "v1.2.3-4-gabc", "-date", "1767225600", "-compression", "0", "-o", dir}, io.Discard, os.Stderr); err != nil {
			t.Fatal(err)
		}
	}
	names := []string{"SHA256SUMS", "muster-bootstrapper_1.2.3+4+gabc_amd64.deb", "muster_1.2.3+4+gabc_amd64.deb", "muster_v1.2.3-4-gabc_linux_amd64.tar.gz"}
	t.Run("built twice, they are the same", func(t *testing.T) {
		entries, err := os.ReadDir(dirs[0])
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range entries {
			got = append(got, e.Name())
		}
		if !slices.Equal(got, names) {
			t.Errorf("written: %q", got)
		}
		for _, name := range names {
			a, err := os.ReadFile(filepath.Join(dirs[0], name))
			if err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(filepath.Join(dirs[1], name))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(a, b) {
				t.Errorf("%s differs", name)
			}
		}
	})
	cli, machine := filepath.Join(dirs[0], names[2]), filepath.Join(dirs[0], names[1])
	t.Run("they hold what they should, as root's", func(t *testing.T) {
		entry := regexp.MustCompile(`(?m)^(\S+) (\S+) +\d+ (\S+ \S+) \.(/\S*)$`)
		for deb, want := range map[string][]string{
			cli: {
				"/usr/bin/muster -rwxr-xr-x", "/usr/share/bash-completion/completions/muster -rw-r--r--", "/usr/share/doc/muster/changelog.gz -rw-r--r--", "/usr/share/doc/muster/copyright -rw-r--r--",
				"/usr/share/doc/muster/muster.spdx.json -rw-r--r--", "/usr/share/fish/vendor_completions.d/muster.fish -rw-r--r--", "/usr/share/man/man1/muster.1.gz -rw-r--r--", "/usr/share/zsh/vendor-completions/_muster -rw-r--r--",
			},
			machine: {
				"/usr/bin/bootstrapper -rwxr-xr-x", "/usr/lib/systemd/system/muster-attester.service -rw-r--r--", "/usr/lib/systemd/system/muster-bootstrapper.service -rw-r--r--", "/usr/lib/systemd/system/muster-orders.service -rw-r--r--", "/usr/lib/systemd/system/muster-renewal.service -rw-r--r--", "/usr/lib/systemd/system/muster-reset.service -rw-r--r--", "/usr/lib/systemd/system/muster-rotation.service -rw-r--r--", "/usr/lib/systemd/system/muster-upgrade.service -rw-r--r--",
				"/usr/share/doc/muster-bootstrapper/bootstrapper.spdx.json -rw-r--r--", "/usr/share/doc/muster-bootstrapper/changelog.gz -rw-r--r--", "/usr/share/doc/muster-bootstrapper/copyright -rw-r--r--", "/usr/share/man/man8/bootstrapper.8.gz -rw-r--r--",
			},
		} {
			var got []string
			for _, m := range entry.FindAllStringSubmatch(command(t, "env", "TZ=UTC", "dpkg-deb", "-c", deb), -1) {
				if m[2] != "root/root" || m[3] != "2026-01-01 00:00" {
					t.Errorf("%s: %s", filepath.Base(deb), m[0])
				}
				if !strings.HasSuffix(m[4], "/") {
					got = append(got, m[4]+" "+m[1])
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s holds %q", filepath.Base(deb), got)
			}
		}
	})
	t.Run("they install, and what they installed runs", func(t *testing.T) { install(t, cli, machine) })
	t.Run("the tarball has the same files", func(t *testing.T) {
		got := tarball(t, filepath.Join(dirs[0], names[3]))
		for _, want := range []string{"usr/bin/muster", "usr/bin/bootstrapper", "usr/lib/systemd/system/muster-attester.service", "usr/share/doc/muster/muster.spdx.json"} {
			if !slices.Contains(got, "muster_v1.2.3-4-gabc_linux_amd64/"+want) {
				t.Errorf("%s is missing among %q", want, got)
			}
		}
	})
	t.Run("the sums are right", func(t *testing.T) {
		cmd := exec.CommandContext(t.Context(), "sha256sum", "-c", "SHA256SUMS")
		cmd.Dir = dirs[0]
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Run("a program of another architecture is refused", func(t *testing.T) {
		for _, arch := range []string{"arm64", "riscv64"} {
			err := run(t.Context(), []string{"-source", source, "-bin", bin, "-arch", arch, "-o", t.TempDir()}, io.Discard, os.Stderr)
			if err == nil || !strings.Contains(err.Error(), arch) {
				t.Errorf("%s: %v", arch, err)
			}
		}
	})
	t.Run("several architectures are packed from folders of their names", func(t *testing.T) {
		both, out := t.TempDir(), t.TempDir()
		for _, arch := range []string{"amd64", "arm64"} {
			if err := os.Mkdir(filepath.Join(both, arch), 0o755); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"muster", "bootstrapper"} {
				program, err := os.ReadFile(filepath.Join(bin, name))
				if err != nil {
					t.Fatal(err)
				}
				binary.LittleEndian.PutUint16(program[18:], uint16(machines[arch])) // e_machine: to compile for it takes minutes
				if err := os.WriteFile(filepath.Join(both, arch, name), program, 0o755); err != nil {
					t.Fatal(err)
				}
			}
		}
		args := []string{"-source", source, "-bin", both, "-arch", "amd64,arm64", "-native", filepath.Join(bin, "muster"), "-version", "v1.2.3", "-compression", "0", "-o", out}
		if err := run(t.Context(), args, io.Discard, os.Stderr); err != nil {
			t.Fatal(err)
		}
		sums, err := os.ReadFile(filepath.Join(out, "SHA256SUMS"))
		if err != nil {
			t.Fatal(err)
		}
		for _, arch := range []string{"amd64", "arm64"} {
			for _, name := range []string{"muster", "muster-bootstrapper"} {
				name += "_1.2.3_" + arch + ".deb"
				if got := strings.TrimSpace(command(t, "dpkg-deb", "-f", filepath.Join(out, name), "Architecture")); got != arch || !bytes.Contains(sums, []byte(name)) {
					t.Errorf("%s is for %s; sums:\n%s", name, got, sums)
				}
			}
			if got := tarball(t, filepath.Join(out, "muster_v1.2.3_linux_"+arch+".tar.gz")); !slices.Contains(got, "muster_v1.2.3_linux_"+arch+"/usr/bin/muster") {
				t.Errorf("the tarball of %s has %q", arch, got)
			}
		}
		if n := bytes.Count(sums, []byte("\n")); n != 6 {
			t.Errorf("%d sums, want 6:\n%s", n, sums)
		}
	})
	t.Run("the manual has every command", func(t *testing.T) {
		page := manual(command(t, filepath.Join(bin, "muster"), "--help"))
		for _, name := range []string{"init", "status", "policy", "verify"} {
			if !bytes.Contains(page, []byte("\n.B "+name+"\n")) {
				t.Errorf("muster.1 lacks %s", name)
			}
		}
	})
}

// install has dpkg install both into a folder with its own database.
func install(t *testing.T, debs ...string) {
	t.Helper()
	root := t.TempDir()
	for _, dir := range []string{"var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "var/lib/dpkg/status"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// Unpacked, not configured: the folder is no complete system that could satisfy dependencies or run the scripts.
	out := command(t, "dpkg", append([]string{"--root=" + root, "--force-not-root", "--force-script-chrootless", "--no-triggers", "--unpack"}, debs...)...)
	if strings.Contains(out, "warning") {
		t.Errorf("dpkg warns:\n%s", out)
	}
	for _, name := range []string{"muster", "bootstrapper"} {
		path := filepath.Join(root, "usr/bin", name)
		if out := command(t, path, "version"); !strings.HasPrefix(out, name+" ") {
			t.Errorf("%s says %q", name, out)
		}
		f, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP {
				t.Errorf("%s needs a dynamic linker", name)
			}
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, script := range []string{"postinst", "postrm"} {
		command(t, "sh", "-n", filepath.Join(root, "var/lib/dpkg/info/muster-bootstrapper."+script))
	}
}

func tarball(t *testing.T, path string) []string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
}

func TestDebianVersions(t *testing.T) {
	for version, want := range map[string]string{"v0.1.0": "0.1.0", "v0.1.0-3-gabc": "0.1.0+3+gabc", "28e34c9": "0~28e34c9", "dev": "0~dev", "v": "0~v"} {
		if got := debianVersion(version); got != want {
			t.Errorf("%s: %s, want %s", version, got, want)
		}
	}
	// A build of a commit is older than any release, and one after a tag is newer than the tag.
	for _, pair := range [][2]string{{"28e34c9", "v0.0.1"}, {"v0.1.0", "v0.1.0-3-gabc"}} {
		command(t, "dpkg", "--compare-versions", debianVersion(pair[0]), "lt", debianVersion(pair[1]))
	}
}
