// Package daemon is the lab's one long-lived process: it lives in the lab's network
// namespace, serves the load balancer and the mirror there, and is the parent of every
// machine and every TPM.
//
// [Daemon] removes everything that it has made when it ends. If it is killed, the kernel ends its children with it
// (PR_SET_PDEATHSIG); the remaining folders and empty cgroups have names that follow from the lab's folder alone.
package daemon

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/vm"
)

// A Config is the daemon's initial configuration: lab.json in the lab's folder.
type Config struct {
	Dir     string            `json:"dir"`
	Source  string            `json:"source"`  // the checkout that the lab was built from
	KubeDir string            `json:"kubeDir"` // served to machines as components
	Sums    map[string]string `json:"sums"`    // of the components: file name → SHA-256
	Layouts []string          `json:"layouts"` // image layouts for the registry
	Golden  string            `json:"golden"`  // containerd's folder with images in it that machines begin with; may be empty
}

// A NodeRequest asks for a machine.
type NodeRequest struct {
	Name               string `json:"name"`
	Number             int    `json:"number"`             // its address follows from it
	ControlPlane       bool   `json:"controlPlane"`       // the load balancer sends it connections
	Metadata           string `json:"metadata"`           // the content of /etc/muster/metadata.yaml
	TamperBootstrapper bool   `json:"tamperBootstrapper"` // its bootstrapper differs in one byte
	ForeignEK          bool   `json:"foreignEK"`          // its TPM comes from the other CA
	BareEK             bool   `json:"bareEK"`             // its TPM stores no EK certificate
	CloudKey           bool   `json:"cloudKey"`           // its TPM has an attestation key that the lab's cloud certifies, and no EK certificate
	NoBootstrapper     bool   `json:"noBootstrapper"`     // nothing of Muster, all Kubernetes programs
	KeepEtc            bool   `json:"keepEtc"`            // what it writes to /etc survives a reboot
	Preload            bool   `json:"preload"`            // begin with the golden images
	Bare               bool   `json:"bare"`               // containerd alone: no TPM, no firmware
}

// A VMRequest asks for a virtual machine.
type VMRequest struct {
	Name         string            `json:"name"`
	Number       int               `json:"number"`       // its address follows from it
	ControlPlane bool              `json:"controlPlane"` // the load balancer sends it connections
	Image        string            `json:"image"`        // path of the raw disk image that it boots
	Medium       map[string][]byte `json:"medium"`       // files of its config medium
	StateMiB     int               `json:"stateMiB"`     // size of its state disk; 0 for vm.DefaultState
	MemoryMiB    int               `json:"memoryMiB"`    // 0: vm.DefaultMemory
	ForeignEK    bool              `json:"foreignEK"`    // its TPM comes from the other CA
	SecureBoot   bool              `json:"secureBoot"`   // its firmware starts only what vm.SecureBootKey signed
	Hardware     vm.Hardware       `json:"hardware"`
	ClockOffset  time.Duration     `json:"clockOffset"` // of its firmware's clock
}

// A BootRequest changes what a virtual machine boots from now on. Empty fields leave it as it was.
type BootRequest struct {
	Image    string            `json:"image"`
	Medium   map[string][]byte `json:"medium"`
	Hardware *vm.Hardware      `json:"hardware"`
}

// A Machine is a machine that was started.
type Machine struct {
	Name         string       `json:"name"`
	Number       int          `json:"number"`
	Address      string       `json:"address"`
	ControlPlane bool         `json:"controlPlane"`
	Running      bool         `json:"running"`
	VM           bool         `json:"vm"`      // virtual: it cannot be entered from outside
	Console      string       `json:"console"` // the file with a virtual machine's console since power on
	Init         host.Process `json:"init"`    // PID 1, as the host sees it; a virtual machine's QEMU
	TPM          host.Process `json:"tpm"`
	TPMSocket    string       `json:"tpmSocket"` // the TPM's command socket on the host; empty for a bare machine
	Log          string       `json:"log"`       // folder with the logs of its units
}

// A Status is everything that a lab runs.
type Status struct {
	Daemon   host.Process `json:"daemon"`
	Owner    host.Process `json:"owner"` // holds the owner's network namespace
	Machines []Machine    `json:"machines"`
}

