package problem_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/apiserver"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestCommonErrorsHaveRemedies(t *testing.T) {
	_, missing := os.ReadFile(filepath.Join(t.TempDir(), "nosuch.json"))
	if p := problem.Explain(fmt.Errorf("read: %w", missing)); !strings.Contains(p.Remedy, "Check the name") {
		t.Errorf("%+v", p)
	}
	busy := fmt.Errorf("owner's folder muster-prod is %w by muster rotate", ownerdir.ErrInUse)
	if p := problem.Explain(busy); !strings.Contains(p.Remedy, "Ctrl-C") || !problem.Unreachable(busy) {
		t.Errorf("%+v", p)
	}
	if p := problem.Explain(fmt.Errorf("read: %w", &apiserver.NodeError{Host: "192.0.2.11:6443", Node: "system:node:cp1"})); !strings.Contains(p.Message, "kubelet") || !strings.Contains(p.Remedy, "admin.conf") {
		t.Errorf("%+v", p)
	}
	if p := problem.Explain(errors.New("proto:\u00a0(line 1:2)")); p.Message != "proto: (line 1:2)" {
		t.Errorf("%+v", p)
	}
}

// An API server that is out of reach is no machine on port 9000.
func TestAnAPIServerOutOfReachIsNamed(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	url := server.URL
	server.Close()
	ca := attesttest.NewCA(t)
	o := ownertest.Own(t, &ownertest.FirstMachine{Addr: "192.0.2.1:9000"}, "192.0.2.1:6443", attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}))
	conf := func(text string) {
		t.Helper()
		if err := o.Write(ownerdir.AdminConf, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	conf("apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters: [{name: a, cluster: {server: '" + url + "', insecure-skip-tls-verify: true}}]\ncontexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {}}]\n")
	kube, err := access.Connect(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err = kube.Ready(ctx)
	if p := problem.Explain(err); !strings.Contains(p.Remedy, "load balancer") || strings.Contains(p.Remedy, "9000") || !problem.Unreachable(err) {
		t.Errorf("%+v", p)
	}
	conf("apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters: [{name: a, cluster: {server: '" + url + "'}}]\ncontexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {client-certificate-data: YQ==, client-key-data: YQ==}}]\n")
	_, err = access.Connect(o.Dir)
	if p := problem.Explain(err); !strings.Contains(p.Message, o.File(ownerdir.AdminConf)) || !strings.Contains(p.Remedy, "Restore the file") {
		t.Errorf("a damaged admin.conf: %+v", p)
	}
}
