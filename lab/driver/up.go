package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/lab/internal/daemon"
	"github.com/muster-k8s/muster/lab/internal/firmware"
	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/image"
	"github.com/muster-k8s/muster/lab/internal/kube"
	"github.com/muster-k8s/muster/lab/internal/lan"
	"github.com/muster-k8s/muster/lab/internal/oci"
	"github.com/muster-k8s/muster/lab/internal/vtpm"
)

// components are the programs that machines fetch from the mirror, as a ticket lists them.
var components = []string{"kubelet", "kubeadm", "kubectl"}

// Up describes the lab to bring up.
type Up struct {
	Source       string   // the checkout; empty: found above the working directory
	Lab          string   // the program lab; empty: this program
	Bootstrapper string   // the program that makes machines nodes; empty: machines have none
	Preinstalled []string // of kubelet, kubeadm and kubectl, what the image has already; the others are fetched as components
	OwnerKeys    string   // base64 Ed25519 public keys for image.yaml, with commas between; empty: the image is insecure.noOwnerKey
	Muster       string   // the program muster, instead of OwnerKeys: it makes the key owner.key in the owner's folder, whose public one the image gets
	Images       []string // for the registry, besides the lab's own images: see [Lab.Push]
	NoPreload    bool     // don't prepare a store of container images: machines pull
	Previous     bool     // clusters begin with [PreviousRelease]; the owner gets a list of the current one too, [NextComponents]
	Validity     string   // how long kubeadm's certificates live, as "8m"; empty: a year
	Audit        bool     // API servers log every request: see [AuditLog]
}

// Up installs what is missing on the host, builds what is missing in the cache, builds the
// machines' image, and starts the lab's network and mirror. No machine is started.
func (l *Lab) Up(ctx context.Context, u Up) error {
	if err := host.EnsurePackages(ctx, l.Log); err != nil {
		return err
	}
	if _, err := l.Status(ctx); err == nil {
		return fmt.Errorf("a lab is up in %s; lab down takes it down", l.Dir)
	}
	if err := l.Down(ctx); err != nil { // the remains of a killed lab
		return err
	}
	if left, err := os.ReadDir(l.Dir); err == nil && len(left) > 0 {
		return fmt.Errorf("%s is not empty and not a lab's: choose another --dir", l.Dir)
	}
	cfg, err := l.prepare(ctx, u)
	if err != nil {
		return err
	}
	if err := l.startDaemon(ctx); err != nil {
		return err
	}
	if u.NoPreload {
		return nil
	}
	return l.preload(ctx, cfg)
}

// prepare builds everything that the daemon needs.
func (l *Lab) prepare(ctx context.Context, u Up) (daemon.Config, error) {
	cfg := daemon.Config{Dir: l.Dir}
	var err error
	if u.Source == "" {
		if u.Source, err = findSource(); err != nil {
			return cfg, err
		}
	}
	if u.Lab == "" {
		if u.Lab, err = os.Executable(); err != nil {
			return cfg, err
		}
	}
	cfg.Source = u.Source
	cache, err := kube.CacheDir()
	if err != nil {
		return cfg, err
	}
	done := l.step("Kubernetes binaries")
	build, err := kube.Current.Binaries(ctx, u.Source, cache, l.Log)
	if err != nil {
		return cfg, err
	}
	first := build // the programs of the clusters
	if u.Previous {
		if len(u.Preinstalled) > 0 {
			return cfg, errors.New("clusters begin with the previous release, and the image would have the current one's programs, which firmware measures: preinstall none")
		}
		if first, err = kube.Previous.Binaries(ctx, u.Source, cache, l.Log); err != nil {
			return cfg, err
		}
	}
	done()
	cfg.KubeDir, cfg.Sums = build.Dir, build.Sums

	// From here on there is something to take down.
	if err := os.MkdirAll(l.OwnerDir(), 0o700); err != nil {
		return cfg, err
	}
	if err := l.writeConfig(cfg); err != nil {
		return cfg, err
	}
	done = l.step("container images")
	tools := filepath.Join(l.Dir, "tools")
	if err := kube.Tools(ctx, u.Source, tools, "./lab/pause", "./lab/echo", "./lab/podnet"); err != nil {
		return cfg, err
	}
	layout, id, err := releaseLayout(ctx, first, build, tools, cache)
	if err != nil {
		return cfg, err
	}
	cfg.Layouts = []string{layout} // machines begin with the images of this one
	if u.Previous {
		next, _, err := releaseLayout(ctx, build, build, tools, cache)
		if err != nil {
			return cfg, err
		}
		cfg.Layouts = append(cfg.Layouts, next)
	}
	done()
	for _, i := range u.Images {
		more, err := l.layouts(i)
		if err != nil {
			return cfg, err
		}
		cfg.Layouts = append(cfg.Layouts, more...)
	}
	if !u.NoPreload {
		cfg.Golden = filepath.Join(cache, "containerd", id+"-"+kube.ContainerdVersion)
	}
	if u.Muster != "" {
		if u.OwnerKeys, err = l.newOwnerKey(ctx, u.Muster); err != nil {
			return cfg, err
		}
	}
	done = l.step("machine image")
	if err := l.buildImage(u, build, first.Release); err != nil {
		return cfg, err
	}
	done()
	return cfg, errors.Join(l.ownerFiles(u, first, build, cfg.Layouts), l.writeConfig(cfg))
}

