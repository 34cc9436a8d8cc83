package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/lab/internal/daemon"
	"github.com/muster-k8s/muster/lab/internal/lan"
	"github.com/muster-k8s/muster/lab/internal/vm"
)

// MaxVMs is how many virtual machines of a lab may have power at a time.
const MaxVMs = daemon.MaxVMs

// The signer that a [VM] with SecureBoot accepts: a published private key, encrypted, its passphrase, and its
// certificate. They come with Debian's package ovmf.
const (
	SecureBootKey         = vm.SecureBootKey
	SecureBootPassphrase  = vm.SecureBootPassphrase
	SecureBootCertificate = vm.SecureBootCertificate
	// The firmware of a VM with SecureBoot, and variables with which it has Secure Boot off.
	SecureBootFirmware    = vm.SecureBootFirmware
	NoSecureBootVariables = vm.NoSecureBootVariables
)

// VM describes a virtual machine to add: real firmware that boots a disk image, on the same network, with a TPM from
// the same CA, as machines made of namespaces.
type VM struct {
	Name   string // nodeN gets address 192.168.77.(10+N); others need Number
	Number int    // 1 to 240; 0: the one in the name

	Image     string // the raw disk image that it boots; it is not written to
	StateMiB  int    // size of its state disk; 0 for 4096. The file is sparse
	MemoryMiB int    // 0: 2048

	// For its metadata, which are not measured.
	MetadataName   string   // what its metadata call it; empty: Name
	Role           string   // control-plane or worker (the default)
	InitSecretHash string   // SHA-256 of the init secret, lower-case hex; only where init is allowed
	JoinEndpoints  []string // host:port of joinservices

	ForeignEK bool // its TPM is genuine, but comes from a CA that no policy of the lab names
	// SecureBoot gives it firmware that starts only programs signed by [SecureBootKey].
	SecureBoot bool
	Hardware   Hardware
	// ClockOffset is how far its firmware's clock is ahead of the host's, at each power-on.
	ClockOffset time.Duration
	NTP         []string // addresses of time servers, for its metadata
	Nameservers []string // addresses of name servers, for its metadata; empty: one that answers nothing
	// NoMedium leaves out the config medium: its metadata are in Hardware.
	NoMedium bool
}

// Documents returns the metadata of a virtual machine as one YAML stream, for its user data or a credential.
func (v VM) Documents() (string, error) {
	number, role, err := seat(v.Name, v.Number, v.Role)
	if err != nil {
		return "", err
	}
	files, err := configMedium(v, number, role)
	return string(files["metadata.yaml"]) + "---\n" + string(files["network.yaml"]), err
}

// AddVM makes a virtual machine, powers it on, and returns when the booted program has written to its console, after
// half a minute or so. It is a machine of the lab like others: [Lab.KillNode], [Lab.RebootNode] and [Lab.RemoveNode]
// take its name, and [Lab.Down] ends it. It cannot be entered from outside: there is no [Lab.Command] in it.
func (l *Lab) AddVM(ctx context.Context, v VM) (Machine, error) {
	number, role, err := seat(v.Name, v.Number, v.Role)
	if err != nil {
		return Machine{}, err
	}
	if v.Image == "" {
		return Machine{}, errors.New("a virtual machine needs an image: make vm-image builds it")
	}
	image, err := filepath.Abs(v.Image)
	if err != nil {
		return Machine{}, err
	}
	medium, err := configMedium(v, number, role)
	if err != nil {
		return Machine{}, err
	}
	if v.NoMedium {
		medium = nil
	}
	done := l.step("virtual machine " + v.Name)
	m, err := l.client().AddVM(ctx, daemon.VMRequest{
		Name: v.Name, Number: number, ControlPlane: role == "control-plane", Image: image, Medium: medium,
		StateMiB: v.StateMiB, MemoryMiB: v.MemoryMiB, ForeignEK: v.ForeignEK, SecureBoot: v.SecureBoot, Hardware: v.Hardware, ClockOffset: v.ClockOffset,
	})
	if err == nil {
		done()
	}
	return m, err
}

// Hardware is what the provider of a virtual machine can put below its image.
type Hardware = vm.Hardware

// Boot changes what a virtual machine boots from now on. Empty fields leave it as it was.
type Boot struct {
	Image    string
	Hardware *Hardware
}

// RebootVM cuts a virtual machine's power, if it has any, and gives it power again, with what b changes.
// It returns as [Lab.AddVM] does.
func (l *Lab) RebootVM(ctx context.Context, name string, b Boot) (Machine, error) {
	image := b.Image
	if image != "" {
		var err error
		if image, err = filepath.Abs(image); err != nil {
			return Machine{}, err
		}
	}
	done := l.step("virtual machine " + name + " again")
	m, err := l.client().RebootVM(ctx, name, daemon.BootRequest{Image: image, Hardware: b.Hardware})
	if err == nil {
		done()
	}
	return m, err
}

