package orders

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/attest"
)

// EvidenceFolder has the evidence of the latest order to verify this machine.
const EvidenceFolder = "/var/log/" + ownerorder.EvidenceFolder

// Verify returns the action that makes evidence bound to the order that runs, and answers its challenge. own makes evidence of the purpose
// [attest.PurposeOrder] (A5). The evidence is too long for a report, so the kubelet serves it from a file; it is not secret.
func Verify(root string, own attest.Attester) Action {
	return repeatable(func(ctx context.Context, args Args) (string, error) {
		var rec record
		if err := read(filepath.Join(root, Journal), &rec); err != nil {
			return "", err
		}
		order := rec.Last.Order.signed()
		challenge, err := ownerorder.ParseChallenge(args)
		if err != nil {
			return "", err
		}
		mac, err := own.Respond(ctx, challenge, order.Binding())
		if err != nil {
			return "", err
		}
		ev, err := own.Attest(ctx, attestv1.Format_FORMAT_TPM2, order.Binding())
		if err != nil {
			return "", err
		}
		b, err := proto.Marshal(ev)
		if err != nil {
			return "", err
		}
		if len(b) > ownerorder.MaxEvidence {
			return "", fmt.Errorf("the evidence has %d bytes, and may have %d", len(b), ownerorder.MaxEvidence)
		}
		dir := filepath.Join(root, EvidenceFolder)
		if err := empty(dir); err != nil {
			return "", err
		}
		return hex.EncodeToString(mac), machine.WriteFile(filepath.Join(dir, order.EvidenceFile()), b, 0o600, 0o700)
	}, ownerorder.ArgCredential, ownerorder.ArgSecret)
}

// empty removes the files of a folder, which may be missing: orders leave one file, however many there are.
func empty(dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, f := range files {
		if err := os.Remove(filepath.Join(dir, f.Name())); err != nil {
			return err
		}
	}
	return nil
}
