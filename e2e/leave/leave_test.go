package leave

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

const (
	certificate = "/var/lib/kubelet/pki/kubelet-client-current.pem"
	diskID      = "/var/lib/muster/state/uuid"
	diskCheck   = "/var/lib/muster/state/key-check"
	metadata    = "/etc/muster/metadata.yaml"
)

// writes creates a Node, in a dry run, from node1 with the given certificate and key. It is an error if the API
// server refuses that. An existing Node is no refusal.
func (c *cluster) writes(ctx context.Context, node, pem string) error {
	const script = `set -eu
umask 077; cat > /root/as.pem
curl -sS --max-time 60 --cacert /etc/kubernetes/pki/ca.crt --cert /root/as.pem --key /root/as.pem -H 'Content-Type: application/json' \
  --data '{"apiVersion":"v1","kind":"Node","metadata":{"name":"%s"}}' -w '\n%%{http_code}' 'https://192.168.77.1:6443/api/v1/nodes?dryRun=All'`
	out, err := c.answer(ctx, pem, fmt.Sprintf(script, node))
	if err != nil {
		return err
	}
	i := strings.LastIndexByte(out, '\n')
	if status := out[i+1:]; status != "201" && status != "409" {
		return fmt.Errorf("HTTP %s: %s", status, out[:i])
	}
	return nil
}

// answer runs a script on node1 that asks the API server, until there is an answer.
func (c *cluster) answer(ctx context.Context, stdin, script string) (out string, err error) {
	err = labtest.Within(ctx, labtest.Patience, func(ctx context.Context) (err error) {
		out, err = c.At(ctx, "node1", stdin, "sh", "-c", script)
		return err
	})
	return out, err
}

// refused returns an error if the API server accepts a write as the node with that key, or refuses it for another
// reason than a revoked certificate.
func (c *cluster) refused(ctx context.Context, node, key, why string) error {
	err := c.writes(ctx, node, key)
	if err == nil {
		return fmt.Errorf("the old key of %s writes", node)
	}
	if !strings.Contains(err.Error(), why) {
		return fmt.Errorf("the old key of %s is refused otherwise than by %q: %w", node, why, err)
	}
	return nil
}

// believes returns the API server's status for a request with the token that lists Services.
func (c *cluster) believes(ctx context.Context, token string) (string, error) {
	const script = `set -eu
umask 077; { printf 'Authorization: Bearer '; cat; } > /root/as.header
curl -sS --max-time 60 --cacert /etc/kubernetes/pki/ca.crt -H @/root/as.header -o /dev/null -w '%{http_code}' https://192.168.77.1:6443/api/v1/services`
	return c.answer(ctx, token, script)
}

// watches opens a watch on the node's pods for a day, with the kubelet's certificate. The returned channel is closed
// when the watch has ended.
func (c *cluster) watches(t *testing.T, node, pem string) <-chan struct{} {
	t.Helper()
	const script = `set -eu
umask 077; cat > /root/watch.pem; : > /root/watch.out
exec curl -sS -N --cacert /etc/kubernetes/pki/ca.crt --cert /root/watch.pem --key /root/watch.pem -o /root/watch.out \
  'https://192.168.77.1:6443/api/v1/pods?watch=1&timeoutSeconds=86400&fieldSelector=spec.nodeName%%3D%s'`
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		out, err := c.At(t.Context(), "node1", pem, "sh", "-c", fmt.Sprintf(script, node))
		t.Log("the watch has ended:", out, err)
	}()
	t.Cleanup(func() {
		_, _ = c.At(context.WithoutCancel(t.Context()), "node1", "", "pkill", "-f", "/root/watch.pem") // it is expected that none is left
		<-ended
	})
	labtest.Eventually(t, func(ctx context.Context) error {
		_, err := c.At(ctx, "node1", "", "grep", "-q", `"type":"ADDED"`, "/root/watch.out")
		return err
	})
	return ended
}

// shows returns an error unless kubectl prints that.
func (c *cluster) shows(ctx context.Context, want string, args ...string) error {
	out, err := c.Kubectl(ctx, args...)
	if err == nil && out != want {
		err = fmt.Errorf("kubectl %s: %q, want %q", strings.Join(args, " "), out, want)
	}
	return err
}

