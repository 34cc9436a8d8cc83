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
	// RotationTime is how long [ownerorder.ActionRotateKey] may take. The time limit of muster-rotation.service is shorter.
	RotationTime = 30 * time.Minute
	// UpgradeTime is how long [ownerorder.ActionUpgradeKubernetes] may take. The time limit of muster-upgrade.service is shorter.
	UpgradeTime = time.Hour
)

// results have the end of the latest order that a unit has executed: a unit that fails has no text. Its program writes the file.
var results = map[ownerorder.Action]string{
	ownerorder.ActionUpgradeKubernetes: "/var/lib/muster/upgrade/result",
	ownerorder.ActionRotateKey:         "/var/lib/muster/rotation/result",
}

// unitResult is the content of such a file.
type unitResult struct {
	// Order is the digest of the order.
	Order  string `json:"order"`
	Output string `json:"output,omitempty"`
	Error  string `json:"error,omitempty"`
}

// UpgradeKubernetes returns the action that upgrades this node to another release of Kubernetes. start runs the privileged unit to its end, or waits
// for the end if the unit already runs, because it continues after an interruption of this process.
func UpgradeKubernetes(root string, start func(context.Context) error) Action {
	a := byUnit(root, ownerorder.ActionUpgradeKubernetes, start, ownerorder.ArgVersion, ownerorder.ArgList, ownerorder.ArgPart)
	a.Time = UpgradeTime
	return a
}

// RotateKey returns the action that does a phase of a key's rotation on this control plane; start as in [UpgradeKubernetes].
func RotateKey(root string, start func(context.Context) error) Action {
	a := byUnit(root, ownerorder.ActionRotateKey, start, ownerorder.ArgKey, ownerorder.ArgPhase, ownerorder.ArgID)
	a.Time = RotationTime
	return a
}

func byUnit(root string, action ownerorder.Action, start func(context.Context) error, args ...string) Action {
	return repeatable(func(ctx context.Context, _ Args) (string, error) {
		began := start(ctx)
		var rec record
		if err := read(filepath.Join(root, Journal), &rec); err != nil {
			return "", err
		}
		var r unitResult
		if err := read(filepath.Join(root, results[action]), &r); err != nil || r.Order != rec.Last.Order.signed().Digest() {
			if began == nil {
				began = fmt.Errorf("%s has left no result; order it again", action)
			}
			return "", began
		}
		if r.Error != "" {
			return r.Output, errors.New(r.Error)
		}
		return r.Output, began
	}, args...)
}

// BeginResult removes the result of an earlier order with the action.
func BeginResult(root string, action ownerorder.Action) error {
	if err := os.Remove(filepath.Join(root, results[action])); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// WriteResult writes the end of the order that runs on this machine.
func WriteResult(root string, action ownerorder.Action, output string, failed error) error {
	var rec record
	if err := read(filepath.Join(root, Journal), &rec); err != nil {
		return err
	}
	r := unitResult{Order: rec.Last.Order.signed().Digest(), Output: output}
	if failed != nil {
		r.Error = failed.Error()
	}
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("result of %s: %w", action, err)
	}
	return machine.WriteFile(filepath.Join(root, results[action]), b, 0o600, 0o700)
}
