package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/trust/attest"
)

// A folder that knows nothing any more, and a policy of another owner, are not passed over, and are no rollback.
func TestStatusNamesADamagedFolderAndAForeignPolicy(t *testing.T) {
	api, path := cluster(t), filepath.Join(t.TempDir(), "muster-prod")
	if err := ownersFolder(path, api, testPolicy(t, tdxRules)); err != nil {
		t.Fatal(err)
	}
	dir, err := ownerdir.View(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dir.Close() }()
	kube, err := access.Connect(dir)
	if err != nil {
		t.Fatal(err)
	}
	p, signed, err := policies.SignedPolicy(dir)
	if err == nil {
		err = ownertest.PutPolicy(t.Context(), kube, signed)
	}
	if err != nil {
		t.Fatal(err)
	}
	accepts(t, api, int64(p.Serial()), nil)
	status := func(more ...string) (out, said string, code int) {
		var o, e strings.Builder
		a := &app{stdout: &o, stderr: &e}
		if err := a.run(t.Context(), append([]string{"status", "--directory", path}, more...)); err != nil {
			code = exitCode(err)
		}
		return o.String(), e.String(), code
	}
	if out, said, code := status(); code != 0 || said != "" {
		t.Fatalf("%d\n%s%s", code, out, said)
	}
	known := dir.File(ownerdir.KnownFile)
	good, err := os.ReadFile(known)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(known, []byte("{bad"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, _, code := status(); code != 0 || !strings.Contains(out, "ATTENTION  known.json: ") || !strings.Contains(out, "move the file away") || strings.Contains(out, "Nothing needs attention") {
		t.Errorf("a damaged known.json: %d\n%s", code, out)
	}
	if out, _, code := status("--check"); code != exitFailed {
		t.Errorf("--check with a damaged known.json: %d\n%s", code, out)
	}
	if err := os.WriteFile(known, good, 0o600); err != nil {
		t.Fatal(err)
	}
	signed.Signature = make([]byte, len(signed.GetSignature()))
	if err := ownertest.PutPolicy(t.Context(), kube, signed); err != nil {
		t.Fatal(err)
	}
	if out, said, code := status(); code != exitFailed || strings.Contains(said, "is older") || !strings.Contains(said, "POLICY_SIGNATURE") || !strings.Contains(said, "muster policy apply") {
		t.Errorf("a policy of another key: %d\n%s%s", code, out, said)
	}
	if now, err := os.ReadFile(known); err != nil || string(now) != string(good) {
		t.Errorf("known.json was changed: %v", err)
	}
}

func TestAWorkerIsAskedForNoBackup(t *testing.T) {
	api, path := cluster(t), filepath.Join(t.TempDir(), "muster-prod")
	if err := ownersFolder(path, api, testPolicy(t, tdxRules)); err != nil {
		t.Fatal(err)
	}
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: attest.MachineID{1}.String(), Role: v1alpha1.RoleWorker}}
	if err := api.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	dir, err := ownerdir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dir.Close() }()
	if _, _, err := backups.MakeBackup(t.Context(), dir, "w1", func(s string) { _, _ = io.WriteString(t.Output(), s) }); err == nil || !strings.Contains(err.Error(), "w1 is a worker") {
		t.Errorf("%v", err)
	}
}
