package observe

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

const (
	receiver = "192.168.77.2:9090" // the owner's workstation
	api      = "192.168.77.1:6443"
)

type object = map[string]any

// fixture is a lab with a Prometheus on the owner's workstation and an agent on each machine.
type fixture struct {
	*labtest.Cluster
}

// add boots machines, all at once, and starts an agent on each.
func (w *fixture) add(t *testing.T, nodes ...driver.Node) {
	t.Helper()
	w.Add(t, nodes...)
	for _, n := range nodes {
		w.startAgent(t, n.Name)
	}
}

// startPrometheus starts the owner's. It has the shipped rules and receives what agents send; scrape adds its own
// targets, once there is a cluster.
func (w *fixture) startPrometheus(t *testing.T) {
	t.Helper()
	config := w.config(t)
	config["scrape_configs"] = []any{}
	w.write(t, "prometheus.yaml", config)
	w.start(t, driver.Owner, "prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=prometheus", "--web.listen-address="+receiver,
		"--web.enable-remote-write-receiver", "--web.enable-lifecycle", "--log.level=warn")
	labtest.Eventually(t, func(ctx context.Context) error {
		_, err := w.At(ctx, driver.Owner, "", "curl", "-sSf", "http://"+receiver+"/-/ready")
		return err
	})
}

// config is the shipped configuration with this lab's addresses and shorter intervals.
func (w *fixture) config(t *testing.T) object {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(w.Root, "deploy", "prometheus", "prometheus.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	rules := filepath.Join(w.Root, "deploy", "charts", "muster", "files", "muster.rules.yaml")
	text := strings.NewReplacer("API-SERVER", api, "muster.rules.yaml", rules, "30s", "2s").Replace(string(b))
	var config object
	if err := yaml.Unmarshal([]byte(text), &config); err != nil {
		t.Fatal(err)
	}
	return config
}

// scrape gives Prometheus the shipped scrape configuration and the rights of the shipped service account. Debian's
// Prometheus is built without the discovery of pods, so a file has the targets with the labels that the discovery
// sets.
func (w *fixture) scrape(t *testing.T) {
	t.Helper()
	reader, err := os.ReadFile(filepath.Join(w.Root, "deploy", "prometheus", "reader.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	w.Apply(t, string(reader))
	token := w.MustKubectl(t, "-n", "muster-system", "create", "token", "muster-metrics")
	ca := w.Must(t, "node1", "", "cat", "/etc/kubernetes/pki/ca.crt")
	for name, content := range map[string]string{"token": token, "ca.crt": ca} {
		if err := os.WriteFile(filepath.Join(w.OwnerDir(), name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var pods struct {
		Items []struct {
			Metadata struct {
				Name, Namespace string
				Labels          map[string]string
			}
			Spec struct {
				NodeName   string
				Containers []struct {
					Ports []struct {
						Name          string
						ContainerPort int
					}
				}
			}
			Status struct{ PodIP string }
		}
	}
	if err := json.Unmarshal([]byte(w.MustKubectl(t, "-n", "muster-system", "get", "pods", "-o", "json")), &pods); err != nil {
		t.Fatal(err)
	}
	var targets []object
	for _, p := range pods.Items {
		for _, c := range p.Spec.Containers {
			for _, port := range c.Ports {
				targets = append(targets, object{"targets": []string{fmt.Sprintf("%s:%d", p.Status.PodIP, port.ContainerPort)}, "labels": object{
					"__meta_kubernetes_namespace": p.Metadata.Namespace, "__meta_kubernetes_pod_name": p.Metadata.Name, "__meta_kubernetes_pod_node_name": p.Spec.NodeName,
					"__meta_kubernetes_pod_label_app_kubernetes_io_name": p.Metadata.Labels["app.kubernetes.io/name"],
					"__meta_kubernetes_pod_container_port_name":          port.Name, "__meta_kubernetes_pod_container_port_number": fmt.Sprint(port.ContainerPort),
				}})
			}
		}
	}
	if len(targets) < 4 { // two ports of two pods; the configuration drops the one without metrics
		t.Fatalf("targets: %v", targets)
	}
	w.write(t, "targets.json", targets)
	config := w.config(t)
	for _, c := range config["scrape_configs"].([]any) {
		c := c.(object)
		delete(c, "kubernetes_sd_configs")
		c["file_sd_configs"] = []object{{"files": []string{"targets.json"}}}
	}
	w.write(t, "prometheus.yaml", config)
	w.Must(t, driver.Owner, "", "curl", "-sSf", "-X", "POST", "http://"+receiver+"/-/reload")
}

func (w *fixture) startAgent(t *testing.T, node string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(w.Root, "deploy", "prometheus", "agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer("https://PROMETHEUS/", "http://"+receiver+"/", "30s", "2s").Replace(string(b))
	w.Must(t, node, text, "sh", "-c", "cat > /root/agent.yaml")
	w.start(t, node, "env", "NODE_NAME="+node, "prometheus", "--enable-feature=agent,expand-external-labels", "--storage.agent.path=/root/agent",
		"--web.listen-address=127.0.0.1:9091", "--config.file=/root/agent.yaml", "--log.level=warn")
}

// start runs a program until the test ends.
func (w *fixture) start(t *testing.T, where string, argv ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	cmd, err := w.Command(ctx, where, argv...)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	log, err := os.CreateTemp(t.TempDir(), where)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
		if b, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("%s on %s:\n%s", argv, where, b)
		}
		_ = log.Close()
	})
}

func (w *fixture) write(t *testing.T, name string, content any) {
	t.Helper()
	b, err := json.Marshal(content) // which is YAML too
	if err == nil {
		err = os.WriteFile(filepath.Join(w.OwnerDir(), name), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// ask calls Prometheus's HTTP API and decodes the answer's data.
func (w *fixture) ask(ctx context.Context, path string, query url.Values, into any) error {
	out, err := w.At(ctx, driver.Owner, "", "curl", "-sS", "--max-time", "300", "http://"+receiver+"/api/v1/"+path+"?"+query.Encode())
	if err != nil {
		return err
	}
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		return fmt.Errorf("%s: %w: %s", path, err, out)
	}
	if answer.Status != "success" {
		return fmt.Errorf("%s: %s", path, answer.Error)
	}
	return json.Unmarshal(answer.Data, into)
}

type sample struct {
	Metric map[string]string
	Value  [2]any   // time, and the value as a string
	Values [][2]any // of a range
}

func (w *fixture) query(ctx context.Context, expr string) ([]sample, error) {
	var data struct{ Result []sample }
	err := w.ask(ctx, "query", url.Values{"query": {expr}}, &data)
	return data.Result, err
}
