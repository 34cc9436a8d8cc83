package ownertest

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
)

// ServerClock has the API server that the folder names show another time when it is asked for its time.
func (o *Owned) ServerClock(t *testing.T, ahead time.Duration) {
	t.Helper()
	asks := func(r *http.Request) bool {
		return r.Method == http.MethodPost && r.URL.Path == "/api/v1/namespaces/default/configmaps" && r.URL.Query().Has("dryRun")
	}
	o.proxied(t, func(r *http.Request) {
		if asks(r) {
			r.Header.Set("Accept", "application/json")
			r.Header.Del("Accept-Encoding")
		}
	}, func(r *http.Response) error {
		if !asks(r.Request) || r.StatusCode != http.StatusCreated {
			return nil
		}
		m := &corev1.ConfigMap{}
		if err := json.NewDecoder(r.Body).Decode(m); err != nil {
			return err
		}
		m.CreationTimestamp = metav1.NewTime(time.Now().Add(ahead))
		text, err := json.Marshal(m)
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
		r.Header.Set("Content-Length", strconv.Itoa(len(text)))
		return err
	})
}

// proxied puts a proxy before the API server that the folder names, which changes requests and answers; answer may be nil.
func (o *Owned) proxied(t *testing.T, change func(*http.Request), answer func(*http.Response) error) {
	t.Helper()
	transport, err := rest.TransportFor(Shared.Admin)
	if err != nil {
		t.Fatal(err)
	}
	to, err := url.Parse(Shared.Admin.Host)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewTLSServer(&httputil.ReverseProxy{Transport: transport, ModifyResponse: answer, Rewrite: func(p *httputil.ProxyRequest) {
		p.SetURL(to)
		change(p.Out)
	}})
	t.Cleanup(server.Close)
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})}
	conf.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	conf.CurrentContext = "c"
	text, err := clientcmd.Write(*conf)
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Write(ownerdir.AdminConf, text); err != nil {
		t.Fatal(err)
	}
}
