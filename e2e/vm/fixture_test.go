// Package vm runs the real image through a machine's life, in a virtual machine with measured boot, on the network of
// a cluster whose control plane is made of namespaces: it boots, joins, reboots, and is tampered with.
//
// `make test-vm` runs the tests; they have the build tag vm. The state of a machine is read from its console, as a person would read it.
package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

const (
	joinservice1 = "192.168.77.11:30090"
	node5        = "192.168.77.15"
	node7        = "192.168.77.17"
	node8        = "192.168.77.18"
	// The processors are emulated, and shared: what takes a second on a real machine takes twenty.
	bootTime = 8 * time.Minute
	joinTime = 16 * time.Minute
	// A worker's state: programs and images of a node take half of it. Each byte is written once when the disk is
	// made.
	stateMiB = 768
)

// fixture is a cluster whose control plane is node1, and an image for virtual machines whose measurements its policy
// accepts beside those of the lab's own machines.
type fixture struct {
	*labtest.Cluster
	key, secret  string // files: the owner's key, the init secret
	public, hash string // of the two

	statePath string            // of the image's state disk; empty: by its serial number
	image     string            // raw disk
	predicted map[string]string // PCR → the value that the image results in
}

// bringUp makes a cluster of node1 and the image, and takes all down when the test ends.
func bringUp(t *testing.T, changes ...func(*fixture, *driver.Up)) *fixture {
	t.Helper()
	w := prepare(t, changes...)
	if _, err := w.AddNode(t.Context(), driver.Node{Name: "node1", Role: "control-plane", InitSecretHash: w.hash}); err != nil {
		t.Fatal(err)
	}
	w.initialize(t, "192.168.77.11")
	return w
}

// prepare makes a lab without machines, the image, and one policy for both kinds of machine.
func prepare(t *testing.T, changes ...func(*fixture, *driver.Up)) *fixture {
	t.Helper()
	lab, root := labtest.New(t, "muster-vm")
	w := &fixture{Cluster: &labtest.Cluster{Lab: lab, Root: root}}
	t.Cleanup(func() { // before the lab is taken down
		if t.Failed() {
			w.consoles(t)
		}
	})
	keys := t.TempDir()
	w.key, w.secret = filepath.Join(keys, "owner.key"), filepath.Join(keys, "init-secret")
	w.public = w.program(t, "muster", "key", "new", w.key)
	w.hash = w.program(t, "muster", "init-secret", w.secret)
	images := filepath.Join(root, "dist", "images")
	up := driver.Up{
		Lab: filepath.Join(root, "bin", "lab"), Bootstrapper: filepath.Join(root, "bin", "bootstrapper"), Preinstalled: []string{"kubelet"},
		OwnerKeys: w.public, Images: []string{filepath.Join(images, "joinservice.tar"), filepath.Join(images, "kms.tar")},
	}
	lists := []string{driver.Components}
	for _, change := range changes {
		change(w, &up)
	}
	if up.Previous {
		lists = append(lists, driver.NextComponents)
	}
	var wg sync.WaitGroup
	errs := make([]error, 2)
	wg.Go(func() { w.image, w.predicted, errs[0] = w.buildImage(t) })
	wg.Go(func() { errs[1] = lab.Up(t.Context(), up) })
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		if err := w.leaveOut(list, "kubectl"); err != nil {
			t.Fatal(err)
		}
	}
	// Nothing has booted yet: the accepted values come from the builds alone.
	w.policy(t, 1, "policy.yaml", w.image)
	return w
}

// leaveOut removes a program from a list of components. Emulated, each takes half a minute to fetch.
func (w *fixture) leaveOut(file, program string) error {
	path := filepath.Join(w.OwnerDir(), file)
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	list, err := versions.Parse(b)
	if err != nil {
		return err
	}
	list.Components = slices.DeleteFunc(list.Components, func(c versions.Component) bool { return c.Path == "/usr/local/bin/"+program })
	if b, err = yaml.Marshal(list); err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o644)
}

