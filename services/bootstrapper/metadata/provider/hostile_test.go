package provider

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// honest returns the service of a provider, and the path of its documents.
func honest(t *testing.T, name string) (*platform, string) {
	switch name {
	case metadata.ProviderAWS:
		return awsPlatform(t), "/latest/user-data"
	case metadata.ProviderGCP:
		return gcpPlatform(t), "/computeMetadata/v1/instance/attributes/user-data"
	case metadata.ProviderAzure:
		return azurePlatform(t, "azure-imds-instance.json"), "/metadata/instance"
	case metadata.ProviderOpenStack:
		return openStackPlatform(t), "/openstack/latest/user_data"
	}
	t.Fatal(name)
	return nil, ""
}

// eachCloud runs a test with the service of each cloud.
func eachCloud(t *testing.T, check func(t *testing.T, name, path string, p *platform)) {
	t.Helper()
	for name := range services {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, path := honest(t, name)
			if _, err := complete(t, service(t, name, p), name); err != nil {
				t.Fatalf("the honest service: %v", err)
			}
			check(t, name, path, p)
		})
	}
}

func TestHostileServices(t *testing.T) {
	for attack, tt := range map[string]struct {
		answer func(w http.ResponseWriter, r *http.Request)
		want   string
	}{
		"redirects to another address": {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/other", http.StatusFound) }, "302"},
		"redirects for good": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", "http://192.0.2.1/")
			w.WriteHeader(http.StatusPermanentRedirect)
		}, "308"},
		"sends 1 MiB": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(strings.Repeat("#", 1<<20)))
		}, "longer"},
		"sends a web page": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			fmt.Fprint(w, document)
		}, "web page"},
		"sends a web page as text": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			fmt.Fprint(w, "<!DOCTYPE html><html><body>Log in</body></html>")
		}, ""},
		"sends compressed data": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write([]byte("\x1f\x8b\x08\x00\x00"))
		}, ""},
		"fails": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }, "500"},
		"sends a large header": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Large", strings.Repeat("x", 2*maxHeader))
		}, "header"},
		"hangs up":        {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF"},
		"has no document": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }, ""},
		"sends nothing":   {func(http.ResponseWriter, *http.Request) {}, ""},
		"promises more and stops": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "9999")
			fmt.Fprint(w, document)
		}, ""},
	} {
		t.Run(attack, func(t *testing.T) {
			t.Parallel()
			eachCloud(t, func(t *testing.T, name, path string, p *platform) {
				m := service(t, name, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path != path {
						p.ServeHTTP(w, r)
						return
					}
					if p.extra != nil {
						w.Header()["Metadata-Flavor"] = p.extra["Metadata-Flavor"]
					}
					tt.answer(w, r)
				}))
				if got, err := complete(t, m, name); err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("%+v, %v, want an error with %q", got, err, tt.want)
				}
			})
		})
	}
}

// A service that answers slowly, or one byte after another, holds its machine for the provider's time and no longer.
func TestASlowServiceCostsABoundedTime(t *testing.T) {
	for attack, trickle := range map[string]bool{"says nothing": false, "sends one byte after another": true} {
		t.Run(attack, func(t *testing.T) {
			t.Parallel()
			eachCloud(t, func(t *testing.T, name, path string, p *platform) {
				m := service(t, name, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path != path {
						p.ServeHTTP(w, r)
						return
					}
					if p.extra != nil {
						w.Header()["Metadata-Flavor"] = p.extra["Metadata-Flavor"]
					}
					tick := time.NewTicker(time.Millisecond)
					defer tick.Stop()
					for {
						select {
						case <-r.Context().Done():
							return
						case <-tick.C:
							if trickle {
								fmt.Fprint(w, "#")
								_ = http.NewResponseController(w).Flush()
							}
						}
					}
				}))
				m.Timeout = 200 * time.Millisecond
				start := time.Now()
				_, err := complete(t, m, name)
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v", err)
				}
				if took := time.Since(start); took > 5*time.Second {
					t.Errorf("it took %s", took)
				}
			})
		})
	}
}

