package provider

import (
	"io"
	"net/http/httptest"
	"strings"
	"testing"

	gcpmetadata "cloud.google.com/go/compute/metadata"
	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// The providers' own SDKs read the services of these tests, and the same values: so the services answer as the providers document it, and not only as this
// package expects it. The SDKs of Azure and OpenStack for Go have no client of the metadata service. Kubernetes' cloud providers for the two have one each, in
// modules with too many dependencies for a test (sigs.k8s.io/cloud-provider-azure, k8s.io/cloud-provider-openstack).

func TestAWSsOwnClientReadsTheSameFromTheSameService(t *testing.T) {
	s := httptest.NewServer(awsPlatform(t))
	defer s.Close()
	c := imds.New(imds.Options{Endpoint: s.URL})
	doc, err := c.GetInstanceIdentityDocument(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	data, err := c.GetUserData(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Content.Close()
	text, err := io.ReadAll(data.Content)
	if err != nil {
		t.Fatal(err)
	}
	host, err := c.GetMetadata(t.Context(), &imds.GetMetadataInput{Path: "local-hostname"})
	if err != nil {
		t.Fatal(err)
	}
	defer host.Content.Close()
	name, err := io.ReadAll(host.Content)
	if err != nil {
		t.Fatal(err)
	}
	m := Machine{Clouds: map[string]string{metadata.ProviderAWS: s.URL}, Timeout: Timeout}
	f, err := m.Find(t.Context(), []string{metadata.ProviderAWS})
	if err != nil {
		t.Fatal(err)
	}
	if string(f.Document) != string(text) || f.Hostname != string(name) || f.Region != doc.Region || f.Zone != doc.AvailabilityZone || f.InstanceType != doc.InstanceType || f.Addresses[0] != doc.PrivateIP || !strings.HasSuffix(f.ProviderID, "/"+doc.InstanceID) {
		t.Errorf("%+v, and AWS's client %+v, %q, %q", f, doc, text, name)
	}
}

func TestGooglesOwnClientReadsTheSameFromTheSameService(t *testing.T) {
	s := httptest.NewServer(gcpPlatform(t))
	defer s.Close()
	t.Setenv("GCE_METADATA_HOST", strings.TrimPrefix(s.URL, "http://"))
	c := gcpmetadata.NewClient(s.Client())
	read := func(value string, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
	m := Machine{Clouds: map[string]string{metadata.ProviderGCP: s.URL}, Timeout: Timeout}
	f, err := m.Find(t.Context(), []string{metadata.ProviderGCP})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	project, zone, name := read(c.ProjectIDWithContext(ctx)), read(c.ZoneWithContext(ctx)), read(c.InstanceNameWithContext(ctx))
	for what, pair := range map[string][2]string{
		"user data": {string(f.Document), read(c.InstanceAttributeValueWithContext(ctx, "user-data"))}, "address": {f.Addresses[0], read(c.InternalIPWithContext(ctx))},
		"zone": {f.Zone, zone}, "name": {f.Hostname, name}, "provider ID": {f.ProviderID, "gce://" + project + "/" + zone + "/" + name},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: %q, and Google's client %q", what, pair[0], pair[1])
		}
	}
}