// Credentials that were taken from a node end with its ban; its kubelet cannot restore access, and gets it back once
// the ban is lifted.
func (c *cluster) ban(t *testing.T, node string) {
	t.Helper()
	key := c.Must(t, node, "", "cat", certificate)
	labtest.Eventually(t, func(ctx context.Context) error { // a Ready node may still be starting it
		return c.shows(ctx, "Running", "-n", "kube-system", "get", "pods", "-l", "k8s-app=kube-proxy", "--field-selector", "spec.nodeName="+node, "-o", "jsonpath={.items[*].status.phase}")
	})
	token := strings.TrimSpace(c.Must(t, node, "", "sh", "-c", "cat /var/lib/kubelet/pods/"+
		strings.TrimSpace(c.MustKubectl(t, "-n", "kube-system", "get", "pods", "-l", "k8s-app=kube-proxy", "--field-selector", "spec.nodeName="+node, "-o", "jsonpath={.items[0].metadata.uid}"))+
		"/volumes/kubernetes.io~projected/*/token"))
	var claims struct{ Exp, Iat int64 }
	if parts := strings.Split(token, "."); len(parts) != 3 {
		t.Fatal("this is no token")
	} else if b, err := base64.RawURLEncoding.DecodeString(parts[1]); err != nil || json.Unmarshal(b, &claims) != nil || claims.Exp-claims.Iat > 2*3600 {
		t.Errorf("a pod's token lives for %d s: %v", claims.Exp-claims.Iat, err)
	}
	if status, err := c.believes(t.Context(), token); err != nil || status != "200" {
		t.Fatalf("before the ban: %s %v", status, err)
	}
	spec := func(banned bool) {
		c.MustKubectl(t, "patch", "attestednode", node, "--type", "merge", "-p", fmt.Sprintf(`{"spec":{"banned":%t}}`, banned))
	}
	evicted := func(ctx context.Context) error {
		return errors.Join(
			c.shows(ctx, "", "get", "node", node, "--ignore-not-found", "-o", "name"),
			c.shows(ctx, "", "get", "pods", "-A", "--field-selector", "spec.nodeName="+node, "-o", "name"),
		)
	}
	watch := c.watches(t, node, key)
	spec(true)
	labtest.Eventually(t, evicted)
	labtest.Eventually(t, func(context.Context) error { // the API server restarts
		select {
		case <-watch:
			return nil
		default:
			return errors.New("a watch of the banned node goes on")
		}
	})
	labtest.Eventually(t, func(ctx context.Context) error { return c.shows(ctx, "ok", "get", "--raw", "/readyz") })
	labtest.Eventually(t, func(ctx context.Context) error {
		status, err := c.believes(ctx, token)
		if err == nil && status != "401" {
			err = fmt.Errorf("the token of a pod that is gone: %s", status)
		}
		return err
	})
	c.Must(t, node, "", "systemctl", "restart", "kubelet.service") // so that it registers
	labtest.Eventually(t, func(ctx context.Context) error {
		_, err := c.At(ctx, node, "", "grep", "-q", "Unable to register node.*may not write", "/var/log/kubelet.log")
		return err
	})
	if err := errors.Join(evicted(t.Context()), c.refused(t.Context(), node, key, "may not write")); err != nil {
		t.Error(err)
	}
	spec(false)
	labtest.Eventually(t, func(ctx context.Context) error { return c.writes(ctx, node, key) })
	c.Must(t, node, "", "systemctl", "restart", "kubelet.service") // as a reboot does
	c.Ready(t, node)
}

