package kubetest_test

import (
	"context"
	"os"
	"testing"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/kubetest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

func TestTheControlPlaneComesUpAndGoes(t *testing.T) {
	c, err := kubetest.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	defer func() {
		if !stopped {
			_ = c.Stop()
		}
	}()
	ctx := t.Context()
	if err := c.InstallCRDs(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.Client.List(ctx, &v1alpha1.AttestedNodeList{}); err != nil {
		t.Error(err)
	}
	if err := c.Namespace(ctx, "muster-system"); err != nil {
		t.Fatal(err)
	}
	if err := c.Client.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "muster-system", Name: "joinservice"}}); err != nil {
		t.Fatal(err)
	}
	pod, err := c.Pod(ctx, "muster-system", "joinservice", "cp1")
	if err != nil {
		t.Fatal(err)
	}
	if token, err := c.Token(ctx, "muster-system", "joinservice", "muster-kms", pod); err != nil || token == "" {
		t.Errorf("token %q, %v", token, err)
	}
	stopped = true
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(c.Dir); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
}

func TestMissingProgramsAreAnError(t *testing.T) {
	t.Setenv("MUSTER_KUBE_BIN", t.TempDir())
	if c, err := kubetest.Start(context.WithoutCancel(t.Context())); err == nil {
		_ = c.Stop()
		t.Error("a cluster without programs came up")
	}
}