// KillVM cuts a virtual machine's power, in the middle of a boot too: QEMU and the TPM end by SIGKILL.
// Its disk stays as it was at that moment.
func (l *Lab) KillVM(ctx context.Context, name string) error { return l.client().KillNode(ctx, name) }

// StopVM presses a virtual machine's power button and returns when it is off.
func (l *Lab) StopVM(ctx context.Context, name string) error { return l.client().StopVM(ctx, name) }

// RemoveVM cuts a virtual machine's power and deletes all that it had.
func (l *Lab) RemoveVM(ctx context.Context, name string) error {
	return l.client().RemoveNode(ctx, name)
}

// StateDisk is the raw image of a virtual machine's state disk. Only the machine may use it while it is powered.
func (l *Lab) StateDisk(name string) string { return vm.StatePath(daemon.MachineDir(l.Dir, name)) }

// FirmwareVariables is the flash image with a virtual machine's firmware variables. Only the machine may use it while
// it is powered.
func (l *Lab) FirmwareVariables(name string) string {
	return vm.VariablesPath(daemon.MachineDir(l.Dir, name))
}

// Console is the file with what a virtual machine wrote to its serial port since it got power last.
func (l *Lab) Console(name string) (string, error) { return vm.Console(daemon.MachineDir(l.Dir, name)) }

// WaitConsole returns the first line that holds text of what a virtual machine wrote since it got power
// last. It fails with the console's last line when ctx ends, or the machine goes off.
func (l *Lab) WaitConsole(ctx context.Context, name, text string) (string, error) {
	path, err := l.Console(name)
	if err != nil {
		return "", err
	}
	s, err := l.Status(ctx)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(s.Machines, func(m Machine) bool { return m.Name == name && m.VM })
	if i < 0 {
		return "", fmt.Errorf("there is no virtual machine %q; lab vm list names them", name)
	}
	line, err := vm.WaitLine(ctx, path, s.Machines[i].Init.Alive, func(line string) bool { return strings.Contains(line, text) })
	if err != nil {
		return "", fmt.Errorf("%s has not written %q: %w", name, text, err)
	}
	return line, nil
}

// CleanLine converts a console's line to the text that a person would read, without control characters.
func CleanLine(line string) string { return vm.Clean(line) }

// seat completes a machine's number and role.
func seat(name string, number int, role string) (int, string, error) {
	if role == "" {
		role = "worker"
	}
	if role != "worker" && role != "control-plane" {
		return 0, "", fmt.Errorf("role %q: want control-plane or worker", role)
	}
	if number == 0 {
		if _, err := fmt.Sscanf(name, "node%d", &number); err != nil {
			return 0, "", fmt.Errorf("machine %q has no number in its name: give it one with --number", name)
		}
	}
	return number, role, nil
}

// machineMetadata is metadata.yaml of a machine.
func machineMetadata(name, role string, number int, initSecretHash string, joinEndpoints []string) ([]byte, error) {
	metadata := map[string]any{
		"apiVersion": "muster.dev/v1alpha1", "kind": "MachineMetadata",
		"name": name, "role": role, "addresses": []string{lan.Address(number)}, "joinEndpoints": append([]string{}, joinEndpoints...),
	}
	if initSecretHash != "" {
		metadata["initSecretHash"] = initSecretHash
	}
	return yaml.Marshal(metadata)
}

// configMedium makes the files of a virtual machine's config medium.
func configMedium(v VM, number int, role string) (map[string][]byte, error) {
	metadata, err := machineMetadata(cmp.Or(v.MetadataName, v.Name), role, number, v.InitSecretHash, v.JoinEndpoints)
	if err != nil {
		return nil, err
	}
	conf := map[string]any{
		"apiVersion": "muster.dev/v1alpha1", "kind": "MachineNetwork",
		"interfaces":  []map[string]any{{"mac": lan.HardwareAddress(v.Name).String(), "addresses": []string{lan.Address(number) + "/24"}, "gateway": lan.Gateway}},
		"nameservers": []string{lan.Gateway}, // as other machines of the lab: nothing listens there, names outside the cluster fail at once
	}
	if len(v.Nameservers) > 0 {
		conf["nameservers"] = v.Nameservers
	}
	if len(v.NTP) > 0 {
		conf["ntp"] = v.NTP
	}
	network, err := yaml.Marshal(conf)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{"metadata.yaml": metadata, "network.yaml": network}, nil
}