// releaseLayout returns the layout of the images of a release, and its name.
func releaseLayout(ctx context.Context, release, current kube.Build, tools, cache string) (dir, id string, err error) {
	images, err := oci.Images(release, current, tools)
	if err != nil {
		return "", "", err
	}
	return oci.Layout(ctx, images, cache)
}

// newOwnerKey makes the owner's key, which is older than the machines' image.
func (l *Lab) newOwnerKey(ctx context.Context, muster string) (public string, err error) {
	cmd := exec.CommandContext(ctx, muster, "key", "new", filepath.Join(l.OwnerDir(), OwnerKeyFile))
	var problems bytes.Buffer
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("muster key new: %w: %s", err, problems.Bytes())
	}
	return string(bytes.TrimSpace(out)), nil
}

func (l *Lab) layouts(path string) ([]string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	return oci.Layouts(abs, filepath.Join(l.Dir, "layouts"))
}

func (l *Lab) writeConfig(cfg daemon.Config) error {
	j, err := json.MarshalIndent(cfg, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(l.Dir, "lab.json"), j, 0o600)
}

// buildImage makes the CAs and the image, and writes the predicted measurements.
func (l *Lab) buildImage(u Up, build kube.Build, release kube.Release) error {
	ca, err := vtpm.NewCA(filepath.Join(l.Dir, "ca"), "Muster lab EK CA")
	if err != nil {
		return err
	}
	if _, err := vtpm.NewCA(filepath.Join(l.Dir, "ca-foreign"), "Another EK CA"); err != nil {
		return err
	}
	if _, err := vtpm.NewCA(filepath.Join(l.Dir, "ca-cloud"), "Muster lab cloud CA"); err != nil {
		return err
	}
	roots, err := os.ReadFile(ca.CertPath())
	if err != nil {
		return err
	}
	for _, p := range u.Preinstalled {
		if !slices.Contains(components, p) {
			return fmt.Errorf("preinstalled program %q: want some of %v", p, components)
		}
	}
	if _, err := image.Build(filepath.Join(l.Dir, "image"), image.Spec{
		Lab: u.Lab, Bootstrapper: u.Bootstrapper, Kube: build, Release: release, Preinstalled: u.Preinstalled,
		EKRoots: roots, OwnerKeys: u.OwnerKeys, Mirror: lan.Registry, Validity: u.Validity, Audit: u.Audit,
	}); err != nil {
		return err
	}
	m, err := l.Measurements()
	if err != nil {
		return err
	}
	class, err := firmware.ExpectedClass()
	if err != nil {
		return err
	}
	return errors.Join(writeJSON(l.MeasurementsPath(), m), writeJSON(l.firmwarePath(), class))
}

func writeJSON(path string, v any) error {
	j, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(j, '\n'), 0o644)
}

// ownerFiles writes the files that an owner of this lab's machines needs into the owner's folder.
func (l *Lab) ownerFiles(u Up, first, current kube.Build, layouts []string) error {
	for name, file := range map[string]string{"ca": "ek-roots.pem", "ca-cloud": CloudRoots} {
		ca, err := os.ReadFile(filepath.Join(l.Dir, name, "ca.pem"))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(l.OwnerDir(), file), ca, 0o644); err != nil {
			return err
		}
	}
	var err error
	served := func(program string) (string, error) { return lan.Files{}.URL(program), nil }
	published := func(program string) (string, error) { return l.Publish(first.Path(program)) }
	if u.Previous {
		err = errors.Join(l.componentList(Components, first, layouts[0], published), l.componentList(NextComponents, current, layouts[1], served))
	} else {
		err = l.componentList(Components, current, layouts[0], served)
	}
	return errors.Join(err, os.CopyFS(l.OwnerDir(), manifests))
}

