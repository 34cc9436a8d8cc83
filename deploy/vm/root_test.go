package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/BurntSushi/toml"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const shadow = "daemon:*:1::::::\nroot:*:1:0:99999:7:::\nx:!*:1::::::\n"

func archive(t *testing.T, entries ...tar.Header) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		content := h.Linkname
		if h.Typeflag == tar.TypeReg {
			h.Size, h.Linkname = int64(len(content)), ""
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := io.WriteString(w, content); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

// debian has files whose content stands in Linkname.
func debian(extra ...tar.Header) []tar.Header {
	return append([]tar.Header{
		{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755},
		{Typeflag: tar.TypeReg, Name: "./etc/shadow", Mode: 0o640, Gid: 42, Linkname: shadow},
		{Typeflag: tar.TypeReg, Name: "./etc/hostname", Mode: 0o644, Linkname: "builder"},
		{Typeflag: tar.TypeDir, Name: "./usr/bin", Mode: 0o755},
		{Typeflag: tar.TypeReg, Name: "./usr/bin/mount", Mode: 0o4755, Linkname: "program", ModTime: time.Unix(5, 0), PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "all"}},
		{Typeflag: tar.TypeSymlink, Name: "./bin", Linkname: "usr/bin"},
		{Typeflag: tar.TypeReg, Name: "./var/lib/dpkg/status", Mode: 0o644, Linkname: "Package: x\n"},
		{Typeflag: tar.TypeReg, Name: "./variable", Mode: 0o644, Linkname: "stays"},
	}, extra...)
}

func read(t *testing.T, b []byte) (map[string]*tar.Header, map[string]string) {
	t.Helper()
	heads, contents := map[string]*tar.Header{}, map[string]string{}
	r := tar.NewReader(bytes.NewReader(b))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return heads, contents
		}
		if err != nil {
			t.Fatal(err)
		}
		if heads[h.Name] != nil {
			t.Errorf("%s is there twice", h.Name)
		}
		c, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		heads[h.Name], contents[h.Name] = h, string(c)
	}
}

func TestTheRootIsDebiansWithoutWhatANodeHasNotAndWithOurs(t *testing.T) {
	date := time.Unix(1767225600, 0)
	add := func() tree {
		a := tree{}
		a.dir("var")
		a.file("usr/lib/muster/deep/file", 0o644, []byte("ours"))
		a.link("etc/hosts", "/run/muster/hosts")
		return a
	}
	var one, two bytes.Buffer
	status, err := merge(&one, archive(t, debian()...), add(), date)
	if err != nil || string(status) != "Package: x\n" {
		t.Fatalf("%q, %v", status, err)
	}
	if _, err := merge(&two, archive(t, debian()...), add(), date); err != nil || !bytes.Equal(one.Bytes(), two.Bytes()) {
		t.Errorf("the same packages give another root: %v", err)
	}
	heads, contents := read(t, one.Bytes())
	want := []string{"bin", "etc", "etc/hosts", "etc/shadow", "usr", "usr/bin", "usr/bin/mount", "usr/lib", "usr/lib/muster", "usr/lib/muster/deep", "usr/lib/muster/deep/file", "var", "variable"}
	var have []string
	for name := range maps.Keys(heads) {
		have = append(have, strings.TrimSuffix(name, "/"))
	}
	slices.Sort(have)
	if !slices.Equal(have, want) {
		t.Errorf("it has %v\nwant %v", have, want)
	}
	if h := heads["usr/bin/mount"]; h.Mode != 0o755 || len(h.PAXRecords) != 0 {
		t.Errorf("mount has the mode %o and %v: it makes root of anybody", h.Mode, h.PAXRecords)
	}
	if contents["etc/shadow"] != shadow || heads["etc/shadow"].Mode != 0o640 || contents["usr/lib/muster/deep/file"] != "ours" {
		t.Errorf("shadow is %+v", heads["etc/shadow"])
	}
	for name, h := range heads {
		if !h.ModTime.Equal(date) {
			t.Errorf("%s is of %s", name, h.ModTime)
		}
	}
}

