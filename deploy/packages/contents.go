package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"debug/elf"
	"embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/muster-k8s/muster/deploy/sbom"
)

//go:embed files
var files embed.FS

// file is one to install.
type file struct {
	path    string // absolute on a machine
	mode    os.FileMode
	content []byte
}

// contents collects the contents of the packages.
type contents struct {
	source, bin, version string
	arch                 string // GOARCH, which Debian names in the same way
	native               string // a muster that runs here; empty: the one to be packed
	date                 time.Time
	level                int // of compression
}

// cli contains the files for an owner.
func (c contents) cli(ctx context.Context) (debian, error) {
	p := debian{
		name: "muster", section: "admin", summary: "make Kubernetes clusters of machines that prove what they booted",
		text: "The owner's program: initializes the first machine of a cluster, signs policies,\nenrolls machines, and shows who is in and why others are not.",
	}
	muster := filepath.Join(c.bin, "muster")
	if err := c.program(ctx, &p, muster); err != nil {
		return p, err
	}
	runs := cmp.Or(c.native, muster)
	for shell, path := range map[string]string{
		"bash": "/usr/share/bash-completion/completions/muster",
		"zsh":  "/usr/share/zsh/vendor-completions/_muster",
		"fish": "/usr/share/fish/vendor_completions.d/muster.fish",
	} {
		script, err := output(ctx, runs, "completion", shell)
		if err != nil {
			return p, err
		}
		p.files = append(p.files, file{path, 0o644, script})
	}
	help, err := output(ctx, runs, "--help")
	if err != nil {
		return p, err
	}
	return p, p.compressed("/usr/share/man/man1/muster.1.gz", manual(string(help)))
}

// machine contains the files for an image for machines.
func (c contents) machine(ctx context.Context) (debian, error) {
	p := debian{
		name: "muster-bootstrapper", section: "admin", summary: "make this machine a Kubernetes node after it has proven what it booted",
		text:    "The program that makes a machine with a TPM 2.0 a node of a cluster, its attester,\nand hardened systemd units for both. It belongs into a measured image.",
		depends: "init-system-helpers (>= 1.54~)", recommends: "containerd | containerd.io",
		control: map[string][]byte{},
	}
	if err := c.program(ctx, &p, filepath.Join(c.bin, "bootstrapper")); err != nil {
		return p, err
	}
	for _, unit := range []string{"muster-bootstrapper.service", "muster-attester.service", "muster-renewal.service", "muster-orders.service", "muster-reset.service", "muster-upgrade.service", "muster-rotation.service"} {
		b, err := os.ReadFile(filepath.Join(c.source, "deploy", "systemd", unit))
		if err != nil {
			return p, err
		}
		p.files = append(p.files, file{"/usr/lib/systemd/system/" + unit, 0o644, b})
	}
	for _, script := range []string{"postinst", "postrm"} {
		b, err := files.ReadFile("files/" + script)
		if err != nil {
			return p, err
		}
		p.control[script] = b
	}
	page, err := files.ReadFile("files/bootstrapper.8")
	if err != nil {
		return p, err
	}
	return p, p.compressed("/usr/share/man/man8/bootstrapper.8.gz", page)
}

// program adds a program and its documents.
func (c contents) program(ctx context.Context, p *debian, path string) error {
	name := filepath.Base(path)
	binary, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("%w; `make build` builds it", err)
	}
	if err := c.check(path, binary); err != nil {
		return err
	}
	bill, err := sbom.Local(ctx, c.date)
	if err != nil {
		return err
	}
	made, err := bill.Of(path, c.version)
	if err != nil {
		return err
	}
	copyright, err := files.ReadFile("files/copyright")
	if err != nil {
		return err
	}
	changes, err := os.ReadFile(filepath.Join(c.source, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	doc := "/usr/share/doc/" + p.name
	p.files = append(p.files,
		file{"/usr/bin/" + name, 0o755, binary},
		file{doc + "/" + name + ".spdx.json", 0o644, made},
		file{doc + "/copyright", 0o644, copyright},
	)
	return p.compressed(doc+"/changelog.gz", changes)
}

// machines are the ELF machines of the architectures.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// check refuses a program of another architecture.
func (c contents) check(path string, binary []byte) error {
	want, known := machines[c.arch]
	if !known {
		return fmt.Errorf("the architecture is amd64 or arm64, not %q", c.arch)
	}
	f, err := elf.NewFile(bytes.NewReader(binary))
	if err != nil {
		return fmt.Errorf("%s: want a Linux binary: %w", path, err)
	}
	if f.Machine != want {
		return fmt.Errorf("%s is for %s, not for %s", path, f.Machine, c.arch)
	}
	return nil
}

// compressed adds a file in gzip without name and time (gzip -n9).
func (p *debian) compressed(path string, content []byte) error {
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := w.Write(content); err != nil {
		return err
	}
	p.files = append(p.files, file{path, 0o644, nil})
	last := &p.files[len(p.files)-1]
	err = w.Close()
	last.content = b.Bytes()
	return err
}

func output(ctx context.Context, program string, args ...string) ([]byte, error) {
	path, err := filepath.Abs(program)
	if err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, path, args...).Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", program, strings.Join(args, " "), err)
	}
	return out, nil
}

// manual makes a page of section 1 from the output of `muster --help`, so that it is always complete.
func manual(help string) []byte {
	var commands strings.Builder
	_, list, _ := strings.Cut(help, "Available Commands:\n")
	list, _, _ = strings.Cut(list, "\n\n")
	for line := range strings.Lines(list) {
		name, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		fmt.Fprintf(&commands, ".TP\n.B %s\n%s\n", escape(name), escape(strings.TrimSpace(what)))
	}
	return fmt.Appendf(nil, `.TH MUSTER 1 "" "Muster" "User Commands"
.SH NAME
muster \- make Kubernetes clusters of machines that prove what they booted
.SH SYNOPSIS
.B muster
.I command
.RI [ flags ]
.SH COMMANDS
%s.PP
.B muster
.I command
.B \-\-help
explains each, with its flags.
.SH SEE ALSO
.BR bootstrapper (8)
.PP
https://github.com/muster-k8s/muster/blob/main/docs/operate.md
`, commands.String())
}

func escape(s string) string { return strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(s) }