// policy makes a policy of the owner's that accepts the lab's own machines and those that boot the images.
func (w *fixture) policy(t *testing.T, serial int, to string, images ...string) {
	t.Helper()
	args := []string{"policy", "from-measurements", w.MeasurementsPath()}
	for _, i := range images {
		args = append(args, filepath.Join(filepath.Dir(i), measurementsFile))
	}
	if serial == 1 {
		args = append(args, "--class", w.ClassFlag()) // a later policy keeps the classes of the one before
	}
	w.Muster(t, append(args, "--ek-root", "ek-roots.pem", "--ek-key", "ecc-p384", "--operator", "--node-cidr", driver.NodeSubnet, "--allow-plain-state", "--serial", strconv.Itoa(serial), "-o", to)...)
}

// addClass adds the firmware of a machine that waits for admission to the policy in the owner's folder, or in the file that more names, as a class.
func (w *fixture) addClass(t *testing.T, class, address string, more ...string) {
	t.Helper()
	until(t, joinTime, func(ctx context.Context) error {
		out, err := w.At(ctx, driver.Owner, "", append([]string{"muster", "policy", "add-class", class, "--from", address + ":9000"}, more...)...)
		if err == nil {
			t.Log(out)
		}
		return err
	})
}

// acceptFirmware adds the firmware of a machine to the policy in force.
func (w *fixture) acceptFirmware(t *testing.T, address string) {
	t.Helper()
	w.addClass(t, "vm", address)
	until(t, joinTime, func(ctx context.Context) error { // a busy API server may need more than one attempt
		_, err := w.At(ctx, driver.Owner, "", "muster", "policy", "apply")
		return err
	})
}

// initialize makes a cluster of the machine at that address. An owner whose command stops repeats it, as its help
// says; an emulated control plane may need that.
func (w *fixture) initialize(t *testing.T, address string, more ...string) {
	t.Helper()
	args := append([]string{"muster", "init", "--name", "vm", "--endpoint", address + ":9000", "--init-secret-file", w.secret, "--owner-key-file", w.key, "--policy", "policy.yaml",
		"--control-plane-endpoint", driver.ControlPlaneEndpoint, "--pod-cidr", driver.PodSubnet, "--service-cidr", driver.ServiceSubnet,
		"--components", driver.Components, "--manifests", filepath.Join("manifests", "podnet.yaml"), "--images", filepath.Join(w.Root, "dist", "images", "digests.json")}, more...)
	for try := 1; ; try++ {
		_, progress, err := w.Run(t.Context(), driver.Owner, "", args...)
		t.Logf("muster init, run %d: %v\n%s", try, err, progress)
		if err == nil {
			return
		}
		if try == 3 {
			t.Fatal(err)
		}
	}
}

// Kubectl runs kubectl on the owner's workstation, as the owner.
func (w *fixture) Kubectl(ctx context.Context, args ...string) (string, error) {
	return w.kubectl(ctx, "", args...)
}

func (w *fixture) kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	return w.At(ctx, driver.Owner, stdin, append([]string{"kubectl", "--kubeconfig", filepath.Join("muster-vm", "admin.conf")}, args...)...)
}

// program runs a program of the checkout and returns the line that it prints.
func (w *fixture) program(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), filepath.Join(w.Root, "bin", name), args...).Output()
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return strings.TrimSpace(string(out))
}

// The outputs of the image's build.
const (
	imageFile        = "muster.raw"
	measurementsFile = "measurements.json"
)

