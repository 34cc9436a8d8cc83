package atls_test

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/atls/atlstest"
	"github.com/muster-k8s/muster/trust/attest"
)

// tabled gives the codes of the table in section 9 of the specification.
func tabled(t *testing.T) map[string]bool {
	t.Helper()
	page, err := os.ReadFile("../../docs/attested-tls.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## 9. ")
	section, _, _ = strings.Cut(section, "\n## ")
	codes := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\|").FindAllStringSubmatch(section, -1) {
		codes[m[1]] = true
	}
	if len(codes) < 10 {
		t.Fatalf("section 9 has the codes %v", codes)
	}
	return codes
}

// Whoever answers in a server's place, without a TPM, can refuse; but only as a Verdict can, and never as one that has proven itself.
func TestTheVerdictOfAStrangerIsKnownAsOne(t *testing.T) {
	w, codes := newWorld(t), tabled(t)
	for n, name := range attestv1.Reason_name {
		reason := attestv1.Reason(n)
		if name = strings.TrimPrefix(name, "REASON_"); name == "ACCEPTED" || name == "UNSPECIFIED" {
			continue
		}
		_, err := get(t.Context(), dial(t, w.clientConfig(t)), "https://"+atlstest.Stranger(t, &attestv1.Verdict{Reason: reason, RetryAfter: durationpb.New(time.Hour)}))
		var r *attest.Refusal
		switch {
		case !errors.As(err, &r) || !atls.Unproven(err):
			t.Errorf("%s: %v", name, err)
		case codes[name] && (r.Reason != reason || !r.Remote || !atls.UnprovenRefusal(err) || r.RetryAfter > 5*time.Second || !strings.Contains(err.Error(), "has not proven")):
			t.Errorf("%s: %v, want the stranger's refusal", name, err)
		case !codes[name] && (r.Reason != attestv1.Reason_REASON_FRAME_INVALID || r.Remote || atls.UnprovenRefusal(err)):
			t.Errorf("%s: %v, want FRAME_INVALID: no verdict says that", name, err)
		}
	}
}

// A server's refusal is its own word if the client knows its key: then the server has proven itself before it refuses. What no Verdict
// may carry, it calls a fault of its own.
func TestTheVerdictOfAKnownServerIsItsOwn(t *testing.T) {
	for refused, want := range map[attestv1.Reason]attestv1.Reason{
		attestv1.Reason_REASON_BANNED:       attestv1.Reason_REASON_BANNED,
		attestv1.Reason_REASON_NOT_READY:    attestv1.Reason_REASON_NOT_READY,
		attestv1.Reason_REASON_NOT_ENROLLED: attestv1.Reason_REASON_INTERNAL,
	} {
		w := newWorld(t)
		cc := w.clientConfig(t)
		good, bad := serve(t, w.serverConfig(t), whoami), w.serverConfig(t)
		bad.Appraiser = refusing{refused}
		refuses := serve(t, bad, whoami)
		_, err := get(t.Context(), dial(t, cc), refuses.url)
		if attest.ReasonOf(err) != want || !atls.UnprovenRefusal(err) {
			t.Errorf("by a server that was never met: %v", err)
		}
		if _, err := get(t.Context(), dial(t, cc), good.url); err != nil {
			t.Fatal(err)
		}
		_, err = get(t.Context(), dial(t, cc), refuses.url)
		var r *attest.Refusal
		if !errors.As(err, &r) || r.Reason != want || !r.Remote || atls.Unproven(err) {
			t.Errorf("%v, want %s by a proven server", err, attest.ReasonName(want))
		}
	}
}

// refusing accepts nobody.
type refusing struct{ reason attestv1.Reason }

func (r refusing) Appraise(context.Context, attest.Claims) (attest.Appraisal, error) {
	return attest.Appraisal{}, attest.Refuse(r.reason, "no")
}
