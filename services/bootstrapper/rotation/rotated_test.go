package rotation

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// rotated is a key of API servers that is rotated.
type rotated struct {
	t       *testing.T
	servers []*apiServer
	key     clusterinfo.RotatedKey
	id      string
	// check is called before the first phase, which is the empty one, and after each phase of each API server. last means that all have reached it.
	check func(phase clusterinfo.RotationPhase, server int, last bool)
}

// The keys are rotated together, for in each phase of each key the API servers start anew, which takes seconds.
func TestAPIServersServeAtEachTimeOfARotation(t *testing.T) {
	t.Parallel()
	servers := newServers(t, 2)
	all := []*rotated{{key: clusterinfo.ClusterCA}, {key: clusterinfo.ServiceAccountKey}, {key: clusterinfo.EncryptionKey}, {key: clusterinfo.FrontProxyCA}}
	for i, begin := range []func(*rotated){
		clientsOfTheOldAuthorityReachEachAPIServerUntilItIsDropped,
		tokensAreAcceptedEverywhereUntilTheOldKeyIsDropped,
		secretsAreReadEverywhereAndTheOldKeyStaysUntilAllAreWrittenAgain,
		theFrontProxysAuthoritiesArePublishedBeforeOneIsUsed,
	} {
		all[i].t, all[i].servers = t, servers
		begin(all[i])
		all[i].check("", len(servers)-1, true)
	}
	for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse, clusterinfo.RotationFinish} {
		for i, a := range servers {
			for _, r := range all {
				a.restarted = nil
				r.id = a.must(r.key, phase, r.id).ID
				if !slices.Contains(a.restarted, "kube-apiserver") {
					t.Errorf("%s, %s: the API server is not restarted", r.key, phase)
				}
			}
			a.connect(t) // the authority may be another one
			a.restart(t)
			for _, r := range all {
				r.check(phase, i, i == len(servers)-1)
			}
		}
	}
}

// answers reports whether an API server and a client with this connection accept each other.
func answers(t *testing.T, a *apiServer, c *rest.Config) error {
	t.Helper()
	at := rest.CopyConfig(c)
	at.Host = a.config(t).Host
	client, err := kubernetes.NewForConfig(at)
	if err != nil {
		t.Fatal(err)
	}
	return client.CoreV1().RESTClient().Get().AbsPath("/api/v1/namespaces/default").Do(t.Context()).Error()
}

// Machines that are off, and pods that have read the authority at their start, trust the old one alone until the last phase. The others trust both, or the new
// one alone.
func clientsOfTheOldAuthorityReachEachAPIServerUntilItIsDropped(r *rotated) {
	t, old := r.t, r.servers[0].config(r.t)
	var next *rest.Config
	r.check = func(phase clusterinfo.RotationPhase, server int, _ bool) {
		all := func(clients ...*rest.Config) {
			t.Helper()
			for i, a := range r.servers {
				for n, c := range clients {
					if err := answers(t, a, c); err != nil {
						t.Errorf("%s: API server %d and client %d: %v", phase, i, n, err)
					}
				}
			}
		}
		a := r.servers[server]
		switch phase {
		case clusterinfo.RotationUse:
			if next = a.config(t); bytes.Equal(next.CAData, old.CAData) {
				t.Fatal("the API server's control plane does not sign with the new authority")
			}
			both := rest.CopyConfig(next) // a kubelet, with the certificate of either one
			both.CAData = slices.Concat(next.CAData, old.CAData)
			late := rest.CopyConfig(old)
			late.CAData = both.CAData
			all(old, both, late)
			for j, done := range r.servers[:server+1] {
				if err := answers(t, done, next); err != nil {
					t.Errorf("a client that trusts the new authority alone, and API server %d: %v", j, err)
				}
			}
		case clusterinfo.RotationFinish:
			all(next)
			if err := answers(t, a, old); err == nil {
				t.Errorf("API server %d accepts a client of the old authority in the end", server)
			}
			for _, c := range []struct{ ca, client *rest.Config }{{old, next}, {next, old}} {
				mixed := rest.CopyConfig(c.ca)
				mixed.CertData, mixed.KeyData = c.client.CertData, c.client.KeyData
				if err := answers(t, a, mixed); err == nil {
					t.Errorf("API server %d: the old authority counts in one direction", server)
				}
			}
		default:
			all(old)
		}
	}
}

