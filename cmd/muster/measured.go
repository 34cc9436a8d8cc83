package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/image"
	"github.com/muster-k8s/muster/internal/image/builder"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// policyFlags has the flags of the commands that make a policy.
type policyFlags struct {
	t                         policyfile.Template
	roots, machines, networks []string
	control, classes, bare    []string
	platforms                 []string
	platform                  attestv1.PlatformRoot
	nitro, nitroMachines      []string
	operator                  bool
	key, out                  string
	builder                   string
}

func (p *policyFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringSliceVar(&p.roots, "ek-root", nil, "authority that issues EK certificates, PEM file with one or more")
	f.BoolVar(&p.operator, "operator", false, "the authorities of --ek-root issue for your machines only; never a TPM vendor's: list machines by --machine-id instead")
	f.StringVar(&p.key, "ek-key", string(attest.EKP256), "the one kind of endorsement key that they certify: ecc-p256, ecc-p384 or rsa-2048")
	f.StringSliceVar(&p.machines, "machine-id", nil, "accept this machine (default: all machines that a listed root certifies)")
	f.StringSliceVar(&p.bare, "bare-machine-id", nil, "machine ID of a machine whose TPM has no EK certificate, to be accepted; read it on the machine's console, not over the network")
	f.StringSliceVar(&p.platforms, "platform-root", nil, "PEM file with one or more CA certificates of a cloud, which certify the attestation keys of its virtual machines")
	f.StringVar(&p.platform.Provider, "platform-provider", "gcp", "cloud of --platform-root: gcp or azure")
	f.StringVar(&p.platform.Key, "platform-key", string(attest.EKP256), "kind of key that --platform-root certifies: ecc-p256 (gcp) or rsa-2048")
	f.StringSliceVar(&p.platform.Projects, "platform-project", nil, "ID of a GCP project whose virtual machines are accepted")
	f.StringSliceVar(&p.platform.Zones, "platform-zone", nil, "GCP zone whose virtual machines are accepted (default: all zones)")
	f.StringSliceVar(&p.platform.MachineIds, "platform-machine-id", nil, "machine ID of a virtual machine to be accepted (default: all of the projects)")
	f.StringSliceVar(&p.nitro, "nitro-root", nil, "PEM file with one or more CA certificates of AWS, which certify the attestation documents of NitroTPMs")
	f.StringSliceVar(&p.nitroMachines, "nitro-machine-id", nil, "machine ID of a virtual machine of AWS to be accepted")
	f.StringSliceVar(&p.control, "control-plane", nil, "machine ID of a control plane; muster init and muster enroll list them automatically")
	f.StringArrayVar(&p.classes, "class", nil, "NAME=FILE: machine class of this name with a maker's values of PCR 0, 2, 3 and 7; muster policy add-class takes one from a machine")
	f.StringSliceVar(&p.networks, "node-cidr", nil, "network of node addresses")
	f.StringSliceVar(&p.t.Roles, "role", []string{attest.RoleWorker, attest.RoleControlPlane}, "role that machines may have")
	f.Uint64Var(&p.t.Serial, "serial", 1, "serial of the policy, higher than that of the one it replaces")
	f.BoolVar(&p.t.AllowPlainState, "allow-plain-state", false, "insecure: accept machines whose state is not on an encrypted disk")
	f.BoolVar(&p.t.AnyFirmware, "any-firmware", false, "insecure: accept any firmware, and any driver that it loads")
	f.BoolVar(&p.t.AnyMachine, "any-machine", false, "insecure: accept any machine that a TPM vendor's root certifies")
	p.addBuilder(cmd)
	f.StringVarP(&p.out, "out", "o", "", "file to write (default: standard output)")
}

func (p *policyFlags) addBuilder(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.builder, "builder-key", "", "public key of the image's builder, a file of ssh-keygen -t ed25519: accept only files that SHA256SUMS.sig in their folder signs")
}

// signed checks a file's signature if the owner named a builder's key.
func (p *policyFlags) signed(path string, sum [sha256.Size]byte) error {
	if p.builder == "" {
		return nil
	}
	key, err := builder.ReadPublicKey(p.builder)
	if err != nil {
		return usagef("--builder-key: %w", err)
	}
	sums, err := builder.Open(filepath.Dir(path), key)
	if err != nil {
		return err
	}
	return sums.Check(filepath.Base(path), sum)
}