func TestARootThatSomebodyCanLogInToIsRefused(t *testing.T) {
	for name, shadow := range map[string]string{
		"a password":         "root:$y$abc:1::::::\n",
		"an empty password":  "root::1::::::\n",
		"another's password": shadow + "user:$y$abc:1::::::\n",
		"no root":            "daemon:*:1::::::\n",
		"a broken line":      "root\n",
	} {
		list := debian()
		list[1].Linkname = shadow
		if _, err := merge(io.Discard, archive(t, list...), tree{}, time.Unix(1, 0)); err == nil || !strings.Contains(err.Error(), "shadow") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFoldersAreTakenOverAndLinksInThemRefused(t *testing.T) {
	a := tree{}
	from := fstest.MapFS{"x/etc/a": {Data: []byte("1"), Mode: 0o600}, "x/bin/b": {Data: []byte("2"), Mode: 0o700}}
	if err := a.folder(from, "x", ""); err != nil {
		t.Fatal(err)
	}
	if a["etc/a"].header.Mode != 0o644 || a["bin/b"].header.Mode != 0o755 || a["etc"].header.Typeflag != tar.TypeDir {
		t.Errorf("%+v", a)
	}
	dir := t.TempDir()
	if err := os.Symlink("/etc/shadow", filepath.Join(dir, "l")); err != nil {
		t.Fatal(err)
	}
	if err := a.folder(os.DirFS(dir), ".", ""); err == nil {
		t.Error("a link was taken over")
	}
}

// The promises of the documents about the image.
func TestNoLoginAndNoUnitThatMeasures(t *testing.T) {
	for _, u := range []string{"systemd-pcrphase.service", "systemd-pcrphase-sysinit.service", "systemd-pcrphase-initrd.service", "systemd-pcrmachine.service", "systemd-pcrfs@.service", "systemd-pcrfs-root.service", "getty@.service", "serial-getty@.service", "emergency.service", "rescue.service", "debug-shell.service",
		"sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target", "suspend-then-hibernate.target", // J11, K3
		"systemd-suspend.service", "systemd-hibernate.service", "systemd-hybrid-sleep.service", "systemd-suspend-then-hibernate.service"} {
		if !slices.Contains(masked, u) {
			t.Errorf("%s is not masked", u)
		}
	}
	for _, p := range []string{"usr/sbin/agetty", "usr/sbin/sulogin", "usr/bin/login", "usr/bin/su"} {
		if !slices.Contains(removed, p) {
			t.Errorf("%s is in the image", p)
		}
	}
	for _, p := range waysIn {
		list := debian(tar.Header{Typeflag: tar.TypeReg, Name: "./" + p, Mode: 0o755, Linkname: "program"})
		if _, err := merge(io.Discard, archive(t, list...), tree{}, time.Unix(1, 0)); err == nil || !strings.Contains(err.Error(), p) {
			t.Errorf("%s was taken over: %v", p, err)
		}
	}
	for _, p := range debianPackages {
		if strings.Contains(p, "ssh") || strings.Contains(p, "telnet") {
			t.Errorf("the package %s lets people in", p)
		}
	}
	for unit := range enabled {
		if slices.Contains(masked, filepath.Base(unit)) {
			t.Errorf("%s is both enabled and masked", unit)
		}
	}
	for _, word := range []string{"efi=noruntime,disable_early_pci_dma", "systemd.import_credentials=no"} {
		if !slices.Contains(fixedCmdline, word) {
			t.Errorf("the command line lacks %s: what nobody measured could change the system", word)
		}
	}
}

// B8: if the root's disk answers reads with errors, files of the root are missing, such as systemd's own configuration with the path of all units.
func TestWhatStartsBeforeTheComparisonFindsNoProgramOfTheStateDisk(t *testing.T) {
	for _, unit := range append(slices.Collect(maps.Keys(enabled)), "/etc/systemd/system/muster-images.service") {
		name := filepath.Base(unit)
		if strings.HasPrefix(name, "systemd-") || strings.HasSuffix(name, ".mount") { // these have full paths
			continue
		}
		from := filepath.Join("..", "systemd", name)
		if strings.HasPrefix(unit, "/etc/") {
			from = filepath.Join("files", "root", unit)
		}
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if got := pathOf(string(b)); got != "Environment=PATH=/usr/sbin:/usr/bin:/sbin:/bin" {
			t.Errorf("the last line of %s that sets its path is %q", name, got)
		}
	}
	var config struct {
		Disabled []string `toml:"disabled_plugins"`
		Plugins  map[string]struct {
			Containerd struct {
				Runtimes map[string]struct {
					Path string `toml:"runtime_path"`
				} `toml:"runtimes"`
			} `toml:"containerd"`
		} `toml:"plugins"`
	}
	if _, err := toml.DecodeFile("files/root/etc/containerd/config.toml", &config); err != nil {
		t.Fatal(err)
	}
	runtimes := config.Plugins["io.containerd.cri.v1.runtime"].Containerd.Runtimes
	if len(runtimes) == 0 {
		t.Error("containerd has no runtime")
	}
	for name, r := range runtimes {
		if r.Path != "/usr/bin/containerd-shim-runc-v2" {
			t.Errorf("containerd looks for the runtime %s in the path: %q", name, r.Path)
		}
	}
	for _, plugin := range []string{"io.containerd.internal.v1.opt", "io.containerd.monitor.container.v1.restart", "io.containerd.differ.v1.erofs"} {
		if !slices.Contains(config.Disabled, plugin) {
			t.Errorf("containerd's plugin %s is on: it runs what it finds when containerd starts", plugin)
		}
	}
}

// pathOf returns the line of a unit that decides about its PATH: the last one that sets it, or one that could. A file wins over a line, and so does what is
// unset or passed on.
func pathOf(unit string) (decides string) {
	for line := range strings.Lines(unit) {
		line = strings.TrimSpace(line)
		switch key, value, _ := strings.Cut(line, "="); strings.TrimSpace(key) {
		case "EnvironmentFile":
			return line
		case "Environment", "UnsetEnvironment", "PassEnvironment":
			if strings.TrimSpace(value) == "" || strings.Contains(value, "PATH") || strings.HasSuffix(value, "\\") {
				decides = line
			}
		}
	}
	return decides
}

func TestTheLastLineDecidesAboutThePath(t *testing.T) {
	const good = "Environment=PATH=/usr/bin"
	for unit, want := range map[string]string{
		"[Service]\n" + good + "\nEnvironment=GOMEMLIMIT=1\n":          good,
		good + "\nEnvironment=A=b PATH=/usr/local/bin\n":               "Environment=A=b PATH=/usr/local/bin",
		good + "\nEnvironment=\n":                                      "Environment=",
		good + "\nUnsetEnvironment=PATH\n":                             "UnsetEnvironment=PATH",
		"EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env\n" + good: "EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env",
		"# " + good + "\n":                                             "",
	} {
		if got := pathOf(unit); got != want {
			t.Errorf("%q: %q, want %q", unit, got, want)
		}
	}
}
