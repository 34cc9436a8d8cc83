// Package observe monitors a real cluster with a real Prometheus: it checks the shipped configuration, rules and
// dashboards against the programs' metrics.
package observe

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAClusterIsWatched(t *testing.T) {
	w := &fixture{labtest.Up(t, "muster-obs")}
	w.startPrometheus(t)
	w.add(t, w.First(t), labtest.Worker("node2"))
	w.Init(t, "watched")
	w.scrape(t)
	w.add(t, driver.Node{Name: "node3", JoinEndpoints: []string{labtest.Joinservice}, TamperBootstrapper: true}) // it will be refused
	t.Run("every process is scraped", w.targetsAreUp)
	t.Run("the rules are loaded and none fails", w.rulesAreLoaded)
	t.Run("a refused machine and a switch raise alerts", w.refusalsRaiseAlerts)
	t.Run("a policy with a wrong signature raises an alert, which ends with it", w.policyAlertComesAndGoes)
	t.Run("the dashboards show data", w.dashboardsShowData)
}

func (w *fixture) targetsAreUp(t *testing.T) {
	// A bootstrapper ends when its machine is a node, and the attester begins; node3 will be no node.
	want := []string{"muster-attester node1 1", "muster-attester node2 1", "muster-bootstrapper node3 1", "muster-joinservice node1 1", "muster-kms node1 1"}
	var got []string
	labtest.Eventually(t, func(ctx context.Context) error {
		up, err := w.query(ctx, "up")
		if err != nil {
			return err
		}
		got = nil
		for _, s := range up {
			got = append(got, fmt.Sprint(s.Metric["job"], " ", s.Metric["node"], " ", s.Value[1]))
		}
		for _, target := range want {
			if !slices.Contains(got, target) {
				return fmt.Errorf("no %q among %q", target, got)
			}
		}
		return nil
	})
	t.Logf("targets: %q", got)
	labtest.Eventually(t, func(ctx context.Context) error {
		instances, err := w.query(ctx, `count by (job) (count by (job, instance) (up))`)
		if err != nil {
			return err
		}
		for _, s := range instances {
			if job := s.Metric["job"]; (job == "muster-attester" || job == "muster-bootstrapper") && s.Value[1] != "3" {
				return fmt.Errorf("%s has %v instances, want 3: machines can't be told apart", job, s.Value[1])
			}
		}
		return nil
	})
}

type alert struct {
	Labels map[string]string
	State  string
}

func (w *fixture) alerts(ctx context.Context) ([]alert, error) {
	var data struct{ Alerts []alert }
	err := w.ask(ctx, "alerts", nil, &data)
	return data.Alerts, err
}

// firing returns nil if an alert with these labels fires.
func (w *fixture) firing(ctx context.Context, name, label, value string) error {
	alerts, err := w.alerts(ctx)
	if err == nil && !slices.ContainsFunc(alerts, fires(name, label, value)) {
		err = fmt.Errorf("%s with %s=%s does not fire; these do: %v", name, label, value, alerts)
	}
	return err
}

func fires(name, label, value string) func(alert) bool {
	return func(a alert) bool {
		return a.Labels["alertname"] == name && a.Labels[label] == value && a.State == "firing"
	}
}

func (w *fixture) rulesAreLoaded(t *testing.T) {
	type rule struct{ Name, Health, LastError string }
	labtest.Eventually(t, func(ctx context.Context) error {
		var data struct{ Groups []struct{ Rules []rule } }
		if err := w.ask(ctx, "rules", nil, &data); err != nil {
			return err
		}
		n := 0
		for _, g := range data.Groups {
			for _, r := range g.Rules {
				if n++; r.Health != "ok" {
					return fmt.Errorf("%s: %s %s", r.Name, r.Health, r.LastError)
				}
			}
		}
		if n < 20 {
			return fmt.Errorf("%d rules", n)
		}
		t.Logf("%d rules, all in health", n)
		return nil
	})
}

