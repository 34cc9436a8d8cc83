package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/deploy/vm/internal/lock"
)

// apt queries mirrors for packages, with its own state: it does not use this machine's configuration or packages.
type apt struct {
	dir   string
	index map[string][]offer // by name
}

// offer is the entry of a package in a signed index.
type offer struct {
	lock.Package
	depends string
}

// newApt fetches the indexes of sources. apt checks their signatures.
func newApt(ctx context.Context, dir, sources string) (*apt, error) {
	a := &apt{dir: dir, index: map[string][]offer{}}
	for _, d := range []string{"etc/apt.conf.d", "etc/preferences.d", "state/lists/partial", "cache/archives/partial", "new"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	conf := fmt.Sprintf(`Dir::Etc "%[1]s/etc"; Dir::Etc::sourcelist "%[1]s/sources.list"; Dir::Etc::sourceparts "/dev/null"; Dir::Etc::trusted "/dev/null"; Dir::Etc::trustedparts "/dev/null";
Dir::State "%[1]s/state"; Dir::State::status "%[1]s/status"; Dir::Cache "%[1]s/cache";
APT::Architecture "%[2]s"; APT::Architectures "%[2]s"; APT::Install-Recommends "false"; APT::Sandbox::User "root";
Acquire::Languages "none"; Acquire::GzipIndexes "false"; Acquire::Retries "3";
`, dir, architecture)
	for name, content := range map[string]string{"apt.conf": conf, "sources.list": sources, "status": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return nil, err
		}
	}
	if _, err := a.get(ctx, "update", "-o", "APT::Update::Error-Mode=any"); err != nil {
		return nil, err
	}
	lists, err := filepath.Glob(filepath.Join(dir, "state", "lists", "*_Packages"))
	if err != nil {
		return nil, err
	}
	for _, l := range lists {
		if err := a.read(l); err != nil {
			return nil, err
		}
	}
	if len(a.index) == 0 {
		return nil, errors.New("the mirrors of apt's sources have no packages for " + architecture)
	}
	return a, nil
}

// get runs apt-get in the folder for new packages.
func (a *apt) get(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-qq"}, args...)...)
	cmd.Dir = filepath.Join(a.dir, "new")
	cmd.Env = append(environment(a.dir), "APT_CONFIG="+filepath.Join(a.dir, "apt.conf"))
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("apt-get %s: %w\n%s", args[0], err, stderr.String())
	}
	// A warning of apt means that an index is not that of the suite, or cannot be verified in full: a mirror that
	// holds updates back.
	if strings.Contains(stderr.String(), "W:") {
		return "", fmt.Errorf("apt-get %s: %s", args[0], stderr.String())
	}
	return string(out), nil
}

// read reads an index (deb822(5)).
func (a *apt) read(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	var o offer
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		name, value, _ := strings.Cut(in.Text(), ":")
		value = strings.TrimSpace(value)
		switch name {
		case "Package":
			o.Name = value
		case "Version":
			o.Version = value
		case "Architecture":
			o.Architecture = value
		case "Depends":
			o.depends = value
		case "SHA256":
			b, err := hex.DecodeString(value)
			if err != nil || len(b) != len(o.Sum) {
				return fmt.Errorf("%s: %s has the SHA-256 %q", file, o, value)
			}
			o.Sum = lock.Sum(b)
		case "":
			a.add(o)
			o = offer{}
		}
	}
	a.add(o)
	return in.Err()
}

func (a *apt) add(o offer) {
	if o.Name != "" && o.Sum != (lock.Sum{}) {
		a.index[o.Name] = append(a.index[o.Name], o)
	}
}

