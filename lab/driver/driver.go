// Package driver drives a lab: it implements the program lab, for programs and tests that need the same without
// parsing its output.
//
// A lab is a folder and one daemon process. Everything else (machines, their TPMs, the network) depends on that
// process, so a [Lab] is only a folder name and needs no closing; the lab itself must be closed, with [Lab.Down].
package driver

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"

	"github.com/muster-k8s/muster/lab/internal/daemon"
	"github.com/muster-k8s/muster/lab/internal/firmware"
	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/image"
	"github.com/muster-k8s/muster/lab/internal/kube"
	"github.com/muster-k8s/muster/lab/internal/lan"
	"github.com/muster-k8s/muster/lab/internal/machine"
	"github.com/muster-k8s/muster/lab/internal/vtpm"
)

//go:embed manifests
var manifests embed.FS

// DefaultDir is the default folder of a lab's state.
const DefaultDir = "/var/lib/muster-lab"

// Owner is the name of the owner's workstation for [Lab.Command]: not a machine, but a network namespace on the lab's
// network with the address [OwnerAddress].
const Owner = "owner"

// CloudRoots has the CA of the lab's cloud, in the owner's folder. CloudProject is the project of its machines.
const (
	CloudRoots   = "cloud-roots.pem"
	CloudProject = vtpm.CloudProject
)

// OwnerKeyFile is the owner's key in the owner's folder, of a lab that was brought up with Muster.
const OwnerKeyFile = "owner.key"

// Component lists in the owner's folder.
const (
	Components     = "components.yaml"      // of the release that clusters begin with
	NextComponents = "components-next.yaml" // of the current release, in a lab that was brought up with [Up.Previous]
)

// AuditLog is where a control plane's API server writes its audit log (audit.k8s.io/v1, a JSON
// line for each request, level Metadata) if the lab was brought up with Audit.
const AuditLog = image.AuditLog

// Addresses of every lab, for what is configured with them.
const (
	OwnerAddress         = lan.Owner
	ControlPlaneEndpoint = lan.ControlPlane // the load balancer in front of all control planes
	PodSubnet            = "10.244.0.0/16"
	ServiceSubnet        = "10.96.0.0/16"
	NodeSubnet           = lan.Network
	RegistryMirror       = lan.Registry // HTTP; serves all images that machines pull, for any registry in a reference
)

// Tags of images in the lab's registry that kubeadm would give others, since the lab builds them from modules.
const (
	CoreDNSTag = kube.CoreDNSTag
	EtcdTag    = kube.EtcdTag
)

type (
	// Machine is a machine that was started.
	Machine = daemon.Machine
	// Status is everything that a lab runs.
	Status = daemon.Status
	// Measurements are the PCR values for a policy.
	Measurements = firmware.Measurements
	// Process identifies one process: a reused pid is another Process.
	Process = host.Process
)

// A Lab is the lab in Dir, up or not.
type Lab struct {
	Dir string    // absolute, at most 70 bytes (Unix sockets are below it)
	Log io.Writer // progress, a line per step
}

// Open names a lab. It does not look whether it is up.
func Open(dir string, log io.Writer) (*Lab, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if len(abs) > 70 {
		return nil, fmt.Errorf("lab folder %s: its path is longer than 70 bytes; choose a shorter --dir", abs)
	}
	return &Lab{Dir: abs, Log: log}, nil
}

// Publish puts a copy of a file on the lab's web server, and returns its URL.
func (l *Lab) Publish(path string) (string, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	folder, name := filepath.Join(l.Dir, "published"), filepath.Base(path)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	return "http://" + lan.FilesHost + "/published/" + name, os.WriteFile(filepath.Join(folder, name), content, 0o644)
}

// OwnerDir is the folder in which commands of the owner's workstation run. It holds components.yaml and manifests/
// from the lab, and the owner's files.
func (l *Lab) OwnerDir() string { return filepath.Join(l.Dir, "owner") }

// MeasurementsPath is the file that [Lab.Measurements] reads, written when the image is built.
func (l *Lab) MeasurementsPath() string { return filepath.Join(l.Dir, "measurements.json") }

// ClassFlag is the argument of muster policy from-measurements --class that accepts the lab's firmware.
func (l *Lab) ClassFlag() string { return "lab-firmware=" + l.firmwarePath() }

// firmwarePath is the file with the values of the lab's firmware, written beside the measurements.
func (l *Lab) firmwarePath() string { return filepath.Join(l.Dir, "firmware.json") }

// Measurements returns the measurements of a machine of this lab, computed from the image when it was built; it asks
// no machine.
func (l *Lab) Measurements() (Measurements, error) {
	m, err := image.LoadManifest(image.Image{Dir: filepath.Join(l.Dir, "image")}.ManifestPath())
	if err != nil {
		return Measurements{}, err
	}
	return m.Measurements()
}

