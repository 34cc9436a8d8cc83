package main

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/rollout"
	"github.com/muster-k8s/muster/internal/versions"
)

func (a *app) componentsCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "components", Short: "List and pin the components and images that nodes fetch"}
	cmd.AddCommand(a.componentsListCommand(), a.componentsPinCommand())
	return cmd
}

func (a *app) componentsListCommand() *cobra.Command {
	var (
		components, images string
		check              bool
		timeout            time.Duration
	)
	cmd := &cobra.Command{
		Use:   "list [--components FILE] [--images FILE] [--check]",
		Short: "List what a mirror must have: URL, SHA-256, and with --check the size",
		Long: `Lists the components that nodes fetch (those of the owner's folder, or of a list that is not used yet) and, with
--images, the services' images by digest. With --check, each component is fetched from its URL and its SHA-256 compared:
run it in the nodes' network.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			wanted, err := a.wanted(components, images)
			if err != nil {
				return err
			}
			if check {
				ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
				defer cancel()
				backups.CheckComponents(ctx, wanted)
			}
			return a.showWanted(wanted)
		},
	}
	f := cmd.Flags()
	f.StringVar(&components, "components", "", "list of what nodes install (kind ComponentList); that of the owner's folder if left out")
	f.StringVar(&images, "images", "", "digests.json of an image build")
	f.BoolVar(&check, "check", false, "fetch each component and compare it")
	f.DurationVar(&timeout, "timeout", time.Hour, "how long all fetches may take")
	return cmd
}

func (a *app) componentsPinCommand() *cobra.Command {
	var (
		components string
		timeout    time.Duration
	)
	cmd := &cobra.Command{
		Use:   "pin --components FILE IMAGE…",
		Short: "Write the digests of Kubernetes' images into a component list",
		Long: `Resolves each image's tag at its registry, once and from this computer, and prints the list with the digests. The registry is trusted
only this time: afterwards machines run only images with these digests, also from a compromised registry or mirror. Compare the
digests with those from other networks, or with signatures, before you use the list.

  muster components pin --components components.yaml $(kubeadm config images list --kubernetes-version v1.36.1) > pinned.yaml

An IMAGE with tag and digest, NAME:TAG@sha256:DIGEST, is not changed. One with a digest and no tag is refused.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			list, err := parseList(components, versions.ParseUnpinned)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			if list.Images, err = rollout.Pin(ctx, args); err != nil {
				return err
			}
			out, err := yaml.Marshal(list)
			if err != nil {
				return err
			}
			_, err = a.stdout.Write(out)
			return err
		},
	}
	cmd.Flags().StringVar(&components, "components", "", "list of what nodes install (kind ComponentList)")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Minute, "how long all registries may take")
	if err := cmd.MarkFlagRequired("components"); err != nil {
		panic(err) // the flag above was renamed
	}
	return cmd
}

// readList reads the flag --components.
func readList(path string) (versions.List, error) { return parseList(path, versions.Parse) }

func parseList(path string, parse func([]byte) (versions.List, error)) (versions.List, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return versions.List{}, usagef("--components: %w", err)
	}
	list, err := parse(text)
	if err != nil {
		return versions.List{}, usagef("--components %s: %w", path, err)
	}
	return list, nil
}

func (a *app) wanted(components, images string) ([]backups.Wanted, error) {
	var list versions.List
	if components != "" {
		var err error
		if list, err = readList(components); err != nil {
			return nil, err
		}
	} else {
		dir, err := a.view()
		if err != nil {
			return nil, err
		}
		list.Components, list.Images = dir.Cluster().Components, dir.Cluster().Images
		if err := dir.Close(); err != nil {
			return nil, err
		}
	}
	out := append(backups.WantedComponents(list.Components), backups.WantedImages(list.Images)...)
	if images == "" {
		return out, nil
	}
	digests, err := readDigests(images)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(digests)) {
		out = append(out, backups.WantedImages([]string{digests[name]})...)
	}
	return out, nil
}

func (a *app) showWanted(list []backups.Wanted) error {
	bad := 0
	rows := [][]string{{"KIND", "SHA-256", "SIZE", "SOURCE", "PATH"}}
	for _, w := range list {
		size := "-"
		if w.Size > 0 {
			size = strconv.FormatInt(w.Size, 10)
		}
		source := w.Source
		if w.Problem != "" {
			bad++
			source += "  PROBLEM: " + w.Problem
		}
		rows = append(rows, []string{w.Kind, w.SHA256, size, source, dash(w.Path)})
	}
	var err error
	if a.output == outputJSON {
		err = a.json(list)
	} else {
		err = a.table(rows)
	}
	if err == nil && bad > 0 {
		err = errors.New(strconv.Itoa(bad) + " components are missing at their URLs, or have another content")
	}
	return err
}
