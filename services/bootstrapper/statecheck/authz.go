package statecheck

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"

	"github.com/muster-k8s/muster/internal/objects/podsecurity"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// checkAuthz rewrites the API server's configuration of authorization and admission if it differs from this program's: an additional authorizer would give
// an attacker all permissions, also after upgrades and rotations (B8). A cluster that existed before Muster may have its own. It does not create a missing
// file before kubeadm has run.
func (ck *check) checkAuthz(ctx context.Context, d *component.Desired) error {
	if d.Adopted {
		return nil
	}
	if err := ck.wantFolder(ctx, kubeadm.AuthzFolder); err != nil {
		return err
	}
	for name, want := range map[string]string{kubeadm.AuthzFile: kubeadm.AuthzConfig, kubeadm.AdmissionFile: podsecurity.Config} {
		is, err := os.ReadFile(ck.On(name))
		if errors.Is(err, fs.ErrNotExist) && ck.Lock.Record().Step < journal.StepDone {
			continue
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err == nil && bytes.Equal(is, []byte(want)) {
			continue
		}
		if err := machine.WriteFile(ck.On(name), []byte(want), 0o600, 0o755); err != nil {
			return err
		}
		ck.found(ctx, name, "rewritten")
	}
	return nil
}
