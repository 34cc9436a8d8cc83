package doctor

import (
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/internal/checkup"
)

// Without a quorum no API server is ready, and the remedy has to name the way out for lost machines, too.
func TestAnAPIServerThatDoesNotAnswerLeadsToTheRunbooks(t *testing.T) {
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: "https://127.0.0.1:1"}
	conf.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	conf.CurrentContext = "c"
	text, err := clientcmd.Write(*conf)
	try(t, err)
	d := newDoctor(Config{})
	d.kube, err = clusterapi.Connect(text)
	try(t, err)
	if d.apiServer(t.Context()) {
		t.Fatal("it answers")
	}
	for _, want := range []string{"muster recover", "docs/runbooks.md#lost-quorum", "consoles"} {
		if len(d.Findings) != 1 || d.Findings[0].Check != CheckAPI || d.Findings[0].Level != checkup.Fail || !strings.Contains(d.Findings[0].Remedy, want) {
			t.Errorf("%s is missing: %+v", want, d.Findings)
		}
	}
}
