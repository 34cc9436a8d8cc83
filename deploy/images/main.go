// Images builds the OCI images of Muster's services: its static binary and that of probe on
// nothing, without a container engine. The same source and toolchain give the same digests.
//
//	go run ./deploy/images -o dist/images -repository ghcr.io/muster-k8s -version v0.1.0
//
// builds the binaries, or takes those of -bin, and writes, for each service, NAME.tar (an OCI image layout in a tar, which `ctr images
// import` and `skopeo copy oci-archive:` read) and NAME.spdx.json (what it is made of), and digests.json, which maps NAME to
// REPOSITORY/NAME@sha256:…, the reference that the chart wants. With several architectures, an image is an index of one for each, its
// reference is that of the index, and the lists are NAME.ARCH.spdx.json.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/deploy/sbom"
)

// services are the programs in the cluster. The bootstrapper and the CLI have no image.
var services = []string{"joinservice", "kms"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("images", flag.ContinueOnError)
	flags.SetOutput(stderr)
	out := flags.String("o", filepath.Join("dist", "images"), "folder to write to")
	repository := flags.String("repository", "ghcr.io/muster-k8s", "registry and folder of the image names")
	version := flags.String("version", "dev", "version to stamp, and the tag")
	commit := flags.String("commit", "", "Git commit to stamp")
	bin := flags.String("bin", "", "folder with static linux binaries to take, for several architectures in folders of their names; empty: build them")
	archs := flags.String("arch", "amd64", "GOARCH of the images, or several, separated by commas; the system is always linux")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	bill, err := sbom.Local(ctx, time.Unix(0, 0)) // the creation time of the images
	if err != nil {
		return err
	}
	digests := map[string]string{}
	platforms := strings.Split(*archs, ",")
	for _, name := range services {
		spec := imageSpec{Name: *repository + "/" + name, Tag: *version, Revision: *commit, Entrypoint: "/" + name}
		for _, arch := range platforms {
			dir, list := *bin, name+".spdx.json"
			if len(platforms) > 1 {
				dir, list = filepath.Join(*bin, arch), name+"."+arch+".spdx.json"
			}
			if *bin == "" {
				dir = filepath.Join(*out, "bin", arch)
				for _, c := range []string{name, "probe"} {
					if err := compile(ctx, stderr, "./cmd/"+c, filepath.Join(dir, c), arch, *version, *commit); err != nil {
						return err
					}
				}
			}
			binary := filepath.Join(dir, name)
			spec.Binaries = append(spec.Binaries, platformBinary{Arch: arch, Path: binary, Probe: filepath.Join(dir, "probe")})
			made, err := bill.Of(binary, *version) // probe has modules of the service only
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(*out, list), made, 0o644); err != nil {
				return err
			}
		}
		ref, err := writeImage(spec, filepath.Join(*out, name+".tar"))
		if err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
		digests[name] = ref
	}
	b, err := json.MarshalIndent(digests, "", "  ")
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(digests)) {
		fmt.Fprintln(stdout, digests[name])
	}
	return os.WriteFile(filepath.Join(*out, "digests.json"), append(b, '\n'), 0o644)
}

// compile builds a static binary. With -trimpath and -buildvcs=false it does not depend on path and state of the
// checkout, so that two builds have the same digest.
func compile(ctx context.Context, stderr io.Writer, pkg, binary, arch, version, commit string) error {
	const buildinfo = "github.com/muster-k8s/muster/internal/buildinfo"
	stamp := []string{"-s", "-w", "-buildid=", "-X", buildinfo + ".version=" + version}
	if commit != "" {
		stamp = append(stamp, "-X", buildinfo+".commit="+commit)
	}
	abs, err := filepath.Abs(binary)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", strings.Join(stamp, " "), "-o", abs, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	cmd.Stdout, cmd.Stderr = stderr, stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	return nil
}
