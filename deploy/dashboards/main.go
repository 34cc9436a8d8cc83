// Dashboards writes Muster's Grafana dashboards: panels.go contains their panels, one line for each query.
//
//	go generate ./deploy/dashboards
//
// The files are the chart's (deploy/charts/muster/files), which can put them into a ConfigMap.
package main

//go:generate go run . -o ../charts/muster/files

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "dashboards:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("dashboards", flag.ContinueOnError)
	out := flags.String("o", ".", "folder to write to")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for _, d := range dashboards {
		b, err := d.render()
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(*out, d.file()), b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

type object = map[string]any

// source lets the reader choose the Prometheus.
var source = object{"type": "prometheus", "uid": "${datasource}"}

// render returns the dashboard in Grafana's JSON model, three panels in a row of 24 columns.
func (d dashboard) render() ([]byte, error) {
	const width, height = 8, 8
	panels := make([]object, 0, len(d.panels))
	for i, p := range d.panels {
		targets := make([]object, 0, len(p.queries))
		for j, q := range p.queries {
			targets = append(targets, object{"refId": string(rune('A' + j)), "datasource": source, "expr": q.expr, "legendFormat": q.legend, "range": true})
		}
		panels = append(panels, object{
			"id": i + 1, "type": "timeseries", "title": p.title, "description": p.why, "datasource": source, "targets": targets,
			"gridPos":     object{"x": i % 3 * width, "y": i / 3 * height, "w": width, "h": height},
			"fieldConfig": object{"defaults": object{"unit": p.unit, "min": 0}, "overrides": []object{}},
			"options":     object{"legend": object{"displayMode": "list", "placement": "bottom"}, "tooltip": object{"mode": "multi"}},
		})
	}
	b, err := json.MarshalIndent(object{
		"uid": d.uid, "title": d.title, "tags": []string{"muster"}, "schemaVersion": 39, "editable": true, "refresh": "30s",
		"time": object{"from": "now-6h", "to": "now"}, "timezone": "browser",
		"templating": object{"list": []object{{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}}},
		"links":      []object{{"title": "What the metrics mean", "type": "link", "url": "https://github.com/muster-k8s/muster/blob/main/docs/metrics.md", "targetBlank": true}},
		"panels":     panels,
	}, "", " ")
	return append(b, '\n'), err
}
