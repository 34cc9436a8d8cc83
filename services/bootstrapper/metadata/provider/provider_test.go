package provider

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// document is an operator's document without what a platform knows.
const document = "apiVersion: muster.dev/v1alpha1\nkind: MachineMetadata\nrole: worker\npool: gpu\n"

func captured(t *testing.T, name string, into any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "captured", name))
	if err == nil {
		err = json.Unmarshal(b, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// platform is a metadata service: answers by path, and the headers that a request must have.
type platform struct {
	need    http.Header       // of each request
	answers map[string]string // by path
	kind    map[string]string // content types; without one text/plain
	extra   http.Header       // of each answer
	token   string            // AWS: a PUT returns it, and all other requests need it
}

func (p *platform) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	maps.Copy(w.Header(), p.extra)
	if p.token != "" {
		if r.Method == http.MethodPut && r.URL.Path == "/latest/api/token" && r.Header.Get("X-Aws-Ec2-Metadata-Token-Ttl-Seconds") != "" {
			w.Header().Set("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", r.Header.Get("X-Aws-Ec2-Metadata-Token-Ttl-Seconds"))
			fmt.Fprint(w, p.token)
			return
		}
		if r.Header.Get("X-Aws-Ec2-Metadata-Token") != p.token {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
	}
	for k := range p.need {
		if r.Header.Get(k) != p.need.Get(k) {
			w.WriteHeader(http.StatusForbidden)
			return
		}
	}
	a, ok := p.answers[r.URL.Path]
	if !ok || r.Method != http.MethodGet {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	kind := "text/plain"
	if k := p.kind[r.URL.Path]; k != "" {
		kind = k
	}
	w.Header().Set("Content-Type", kind)
	fmt.Fprint(w, a)
}

// service starts a metadata service, and returns the machine that asks it.
func service(t *testing.T, name string, h http.Handler) Machine {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return Machine{Clouds: map[string]string{name: s.URL}, Timeout: 10 * time.Second}
}

func awsPlatform(t *testing.T) *platform {
	var values struct {
		Document json.RawMessage   `json:"instance-identity-document"`
		Values   map[string]string `json:"values"`
	}
	captured(t, "aws.json", &values)
	return &platform{token: "AQAEABEXAMPLE==", answers: map[string]string{
		"/latest/user-data":                          document,
		"/latest/dynamic/instance-identity/document": string(values.Document),
		"/latest/meta-data/local-hostname":           values.Values["local-hostname"],
		"/latest/meta-data/ipv6":                     values.Values["mac-ipv6-associations"],
		"/latest/meta-data/instance-id":              values.Values["instance-id"],
	}}
}

func gcpPlatform(t *testing.T) *platform {
	var tree struct {
		Instance struct {
			ID         json.Number `json:"id"`
			Name       string      `json:"name"`
			Hostname   string      `json:"hostname"`
			Zone       string      `json:"zone"`
			Type       string      `json:"machineType"`
			Interfaces []struct {
				IP string `json:"ip"`
			} `json:"networkInterfaces"`
		} `json:"instance"`
		Project struct {
			ID string `json:"projectId"`
		} `json:"project"`
	}
	captured(t, "gcp-recursive.json", &tree)
	const instance = "/computeMetadata/v1/instance/"
	return &platform{need: http.Header{"Metadata-Flavor": {"Google"}}, extra: http.Header{"Metadata-Flavor": {"Google"}, "Server": {"Metadata Server for VM"}}, answers: map[string]string{
		instance + "id": tree.Instance.ID.String(), instance + "name": tree.Instance.Name, instance + "hostname": tree.Instance.Hostname, instance + "zone": tree.Instance.Zone,
		instance + "machine-type": tree.Instance.Type, instance + "network-interfaces/0/ip": tree.Instance.Interfaces[0].IP,
		instance + "attributes/user-data": document, "/computeMetadata/v1/project/project-id": tree.Project.ID,
	}}
}

// azurePlatform adds to a captured answer what newer versions of the service have.
func azurePlatform(t *testing.T, file string) *platform {
	var doc map[string]map[string]any
	captured(t, file, &doc)
	c := doc["compute"]
	c["userData"] = base64.StdEncoding.EncodeToString([]byte(document))
	c["resourceId"] = fmt.Sprintf("/subscriptions/%s/resourceGroups/%s/providers/Microsoft.Compute/virtualMachines/%s", c["subscriptionId"], strings.ToUpper(c["resourceGroupName"].(string)), c["name"])
	c["zone"] = "1"
	b, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return &platform{need: http.Header{"Metadata": {"true"}}, answers: map[string]string{"/metadata/instance": string(b)}, kind: map[string]string{"/metadata/instance": "application/json; charset=utf-8"}}
}

func openStackPlatform(t *testing.T) *platform {
	b, err := os.ReadFile(filepath.Join("testdata", "captured", "openstack-meta_data-2018-08-27.json"))
	if err != nil {
		t.Fatal(err)
	}
	var ec2 map[string]any
	captured(t, "openstack-configdrive-ec2-meta-data.json", &ec2)
	return &platform{answers: map[string]string{
		"/openstack/latest/user_data": document, "/openstack/latest/meta_data.json": string(b),
		"/latest/meta-data/local-ipv4": ec2["local-ipv4"].(string), "/latest/meta-data/instance-type": ec2["instance-type"].(string),
	}, kind: map[string]string{"/openstack/latest/meta_data.json": "application/json"}}
}

// complete finds the metadata of one provider and completes them.
func complete(t *testing.T, m Machine, name string) (*metadata.Machine, error) {
	t.Helper()
	f, err := m.Find(t.Context(), []string{name})
	if err != nil {
		return nil, err
	}
	_, out, err := metadata.Complete(f.Document, f.Platform, f.Source)
	return out, err
}

func TestCloudsFillInWhatTheDocumentLeavesOut(t *testing.T) {
	for name, tt := range map[string]struct {
		service    *platform
		name       string
		addresses  string
		providerID string
		labels     map[string]string
	}{
		metadata.ProviderAWS: {
			awsPlatform(t), "ip-172-16-34-43", "10.0.7.10 2001:db8:8:4::2", "aws:///us-east-1f/i-1234567890abcdef0",
			map[string]string{metadata.LabelRegion: "us-east-1", metadata.LabelZone: "us-east-1f", metadata.LabelInstanceType: "m4.xlarge"},
		},
		metadata.ProviderGCP: {
			gcpPlatform(t), "test-gce-dev", "10.10.0.2", "gce://test-dev/us-east1-b/test-gce-dev",
			map[string]string{metadata.LabelRegion: "us-east1", metadata.LabelZone: "us-east1-b", metadata.LabelInstanceType: "f1-micro"},
		},
		metadata.ProviderAzure: {
			azurePlatform(t, "azure-imds-instance.json"), "my-hostname", "10.0.0.4",
			"azure:///subscriptions/12aad61c-6de4-4e53-a6c6-5aff52a83777/resourceGroups/srugroup1/providers/Microsoft.Compute/virtualMachines/my-hostname",
			map[string]string{metadata.LabelRegion: "eastus2", metadata.LabelZone: "eastus2-1", metadata.LabelInstanceType: "Standard_DS1_v2"},
		},
		metadata.ProviderOpenStack: { // the documentation's answer has no uuid
			openStackPlatform(t), "test", "10.0.151.35", "",
			map[string]string{metadata.LabelZone: "nova", metadata.LabelInstanceType: "m1.small"},
		},
	} {
		tt.labels[metadata.PoolLabel] = "gpu"
		m, err := complete(t, service(t, name, tt.service), name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var addresses []string
		for _, a := range m.Addresses {
			addresses = append(addresses, a.String())
		}
		if m.Name != tt.name || strings.Join(addresses, " ") != tt.addresses || m.ProviderID != tt.providerID || !maps.Equal(m.Labels, tt.labels) || m.Source.Provider != name || len(m.Source.Ignored) > 0 {
			t.Errorf("%s: %+v of %v, want %+v", name, m, m.Source, tt)
		}
	}
	if m, err := complete(t, service(t, metadata.ProviderAzure, azurePlatform(t, "azure-imds-instance-waagent.json")), metadata.ProviderAzure); err != nil || m.Name != "health" || m.Addresses[0].String() != "10.0.1.4" {
		t.Errorf("an older answer of Azure: %+v, %v", m, err)
	}
	// The answer above is from the description of the newest version, which leaves the instance's UUID out. nova's guide of config drives has it
	// (doc/source/user/config-drive.rst), and the service answers with it since version 2012-08-10.
	const path, uuid = "/openstack/latest/meta_data.json", "83679162-1378-4288-a2d4-70e13ec132aa"
	p, doc := openStackPlatform(t), map[string]any{}
	captured(t, "openstack-meta_data-2018-08-27.json", &doc)
	doc["uuid"] = uuid
	b, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	p.answers[path] = string(b)
	if m, err := complete(t, service(t, metadata.ProviderOpenStack, p), metadata.ProviderOpenStack); err != nil || m.ProviderID != "openstack:///"+uuid || m.Name != "test" {
		t.Errorf("with a UUID: %+v, %v", m, err)
	}
}

// Each service needs its header, and an answer is not taken from a server that does not know it.
func TestServicesAreAskedAsTheirProviderRequires(t *testing.T) {
	for name, p := range map[string]*platform{
		metadata.ProviderAWS: awsPlatform(t), metadata.ProviderGCP: gcpPlatform(t), metadata.ProviderAzure: azurePlatform(t, "azure-imds-instance.json"),
	} {
		if _, err := complete(t, service(t, name, p), name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		p.need = http.Header{"X-Other": {"1"}}
		if _, err := complete(t, service(t, name, p), name); err == nil || !strings.Contains(err.Error(), "403") {
			t.Errorf("%s, which needs another header: %v", name, err)
		}
	}
	p := gcpPlatform(t)
	p.extra = nil
	if _, err := complete(t, service(t, metadata.ProviderGCP, p), metadata.ProviderGCP); err == nil || !strings.Contains(err.Error(), "Metadata-Flavor") {
		t.Errorf("answers without Google's header: %v", err)
	}
}

// The addresses are link-local and by number (RFC 3927): no other machine than a neighbor can answer, and DNS has no part in it.
func TestCloudsAreAskedAtLinkLocalAddressesAlone(t *testing.T) {
	m := This(t.TempDir())
	if len(m.Clouds) != len(services) {
		t.Errorf("%v", m.Clouds)
	}
	for name, base := range m.Clouds {
		u, err := url.Parse(base)
		if err != nil {
			t.Fatal(err)
		}
		if a, err := netip.ParseAddr(u.Hostname()); err != nil || !a.IsLinkLocalUnicast() || u.Scheme != "http" || u.Path != "" {
			t.Errorf("%s is asked at %s", name, base)
		}
	}
}

func TestNoProxyTakesTheRequests(t *testing.T) {
	asked := false
	proxy := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer proxy.Close()
	t.Setenv("HTTP_PROXY", proxy.URL)
	t.Setenv("http_proxy", proxy.URL)
	c := newClient(linkLocal)
	defer c.close()
	if c.transport.Proxy != nil {
		t.Error("the client has a proxy")
	}
	m := service(t, metadata.ProviderOpenStack, openStackPlatform(t))
	if _, err := complete(t, m, metadata.ProviderOpenStack); err != nil || asked {
		t.Errorf("%v, proxy asked: %v", err, asked)
	}
}

func TestByDefaultACloudIsAskedOnlyIfTheFirmwareNamesIt(t *testing.T) {
	local := []string{metadata.ProviderMedium, metadata.ProviderCredential, metadata.ProviderNoCloud, metadata.ProviderConfigDrive}
	for name, tt := range map[string]struct {
		file, text string
		want       []string
	}{
		"no tables":       {"other", "x", nil},
		"another machine": {"sys_vendor", "QEMU", nil},
		"AWS":             {"sys_vendor", "Amazon EC2", []string{metadata.ProviderAWS}},
		"GCP":             {"product_name", "Google Compute Engine", []string{metadata.ProviderGCP}},
		"Azure":           {"chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", []string{metadata.ProviderAzure}},
		"OpenStack":       {"product_name", "OpenStack Nova", []string{metadata.ProviderOpenStack}},
		"a name like it":  {"product_name", "Google Compute Engine 2", nil},
	} {
		m := Machine{Sys: t.TempDir()}
		place(t, m.Sys, "class/dmi/id/"+tt.file, tt.text+"\n")
		l, d, c := m.Choose(metadata.Sources{})
		onDisks := []string{metadata.ProviderMedium, metadata.ProviderNoCloud, metadata.ProviderConfigDrive}
		if tt.want != nil {
			onDisks = nil
		}
		if !slices.Equal(l, local) || !slices.Equal(d, onDisks) || !slices.Equal(c, tt.want) {
			t.Errorf("%s: %v, %v and %v", name, l, d, c)
		}
		// What the image names is asked on every machine.
		l, d, c = m.Choose(metadata.Sources{Providers: []string{metadata.ProviderOpenStack, metadata.ProviderNoCloud, metadata.ProviderGCP}})
		if noCloud := []string{metadata.ProviderNoCloud}; !slices.Equal(l, noCloud) || !slices.Equal(d, noCloud) || !slices.Equal(c, []string{metadata.ProviderOpenStack, metadata.ProviderGCP}) {
			t.Errorf("%s, named by the image: %v, %v and %v", name, l, d, c)
		}
	}
}

func TestEachNameHasItsProvider(t *testing.T) {
	m := Machine{Sys: t.TempDir(), Dev: t.TempDir(), Clouds: map[string]string{}, Timeout: time.Second}
	for _, n := range metadata.ProviderNames() {
		_, err := m.Find(t.Context(), []string{n})
		if absent := errors.Is(err, ErrAbsent); absent == isCloud(n) || err == nil {
			t.Errorf("%s: %v", n, err)
		}
	}
	if _, err := m.Find(t.Context(), []string{"vmware"}); err == nil || errors.Is(err, ErrAbsent) {
		t.Errorf("an unknown provider: %v", err)
	}
}

func TestTheFirstSourceThatIsThereDecides(t *testing.T) {
	m := Machine{Sys: t.TempDir(), Dev: t.TempDir(), Credentials: t.TempDir(), Disks: true}
	names, _, _ := m.Choose(metadata.Sources{})
	if _, err := m.Find(t.Context(), names); !errors.Is(err, ErrAbsent) {
		t.Fatal(err)
	}
	volumeOf(t, m, "vdb", "nocloud-genisoimage.iso.gz")
	if f, err := m.Find(t.Context(), names); err != nil || f.Provider != metadata.ProviderNoCloud {
		t.Fatalf("%+v, %v", f, err)
	}
	place(t, m.Credentials, credentialName, document)
	if f, err := m.Find(t.Context(), names); err != nil || f.Provider != metadata.ProviderCredential {
		t.Fatalf("%+v, %v", f, err)
	}
	place(t, m.Credentials, credentialName, "hello")
	if f, err := m.Find(t.Context(), names); err == nil || errors.Is(err, ErrAbsent) || !strings.Contains(err.Error(), metadata.ProviderCredential) {
		t.Fatalf("a malformed source: %+v, %v", f, err)
	}
}

func TestDocumentsThatAreRefused(t *testing.T) {
	const network = "apiVersion: muster.dev/v1alpha1\nkind: MachineNetwork\n"
	for name, tt := range map[string]struct{ text, want string }{
		"nothing":              {"", "no document"},
		"a comment":            {"# nothing\n---\n", "no document"},
		"cloud-init's":         {"#cloud-config\nhostname: x\n", "want documents of kind"},
		"a script":             {"#!/bin/sh\necho kind: MachineMetadata\n", "want documents of kind"},
		"a web page":           {"<html><body>kind: MachineMetadata</body></html>", "want documents of kind"},
		"a list":               {"- kind: MachineMetadata\n", "YAML"},
		"another kind":         {document + "---\nkind: Pod\n", "Pod"},
		"two machines":         {document + "---\n" + document, "one document of kind MachineMetadata"},
		"two networks":         {document + "---\n" + network + "---\n" + network, "one document of kind MachineNetwork"},
		"a network alone":      {network, "no document"},
		"compressed":           {"\x1f\x8b\x08xxx", "compressed"},
		"more than its limit":  {document + strings.Repeat("#", MaxDocument), "longer"},
		"an alias":             {"x: &x 1\ny: *x\n" + document, "anchors"},
		"a list as kind":       {"kind: [MachineMetadata]\n", "want text"},
		"a comment behind ---": {document + "--- # two\n" + document, "one document of kind MachineMetadata"},
		"a tag behind ---":     {document + "--- !tag\nkind: Pod\n", "Pod"},
		"a document after ...": {document + "...\n---\nkind: Pod\n", "Pod"},
		"text after ...":       {document + "...\nkind: Pod\n", "YAML"},
		"several MIME parts":   {"Content-Type: multipart/mixed; boundary=x\n\n--x\n" + document, "YAML"},
	} {
		f := &Found{}
		if err := f.setDocuments([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
	for _, text := range []string{
		document, "---\n" + document, network + "--- \r\n" + document, "#cloud-config\n---\n" + document + "---\n" + network,
		document + "--- # the network\n" + network, document + "--- !network\n" + network, document + "...\n---\n" + network, document + "...\n", document + "---\n---\n" + network,
	} {
		f := &Found{}
		if err := f.setDocuments([]byte(text)); err != nil || string(f.Document) != document || strings.Contains(text, network) != strings.Contains(string(f.Network), "MachineNetwork") {
			t.Errorf("%q: %+v, %v", text, f, err)
		}
	}
}

func FuzzDocuments(f *testing.F) {
	f.Add([]byte(document))
	f.Add([]byte("---\nkind: MachineNetwork\n---\n" + document))
	f.Fuzz(func(t *testing.T, b []byte) {
		out := &Found{}
		if out.setDocuments(b) == nil && out.Document == nil {
			t.Error("no document and no error")
		}
	})
}

func place(t *testing.T, dir, name, content string) {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(content), 0o644)); err != nil {
		t.Fatal(err)
	}
}
