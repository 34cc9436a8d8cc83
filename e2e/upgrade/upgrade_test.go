package upgrade_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// TestUpgrade runs on one cluster: an upgrade that fails, one while machines join, one that is killed, plain helm's view of the release, and a rotation of
// the owner's key, which upgrades the release twice.
func TestUpgrade(t *testing.T) {
	// The CLI itself, of the version that muster carries.
	helm := filepath.Join(t.TempDir(), "helm")
	var built sync.WaitGroup
	built.Go(func() {
		// The flags of `make build`, so that muster's packages are not compiled twice.
		cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-o", helm, "helm.sh/helm/v4/cmd/helm")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("build helm: %v\n%s", err, out)
		}
	})
	t.Cleanup(built.Wait)
	c := &release{cluster: bringUp(t), helm: helm}
	t.Run("no Secret is in etcd in the clear", c.etcdHoldsNoSecret)
	next := c.images(t, filepath.Join(c.Root, "bin"), "next")
	built.Wait()
	c.before = len(c.history(t)) - 1
	t.Run("a dry run shows what changes and changes nothing", func(t *testing.T) { c.dryRun(t, next) })
	t.Run("an upgrade to an image that is not there goes back by itself, and machines join", c.missingImage)
	t.Run("an upgrade succeeds while machines join", func(t *testing.T) { c.whileMachinesJoin(t, next) })
	t.Run("an upgrade that is killed is taken up", func(t *testing.T) { c.killed(t, next) })
	t.Run("plain helm works on the release", c.plainHelm)
	t.Run("the owner's key is rotated", c.ownerKey)
}

type release struct {
	*cluster
	helm string
	// before is the number of revisions before the installation's last one: a busy API server may need more than one
	// attempt.
	before int
}

type revision struct {
	Revision int    `json:"revision"`
	Status   string `json:"status"`
}

// history is the output of plain helm.
func (c *release) history(t *testing.T) []revision {
	t.Helper()
	var out []revision
	text, err := c.plain(t.Context(), "history", "muster", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return out
}

func (c *release) plain(ctx context.Context, args ...string) (string, error) {
	return c.At(ctx, driver.Owner, "", append([]string{c.helm, "--kubeconfig", filepath.Join(ownersFolder, "admin.conf"), "-n", "muster-system"}, args...)...)
}

func (c *release) wantHistory(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, r := range c.history(t)[c.before:] {
		got = append(got, r.Status)
	}
	if !slices.Equal(got, want) {
		t.Errorf("revisions %q, want %q", got, want)
	}
}

// etcdHoldsNoSecret reads the value through etcd's own API, and then the files on the disk.
func (c *release) etcdHoldsNoSecret(t *testing.T) {
	root := make([]byte, 32)
	text, err := os.ReadFile(filepath.Join(c.OwnerDir(), ownersFolder, "root-secret"))
	if err != nil {
		t.Fatal(err)
	}
	if n, err := hex.Decode(root, bytes.TrimSpace(text)); err != nil || n != 32 {
		t.Fatal(n, err)
	}
	const key, prefix = "/registry/secrets/muster-system/muster-kms-root", "k8s:enc:secretbox:v1:muster-v1:"
	var out string
	labtest.Eventually(t, func(ctx context.Context) (err error) {
		out, err = c.At(ctx, "node1", "", "curl", "-sS", "--max-time", "60", "--cacert", "/etc/kubernetes/pki/etcd/ca.crt",
			"--cert", "/etc/kubernetes/pki/etcd/healthcheck-client.crt", "--key", "/etc/kubernetes/pki/etcd/healthcheck-client.key",
			"-d", `{"key":"`+base64.StdEncoding.EncodeToString([]byte(key))+`"}`, "https://127.0.0.1:2379/v3/kv/range")
		return err
	})
	var answer struct {
		KVs []struct{ Value []byte }
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil || len(answer.KVs) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	value := answer.KVs[0].Value
	if !bytes.HasPrefix(value, []byte(prefix)) || bytes.Contains(value, root) {
		t.Errorf("etcd holds %q…", value[:min(len(value), 60)])
	}
	files := c.Must(t, "node1", "", "sh", "-c", "cat /var/lib/etcd/member/snap/db /var/lib/etcd/member/wal/*.wal")
	if !strings.Contains(files, key) || !strings.Contains(files, prefix) {
		t.Fatal("the value is not found in etcd's files: this test looks at the wrong ones")
	}
	if strings.Contains(files, string(root)) {
		t.Error("the root secret is in etcd's files in the clear")
	}
	t.Logf("%d bytes of etcd's files; %s begins %q", len(files), key, value[:len(prefix)])
	mode, err := c.At(t.Context(), "node1", "", "stat", "-c", "%a %U", "/etc/kubernetes/pki/encryption.yaml")
	if err != nil || strings.TrimSpace(mode) != "600 root" {
		t.Errorf("encryption.yaml: %q %v", mode, err)
	}
}

func (c *release) dryRun(t *testing.T, images string) {
	out := c.Muster(t, "upgrade", "--dry-run", "--images", images)
	for _, want := range []string{"Value     kms.image: ", "DaemonSet muster-system/muster-joinservice", "+        image: ", "Nothing was changed."} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in it", want)
		}
	}
	if _, err := os.Stat(filepath.Join(c.OwnerDir(), ownersFolder, "backups")); err == nil {
		t.Error("a dry run made a backup")
	}
	c.wantHistory(t, "deployed")
}