// measurements reads a file of an image's build.
func (p *policyFlags) measurements(path string) (policyfile.Measurements, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return policyfile.Measurements{}, err
	}
	if err := p.signed(path, sha256.Sum256(text)); err != nil {
		return policyfile.Measurements{}, err
	}
	m, err := policyfile.ParseMeasurements(text)
	if err != nil {
		return m, fmt.Errorf("%s: %w", path, err)
	}
	return m, nil
}

func (a *app) fromMeasurementsCommand() *cobra.Command {
	var p policyFlags
	cmd := &cobra.Command{
		Use:   "from-measurements measurements.json… --ek-root ca.pem --node-cidr CIDR -o policy.yaml",
		Short: "Make a commented policy from what an image build measured",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			for _, path := range args {
				m, err := p.measurements(path)
				if err != nil {
					return err
				}
				p.t.Measurements = append(p.t.Measurements, m)
			}
			return a.writePolicy(&p)
		},
	}
	p.add(cmd)
	return cmd
}

func (a *app) fromImageCommand() *cobra.Command {
	var (
		p          policyFlags
		secureBoot string
		compare    []string
		bank       string
	)
	cmd := &cobra.Command{
		Use:   "from-image muster.raw --ek-root ca.pem --node-cidr CIDR -o policy.yaml",
		Short: "Make a commented policy from a disk image: this command reads everything in it that a machine would run, and computes the measurements",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			on := map[string][]bool{"off": {false}, "on": {true}, "both": {false, true}}[secureBoot]
			if on == nil {
				return usagef("--secure-boot %q: want off, on or both", secureBoot)
			}
			if attest.Banks[bank] == 0 {
				return usagef("--bank %q: want sha256, sha384 or sha512", bank)
			}
			program, err := readImage(args[0], &p)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			var all []policyfile.Measurements
			for _, secure := range []bool{false, true} {
				m, err := image.Measurements(program, attest.Banks[bank], secure)
				if err != nil {
					return fmt.Errorf("%s: %w", args[0], err)
				}
				all = append(all, m)
				if len(on) == 2 || on[0] == secure {
					p.t.Measurements = append(p.t.Measurements, m)
				}
			}
			for _, path := range compare {
				m, err := p.measurements(path)
				if err != nil {
					return err
				}
				if !reflect.DeepEqual(m, all[0]) && !reflect.DeepEqual(m, all[1]) {
					return fmt.Errorf("%s has %v for %s, but the image gives %v, with Secure Boot on %v: one of the files is from another build", path, m.PCRs, m.Image, all[0].PCRs, all[1].PCRs)
				}
			}
			return a.writePolicy(&p)
		},
	}
	p.add(cmd)
	cmd.Flags().StringVar(&secureBoot, "secure-boot", "off", "whether the machines' firmware has Secure Boot off, on, or both kinds exist")
	cmd.Flags().StringVar(&bank, "bank", "sha256", "bank of PCRs that the machines quote, tpm.bank of the image's image.yaml: sha256, sha384 or sha512")
	cmd.Flags().StringSliceVar(&compare, "measurements", nil, "the build's file of measurements, for a comparison")
	return cmd
}

// readImage returns the EFI program of a disk image. With a builder's key, it checks and measures a private copy
// (S2): otherwise a process with write access to the image could change it between the two.
func readImage(path string, p *policyFlags) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("it is not a regular file: copy the disk into one")
	}
	if p.builder == "" {
		return image.ReadProgram(f, info.Size())
	}
	own, err := os.CreateTemp("", "muster-image-") // 0600
	if err != nil {
		return nil, err
	}
	defer own.Close()
	if err := os.Remove(own.Name()); err != nil { // only this process has it open; it disappears with the process
		return nil, err
	}
	h := sha256.New()
	size, err := io.Copy(io.MultiWriter(own, h), f)
	if err != nil {
		return nil, fmt.Errorf("copy it, to measure what the builder signed: %w; TMPDIR names another folder for the copy", err)
	}
	if err := p.signed(path, [sha256.Size]byte(h.Sum(nil))); err != nil {
		return nil, err
	}
	return image.ReadProgram(own, size)
}

