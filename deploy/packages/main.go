// Packages builds the packages for machines: Debian packages of the CLI and of the bootstrapper with its units, and a
// tarball of both for other systems.
//
//	go run ./deploy/packages -bin bin -version v0.1.0 -date 1767225600 -o dist/packages
//
// The same programs, version and date give the same bytes. dpkg-deb packs them; apart from it
// nothing of Debian's tools is needed. For several architectures, the programs are in folders of their names:
//
//	go run ./deploy/packages -bin bin -arch amd64,arm64 -native bin/muster …
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "packages:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("packages", flag.ContinueOnError)
	flags.SetOutput(stderr)
	source := flags.String("source", ".", "the checkout")
	bin := flags.String("bin", "bin", "folder with the static programs muster and bootstrapper, for several architectures in folders of their names")
	archs := flags.String("arch", "amd64", "GOARCH of the programs, or several, separated by commas: amd64, arm64")
	native := flags.String("native", "", "a muster that runs on this machine, for its completions and manual; empty: that of -bin")
	version := flags.String("version", "dev", "their version")
	date := flags.Int64("date", 1767225600, "time of all files, in seconds since 1970")
	level := flags.Int("compression", 6, "1, quick, to 9, small; 0: none")
	out := flags.String("o", filepath.Join("dist", "packages"), "folder to write to")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	var written []string
	platforms := strings.Split(*archs, ",")
	for _, arch := range platforms {
		c := contents{source: *source, bin: *bin, arch: arch, native: *native, version: *version, date: time.Unix(*date, 0), level: *level}
		if len(platforms) > 1 {
			c.bin = filepath.Join(*bin, arch)
		}
		names, err := c.write(ctx, *out)
		if err != nil {
			return err
		}
		written = append(written, names...)
	}
	return sums(*out, written, stdout)
}

// write writes the packages and the tarball of one architecture, and returns their names.
func (c contents) write(ctx context.Context, out string) ([]string, error) {
	cli, err := c.cli(ctx)
	if err != nil {
		return nil, err
	}
	machine, err := c.machine(ctx)
	if err != nil {
		return nil, err
	}
	var written []string
	for _, p := range []debian{cli, machine} {
		name := fmt.Sprintf("%s_%s_%s.deb", p.name, debianVersion(c.version), c.arch)
		if err := p.write(ctx, filepath.Join(out, name), debianVersion(c.version), c); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		written = append(written, name)
	}
	top := fmt.Sprintf("muster_%s_linux_%s", c.version, c.arch)
	if err := writeTarball(filepath.Join(out, top+".tar.gz"), top, append(cli.files, machine.files...), c); err != nil {
		return nil, err
	}
	return append(written, top+".tar.gz"), nil
}

// debianVersion returns a version that dpkg accepts and that sorts below releases unless it is one: it
// begins with a digit and has no dash, which would begin Debian's own revision (Debian policy 5.6.12).
func debianVersion(v string) string {
	v = strings.ReplaceAll(v, "-", "+")
	if rest, ok := strings.CutPrefix(v, "v"); ok && rest != "" && rest[0] >= '0' && rest[0] <= '9' {
		return rest
	}
	return "0~" + v
}

// sums writes SHA256SUMS, which `sha256sum -c` reads.
func sums(dir string, names []string, stdout io.Writer) error {
	var all strings.Builder
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		fmt.Fprintf(&all, "%x  %s\n", sha256.Sum256(b), name)
	}
	if _, err := io.WriteString(stdout, all.String()); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "SHA256SUMS"), []byte(all.String()), 0o644)
}
