package main

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/kubetest"
)

// TestLeaving runs the scripts in testdata/leave.
func TestLeaving(t *testing.T) {
	withCluster(t, "leave")
}

// TestUninstall runs the scripts in testdata/uninstall. The cluster is of no use afterwards: this is its only parallel test, so it is the last one.
func TestUninstall(t *testing.T) {
	t.Parallel()
	t.Cleanup(func() {
		if err := stopCluster(); err != nil {
			t.Error(err)
		}
	})
	withCluster(t, "uninstall")
}

// TestRotate runs the scripts in testdata/rotate.
func TestRotate(t *testing.T) {
	withCluster(t, "rotate")
}

// withCluster runs the scripts of a folder against a real API server, with an owner's folder for it. Machines are only
// objects: no kubelet and no joinservice runs.
func withCluster(t *testing.T, scripts string) {
	t.Helper()
	api := cluster(t)
	policy, err := os.ReadFile(filepath.Join("..", "..", "internal", "policyfile", "testdata", "policy.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	bin, err := kubetest.Binaries()
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", scripts),
		Setup: func(env *testscript.Env) error {
			env.Setenv("KUBECONFIG", api.Kubeconfig)
			env.Setenv("PATH", bin+string(filepath.ListSeparator)+env.Getenv("PATH"))
			return ownersFolder(filepath.Join(env.WorkDir, "muster-prod"), api, policy)
		},
	})
}

// running is the cluster of [cluster], once there is one.
var running *kubetest.Cluster

// cluster returns an API server with Muster's definitions and namespace, and nothing in them. All tests have the same one, so they are not parallel.
func cluster(t *testing.T) *kubetest.Cluster {
	t.Helper()
	if running == nil {
		api, err := kubetest.Start(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		running = api
		if err := errors.Join(api.InstallCRDs(t.Context()), api.Namespace(t.Context(), clusterapi.Namespace)); err != nil {
			t.Fatal(err)
		}
	}
	empty(t, running.Client)
	return running
}

// stopCluster stops the cluster of [cluster].
func stopCluster() error {
	if running == nil {
		return nil
	}
	api := running
	running = nil
	return api.Stop()
}

// empty deletes what an earlier test has made.
func empty(t *testing.T, c client.Client) {
	t.Helper()
	nodes := &v1alpha1.AttestedNodeList{}
	if err := c.List(t.Context(), nodes); err != nil {
		t.Fatal(err)
	}
	for i := range nodes.Items { // no joinservice runs, which retires certificates
		free := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null},"spec":{"banned":true}}`))
		if err := c.Patch(t.Context(), &nodes.Items[i], free); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
	}
	in := func(o client.Object, namespace string) error {
		return c.DeleteAllOf(t.Context(), o, client.InNamespace(namespace), client.GracePeriodSeconds(0))
	}
	if err := errors.Join(
		in(&v1alpha1.AttestedNode{}, ""), in(&v1alpha1.AttestedDisk{}, ""), in(&v1alpha1.AttestationPolicy{}, ""), in(&corev1.Node{}, ""), in(&certificatesv1.CertificateSigningRequest{}, ""),
		in(&corev1.Pod{}, metav1.NamespaceDefault), in(&corev1.Pod{}, metav1.NamespaceSystem), in(&corev1.ConfigMap{}, clusterapi.Namespace), in(&corev1.Secret{}, clusterapi.Namespace), in(&coordinationv1.Lease{}, clusterapi.Namespace),
	); err != nil {
		t.Fatal(err)
	}
}

// ownersFolder makes an owner's folder for a cluster.
func ownersFolder(path string, api *kubetest.Cluster, policy []byte) error {
	kubeconfig, err := os.ReadFile(api.Kubeconfig)
	if err != nil {
		return err
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	d, err := ownerdir.Create(path, ownerdir.New{
		Cluster: ownerdir.Cluster{
			Name: "prod", Endpoint: "192.0.2.1:9000", KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.0.2.1:6443",
			PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, Stage: ownerdir.StagePrepared,
		},
		Secrets: ownerdir.NewSecrets([32]byte{7}), OwnerKey: key, Policy: policy,
	})
	if err != nil {
		return err
	}
	if err := d.Write(ownerdir.AdminConf, kubeconfig); err != nil {
		return err
	}
	return d.Close()
}
