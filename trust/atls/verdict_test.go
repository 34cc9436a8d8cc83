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

// listed returns the codes that section 9 of the specification lists.
func listed(t *testing.T) map[string]bool {
	t.Helper()
	page, err := os.ReadFile("../../docs/attested-tls.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## 9. ")
	section, _, _ = strings.Cut(section, "\n## ")
	_, list, _ := strings.Cut(section, "\n**Codes** ")
	list, _, _ = strings.Cut(list, "\n")
	codes := map[string]bool{}
	for _, m := range regexp.MustCompile("`([A-Z_]+)`").FindAllStringSubmatch(list, -1) {
		codes[m[1]] = true
	}
	if len(codes) < 10 {
		t.Fatalf("section 9 has the codes %v", codes)
	}
	return codes
}

// A network attacker that answers in a server's place, without a TPM, can refuse, but only with the
// reasons of a Verdict, and never as a server that has proven its identity.
func TestTheVerdictOfAStrangerIsKnownAsOne(t *testing.T) {
	w, codes := newFixture(t), listed(t)
	for n, name := range attestv1.Reason_name {
		reason := attestv1.Reason(n)
		if name = strings.TrimPrefix(name, "REASON_"); name == "ACCEPTED" || name == "UNSPECIFIED" {
			continue
		}
		_, err := get(t.Context(), dial(t, w.clientConfig(t)), "https://"+atlstest.UnattestedServer(t, &attestv1.Verdict{Reason: reason, RetryAfter: durationpb.New(time.Hour)}))
		var r *attest.Refusal
		switch {
		case !errors.As(err, &r) || !atls.Unproven(err):
			t.Errorf("%s: %v", name, err)
		case codes[name] && (r.Reason != reason || !r.Remote || !atls.UnprovenRefusal(err) || r.RetryAfter > 5*time.Second || !strings.Contains(err.Error(), "has not proven")):
			t.Errorf("%s: %v, want the unattested server's refusal", name, err)
		case !codes[name] && (r.Reason != attestv1.Reason_REASON_FRAME_INVALID || r.Remote || atls.UnprovenRefusal(err)):
			t.Errorf("%s: %v, want FRAME_INVALID: no verdict says that", name, err)
		}
	}
}

// A client that knows a server's key can attribute the server's refusal to it: the server has
// proven its identity before it refuses. A reason that no Verdict may carry is sent as the server's
// own fault.
func TestTheVerdictOfAKnownServerIsItsOwn(t *testing.T) {
	for refused, want := range map[attestv1.Reason]attestv1.Reason{
		attestv1.Reason_REASON_BANNED:       attestv1.Reason_REASON_BANNED,
		attestv1.Reason_REASON_NOT_READY:    attestv1.Reason_REASON_NOT_READY,
		attestv1.Reason_REASON_NOT_ENROLLED: attestv1.Reason_REASON_INTERNAL,
	} {
		w := newFixture(t)
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

// refusing accepts no peer.
type refusing struct{ reason attestv1.Reason }

func (r refusing) Appraise(context.Context, attest.Claims) (attest.Appraisal, error) {
	return attest.Appraisal{}, attest.Refuse(r.reason, "no")
}