func tokensAreAcceptedEverywhereUntilTheOldKeyIsDropped(r *rotated) {
	t := r.t
	all := func(when string, want bool, tokens ...string) {
		t.Helper()
		for i, a := range r.servers {
			for n, token := range tokens {
				if a.takes(t, token) != want {
					t.Errorf("%s: API server %d takes token %d: %v", when, i, n, !want)
				}
			}
		}
	}
	old := []string{r.servers[0].token(t)}
	var next []string
	r.check = func(phase clusterinfo.RotationPhase, server int, last bool) {
		switch phase {
		case clusterinfo.RotationUse:
			// After the first one, the switch is half done: one signs with the new key, the other with the old one.
			for i, a := range r.servers {
				if i <= server {
					next = append(next, a.token(t))
				} else {
					old = append(old, a.token(t))
				}
			}
			all("use", true, slices.Concat(old, next)...)
		case clusterinfo.RotationFinish:
			all("finish", true, next...)
			if last {
				all("finished", false, old...)
			}
		default:
			all(string(phase), true, old...)
		}
	}
}

func secretsAreReadEverywhereAndTheOldKeyStaysUntilAllAreWrittenAgain(r *rotated) {
	t := r.t
	var names []string
	write := func(a *apiServer, name string) {
		t.Helper()
		if _, err := a.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{"a": []byte(name)}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	all := func(when string) {
		t.Helper()
		for i, a := range r.servers {
			for _, name := range names {
				if s, err := a.client.CoreV1().Secrets("default").Get(t.Context(), name, metav1.GetOptions{}); err != nil || string(s.Data["a"]) != name {
					t.Errorf("%s: API server %d reads %s: %v", when, i, name, err)
				}
			}
		}
	}
	r.check = func(phase clusterinfo.RotationPhase, server int, last bool) {
		if phase != clusterinfo.RotationFinish {
			for j, a := range r.servers {
				write(a, fmt.Sprintf("secret-%s-%d-%d", phase, server, j))
			}
		}
		all(string(phase))
		if phase != clusterinfo.RotationUse || !last {
			return
		}
		_, err := r.servers[0].do(clusterinfo.EncryptionKey, clusterinfo.RotationFinish, r.id)
		if err == nil || !strings.Contains(err.Error(), "encrypted with another key") {
			t.Fatalf("finished with Secrets of the old key: %v", err)
		}
		all("refused")
		for _, name := range names { // as the owner's program writes them
			if _, err := r.servers[1].client.CoreV1().Secrets("default").Patch(t.Context(), name, types.MergePatchType, []byte("{}"), metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// An aggregated API server reads what API servers accept from a ConfigMap, to which they only add.
func theFrontProxysAuthoritiesArePublishedBeforeOneIsUsed(r *rotated) {
	t, old := r.t, r.servers[0].disk()[clusterinfo.FrontProxyCA].Uses
	published := func() (ids []string) {
		t.Helper()
		m, err := r.servers[0].client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "extension-apiserver-authentication", metav1.GetOptions{})
		if err != nil {
			return nil
		}
		list, err := certutil.ParseCertsPEM([]byte(m.Data["requestheader-client-ca-file"]))
		if err != nil {
			return nil
		}
		for _, ca := range list {
			ids = append(ids, sum(ca.Raw))
		}
		return ids
	}
	r.check = func(phase clusterinfo.RotationPhase, server int, last bool) {
		switch {
		case phase == clusterinfo.RotationAccept && server == 0:
			eventually(t, func(context.Context) error {
				if ids := published(); !slices.Contains(ids, r.id) || !slices.Contains(ids, old) {
					return fmt.Errorf("published: %v", ids)
				}
				return nil
			})
		case phase == clusterinfo.RotationFinish && last:
			if ids := published(); !slices.Contains(ids, r.id) {
				t.Errorf("published: %v", ids)
			}
		}
	}
}