// Each wrong answer is an error or is left out, and never becomes a name, an address or a label.
func TestFactsOfTheWrongFormAreNotTaken(t *testing.T) {
	const aws = "/latest/dynamic/instance-identity/document"
	for name, tt := range map[string]struct{ provider, path, answer, want string }{
		"a document that is a list":      {metadata.ProviderAWS, aws, "[]", "JSON"},
		"a number as a region":           {metadata.ProviderAWS, aws, `{"region": 7}`, "JSON"},
		"an object as an address":        {metadata.ProviderAWS, aws, `{"privateIp": {"a": 1}}`, "JSON"},
		"a document that is cut":         {metadata.ProviderAWS, aws, `{"region": "x"`, "JSON"},
		"no document":                    {metadata.ProviderAWS, aws, ``, "JSON"},
		"a host name of two lines":       {metadata.ProviderAWS, "/latest/meta-data/local-hostname", "a\nb", "line of text"},
		"a host name with a NUL":         {metadata.ProviderAWS, "/latest/meta-data/local-hostname", "a\x00b", "line of text"},
		"a long host name":               {metadata.ProviderAWS, "/latest/meta-data/local-hostname", strings.Repeat("a", maxValue+1), "longer"},
		"a host name that is no label":   {metadata.ProviderAWS, "/latest/meta-data/local-hostname", "../../etc", "name:"},
		"an empty host name":             {metadata.ProviderAWS, "/latest/meta-data/local-hostname", "", "name:"},
		"loopback as an address":         {metadata.ProviderGCP, "/computeMetadata/v1/instance/network-interfaces/0/ip", "127.0.0.1", "addresses:"},
		"a name as an address":           {metadata.ProviderGCP, "/computeMetadata/v1/instance/network-interfaces/0/ip", "localhost", "addresses:"},
		"the service's own address":      {metadata.ProviderGCP, "/computeMetadata/v1/instance/network-interfaces/0/ip", "169.254.169.254", "addresses:"},
		"no address":                     {metadata.ProviderGCP, "/computeMetadata/v1/instance/network-interfaces/0/ip", "", "addresses:"},
		"user data that is no base64":    {metadata.ProviderAzure, "/metadata/instance", `{"compute": {"userData": "%%%"}}`, "base64"},
		"user data of the wrong type":    {metadata.ProviderAzure, "/metadata/instance", `{"compute": {"userData": 5}}`, "JSON"},
		"no user data":                   {metadata.ProviderAzure, "/metadata/instance", `{"compute": {}}`, "no user data"},
		"interfaces of the wrong type":   {metadata.ProviderAzure, "/metadata/instance", `{"network": {"interface": {}}}`, "JSON"},
		"metadata that are no object":    {metadata.ProviderOpenStack, "/openstack/latest/meta_data.json", `"x"`, "meta_data.json"},
		"a zone of the wrong type":       {metadata.ProviderOpenStack, "/openstack/latest/meta_data.json", `{"availability_zone": []}`, "meta_data.json"},
		"a document that names a source": {metadata.ProviderOpenStack, "/openstack/latest/user_data", document + "source: {provider: medium, from: x}\n", "source:"},
		"a document with a token":        {metadata.ProviderOpenStack, "/openstack/latest/user_data", document + "token: x\n", "token"},
	} {
		p, _ := honest(t, tt.provider)
		if _, err := complete(t, service(t, tt.provider, p), tt.provider); err != nil {
			t.Errorf("%s, corrected: %v", name, err)
		}
		p.answers[tt.path] = tt.answer
		if m, err := complete(t, service(t, tt.provider, p), tt.provider); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %+v, %v, want an error with %q", name, m, err, tt.want)
		}
	}
}

// A malformed fact that the machine can do without is left out, and named.
func TestMalformedFactsAreNamedAndLeftOut(t *testing.T) {
	for field, tt := range map[string]struct{ provider, path, answer string }{
		metadata.LabelZone:         {metadata.ProviderOpenStack, "/openstack/latest/meta_data.json", `{"hostname": "a", "availability_zone": "a b"}`},
		metadata.LabelInstanceType: {metadata.ProviderGCP, "/computeMetadata/v1/instance/machine-type", `projects/1/machineTypes/a"b`},
		"providerID":               {metadata.ProviderGCP, "/computeMetadata/v1/project/project-id", `x y`},
	} {
		p, _ := honest(t, tt.provider)
		p.answers[tt.path] = tt.answer
		m, err := complete(t, service(t, tt.provider, p), tt.provider)
		if err != nil {
			t.Errorf("%s: %v", field, err)
			continue
		}
		if len(m.Source.Ignored) != 1 || m.Source.Ignored[0] != field || m.Labels[field] != "" || field == "providerID" && m.ProviderID != "" {
			t.Errorf("%s: %+v, %+v", field, m, m.Source)
		}
	}
}

func TestTheLargestDocumentIsTaken(t *testing.T) {
	for name := range services {
		p, path := honest(t, name)
		text := document + "#" + strings.Repeat("x", MaxDocument-len(document)-1)
		if name == metadata.ProviderAzure {
			p.answers[path] = strings.Replace(p.answers[path], base64.StdEncoding.EncodeToString([]byte(document)), base64.StdEncoding.EncodeToString([]byte(text)), 1)
		} else {
			p.answers[path] = text
		}
		if _, err := complete(t, service(t, name, p), name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAWSWithoutATokenIsNotAsked(t *testing.T) {
	for name, token := range map[string]string{"an empty token": "", "a token of two lines": "a\nb", "a long token": strings.Repeat("a", maxValue+1)} {
		p := awsPlatform(t)
		asked := false
		m := service(t, metadata.ProviderAWS, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPut {
				fmt.Fprint(w, token)
				return
			}
			asked = true
			p.ServeHTTP(w, r)
		}))
		if _, err := complete(t, m, metadata.ProviderAWS); err == nil || asked {
			t.Errorf("%s: %v, asked: %v", name, err, asked)
		}
	}
}
