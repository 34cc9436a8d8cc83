package doctor

import (
	"encoding/json"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/clusterinfo"
	"github.com/muster-k8s/muster/internal/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/owner/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// setBack are harms of a cluster that is older than what the folder knows (B7).
func (p *patient) setBack(t *testing.T) []harm {
	knew := func(change func(k *ownerdir.Known)) func(*testing.T) func(*testing.T) {
		return p.file(ownerdir.KnownFile, func(path string, content []byte) error {
			var k ownerdir.Known
			if err := json.Unmarshal(content, &k); err != nil {
				return err
			}
			change(&k)
			b, err := json.Marshal(k)
			if err != nil {
				return err
			}
			return os.WriteFile(path, b, 0o600)
		})
	}
	key, err := p.dir.OwnerKey()
	try(t, err)
	text, err := p.dir.Read(ownerdir.PolicyFile)
	try(t, err)
	newer, err := policyfile.ListControlPlanes(text, 9, nil, nil)
	try(t, err)
	_, document, err := policyfile.Parse(newer)
	try(t, err)
	signed := attest.SignPolicy(key, document)
	return []harm{
		{CheckKnown, checkup.Fail, "its policy has the serial 1, and had 9", "", knew(func(k *ownerdir.Known) {
			k.Policy = ownerdir.KnownPolicy{JSON: string(signed.GetPolicy()), Signature: signed.GetSignature()}
		})},
		{CheckKnown, checkup.Fail, "was banned with generation", "", func(t *testing.T) func(*testing.T) {
			t.Helper()
			node := &v1alpha1.AttestedNode{}
			try(t, shared.Client.Get(t.Context(), client.ObjectKey{Name: "node1"}, node))
			return knew(func(k *ownerdir.Known) { k.Bans = map[string]int64{string(node.UID): node.Generation + 1} })(t)
		}},
		{CheckKnown, checkup.Fail, "the cluster is at epoch 0, and node1 knows 7", "", func(t *testing.T) func(*testing.T) {
			t.Helper()
			write := func(t *testing.T, value, label any) {
				t.Helper()
				patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
					"annotations": map[string]any{clusterinfo.EpochAnnotation: value}, "labels": map[string]any{"node-role.kubernetes.io/control-plane": label},
				}})
				try(t, err)
				try(t, shared.Client.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, client.RawPatch(types.MergePatchType, patch)))
			}
			write(t, "7", "")
			return func(t *testing.T) { write(t, nil, nil) }
		}},
		{CheckKnown, checkup.Warn, "known.json", "", p.file(ownerdir.KnownFile, func(path string, _ []byte) error { return os.WriteFile(path, []byte(`{"version": 9}`), 0o600) })},
	}
}
