//go:build renewal

package renewal

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

var controlPlanes = []string{"node1", "node2", "node3"}

// bringUpPlanes makes a cluster of three control planes.
func bringUpPlanes(t *testing.T, validity string) *fixture {
	t.Helper()
	w := &fixture{labtest.UpFor(t, "muster-e2e", validity)}
	t.Cleanup(func() {
		if t.Failed() {
			for _, name := range controlPlanes {
				out, err := w.At(context.WithoutCancel(t.Context()), name, "", "tail", "-n", "20", "/var/log/muster-renewal.log", "/var/log/muster-bootstrapper.log", "/var/log/kubelet.log")
				t.Logf("%s, %v\n%s", name, err, out)
			}
		}
	})
	var endpoints []string
	for i := range controlPlanes {
		endpoints = append(endpoints, fmt.Sprintf("192.168.77.%d:30090", 11+i))
	}
	machines := []driver.Node{w.First(t)}
	for _, name := range controlPlanes[1:] {
		machines = append(machines, driver.Node{Name: name, Role: "control-plane", JoinEndpoints: endpoints})
	}
	w.Add(t, machines...)
	ids := map[string]string{}
	for i, name := range controlPlanes[1:] {
		ids[name] = w.MachineID(t, fmt.Sprintf("192.168.77.%d", 12+i))
	}
	w.Init(t, "renewal")
	for name, id := range ids {
		w.Muster(t, "enroll", name, "--role", "control-plane", "--machine-id", id)
	}
	for _, name := range controlPlanes {
		w.Ready(t, name)
		// A Node is Ready before the join is done, and the machine resumes an unfinished one at boot.
		within(t, func(ctx context.Context) error {
			_, err := w.At(ctx, name, "", "grep", "-q", "this machine is a node", "/var/log/muster-bootstrapper.log")
			return err
		})
	}
	return w
}

// apiServer is the certificate on a control plane's disk.
func (w *fixture) apiServer(ctx context.Context, node string) (*x509.Certificate, error) {
	out, err := w.At(ctx, node, "", "cat", "/etc/kubernetes/pki/apiserver.crt")
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode([]byte(out))
	if block == nil {
		return nil, errors.New("it is no PEM")
	}
	return x509.ParseCertificate(block.Bytes)
}

// All certificates of kubeadm live twelve minutes, and the cluster goes on when the last of the first ones has ended.
// They are due after six minutes; three control planes need four to renew one after another, more on a busy computer.
// One whose slot comes too late renews alone, which is accepted as well.
func TestControlPlanesOutliveTheirCertificates(t *testing.T) {
	w := bringUpPlanes(t, "12m")
	first, end := map[string]*x509.Certificate{}, time.Time{}
	for _, name := range controlPlanes {
		c, err := w.apiServer(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		first[name] = c
		if c.NotAfter.After(end) {
			end = c.NotAfter
		}
		t.Logf("%s's certificate: %s to %s", name, c.NotBefore, c.NotAfter)
	}
	if err := labtest.Within(t.Context(), 2*life, func(ctx context.Context) error {
		for _, name := range controlPlanes {
			c, err := w.apiServer(ctx, name)
			if err != nil {
				return err
			}
			if c.Equal(first[name]) {
				return fmt.Errorf("%s has its first certificate", name)
			}
		}
		if time.Now().Before(end) {
			return fmt.Errorf("the first ones end at %s", end)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for _, name := range controlPlanes {
		within(t, func(ctx context.Context) error { // only what its kubelet has reported since
			out, err := w.Kubectl(ctx, "-n", "kube-node-lease", "get", "lease", name, "-o", "jsonpath={.spec.renewTime}")
			if err != nil {
				return err
			}
			if renewed, err := time.Parse(time.RFC3339Nano, out); err != nil || renewed.Before(began) {
				return fmt.Errorf("%s's lease is of %s: %w", name, out, err)
			}
			return w.IsReady(ctx, name)
		})
		t.Logf("%s is Ready %s after its first certificate ended", name, time.Since(first[name].NotAfter).Round(time.Second))
	}
	out, err := w.Kubectl(t.Context(), "-n", "kube-system", "get", "pods", "-l", "tier=control-plane", "-o", "wide")
	t.Log(out, err)
}

// Kubeadm's certificates end while all machines are off. They come back by themselves.
func TestControlPlanesComeBackAfterALongPowerOff(t *testing.T) {
	w := bringUpPlanes(t, "")
	version := w.Must(t, "node1", "", "kubeadm", "version", "-o", "short")
	var end time.Time
	for _, name := range controlPlanes {
		w.Must(t, name, "", "systemctl", "stop", "muster-renewal")
		w.Must(t, name, "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: "+version+"\ncertificateValidityPeriod: 1m0s\n",
			"sh", "-c", "cat >/tmp/short.yaml && kubeadm certs renew all --config /tmp/short.yaml")
		c, err := w.apiServer(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		end = c.NotAfter
	}
	for _, name := range controlPlanes {
		if err := w.KillNode(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	within(t, func(context.Context) error {
		if time.Now().Before(end) {
			return fmt.Errorf("the last certificate ends at %s", end)
		}
		return nil
	})
	booted := time.Now()
	for _, name := range controlPlanes {
		if _, err := w.RebootNode(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range controlPlanes {
		within(t, func(ctx context.Context) error {
			out, err := w.Kubectl(ctx, "--request-timeout=10s", "-n", "kube-node-lease", "get", "lease", name, "-o", "jsonpath={.spec.renewTime}")
			if err != nil {
				return err
			}
			renewed, err := time.Parse(time.RFC3339Nano, out)
			if err != nil || !renewed.After(booted) {
				return fmt.Errorf("%s's lease is of %s: %w", name, out, err)
			}
			return w.IsReady(ctx, name)
		})
		t.Logf("%s is Ready %.0f s after the power came back", name, time.Since(booted).Seconds())
	}
	for _, name := range controlPlanes {
		c, err := w.apiServer(t.Context(), name)
		if err != nil || time.Now().After(c.NotAfter) {
			t.Errorf("%s: %v, %v", name, c.NotAfter, err)
		}
	}
	t.Log(w.Must(t, driver.Owner, "", "muster", "status"))
}
