package doctor

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/jointoken"
)

// Where tickets have tokens, doctor accepts theirs, and reports all others.
func TestOnlyTicketsTokensAreAllowed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	text, err := os.ReadFile(shared.Kubeconfig)
	try(t, err)
	kube, err := clusterapi.Connect(text)
	try(t, err, shared.Namespace(ctx, jointoken.Namespace))
	now := time.Now()
	at := func(d time.Duration) string { return now.Add(d).UTC().Format(time.RFC3339) }
	ticket := map[string]string{jointoken.GroupsKey: jointoken.Group, jointoken.ExpirationKey: at(jointoken.Life)}
	for name, tt := range map[string]struct {
		credential string
		data       map[string]string
		want       checkup.Level
		says       string
	}{
		"a ticket's":                              {jointoken.Credential, ticket, checkup.OK, "1, from tickets"},
		"one that is over":                        {jointoken.Credential, map[string]string{jointoken.GroupsKey: jointoken.Group, jointoken.ExpirationKey: at(-time.Minute)}, checkup.OK, "1, from tickets"},
		"a ticket's where there should be none":   {"certificate", ticket, checkup.Fail, "bootstrap-token-doctor"},
		"a ticket's where nobody asked for any":   {"", ticket, checkup.Fail, "bootstrap-token-doctor"},
		"one that lasts":                          {jointoken.Credential, map[string]string{jointoken.GroupsKey: jointoken.Group, jointoken.ExpirationKey: at(time.Hour)}, checkup.Fail, "bootstrap-token-doctor"},
		"one without an end":                      {jointoken.Credential, map[string]string{jointoken.GroupsKey: jointoken.Group}, checkup.Fail, "bootstrap-token-doctor"},
		"kubeadm's":                               {jointoken.Credential, map[string]string{jointoken.GroupsKey: "system:bootstrappers:kubeadm:default-node-token", jointoken.ExpirationKey: at(time.Minute)}, checkup.Fail, "bootstrap-token-doctor"},
		"one of kubeadm's group beside Muster's":  {jointoken.Credential, map[string]string{jointoken.GroupsKey: jointoken.Group + ",system:bootstrappers:kubeadm:default-node-token", jointoken.ExpirationKey: at(time.Minute)}, checkup.Fail, "bootstrap-token-doctor"},
		"one of no group, so of all bootstrapper": {jointoken.Credential, map[string]string{jointoken.ExpirationKey: at(time.Minute)}, checkup.Fail, "bootstrap-token-doctor"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: jointoken.Namespace, Name: "bootstrap-token-doctor"}, Type: corev1.SecretTypeBootstrapToken, StringData: tt.data}
			remove := created(s)(t)
			defer remove(t)
			d := &doctor{Config: Config{Now: time.Now}, kube: kube, release: &releasev1.Release{Config: map[string]any{}}}
			if tt.credential != "" {
				d.release.Config["joinservice"] = map[string]any{"joinCredential": tt.credential}
			}
			try(t, d.tokens(ctx))
			if f := d.Findings; len(f) != 1 || f[0].Check != CheckTokens || f[0].Level != tt.want || !strings.Contains(f[0].Detail, tt.says) {
				t.Errorf("%+v", f)
			}
		})
	}
}
