package renewal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/retry"
)

// Upgrading is the cluster as an upgrade of this control plane uses it.
type Upgrading struct{ c *cluster }

// ConnectUpgrade returns the cluster with the rights of this control plane's admin.conf, like [Connect].
func ConnectUpgrade(root, node string, log *slog.Logger) (Upgrading, error) {
	c, err := connect(root, node, nil, log)
	if err != nil {
		return Upgrading{}, err
	}
	c.holder = "upgrade/" + node // the renewal on this machine is another holder
	return Upgrading{c}, nil
}

// Exclusively runs do while this control plane holds the lease for joining control planes (J8).
func (u Upgrading) Exclusively(ctx context.Context, do func(context.Context) error) error {
	return u.c.Exclusively(ctx, do)
}

// Unhealthy lists the static pods of control planes that are not Ready.
func (u Upgrading) Unhealthy(ctx context.Context) ([]string, error) { return u.c.Unhealthy(ctx) }

// API returns the client.
func (u Upgrading) API() kubernetes.Interface { return u.c.Interface }

// Close frees idle connections.
func (u Upgrading) Close() { u.c.Close() }

// Pause takes the lock of this machine's renewal, which neither renews nor restarts a static pod until the returned function is called. It waits for
// a renewal in progress.
func Pause(ctx context.Context, root string, every time.Duration) (func(), error) {
	unlock, _, err := pause(ctx, plane{root: root}, every, false)
	return unlock, err
}

// pause is [Pause]. With over, it also takes the lock if there is an unfinished renewal, and reports that.
func pause(ctx context.Context, p plane, every time.Duration, over bool) (unlock func(), pending bool, err error) {
	for {
		unlock, err := p.exclusive()
		if err == nil && (over || !p.pending()) {
			return unlock, p.pending(), nil
		}
		switch {
		case err == nil:
			unlock()
			err = errors.New("renewed certificates are being put in place")
		case !errors.Is(err, unix.EWOULDBLOCK):
			return nil, false, err
		}
		if werr := retry.Wait(ctx, every); werr != nil {
			return nil, false, errors.Join(errors.New("waiting for the renewal of this control plane's certificates"), werr, err)
		}
	}
}

// NoteOf returns the value of [Annotation] in a static pod's manifest; empty if it has none.
func NoteOf(root, component string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, manifests, component+".yaml"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	var pod metav1.PartialObjectMetadata
	if err := yaml.Unmarshal(text, &pod); err != nil {
		return "", fmt.Errorf("%s: %w", component, err)
	}
	return pod.Annotations[Annotation], nil
}