// resolve returns the packages to install for those of the root, and the kernel and its loader without their
// dependencies.
func (a *apt) resolve(ctx context.Context) ([]lock.Package, error) {
	install := append([]string{"install", "--print-uris", "--yes", essentialPackages, mergedPackage}, debianPackages...)
	lines, err := a.get(ctx, install...)
	if err != nil {
		return nil, err
	}
	meta, err := a.get(ctx, "download", "--print-uris", kernelPackage)
	if err != nil {
		return nil, err
	}
	p, err := a.printed(meta)
	if err != nil || len(p) != 1 {
		return nil, fmt.Errorf("the mirror has %d packages %s, want one: %w", len(p), kernelPackage, err)
	}
	kernel, _, _ := strings.Cut(p[0].depends, " ")
	if !strings.HasPrefix(kernel, kernelPrefix) {
		return nil, fmt.Errorf("%s depends on %q: want a package %s…", kernelPackage, p[0].depends, kernelPrefix)
	}
	more, err := a.get(ctx, "download", "--print-uris", strings.TrimSuffix(kernel, ","), loaderPackage)
	if err != nil {
		return nil, err
	}
	found, err := a.printed(lines + more)
	if err != nil {
		return nil, err
	}
	var out []lock.Package
	for _, o := range found {
		out = append(out, o.Package)
	}
	lock.Sort(out)
	return slices.Compact(out), nil
}

// printed finds the packages in the index that apt-get --print-uris lists.
func (a *apt) printed(lines string) ([]offer, error) {
	var out []offer
	for line := range strings.Lines(lines) {
		f := strings.Fields(line) // 'URI' FILE SIZE HASH
		if len(f) < 3 {
			return nil, fmt.Errorf("apt-get --print-uris printed %q", line)
		}
		p, err := debianFile(f[1])
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(a.index[p.Name], func(o offer) bool { return o.Version == p.Version && o.Architecture == p.Architecture })
		if i < 0 {
			return nil, fmt.Errorf("%s is in no index of the mirror", p)
		}
		out = append(out, a.index[p.Name][i])
	}
	return out, nil
}

// moved returns those of these packages that the mirror has no more, or with another content.
func (a *apt) moved(want []lock.Package) error {
	var gone []string
	for _, p := range want {
		var has []string
		found := false
		for _, o := range a.index[p.Name] {
			found = found || o.Package == p
			has = append(has, fmt.Sprintf("%s with SHA-256 %s", o.Version, o.Sum))
		}
		if !found {
			gone = append(gone, fmt.Sprintf("  %s with SHA-256 %s; the mirror has: %s", p, p.Sum, strings.Join(has, ", ")))
		}
	}
	if len(gone) == 0 {
		return nil
	}
	return fmt.Errorf("the mirror no longer has what the lock file names:\n%s\n%s; to build from this lock file again, name a snapshot of the mirror with -sources", strings.Join(gone, "\n"), refresh)
}

// download fetches packages that the mirror has, and returns their files.
func (a *apt) download(ctx context.Context, want []lock.Package) (map[lock.Package]string, error) {
	args := []string{"download"}
	for _, p := range want {
		args = append(args, p.Name+"="+p.Version)
	}
	if _, err := a.get(ctx, args...); err != nil {
		return nil, err
	}
	found, err := filepath.Glob(filepath.Join(a.dir, "new", "*.deb"))
	if err != nil {
		return nil, err
	}
	out := map[lock.Package]string{}
	for _, file := range found {
		p, err := debianFile(filepath.Base(file))
		if err != nil {
			return nil, err
		}
		for _, w := range want {
			if p.Name == w.Name && p.Version == w.Version && p.Architecture == w.Architecture {
				out[w] = file
			}
		}
	}
	return out, nil
}

// debianFile reads NAME_VERSION_ARCHITECTURE.deb, as apt names what it downloads.
func debianFile(name string) (lock.Package, error) {
	part := strings.Split(strings.TrimSuffix(name, ".deb"), "_")
	if len(part) != 3 {
		return lock.Package{}, fmt.Errorf("%s is not named as apt names packages", name)
	}
	version, err := url.PathUnescape(part[1])
	return lock.Package{Name: part[0], Version: version, Architecture: part[2]}, err
}