// UpdateImage makes another image of this name, with other owner's keys (base64), and writes its measurements to a file, which it returns. Machines have the
// image from their next boot on, see [Lab.RebootNode].
func (l *Lab) UpdateImage(name string, ownerKeys ...string) (string, error) {
	manifest, err := image.Image{Dir: filepath.Join(l.Dir, "image")}.Update(name, ownerKeys)
	if err != nil {
		return "", err
	}
	m, err := manifest.Measurements()
	if err != nil {
		return "", err
	}
	path := filepath.Join(l.Dir, "measurements-"+name+".json")
	return path, writeJSON(path, m)
}

// InitLog is the log of a machine's PID 1: when units started and ended, and the resources that they used.
func (l *Lab) InitLog(machine string) string {
	return filepath.Join(l.Dir, "machines", machine, "init.log")
}

// Status returns what runs.
func (l *Lab) Status(ctx context.Context) (Status, error) { return l.client().Status(ctx) }

// Push puts images into the lab's registry, from which machines pull whatever registry a
// reference names. The path is an OCI image layout, one in a tar, or a folder of such tars;
// in the layout's index each image has the annotation io.containerd.image.name with its
// full reference.
func (l *Lab) Push(ctx context.Context, path string) error {
	dirs, err := l.layouts(path)
	if err != nil {
		return err
	}
	for _, d := range dirs {
		if err := l.client().Push(ctx, d); err != nil {
			return err
		}
	}
	return nil
}

// Node describes a machine to add.
type Node struct {
	Name   string // nodeN gets address 192.168.77.(10+N); others need Number
	Number int    // 1 to 240; 0: the one in the name

	// For /etc/muster/metadata.yaml, which is not measured.
	Role           string   // control-plane or worker (the default)
	InitSecretHash string   // SHA-256 of the init secret, lower-case hex; only where init is allowed
	JoinEndpoints  []string // host:port of joinservices

	TamperBootstrapper bool // its bootstrapper differs from the image's in one byte, and runs
	ForeignEK          bool // its TPM is genuine, but comes from a CA that the image's ekRoots don't name
	BareEK             bool // its TPM stores no EK certificate
	CloudKey           bool // its TPM has an attestation key that the lab's cloud certifies, and no EK certificate
	NoBootstrapper     bool // without Muster, but with kubelet, kubeadm and kubectl
	KeepEtc            bool // what it writes to /etc survives a reboot, as on a machine whose root is writable
	PullImages         bool // begin without container images: each one is pulled from the mirror
}

// AddNode makes and boots a machine and returns when its units are started.
func (l *Lab) AddNode(ctx context.Context, n Node) (Machine, error) {
	number, role, err := seat(n.Name, n.Number, n.Role)
	if err != nil {
		return Machine{}, err
	}
	metadata, err := machineMetadata(n.Name, role, number, n.InitSecretHash, n.JoinEndpoints)
	if err != nil {
		return Machine{}, err
	}
	done := l.step("machine " + n.Name)
	m, err := l.client().AddNode(ctx, daemon.NodeRequest{
		Name: n.Name, Number: number, ControlPlane: role == "control-plane", Metadata: string(metadata),
		TamperBootstrapper: n.TamperBootstrapper, ForeignEK: n.ForeignEK, BareEK: n.BareEK, CloudKey: n.CloudKey, NoBootstrapper: n.NoBootstrapper, KeepEtc: n.KeepEtc, Preload: !n.PullImages,
	})
	if err == nil {
		done()
	}
	return m, err
}

// RemoveNode ends a machine and deletes all its files.
func (l *Lab) RemoveNode(ctx context.Context, name string) error {
	return l.client().RemoveNode(ctx, name)
}

// RebootNode cuts a machine's power and boots it again: the disk stays, the PCRs start over.
func (l *Lab) RebootNode(ctx context.Context, name string) (Machine, error) {
	return l.client().RebootNode(ctx, name)
}

// KillNode cuts a machine's power without notice. Its disk stays, and the load balancer keeps connecting to it; RebootNode
// powers it on again.
func (l *Lab) KillNode(ctx context.Context, name string) error {
	return l.client().KillNode(ctx, name)
}

// ExchangeTPM replaces the TPM of a powered-off machine by another one of the same maker, as with a new mainboard:
// its disk stays.
func (l *Lab) ExchangeTPM(ctx context.Context, name string) error {
	s, err := l.Status(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(s.Machines, func(m Machine) bool { return m.Name == name })
	if i < 0 || s.Machines[i].Running {
		return fmt.Errorf("machine %s has power, or is not there: its TPM can't be exchanged", name)
	}
	tpm := vtpm.TPM{Dir: filepath.Join(daemon.MachineDir(l.Dir, name), "tpm")}
	if err := os.RemoveAll(tpm.Dir); err != nil {
		return err
	}
	return tpm.Manufacture(ctx, vtpm.CA{Dir: filepath.Join(l.Dir, "ca")})
}

// ClearTPM clears the TPM of a machine that runs, as firmware's setup does (TPM2_Clear, TPM 2.0 Part 3, 24.6): its endorsement
// key stays, its reset counter restarts.
func (l *Lab) ClearTPM(ctx context.Context, name string) error {
	s, err := l.Status(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(s.Machines, func(m Machine) bool { return m.Name == name })
	if i < 0 || !s.Machines[i].Running || s.Machines[i].TPMSocket == "" {
		return fmt.Errorf("machine %s does not run with a TPM of its own", name)
	}
	t, err := linuxudstpm.Open(s.Machines[i].TPMSocket)
	if err != nil {
		return err
	}
	_, err = tpm2.Clear{AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHLockout, Auth: tpm2.PasswordAuth(nil)}}.Execute(t)
	return errors.Join(err, t.Close())
}

// Command returns a command that runs in a machine, or on the owner's workstation. The caller sets standard input and
// output. Killing it kills the command inside.
func (l *Lab) Command(ctx context.Context, where string, argv ...string) (*exec.Cmd, error) {
	args, env, err := l.enter(ctx, where)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "nsenter", append(args, argv...)...)
	cmd.Env = env
	if where == Owner {
		cmd.Dir = l.OwnerDir()
	}
	return cmd, nil
}