func (w *fixture) refusalsRaiseAlerts(t *testing.T) {
	labtest.Eventually(t, func(ctx context.Context) error {
		return w.firing(ctx, "MusterMachinesRefused", "reason", "POLICY_REFUSED")
	})
	// The lab's machines have no encrypted disk, and its policy allows that.
	labtest.Eventually(t, func(ctx context.Context) error {
		return w.firing(ctx, "MusterInsecureSwitch", "reason", "allowPlainState")
	})
	labtest.Eventually(t, func(ctx context.Context) error { // on a busy computer, a scrape may fail for a while
		alerts, err := w.alerts(ctx)
		for _, a := range alerts {
			if a.State == "firing" && a.Labels["severity"] == "critical" {
				return fmt.Errorf("a healthy cluster raises %v", a.Labels)
			}
		}
		return err
	})
}

func (w *fixture) policyAlertComesAndGoes(t *testing.T) {
	good := w.MustKubectl(t, "get", "attestationpolicy", "default", "-o", "jsonpath={.spec.signature}")
	sign := func(signature string) {
		patch, err := json.Marshal(object{"spec": object{"signature": signature}})
		if err != nil {
			t.Fatal(err)
		}
		w.MustKubectl(t, "patch", "attestationpolicy", "default", "--type=merge", "-p", string(patch))
	}
	if err := w.firing(t.Context(), "MusterPolicyRejected", "reason", "POLICY_SIGNATURE"); err == nil {
		t.Fatal("the alert fires before anything is wrong")
	}
	sign(base64.StdEncoding.EncodeToString(make([]byte, 64)))
	start := time.Now()
	labtest.Eventually(t, func(ctx context.Context) error {
		return w.firing(ctx, "MusterPolicyRejected", "reason", "POLICY_SIGNATURE")
	})
	t.Logf("it fired after %.1f s", time.Since(start).Seconds())
	sign(good)
	start = time.Now()
	labtest.Eventually(t, func(ctx context.Context) error {
		alerts, err := w.alerts(ctx)
		if err == nil && slices.ContainsFunc(alerts, fires("MusterPolicyRejected", "reason", "POLICY_SIGNATURE")) {
			err = errors.New("it still fires")
		}
		return err
	})
	t.Logf("it ended after %.1f s", time.Since(start).Seconds())
}

// quiet panels have no data in a healthy cluster of some minutes, whose disks are plain and whose image has no schedule for backups.
var quiet = []string{"Age of the newest backup", "Size of the newest backup", "Tickets given back", "Keys for machines that rebooted", "Tries to unlock the state disk", "Recoveries", "Turns of control planes", "Connections closed before TLS", "Requests of kubelets for certificates"}

func (w *fixture) dashboardsShowData(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(w.Root, "deploy", "charts", "muster", "files", "*.json"))
	if err != nil || len(files) < 2 {
		t.Fatalf("%v %v", files, err)
	}
	var empty []string
	shown := 0
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		var board struct {
			Panels []struct {
				Title   string
				Targets []struct{ Expr string }
			}
		}
		if err := json.Unmarshal(b, &board); err != nil {
			t.Fatal(err)
		}
		for _, p := range board.Panels {
			for _, q := range p.Targets {
				n, err := w.series(t, strings.ReplaceAll(q.Expr, "$__rate_interval", "1m"))
				if err != nil {
					t.Errorf("%s: %v", p.Title, err)
				}
				if shown++; n == 0 && !slices.Contains(quiet, p.Title) {
					empty = append(empty, p.Title)
				}
			}
		}
	}
	if len(empty) > 0 {
		t.Errorf("no data: %q", empty)
	}
	t.Logf("%d queries", shown)
}

// series counts the series that an expression has had in the last minutes.
func (w *fixture) series(t *testing.T, expr string) (int, error) {
	t.Helper()
	now := time.Now()
	var data struct{ Result []sample }
	err := w.ask(t.Context(), "query_range", url.Values{"query": {expr}, "start": {now.Add(-10 * time.Minute).Format(time.RFC3339)}, "end": {now.Format(time.RFC3339)}, "step": {"1"}}, &data)
	return len(data.Result), err
}
