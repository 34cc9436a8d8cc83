package orders

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

const (
	// resultFile has the end of the latest upgrade: a unit that fails has no text. `bootstrapper upgrade` writes it.
	resultFile = "/var/lib/muster/upgrade/result"
	// UpgradeTime is how long [ownerorder.ActionUpgradeKubernetes] may take. The time limit of muster-upgrade.service is shorter.
	UpgradeTime = time.Hour
)

// upgradeResult is the content of [resultFile].
type upgradeResult struct {
	// Order is the digest of the order.
	Order  string `json:"order"`
	Output string `json:"output,omitempty"`
	Error  string `json:"error,omitempty"`
}

// UpgradeKubernetes returns the action that brings this node to another release of Kubernetes. start runs the unit with the rights for it to its end, or
// waits for the end of one that runs: after an interruption of this process it goes on.
func UpgradeKubernetes(root string, start func(context.Context) error) Action {
	a := repeatable(func(ctx context.Context, _ Args) (string, error) {
		began := start(ctx)
		var rec record
		if err := read(filepath.Join(root, Journal), &rec); err != nil {
			return "", err
		}
		var r upgradeResult
		if err := read(filepath.Join(root, resultFile), &r); err != nil || r.Order != rec.Last.Order.signed().Digest() {
			if began == nil {
				began = errors.New("the upgrade has left no result; order it again")
			}
			return "", began
		}
		if r.Error != "" {
			return r.Output, errors.New(r.Error)
		}
		return r.Output, began
	}, ownerorder.ArgVersion, ownerorder.ArgList, ownerorder.ArgPart)
	a.Time = UpgradeTime
	return a
}

// BeginResult removes the result of an earlier upgrade.
func BeginResult(root string) error {
	if err := os.Remove(filepath.Join(root, resultFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// WriteResult writes the end of the order that runs on this machine.
func WriteResult(root, output string, failed error) error {
	var rec record
	if err := read(filepath.Join(root, Journal), &rec); err != nil {
		return err
	}
	r := upgradeResult{Order: rec.Last.Order.signed().Digest(), Output: output}
	if failed != nil {
		r.Error = failed.Error()
	}
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("result of the upgrade: %w", err)
	}
	return machine.WriteFile(filepath.Join(root, resultFile), b, 0o600, 0o700)
}