// buildImage builds the image as a user would, with this lab's settings: the owner's public key, the source of
// container images, and their tags. The arguments are added to the build's.
func (w *fixture) buildImage(t *testing.T, more ...string) (image string, predicted map[string]string, err error) {
	start, dir := time.Now(), t.TempDir()
	mirror := filepath.Join(dir, "add", "etc", "containerd", "certs.d", "_default")
	hosts := "[host.\"http://" + driver.RegistryMirror + "\"]\n  capabilities = [\"pull\", \"resolve\"]\n"
	if err := errors.Join(os.MkdirAll(mirror, 0o755), os.WriteFile(filepath.Join(mirror, "hosts.toml"), []byte(hosts), 0o644)); err != nil {
		return "", nil, err
	}
	config := filepath.Join(dir, "image.yaml")
	if err := w.imageYAML(config); err != nil {
		return "", nil, err
	}
	containerd, err := driver.KubeBinaries(t.Context(), w.Root, t.Output())
	if err != nil {
		return "", nil, err
	}
	out := filepath.Join(dir, "out")
	build := func(args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "go", append([]string{"run", "-buildvcs=false", "./deploy/vm"}, args...)...)
		cmd.Dir = w.Root
		said, err := cmd.CombinedOutput()
		return string(said), err
	}
	args := append([]string{"-bin", filepath.Join(w.Root, "bin"), "-containerd", containerd, "-config", config, "-add", filepath.Join(dir, "add"), "-o", out}, more...)
	said, err := build(args...)
	if err != nil && strings.Contains(said, "make vm-lock") {
		// Debian's mirror or this host's tools are newer than the lock file. Machines behave as with any other, so these tests go on; `make vm-image` and
		// `make test-image` fail.
		t.Logf("THE COMMITTED LOCK FILE DOES NOT FIT: the image is built with a new one of now, which is not what `make vm-image` builds.\n%s", said)
		lock := filepath.Join(dir, "packages.lock")
		if said, err = build("lock", "-containerd", containerd, "-lock", lock); err == nil {
			said, err = build(append(args, "-lock", lock)...)
		}
	}
	if err != nil {
		return "", nil, fmt.Errorf("build the image: %w\n%s", err, said)
	}
	b, err := os.ReadFile(filepath.Join(out, measurementsFile))
	if err != nil {
		return "", nil, err
	}
	m, err := policyfile.ParseMeasurements(b)
	if err != nil {
		return "", nil, err
	}
	t.Logf("an image was built in %.1f s, and leads to %v", time.Since(start).Seconds(), m.PCRs)
	return filepath.Join(out, imageFile), m.PCRs, nil
}

// imageYAML writes the default image.yaml with this lab's settings.
func (w *fixture) imageYAML(to string) error {
	b, err := os.ReadFile(filepath.Join(w.Root, "deploy", "vm", "files", "image.yaml"))
	if err != nil {
		return err
	}
	var conf map[string]any
	if err := yaml.Unmarshal(b, &conf); err != nil {
		return err
	}
	conf["ownerKeys"] = []string{w.public}
	if w.statePath != "" {
		conf["stateDisk"] = map[string]any{"mode": "luks", "path": w.statePath}
	}
	for _, set := range []struct {
		value string
		path  []string
	}{
		{driver.CoreDNSTag, []string{"clusterConfiguration", "dns", "imageTag"}},
		{driver.EtcdTag, []string{"clusterConfiguration", "etcd", "local", "imageTag"}},
		{"ECDSA-P256", []string{"clusterConfiguration", "encryptionAlgorithm"}}, // emulated, an RSA key takes half a minute
		{"nftables", []string{"kubeProxyConfiguration", "mode"}},                // the lab's kube-proxy has no iptables
	} {
		if err := unstructured.SetNestedField(conf, set.value, append([]string{"kubeadm"}, set.path...)...); err != nil {
			return err
		}
	}
	// On an emulated machine, requests to the API server take so long that both lose their Lease and restart, which takes more of its time. There is
	// one control plane.
	for _, part := range []string{"controllerManager", "scheduler"} {
		path := []string{"kubeadm", "clusterConfiguration", part, "extraArgs"}
		args, _, err := unstructured.NestedSlice(conf, path...)
		if err == nil {
			err = unstructured.SetNestedSlice(conf, append(args, map[string]any{"name": "leader-elect", "value": "false"}), path...)
		}
		if err != nil {
			return err
		}
	}
	if b, err = yaml.Marshal(conf); err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o600)
}