// Invariant J4.
func TestNamesLeaveTheirMachines(t *testing.T) {
	c := bringUp(t)
	t.Run("a banned node is evicted, and comes back when the ban is lifted", func(t *testing.T) { c.ban(t, "node2") })
	t.Run("and once more", func(t *testing.T) { c.ban(t, "node2") })
	oldKey := c.Must(t, "node2", "", "cat", certificate)
	forgottenDisk := c.Must(t, "node2", "", "cat", diskID)
	oldDisk, oldCheck := c.Must(t, "node3", "", "cat", diskID), c.Must(t, "node3", "", "cat", diskCheck)
	oldKey3 := c.Must(t, "node3", "", "cat", certificate)
	if err := errors.Join(c.RemoveNode(t.Context(), "node2"), c.RemoveNode(t.Context(), "node3")); err != nil {
		t.Fatal(err)
	}
	c.MustKubectl(t, "label", "node", "node3", "rack=seven")

	// node3's mainboard is exchanged: the disk is the old one.
	c.Add(t, driver.Node{Name: "node3"})
	t.Run("a forgotten name goes to another machine", func(t *testing.T) {
		id := c.MustKubectl(t, "get", "attestednode", "node2", "-o", "jsonpath={.spec.machineID}")
		if err := c.writes(t.Context(), "node2", oldKey); err != nil {
			t.Fatalf("before it is forgotten: %v", err)
		}
		c.Muster(t, "forget", "node2", "--yes", "--timeout", "20m")
		labtest.Eventually(t, func(ctx context.Context) error { return c.refused(ctx, "node2", oldKey, "or was removed") })
		if out, err := c.Kubectl(t.Context(), "get", "node,attestednode", "node2", "--ignore-not-found", "-o", "name"); err != nil || out != "" {
			t.Fatalf("left: %s %v", out, err)
		}
		if out, err := c.Kubectl(t.Context(), "get", "attesteddisk", strings.TrimSpace(forgottenDisk), "-o", "jsonpath={.spec.machineID}"); err != nil || out != id {
			t.Errorf("its disk is machine %q's, want it to stay %s's: %v", out, id, err)
		}
		c.Add(t, labtest.Worker("node2"))
		c.Ready(t, "node2")
		if err := c.refused(t.Context(), "node2", oldKey, "had the node's name before"); err != nil {
			t.Error(err)
		}
		if err := c.writes(t.Context(), "node2", c.Must(t, "node2", "", "cat", certificate)); err != nil {
			t.Errorf("the next machine's key: %v", err)
		}
	})
	t.Run("a machine with a new TPM takes its name and disk over", func(t *testing.T) {
		c.Must(t, "node3", oldDisk, "sh", "-c", "mkdir -p "+diskID[:strings.LastIndexByte(diskID, '/')]+" && cat > "+diskID)
		id := c.MachineID(t, "192.168.77.13")
		c.Muster(t, "replace", "node3", "--tpm", id, "--yes", "--timeout", "20m")
		c.Must(t, "node3", "", "sed", "-i", `s/joinEndpoints: \[\]/joinEndpoints: ["`+labtest.Joinservice+`"]/`, metadata)
		c.Must(t, "node3", "", "systemctl", "restart", "muster-bootstrapper")
		labtest.Eventually(t, func(ctx context.Context) error {
			out, err := c.At(ctx, "node3", "", "cat", diskCheck)
			if err == nil && out != oldCheck {
				t.Errorf("the key of its disk is another one")
			}
			return err
		})
		labtest.Eventually(t, func(ctx context.Context) error { // its Node is the old one's, so that Ready proves nothing yet
			out, err := c.Kubectl(ctx, "get", "attestednode", "node3", "-o", "jsonpath={.spec.machineID} {.spec.diskID}")
			if want := id + " " + strings.TrimSpace(oldDisk); err == nil && out != want {
				t.Fatalf("enrolled: %s, want %s", out, want)
			}
			if err != nil {
				return err
			}
			key, err := c.At(ctx, "node3", "", "cat", certificate)
			if err != nil {
				return err
			}
			return c.writes(ctx, "node3", key)
		})
		c.Ready(t, "node3")
		if err := c.refused(t.Context(), "node3", oldKey3, "had the node's name before"); err != nil {
			t.Error(err)
		}
		if out, err := c.Kubectl(t.Context(), "get", "attesteddisk", strings.TrimSpace(oldDisk), "-o", "jsonpath={.spec.machineID}"); err != nil || out != id {
			t.Errorf("its disk is machine %q's, want %s: %v", out, id, err)
		}
		if out, err := c.Kubectl(t.Context(), "get", "node", "node3", "-o", "jsonpath={.metadata.labels.rack}"); err != nil || out != "seven" {
			t.Errorf("the Node is another one: label %q %v", out, err)
		}
	})
}
