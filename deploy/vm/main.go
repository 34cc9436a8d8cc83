// Vm builds the disk image that Muster's machines boot, from Debian 12's packages and the project's own programs, and
// predicts the measurements of a machine that has booted it.
//
//	go run ./deploy/vm -bin bin -containerd DIR -version v0.1.0 -o dist/vm
//
//	go run ./deploy/vm lock -containerd DIR
//
// The second writes packages.lock, which lists the parts of the image. The same lock file, checkout and configuration
// result in the same bytes. docs/image.md describes the image and the reasons.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	syscall.Umask(0o022)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(1)
	}
}

// options are the options of a build.
type options struct {
	source     string // the checkout
	bin        string // folder with the static program bootstrapper
	containerd string // folder with containerd, containerd-shim-runc-v2 and ctr, static
	version    string
	date       time.Time // of all files
	out        string

	config         configOptions
	add            string // folder whose files go into the root
	images         string // OCI image layout whose images go into the root; may be empty
	cmdline        string // words added to the kernel's command line
	lockdown       string // of lockdowns
	key, cert      string // of Secure Boot, PEM; both or none
	builderKey     string // signs what is written; may be empty
	sources, cache string // apt's sources.list, and where downloads are kept
	lock           string // file
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	do := build
	if len(args) > 0 && args[0] == "lock" {
		do, args = writeLock, args[1:]
	}
	flags := flag.NewFlagSet("vm", flag.ContinueOnError)
	flags.SetOutput(stderr)
	var o options
	flags.StringVar(&o.source, "source", ".", "the checkout")
	flags.StringVar(&o.bin, "bin", "bin", "folder with the static linux/amd64 program bootstrapper")
	flags.StringVar(&o.containerd, "containerd", "", "folder with containerd, containerd-shim-runc-v2 and ctr, static; `make kube` builds them")
	flags.StringVar(&o.version, "version", "dev", "version of the image")
	date := flags.Int64("date", 1767225600, "time of all files, in seconds since 1970")
	flags.StringVar(&o.out, "o", filepath.Join("dist", "vm"), "folder to write to")
	flags.StringVar(&o.config.file, "config", "", "image.yaml to put into the image, instead of one that is made here")
	flags.StringVar(&o.config.ownerKeys, "owner-keys", "", "owner's public keys for image.yaml, Ed25519 in base64, with commas between")
	flags.Uint64Var(&o.config.lowestSerial, "lowest-policy-serial", 0, "lowest serial of a policy that machines with this image accept, for image.yaml")
	flags.StringVar(&o.config.ekRoots, "ek-roots", "", "PEM file of the authorities that certify TPMs, for image.yaml")
	flags.BoolVar(&o.config.plain, "allow-plain-state", false, "insecure: allow an image.yaml whose state disk is not encrypted")
	flags.BoolVar(&o.config.noOwner, "allow-no-owner-key", false, "insecure: allow an image.yaml without the owner's key")
	flags.StringVar(&o.add, "add", "", "folder whose files are put into the root, at the same path, owner root; for example etc/containerd/certs.d")
	flags.StringVar(&o.images, "images", "", "folder with an OCI image layout: container images that machines have without a registry, named in it as registry/repository (docs/air-gap.md)")
	flags.StringVar(&o.cmdline, "cmdline", "", "words to add to the kernel's command line")
	flags.StringVar(&o.lockdown, "lockdown", lockdowns[0], "what the kernel keeps from root (kernel_lockdown(7)): confidentiality, or integrity for tools that read the kernel's memory (kprobes, perf, BPF tracing)")
	flags.StringVar(&o.key, "secure-boot-key", "", "PEM file of the key that signs for Secure Boot")
	flags.StringVar(&o.cert, "secure-boot-cert", "", "PEM file of its certificate")
	flags.StringVar(&o.builderKey, "builder-key", "", "key that signs SHA256SUMS, Ed25519, as ssh-keygen -t ed25519 makes it, without a passphrase")
	flags.StringVar(&o.sources, "sources", "", "apt's sources.list to take packages from, instead of Debian's own mirrors")
	flags.StringVar(&o.cache, "cache", "", "folder for what is downloaded (default: muster/vm in the user's cache folder)")
	flags.StringVar(&o.lock, "lock", "", "lock file: packages, programs and tools with their SHA-256 or version (default: deploy/vm/packages.lock of the checkout)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if !slices.Contains(lockdowns, o.lockdown) {
		return fmt.Errorf("-lockdown %q: want one of %s", o.lockdown, strings.Join(lockdowns, ", "))
	}
	if (o.key == "") != (o.cert == "") {
		return errors.New("-secure-boot-key and -secure-boot-cert go together")
	}
	if o.containerd == "" {
		return errors.New("-containerd is missing: `go run ./lab kube-binaries` prints the folder")
	}
	o.date = time.Unix(*date, 0).UTC()
	if o.cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return fmt.Errorf("%w: give -cache", err)
		}
		o.cache = filepath.Join(dir, "muster", "vm")
	}
	if o.lock == "" {
		o.lock = filepath.Join(o.source, "deploy", "vm", lockFile)
	}
	return do(ctx, o, stdout, stderr)
}
