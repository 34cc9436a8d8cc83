package access

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
)

func TestAnAPIServerThatDoesNotAnswerIsNamedWithWhatToDo(t *testing.T) {
	o := ownertest.NewLost(t)
	kube, err := Connect(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = kube.Status(t.Context(), slog.New(slog.DiscardHandler))
	if p := problem.Explain(UnreachableError(kube.Server(), err)); p.Reason != "API_UNAVAILABLE" || !strings.Contains(p.Message, "https://127.0.0.1:1") || !strings.Contains(p.Remedy, "muster recover") || !strings.Contains(p.Remedy, "docs/runbooks.md#lost-quorum") {
		t.Errorf("%+v", p)
	}
	if p := problem.Explain(UnreachableError(kube.Server(), errors.New("it answered with nonsense"))); p.Reason != "" || !strings.Contains(p.Message, "https://127.0.0.1:1: it answered with nonsense") {
		t.Errorf("another error: %+v", p)
	}
}
