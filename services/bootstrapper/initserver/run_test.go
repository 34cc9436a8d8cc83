package initserver

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/muster-k8s/muster/trust/keys"
)

// K3: an ended init is kept for an hour, and must not hold the cluster's root secret that long.
func TestAnEndedInitHoldsNoSecret(t *testing.T) {
	raw, salt := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	root, err := keys.ParseRoot(keys.FirstVersion, raw, salt)
	if err != nil {
		t.Fatal(err)
	}
	o := &initOrder{root: root, rawRoot: raw, rawSalt: salt}
	newInitRun(o, slog.New(slog.DiscardHandler), nil).end(nil, nil)
	if o.root != nil || o.rawRoot != nil || o.rawSalt != nil {
		t.Error("secrets are left in the order")
	}
	if !bytes.Equal(raw, make([]byte, 32)) || !bytes.Equal(salt, make([]byte, 32)) {
		t.Error("secrets are left in memory")
	}
}