// says waits until a virtual machine's console has text, and returns the line.
func (w *fixture) says(t *testing.T, name, text string, within time.Duration) string {
	t.Helper()
	start := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	line, err := w.WaitConsole(ctx, name, text)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s after %.0f s: %s", name, time.Since(start).Seconds(), line)
	return line
}

// console is the output of a virtual machine since its last power-on.
func (w *fixture) console(t *testing.T, name string) string {
	t.Helper()
	path, err := w.Console(name)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// until calls check every second until it returns nil. Each call has three minutes.
func until(t *testing.T, within time.Duration, check func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		attempt, end := context.WithTimeout(ctx, 3*time.Minute) // a request that hangs must not use up the time
		err := check(attempt)
		end()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatal(errors.Join(ctx.Err(), err))
		case <-tick.C:
		}
	}
}

// ready waits until a node is Ready in a boot other than the named one, and returns that boot's ID
// (/proc/sys/kernel/random/boot_id of its kernel).
func (w *fixture) ready(t *testing.T, name, notBoot string) (boot string) {
	t.Helper()
	start := time.Now()
	until(t, joinTime, func(ctx context.Context) error {
		out, err := w.Kubectl(ctx, "get", "node", name, "-o", `jsonpath={.status.nodeInfo.bootID} {.status.conditions[?(@.type=="Ready")].status}`)
		if err != nil {
			return err
		}
		id, status, _ := strings.Cut(out, " ")
		if id == notBoot || status != "True" {
			return fmt.Errorf("%s: boot %q, Ready %q", name, id, status)
		}
		boot = id
		return nil
	})
	t.Logf("%s Ready after %.0f s", name, time.Since(start).Seconds())
	return boot
}

// refusal waits for an audit record of a refusal, made after a time, that has all of the texts, and returns the last one's line.
func (w *fixture) refusal(t *testing.T, since time.Time, reason string, contains ...string) (line string) {
	t.Helper()
	until(t, bootTime, func(ctx context.Context) error {
		out, err := w.At(ctx, "node1", "", "cat", "/var/log/muster/audit-refused.jsonl")
		if err != nil {
			return err
		}
		line = ""
		for l := range strings.Lines(out) {
			var record struct {
				Time   time.Time
				Reason string
			}
			if err := json.Unmarshal([]byte(l), &record); err != nil {
				return fmt.Errorf("%s: %w", l, err)
			}
			if record.Reason == reason && record.Time.After(since) && !slices.ContainsFunc(contains, func(text string) bool { return !strings.Contains(l, text) }) {
				line = strings.TrimSpace(l)
			}
		}
		if line == "" {
			return fmt.Errorf("no audit record says %s with %q", reason, contains)
		}
		return nil
	})
	return line
}

// consoles logs the ends of all consoles, for a test that has failed.
func (w *fixture) consoles(t *testing.T) {
	ctx := context.WithoutCancel(t.Context())
	s, err := w.Status(ctx)
	if err != nil {
		t.Log(err)
		return
	}
	for _, m := range s.Machines {
		if !m.VM || m.Console == "" {
			continue
		}
		b, err := os.ReadFile(m.Console)
		if err != nil {
			t.Log(err)
			continue
		}
		const most = 6000
		t.Logf("the end of %s:\n%s", m.Console, driver.CleanLine(string(b[max(0, len(b)-most):])))
	}
	out, err := w.Kubectl(ctx, "-n", "muster-system", "logs", "daemonset/muster-joinservice", "--tail=20")
	t.Logf("joinservice: %s %v", out, err)
}
