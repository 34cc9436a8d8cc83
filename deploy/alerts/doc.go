// Package alerts holds no code: its tests check the chart's alert rules
// (deploy/charts/muster/files/muster.rules.yaml) with Prometheus's own promtool.
package alerts
