package bench

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Marks in docs/performance.md between which [Write] puts its tables.
const (
	markBegin = "<!-- figures: begin -->"
	markEnd   = "<!-- figures: end -->"
)

//go:embed files/plot.gp
var plotScript []byte

// Write puts the results under docs: performance/results.json with every sample, plots
// (SVG) of them, and the tables of performance.md.
func Write(ctx context.Context, docs string, res Results) error {
	if len(res.Muster) == 0 || len(res.Kubeadm) == 0 {
		return errors.New("bench: no sample of one of the two kinds")
	}
	docs, err := filepath.Abs(docs) // gnuplot runs in another folder
	if err != nil {
		return err
	}
	dir := filepath.Join(docs, "performance")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	j, err := json.MarshalIndent(res, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "results.json"), append(j, '\n'), 0o644); err != nil {
		return err
	}
	page := filepath.Join(docs, "performance.md")
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	if text, err = between(text, tables(res)); err != nil {
		return fmt.Errorf("%s: %w", page, err)
	}
	if err := os.WriteFile(page, text, 0o644); err != nil {
		return err
	}
	return plot(ctx, dir, res)
}

func between(page []byte, content string) ([]byte, error) {
	head, rest, ok := bytes.Cut(page, []byte(markBegin))
	_, foot, ok2 := bytes.Cut(rest, []byte(markEnd))
	if !ok || !ok2 {
		return nil, fmt.Errorf("%s and %s are not both there", markBegin, markEnd)
	}
	return slices.Concat(head, []byte(markBegin+"\n\n"+content+"\n"+markEnd), foot), nil
}

// spread is a figure over several samples.
type spread struct{ Min, Median, Max float64 }

func spreadOf(samples []Sample, of func(Sample) float64) spread {
	v := make([]float64, 0, len(samples))
	for _, s := range samples {
		v = append(v, of(s))
	}
	slices.Sort(v)
	m := v[len(v)/2]
	if len(v)%2 == 0 {
		m = (v[len(v)/2-1] + m) / 2
	}
	return spread{v[0], m, v[len(v)-1]}
}

func (s spread) String() string { return fmt.Sprintf("%.2f (%.2f–%.2f)", s.Median, s.Min, s.Max) }

// tables are the figures in Markdown: medians, with minimum and maximum in brackets.
func tables(res Results) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("Version %s, on %s, load average %s before the run: %d clusters through Muster, %d by hand. Median (minimum–maximum), in seconds.\n",
		res.Version, res.Machine, res.Load, len(res.Muster), len(res.Kubeadm))
	line("| from the start until | Muster | kubeadm by hand | ratio of medians |\n|---|---|---|---|")
	for _, row := range []struct {
		name string
		of   func(Sample) float64
	}{
		{"init: kubeadm has finished", func(s Sample) float64 { return s.Init.Kubeadm }},
		{"init: the node is Ready", func(s Sample) float64 { return s.Init.Ready }},
		{"init: Muster's services answer", func(s Sample) float64 { return s.Init.Done }},
		{"join: kubeadm has finished", func(s Sample) float64 { return s.Join.Kubeadm }},
		{"join: the node is Ready", func(s Sample) float64 { return s.Join.Ready }},
	} {
		m, k := spreadOf(res.Muster, row.of), spreadOf(res.Kubeadm, row.of)
		if strings.HasSuffix(row.name, "services answer") {
			line("| %s | %s | | |", row.name, m)
			continue
		}
		line("| %s | %s | %s | %.2f |", row.name, m, k, m.Median/k.Median)
	}
	line("\n| stage (all others: below 0.05 s) | seconds |\n|---|---|")
	for _, name := range stageNames(res.Muster) {
		if s := stageSpread(res.Muster, name); s.Median >= 0.05 {
			line("| %s | %s |", name, s)
		}
	}
	own := spreadOf(res.Muster, func(s Sample) float64 { return s.Join.Done - s.Stages["join: kubeadm"] - s.Stages["join: components"] })
	line("\nMuster's own share of a join (without kubeadm and component downloads): %s s.", own)
	line("\n| process | CPU seconds | most memory, MiB |\n|---|---|---|")
	for _, name := range slices.Sorted(maps.Keys(res.Muster[0].Resources)) {
		line("| %s | %s | %s |", name, spreadOf(res.Muster, func(s Sample) float64 { return s.Resources[name].CPU }), spreadOf(res.Muster, func(s Sample) float64 { return s.Resources[name].RSS }))
	}
	total := spreadOf(res.Muster, func(s Sample) float64 {
		n := 0
		for _, c := range s.Requests {
			n += c
		}
		return float64(n)
	})
	line("\nRequests to the API server for one worker's ticket, from its audit log: %.0f (%.0f–%.0f). Those of the last one:\n", total.Median, total.Min, total.Max)
	last := res.Muster[len(res.Muster)-1].Requests
	line("| request | times |\n|---|---|")
	for _, what := range slices.Sorted(maps.Keys(last)) {
		line("| %s | %d |", what, last[what])
	}
	for _, f := range res.Failures {
		line("\nNot counted: %s.", strings.Join(strings.Fields(f), " "))
	}
	return b.String()
}

func stageSpread(samples []Sample, name string) spread {
	return spreadOf(samples, func(s Sample) float64 { return s.Stages[name] })
}

// stageNames returns the stages in the order in which they happen.
func stageNames(samples []Sample) []string {
	var order []string
	for _, s := range initStages {
		order = append(order, s.name)
	}
	rest := slices.SortedFunc(maps.Keys(samples[0].Stages), cmp.Compare)
	for _, name := range rest {
		if strings.HasPrefix(name, "init: ") && !slices.Contains(order, name) {
			order = append(order, name)
		}
	}
	for _, s := range joinStages {
		order = append(order, s.name)
	}
	return order
}

// plot draws the samples with gnuplot.
func plot(ctx context.Context, dir string, res Results) error {
	tmp, err := os.MkdirTemp("", "bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	var samples, stages strings.Builder
	for i := range max(len(res.Muster), len(res.Kubeadm)) {
		row := []string{fmt.Sprint(i + 1)}
		for _, kind := range [][]Sample{res.Muster, res.Kubeadm} {
			if i >= len(kind) {
				row = append(row, "NaN", "NaN")
				continue
			}
			row = append(row, fmt.Sprintf("%.3f", kind[i].Init.Ready), fmt.Sprintf("%.3f", kind[i].Join.Ready))
		}
		fmt.Fprintln(&samples, strings.Join(row, "\t"))
	}
	for _, name := range stageNames(res.Muster) {
		s := stageSpread(res.Muster, name)
		fmt.Fprintf(&stages, "%q\t%.4f\t%.4f\t%.4f\n", name, s.Median, s.Min, s.Max)
	}
	for name, text := range map[string]string{"samples.tsv": samples.String(), "stages.tsv": stages.String(), "plot.gp": string(plotScript)} {
		if err := os.WriteFile(filepath.Join(tmp, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	cmd := exec.CommandContext(ctx, "gnuplot", "-e", fmt.Sprintf("out = '%s'", dir), "plot.gp")
	cmd.Dir = tmp
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("gnuplot: %v\n%s", err, out) //nolint:errorlint // its exit code is not ours
	}
	return nil
}
