package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/lab/bench"
	"github.com/muster-k8s/muster/lab/internal/host"
)

func benchCommand(open opener) *cobra.Command {
	var o bench.Options
	var docs, from string
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure clusters made through Muster beside clusters made by hand", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := host.EnsurePackages(cmd.Context(), cmd.ErrOrStderr(), "gnuplot-nox"); err != nil {
				return err
			}
			if from != "" { // draw and write again what was measured
				var res bench.Results
				b, err := os.ReadFile(from)
				if err != nil {
					return err
				}
				if err := json.Unmarshal(b, &res); err != nil {
					return fmt.Errorf("%s: %w", from, err)
				}
				return bench.Write(cmd.Context(), docs, res)
			}
			l, err := open()
			if err != nil {
				return err
			}
			o.Lab, o.Out = l, cmd.OutOrStdout()
			res, err := bench.Run(cmd.Context(), o)
			if err != nil {
				return err
			}
			return bench.Write(cmd.Context(), docs, res)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Bin, "bin", "bin", "folder with lab, muster and bootstrapper")
	f.StringVar(&o.Images, "images", "dist/images", "folder that make images has written")
	f.IntVar(&o.Rounds, "rounds", 10, "clusters of each kind")
	f.StringVar(&docs, "docs", "docs", "folder with performance.md, into which the figures go")
	f.StringVar(&from, "from", "", "results.json of an earlier run, in place of a new one")
	return cmd
}
