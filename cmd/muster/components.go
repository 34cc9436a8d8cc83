package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/internal/owner"
	"github.com/muster-k8s/muster/internal/versions"
)

func (a *app) componentsCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "components", Short: "What nodes fetch, and what a mirror must have"}
	cmd.AddCommand(a.componentsListCommand())
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
--images, the services' images by digest. With --check each component is fetched from its URL and compared: run it where
the nodes will be. What kubeadm's own containers need, kubeadm config images list tells.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			wanted, err := a.wanted(components, images)
			if err != nil {
				return err
			}
			if check {
				ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
				defer cancel()
				owner.CheckComponents(ctx, wanted)
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

func (a *app) wanted(components, images string) ([]owner.Wanted, error) {
	var list []versions.Component
	if components != "" {
		text, err := os.ReadFile(components)
		if err != nil {
			return nil, fmt.Errorf("--components: %w", err)
		}
		l, err := versions.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("--components %s: %w", components, err)
		}
		list = l.Components
	} else {
		dir, err := a.view()
		if err != nil {
			return nil, err
		}
		list = dir.Cluster().Components
		if err := dir.Close(); err != nil {
			return nil, err
		}
	}
	out := owner.WantedComponents(list)
	if images == "" {
		return out, nil
	}
	digests, err := readDigests(images)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(digests)) {
		_, sum, _ := strings.Cut(digests[name], "@sha256:")
		out = append(out, owner.Wanted{Kind: "image", Source: digests[name], SHA256: sum})
	}
	return out, nil
}

func (a *app) showWanted(list []owner.Wanted) error {
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
		err = errors.New(strconv.Itoa(bad) + " components are not at their URLs as they should be")
	}
	return err
}