// Exec replaces this process by a command in a machine or on the owner's workstation.
func (l *Lab) Exec(ctx context.Context, where string, argv ...string) error {
	cmd, err := l.Command(ctx, where, argv...)
	if err != nil {
		return err
	}
	if cmd.Dir != "" {
		if err := os.Chdir(cmd.Dir); err != nil {
			return err
		}
	}
	return syscall.Exec(cmd.Path, cmd.Args, cmd.Environ())
}

func (l *Lab) enter(ctx context.Context, where string) (args, env []string, err error) {
	s, err := l.Status(ctx)
	if err != nil {
		return nil, nil, err
	}
	if where == Owner {
		env, err := l.ownerEnv()
		return []string{"-t", strconv.Itoa(s.Owner.PID), "--net", "--"}, env, err
	}
	i := slices.IndexFunc(s.Machines, func(m Machine) bool { return m.Name == where })
	if i < 0 || !s.Machines[i].Running {
		return nil, nil, fmt.Errorf("no machine %q runs; lab status lists them", where)
	}
	if s.Machines[i].VM {
		return nil, nil, fmt.Errorf("machine %q is virtual and has no login; lab vm console %s shows its output", where, where)
	}
	env = []string{"PATH=" + machine.Path, "HOME=/root", "LANG=C.UTF-8", "TERM=" + os.Getenv("TERM")}
	return []string{"-t", strconv.Itoa(s.Machines[i].Init.PID), "--all", "--wdns=/root", "--"}, env, nil
}

// ownerEnv is the environment of the owner's workstation: muster, as the checkout builds it, and kubectl are in its
// path.
func (l *Lab) ownerEnv() ([]string, error) {
	b, err := os.ReadFile(filepath.Join(l.Dir, "lab.json"))
	if err != nil {
		return nil, err
	}
	var cfg daemon.Config
	if err := json.Unmarshal(b, &cfg); err != nil {
		return nil, err
	}
	path := strings.Join([]string{filepath.Join(cfg.Source, "bin"), cfg.KubeDir, os.Getenv("PATH")}, string(filepath.ListSeparator))
	return append(os.Environ(), "PATH="+path), nil
}

// Down ends all processes and removes all files of the lab, with its folder. It also works for a lab whose daemon was
// killed, and for one that is down.
func (l *Lab) Down(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(l.Dir, "lab.json")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	done := l.step("lab down")
	p, err := l.daemonProcess()
	if err != nil {
		return err
	}
	if p.Alive() {
		if err := l.client().Shutdown(ctx); err != nil { // the kernel then ends the remaining processes
			if err := p.Signal(syscall.SIGTERM); err != nil {
				return err
			}
		}
		wait, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		if p.Wait(wait) != nil {
			if err := errors.Join(p.Signal(syscall.SIGKILL), p.Wait(ctx)); err != nil {
				return err
			}
		}
	}
	cg, err := host.DetectCgroups()
	if err != nil {
		return err
	}
	clean, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if err := cg.Remove(clean, daemon.CgroupName(l.Dir)); err != nil {
		return err
	}
	if err := l.removeDir(); err != nil {
		return err
	}
	done()
	return nil
}

// Entries of a lab's folder. Down removes only these, whatever folder it gets.
var entries = []string{
	"machines", "image", "tools", "registry", "layouts", "published", "ca", "ca-cloud", "ca-foreign", "owner", "measurements.json", "firmware.json",
	"daemon.sock", "daemon.log", "daemon.json", "owner.log", "lab.json",
}

func (l *Lab) removeDir() error {
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(l.Dir, e)); err != nil {
			return err
		}
	}
	if err := os.Remove(l.Dir); err != nil && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (l *Lab) client() *daemon.Client { return daemon.NewClient(l.Dir) }

// daemonProcess returns the identity of the daemon that was started last.
func (l *Lab) daemonProcess() (Process, error) {
	var p Process
	b, err := os.ReadFile(filepath.Join(l.Dir, "daemon.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err != nil {
		return p, err
	}
	return p, json.Unmarshal(b, &p)
}

// step reports a step's duration when it is done.
func (l *Lab) step(name string) func() {
	start := time.Now()
	return func() { fmt.Fprintf(l.Log, "%-32s %6.2f s\n", name, time.Since(start).Seconds()) }
}