// eachAuthority calls add with each certificate, in PEM, of the files that a flag names.
func eachAuthority(flag string, paths []string, add func(string)) error {
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return usagef("%s: %w", flag, err)
		}
		certificates, err := policyfile.SplitPEM(text)
		if err != nil {
			return usagef("%s %s: %w", flag, path, err)
		}
		for _, c := range certificates {
			add(c)
		}
	}
	return nil
}

// writePolicy writes the policy from the measurements and the flags.
func (a *app) writePolicy(p *policyFlags) error {
	if err := fill(&p.t, p.roots, p.machines, p.networks, p.operator, attest.EKKind(p.key)); err != nil {
		return err
	}
	if err := eachAuthority("--platform-root", p.platforms, func(c string) {
		r := proto.CloneOf(&p.platform)
		r.Pem = c
		p.t.Platforms = append(p.t.Platforms, r)
	}); err != nil {
		return err
	}
	if err := eachAuthority("--nitro-root", p.nitro, func(c string) {
		p.t.Nitro = append(p.t.Nitro, &attestv1.NitroRoot{Pem: c, MachineIds: p.nitroMachines})
	}); err != nil {
		return err
	}
	for _, s := range p.bare {
		id, err := attest.ParseMachineID(s)
		if err != nil {
			return usagef("--bare-machine-id: %w", err)
		}
		p.t.BareMachineIDs = append(p.t.BareMachineIDs, id)
	}
	for _, s := range p.control {
		id, err := attest.ParseMachineID(s)
		if err != nil {
			return usagef("--control-plane: %w", err)
		}
		p.t.ControlPlanes = append(p.t.ControlPlanes, policyfile.ControlPlane{Machine: id})
	}
	if err := fillClasses(&p.t, p.classes); err != nil {
		return err
	}
	text, err := policyfile.Build(p.t)
	if err != nil {
		return err
	}
	if len(p.t.Classes) == 0 && !p.t.AnyFirmware {
		fmt.Fprintln(a.stderr, "The policy lists no machine class yet, so it accepts no firmware. Add one from a machine that you trust: muster policy add-class NAME --from MACHINE:9000 --policy FILE")
	}
	if p.out == "" || p.out == "-" {
		_, err = a.stdout.Write(text)
		return err
	}
	return os.WriteFile(p.out, text, 0o600)
}

// fillClasses reads NAME=FILE.
func fillClasses(t *policyfile.Template, classes []string) error {
	for _, s := range classes {
		name, path, ok := strings.Cut(s, "=")
		if !ok {
			return usagef("--class %q: want NAME=FILE", s)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return usagef("--class: %w", err)
		}
		c, err := policyfile.ParseFirmware(name, text, t.Measurements[0].Bank)
		if err != nil {
			return usagef("--class %s: %w", s, err)
		}
		t.Classes = append(t.Classes, c)
	}
	return nil
}

func fill(t *policyfile.Template, roots, machines, networks []string, operator bool, key attest.EKKind) error {
	for _, path := range roots {
		text, err := os.ReadFile(path)
		if err != nil {
			return usagef("--ek-root: %w", err)
		}
		certificates, err := policyfile.SplitPEM(text)
		if err != nil {
			return usagef("--ek-root %s: %w", path, err)
		}
		for _, c := range certificates {
			t.Roots = append(t.Roots, policyfile.Root{PEM: c, Operator: operator, Key: key})
		}
	}
	for _, s := range machines {
		id, err := attest.ParseMachineID(s)
		if err != nil {
			return usagef("--machine-id: %w", err)
		}
		t.MachineIDs = append(t.MachineIDs, id)
	}
	for _, s := range networks {
		c, err := netip.ParsePrefix(s)
		if err != nil || c != c.Masked() {
			return usagef("--node-cidr %q is not a network like 10.0.0.0/16", s)
		}
		t.NodeCIDRs = append(t.NodeCIDRs, c)
	}
	return nil
}