func (c *release) missingImage(t *testing.T) {
	_, err := c.At(t.Context(), driver.Owner, "", "muster", "upgrade", "--kms-image", "ghcr.io/muster-k8s/kms@sha256:"+strings.Repeat("0", 64), "--wait", "3m") // and again for the way back
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("revision %d did not become ready, and revision %d", c.before+2, c.before+3)) || !strings.Contains(err.Error(), "What to do:") {
		t.Fatal(err)
	}
	t.Log(err)
	c.wantHistory(t, "superseded", "failed", "deployed")
	c.Add(t, labtest.Worker("node2"))
	c.Ready(t, "node2")
}

func (c *release) whileMachinesJoin(t *testing.T, images string) {
	var joins sync.WaitGroup
	var err error
	joins.Go(func() { _, err = c.AddNode(t.Context(), labtest.Worker("node3")) })
	out := c.Muster(t, "upgrade", "--images", images, "--wait", "10m", "--timeout", "30m")
	c.Add(t, labtest.Worker("node4"))
	joins.Wait()
	if err != nil {
		t.Fatal(err)
	}
	c.Ready(t, "node3")
	c.Ready(t, "node4")
	c.wantHistory(t, "superseded", "failed", "superseded", "deployed")
	digests, err := os.ReadFile(images)
	if err != nil {
		t.Fatal(err)
	}
	running, err := c.Kubectl(t.Context(), "-n", "muster-system", "get", "pods", "-l", "app.kubernetes.io/name=muster-joinservice", "-o", `jsonpath={.items[*].spec.containers[0].image}`)
	if err != nil || running == "" || !strings.Contains(string(digests), `"`+running+`"`) {
		t.Errorf("%q runs, %v", running, err)
	}
	_, backup, _ := strings.Cut(out, "The previous objects are in ")
	c.checkBackup(t, strings.TrimSuffix(strings.TrimSpace(backup), "."))
	if out := c.Muster(t, "upgrade", "--images", images); !strings.Contains(out, "Nothing to change") {
		t.Error("the same upgrade again changes something")
	}
}

// checkBackup has the API server check whether the backup could be restored.
func (c *release) checkBackup(t *testing.T, dir string) {
	t.Helper()
	for _, f := range []string{"definitions.yaml", "objects.yaml", "disks.yaml", "configmaps.yaml", "values.yaml", "manifest.yaml", "release.yaml"} {
		st, err := os.Stat(filepath.Join(c.OwnerDir(), dir, f))
		if err != nil || st.Size() == 0 || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", f, st, err)
		}
	}
	out := c.Must(t, driver.Owner, "", "kubectl", "--kubeconfig", filepath.Join(ownersFolder, "admin.conf"), "apply", "--server-side", "--force-conflicts", "--dry-run=server",
		"-f", filepath.Join(dir, "definitions.yaml"), "-f", filepath.Join(dir, "objects.yaml"), "-f", filepath.Join(dir, "disks.yaml"), "-f", filepath.Join(dir, "configmaps.yaml"))
	for _, want := range []string{"attestednodes.muster.dev", "attestednode.muster.dev/node1", "attesteddisk.muster.dev/", "attestationpolicy.muster.dev/default", "configmap/muster-cluster", "configmap/muster-node-access"} {
		if !strings.Contains(out, want) {
			t.Errorf("the backup has no %s", want)
		}
	}
}

