package observe

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

const (
	root     = "../.."
	admin    = "/etc/kubernetes/admin.conf"
	receiver = "192.168.77.2:9090" // the owner's seat
	api      = "192.168.77.1:6443"
	joins    = "192.168.77.11:30090"
	patience = 3 * time.Minute // machines that build at the same time are slow
)

type object = map[string]any

// world is a lab with a Prometheus on the owner's seat and an agent on each machine.
type world struct {
	*driver.Lab
	bin, images string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	lab, top := labtest.New(t, "muster-obs")
	w := &world{Lab: lab, bin: filepath.Join(top, "bin"), images: filepath.Join(top, "dist", "images")}
	if err := lab.Up(t.Context(), driver.Up{
		Lab: filepath.Join(w.bin, "lab"), Bootstrapper: filepath.Join(w.bin, "bootstrapper"), Preinstalled: []string{"kubelet"},
		Images: []string{filepath.Join(w.images, "joinservice.tar"), filepath.Join(w.images, "kms.tar")},
	}); err != nil {
		t.Fatal(err)
	}
	return w
}

// add boots machines, all at once, and starts an agent on each.
func (w *world) add(t *testing.T, nodes ...driver.Node) {
	t.Helper()
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { _, errs[i] = w.AddNode(t.Context(), n) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		w.startAgent(t, n.Name)
	}
}

// initialise makes node1 the first node, by a policy from the image's measurements.
func (w *world) initialise(t *testing.T) {
	t.Helper()
	muster := filepath.Join(w.bin, "muster")
	w.must(t, driver.Owner, "", muster, "policy", "from-measurements", w.MeasurementsPath(), "--ek-root", "ek-roots.pem", "--operator",
		"--node-cidr", driver.NodeSubnet, "--role", "worker", "--role", "control-plane", "--allow-plain-state", "-o", "policy.yaml")
	secret := strings.Repeat("5a", 32)
	if err := os.WriteFile(filepath.Join(w.OwnerDir(), "secret"), []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256(bytes.Repeat([]byte{0x5a}, 32))
	w.add(t, driver.Node{Name: "node1", Role: "control-plane", InitSecretHash: hex.EncodeToString(hash[:])},
		driver.Node{Name: "node2", JoinEndpoints: []string{joins}})
	w.must(t, driver.Owner, "", muster, "init", "--name", "watched", "--endpoint", "192.168.77.11:9000", "--init-secret-file", "secret", "--policy", "policy.yaml",
		"--control-plane-endpoint", driver.ControlPlaneEndpoint, "--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet,
		"--components", "components.yaml", "--manifests", filepath.Join("manifests", "podnet.yaml"), "--images", filepath.Join(w.images, "digests.json"))
}

// startPrometheus starts the owner's. It has the shipped rules and receives what agents send; what
// it scrapes itself comes with scrape, once there is a cluster.
func (w *world) startPrometheus(t *testing.T) {
	t.Helper()
	config := w.config(t)
	config["scrape_configs"] = []any{}
	w.write(t, "prometheus.yaml", config)
	w.start(t, driver.Owner, "prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=prometheus", "--web.listen-address="+receiver,
		"--web.enable-remote-write-receiver", "--web.enable-lifecycle", "--log.level=warn")
	w.until(t, func() error {
		_, err := w.at(t, driver.Owner, "", "curl", "-sSf", "http://"+receiver+"/-/ready")
		return err
	})
}

// config is the shipped configuration with this lab's addresses, and quicker.
func (w *world) config(t *testing.T) object {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, "deploy", "prometheus", "prometheus.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	rules, err := filepath.Abs(filepath.Join(root, "deploy", "charts", "muster", "files", "muster.rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer("API-SERVER", api, "muster.rules.yaml", rules, "30s", "2s").Replace(string(b))
	var config object
	if err := yaml.Unmarshal([]byte(text), &config); err != nil {
		t.Fatal(err)
	}
	return config
}

// scrape gives Prometheus the shipped scrape configuration and the rights of the shipped service
// account. Debian's Prometheus is built without the discovery of pods, so a file has the targets with
// the labels that the discovery gives them.
func (w *world) scrape(t *testing.T) {
	t.Helper()
	reader, err := os.ReadFile(filepath.Join(root, "deploy", "prometheus", "reader.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	w.kubectl(t, string(reader), "apply", "-f", "-")
	token := w.kubectl(t, "", "-n", "muster-system", "create", "token", "muster-metrics")
	ca := w.must(t, "node1", "", "cat", "/etc/kubernetes/pki/ca.crt")
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
	if err := json.Unmarshal([]byte(w.kubectl(t, "", "-n", "muster-system", "get", "pods", "-o", "json")), &pods); err != nil {
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
	if len(targets) < 4 { // two ports of two pods; the one that is not of metrics is dropped by the configuration
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
	w.must(t, driver.Owner, "", "curl", "-sSf", "-X", "POST", "http://"+receiver+"/-/reload")
}

func (w *world) startAgent(t *testing.T, node string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, "deploy", "prometheus", "agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer("https://PROMETHEUS/", "http://"+receiver+"/", "30s", "2s").Replace(string(b))
	w.must(t, node, text, "sh", "-c", "cat > /root/agent.yaml")
	w.start(t, node, "env", "NODE_NAME="+node, "prometheus", "--enable-feature=agent,expand-external-labels", "--storage.agent.path=/root/agent",
		"--web.listen-address=127.0.0.1:9091", "--config.file=/root/agent.yaml", "--log.level=warn")
}

// start runs a program until the test ends.
func (w *world) start(t *testing.T, where string, argv ...string) {
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

func (w *world) write(t *testing.T, name string, content any) {
	t.Helper()
	b, err := json.Marshal(content) // which is YAML too
	if err == nil {
		err = os.WriteFile(filepath.Join(w.OwnerDir(), name), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) at(t *testing.T, where, stdin string, argv ...string) (string, error) {
	t.Helper()
	cmd, err := w.Command(t.Context(), where, argv...)
	if err != nil {
		return "", err
	}
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &stderr
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s on %s: %w\n%s%s", argv, where, err, out.String(), stderr.String())
	}
	return out.String(), nil
}

func (w *world) must(t *testing.T, where, stdin string, argv ...string) string {
	t.Helper()
	out, err := w.at(t, where, stdin, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (w *world) kubectl(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	return w.must(t, "node1", stdin, append([]string{"kubectl", "--kubeconfig", admin}, args...)...)
}

// ask calls Prometheus's HTTP API and decodes the answer's data.
func (w *world) ask(t *testing.T, path string, query url.Values, into any) error {
	t.Helper()
	out, err := w.at(t, driver.Owner, "", "curl", "-sS", "--max-time", "20", "http://"+receiver+"/api/v1/"+path+"?"+query.Encode())
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

func (w *world) query(t *testing.T, expr string) ([]sample, error) {
	t.Helper()
	var data struct{ Result []sample }
	err := w.ask(t, "query", url.Values{"query": {expr}}, &data)
	return data.Result, err
}

// until waits for a condition.
func (w *world) until(t *testing.T, f func() error) {
	t.Helper()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	end := time.After(patience)
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("after %s: %v", patience, err)
		case <-t.Context().Done():
			t.Fatal(err)
		}
	}
}