// SocketPath is the daemon's control socket.
func SocketPath(dir string) string { return filepath.Join(dir, "daemon.sock") }

// CgroupName names the cgroup that holds all of a lab's machines; two labs differ because
// their folders do.
func CgroupName(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return "muster-lab-" + hex.EncodeToString(sum[:4])
}

// MachineDir is a machine's folder.
func MachineDir(dir, name string) string { return filepath.Join(dir, "machines", name) }

var validName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,13}$`)

func (r NodeRequest) check() error { return check(r.Name, r.Number) }

func (r VMRequest) check() error {
	if !filepath.IsAbs(r.Image) {
		return fmt.Errorf("image %q of machine %s: want an absolute path", r.Image, r.Name)
	}
	return check(r.Name, r.Number)
}

func check(name string, number int) error {
	if !validName.MatchString(name) || name == "owner" {
		return fmt.Errorf("machine name %q: want at most 14 lower-case letters, digits and dashes, and not owner", name)
	}
	if number < 1 || number > 240 {
		return fmt.Errorf("machine number %d: want 1 to 240", number)
	}
	return nil
}

// A Client talks to a lab's daemon.
type Client struct {
	http *http.Client
}

// ErrNotRunning is returned if no daemon answers.
var ErrNotRunning = errors.New("this lab is not up; lab up brings it up")

// NewClient returns a client for the lab in dir.
func NewClient(dir string) *Client {
	return &Client{http: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			c, err := d.DialContext(ctx, "unix", SocketPath(dir))
			if err != nil {
				return nil, errors.Join(ErrNotRunning, err)
			}
			return c, nil
		},
		DisableKeepAlives: true,
	}}}
}

// Status asks what runs.
func (c *Client) Status(ctx context.Context) (s Status, err error) {
	return s, c.call(ctx, http.MethodGet, "/status", nil, &s)
}

// AddNode starts a machine and returns when it has booted.
func (c *Client) AddNode(ctx context.Context, r NodeRequest) (m Machine, err error) {
	return m, c.call(ctx, http.MethodPost, "/machines", r, &m)
}

// RemoveNode ends a machine and deletes its folder.
func (c *Client) RemoveNode(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodDelete, "/machines/"+name, nil, nil)
}

// RebootNode ends a machine and starts it again from its disk, with its TPM reset.
func (c *Client) RebootNode(ctx context.Context, name string) (m Machine, err error) {
	return m, c.call(ctx, http.MethodPost, "/machines/"+name+"/reboot", nil, &m)
}

// KillNode cuts a machine's power. Its disk stays, and the load balancer keeps connecting to it.
func (c *Client) KillNode(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodPost, "/machines/"+name+"/kill", nil, nil)
}

// AddVM makes a virtual machine and returns when it has booted something.
func (c *Client) AddVM(ctx context.Context, r VMRequest) (m Machine, err error) {
	return m, c.call(ctx, http.MethodPost, "/vms", r, &m)
}

// RebootVM cuts a virtual machine's power, if it has any, and gives it power again.
func (c *Client) RebootVM(ctx context.Context, name string, b BootRequest) (m Machine, err error) {
	return m, c.call(ctx, http.MethodPost, "/vms/"+name+"/reboot", b, &m)
}

// StopVM presses a virtual machine's power button and waits until it has gone off.
func (c *Client) StopVM(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodPost, "/vms/"+name+"/stop", nil, nil)
}

// Push puts the images of an OCI layout into the registry.
func (c *Client) Push(ctx context.Context, layout string) error {
	return c.call(ctx, http.MethodPost, "/push", layout, nil)
}

// Shutdown ends all machines and then the daemon.
func (c *Client) Shutdown(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, "/shutdown", nil, nil)
}

func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://lab"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return errors.New(string(bytes.TrimSpace(b)))
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(b, out)
}

func loadConfig(dir string) (Config, error) {
	var c Config
	b, err := os.ReadFile(filepath.Join(dir, "lab.json"))
	if err != nil {
		return c, err
	}
	return c, json.Unmarshal(b, &c)
}
