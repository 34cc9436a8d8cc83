package atls_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// newer is an attester of a later version: its evidence has a field that this version does not
// know. It records the digest of the evidence that it sends.
type newer struct {
	attest.Attester
	sent *[]string
}

func (n newer) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	ev, err := n.Attester.Attest(ctx, f, b)
	if err != nil {
		return nil, err
	}
	ev.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 99, protowire.BytesType), "unknown"))
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(ev)
	sum := sha256.Sum256(raw)
	*n.sent = append(*n.sent, hex.EncodeToString(sum[:]))
	return ev, err
}

func TestTheDigestOfEvidenceIsOfTheBytesThatCame(t *testing.T) {
	w := newFixture(t)
	s := serve(t, w.serverConfig(t), func(rw http.ResponseWriter, r *http.Request) {
		p, _ := attest.PeerFrom(r.Context())
		digest := p.Claims().EvidenceDigest()
		_, _ = io.WriteString(rw, hex.EncodeToString(digest[:]))
	})
	var sent []string
	for range 2 { // one session each
		cc := w.clientConfig(t)
		cc.Attester = newer{cc.Attester, &sent}
		got, err := get(t.Context(), dial(t, cc), s.url)
		if err != nil || got != sent[len(sent)-1] {
			t.Errorf("the digest is %s, %v; want %s", got, err, sent)
		}
	}
	if len(sent) != 2 || sent[0] == sent[1] {
		t.Errorf("digests %s", sent)
	}
}