// killed ends an upgrade to services that crash, where nothing can be cleaned up, and runs another.
func (c *release) killed(t *testing.T, images string) {
	crashes := t.TempDir()
	for name, program := range map[string]string{"joinservice": "bootstrapper", "kms": "bootstrapper", "probe": "probe"} { // bootstrapper does not know their flags
		if err := os.Symlink(filepath.Join(c.Root, "bin", program), filepath.Join(crashes, name)); err != nil {
			t.Fatal(err)
		}
	}
	cmd, err := c.Command(t.Context(), driver.Owner, "muster", "upgrade", "--images", c.images(t, crashes, "crashes"), "--wait", "30m", "--timeout", "40m") // it must not go back before it is killed
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	err = labtest.Within(t.Context(), labtest.Patience, func(ctx context.Context) error {
		out, err := c.Kubectl(ctx, "-n", "muster-system", "get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[0].restartCount}")
		if err == nil && strings.Trim(out, "0 ") == "" {
			err = fmt.Errorf("nothing crashed yet: %q", out)
		}
		return err
	})
	if kerr := cmd.Process.Kill(); kerr != nil {
		t.Error(kerr)
	}
	_ = cmd.Wait()
	if err != nil {
		t.Fatal(err)
	}
	c.wantHistory(t, "superseded", "failed", "superseded", "deployed", "pending-upgrade")
	// The previous pods still serve beside those that crash.
	c.Add(t, labtest.Worker("node5"))
	c.Ready(t, "node5")
	_, progress, err := c.Run(t.Context(), driver.Owner, "", "muster", "upgrade", "--images", images, "--wait", "10m", "--timeout", "30m")
	if err != nil || !strings.Contains(progress, fmt.Sprintf("continues the interrupted revision %d", c.before+5)) {
		t.Fatalf("it doesn't say so: %v\n%s", err, progress)
	}
	t.Logf("muster upgrade\n%s", progress)
	c.wantHistory(t, "superseded", "failed", "superseded", "superseded", "failed", "deployed")
}

func (c *release) plainHelm(t *testing.T) {
	ctx := t.Context()
	values, err := c.plain(ctx, "get", "values", "muster")
	if err != nil || !strings.Contains(values, "publicKeys:") || strings.Contains(strings.ToLower(values), "secret") {
		t.Errorf("%v\n%s", err, values)
	}
	chart := filepath.Join(c.Root, "deploy", "charts", "muster")
	if out, err := c.plain(ctx, "upgrade", "muster", chart, "--reuse-values", "--set", "kms.resources.requests.cpu=11m", "--wait", "--timeout", "15m"); err != nil {
		t.Fatal(err)
	} else {
		t.Log(out)
	}
	if out, err := c.plain(ctx, "upgrade", "muster", chart, "--reuse-values", "--set", "kms.image=ghcr.io/muster-k8s/kms:next"); err == nil || !strings.Contains(err.Error(), "kms/image") {
		t.Errorf("an image by its tag alone: %v\n%s", err, out)
	}
	if out := c.Muster(t, "upgrade", "--dry-run"); !strings.Contains(out, fmt.Sprintf("Nothing would change: revision %d", c.before+7)) {
		t.Error("what plain helm set does not stay")
	}
	if out, err := c.plain(ctx, "rollback", "muster", strconv.Itoa(c.before+6), "--wait", "--timeout", "15m"); err != nil {
		t.Error(err)
	} else {
		t.Log(out)
	}
}