// componentList writes a release's list into a file of the owner's folder.
func (l *Lab) componentList(file string, b kube.Build, layout string, url func(program string) (string, error)) error {
	var list []versions.Component
	for _, c := range components {
		at, err := url(c)
		if err != nil {
			return err
		}
		list = append(list, versions.Component{URL: at, SHA256: b.Sums[c], Path: "/usr/local/bin/" + c, Mode: 0o755})
	}
	all := versions.NewList(list...)
	var err error
	if all.Images, err = oci.Digests(layout, versions.ImageNames()); err != nil {
		return err
	}
	j, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(l.OwnerDir(), file), append(j, '\n'), 0o644)
}

// startDaemon starts the daemon from the image's own copy of this program, in a network
// namespace of its own, and waits until it answers.
func (l *Lab) startDaemon(ctx context.Context) error {
	done := l.step("network and mirror")
	logPath := filepath.Join(l.Dir, "daemon.log")
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(l.Dir, "image", "base", image.Init), "daemon", "--dir", l.Dir) // it outlives ctx: not CommandContext
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: syscall.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the lab's daemon: %w", err)
	}
	p, err := host.ProcessOf(cmd.Process.Pid)
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() { // reaps it, should it end before this process does
		_ = cmd.Wait()
		close(ended)
	}()
	j, err := json.Marshal(p)
	if err == nil {
		err = os.WriteFile(filepath.Join(l.Dir, "daemon.json"), j, 0o600)
	}
	if err != nil {
		return errors.Join(err, p.Signal(syscall.SIGKILL))
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := l.Status(ctx); err == nil {
			done()
			return nil
		}
		select {
		case <-tick.C:
		case <-ended:
			b, err := os.ReadFile(logPath)
			return errors.Join(fmt.Errorf("the lab's daemon ended; its log:\n%s", b), err)
		case <-ctx.Done():
			return errors.Join(ctx.Err(), p.Signal(syscall.SIGKILL))
		}
	}
}

// preload makes the store of container images that machines begin with, if the cache has
// none for these images: containerd itself pulls them from the mirror, once, in a machine
// made for it.
func (l *Lab) preload(ctx context.Context, cfg daemon.Config) error {
	if _, err := os.Stat(cfg.Golden); err == nil {
		return kube.Used(cfg.Golden)
	}
	done := l.step("store of container images")
	unlock, err := kube.Lock(filepath.Dir(cfg.Golden))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(cfg.Golden); err == nil {
		return nil
	}
	const name = "golden"
	if _, err := l.client().AddNode(ctx, daemon.NodeRequest{Name: name, Number: 240, Bare: true}); err != nil {
		return err
	}
	refs, err := oci.Refs(cfg.Layouts[0])
	if err != nil {
		return err
	}
	for _, r := range refs {
		if err := l.output(ctx, name, "ctr", "-n", "k8s.io", "images", "pull", "--hosts-dir", "/etc/containerd/certs.d", r); err != nil {
			return err
		}
	}
	if err := l.output(ctx, name, "systemctl", "stop", "containerd"); err != nil {
		return err
	}
	tmp := cfg.Golden + ".tmp"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	from := filepath.Join(daemon.MachineDir(l.Dir, name), "disk", "containerd")
	if out, err := exec.CommandContext(ctx, "cp", "-a", "--", from, tmp).CombinedOutput(); err != nil {
		return fmt.Errorf("copy containerd's folder: %w: %s", err, out)
	}
	if err := errors.Join(os.Rename(tmp, cfg.Golden), kube.Prune(filepath.Dir(cfg.Golden))); err != nil {
		return err
	}
	if err := l.RemoveNode(ctx, name); err != nil {
		return err
	}
	done()
	return nil
}

func (l *Lab) output(ctx context.Context, where string, argv ...string) error {
	cmd, err := l.Command(ctx, where, argv...)
	if err != nil {
		return err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s in %s: %w\n%s", argv[0], where, err, out)
	}
	return nil
}

// findSource finds the checkout that contains the working directory.
func findSource() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.HasPrefix(b, []byte("module github.com/muster-k8s/muster\n")) {
			return dir, nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("no checkout of Muster above the working directory: name it with --source")
		}
		dir = filepath.Dir(dir)
	}
}
