package main

import (
	"crypto/ed25519"
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/kubetest"
)

// TestLeaving runs the scripts in testdata/leave.
func TestLeaving(t *testing.T) {
	t.Parallel()
	withCluster(t, "leave")
}

// TestUninstall runs the scripts in testdata/uninstall, in a cluster of its own.
func TestUninstall(t *testing.T) {
	t.Parallel()
	withCluster(t, "uninstall")
}

// TestRotate runs the scripts in testdata/rotate, in a cluster of its own.
func TestRotate(t *testing.T) {
	t.Parallel()
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

// cluster starts an API server with Muster's objects.
func cluster(t *testing.T) *kubetest.Cluster {
	t.Helper()
	api, err := kubetest.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := api.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := api.InstallCRDs(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := api.Namespace(t.Context(), clusterapi.Namespace); err != nil {
		t.Fatal(err)
	}
	return api
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
