package etcdencryption_test

import (
	"bytes"
	"encoding/base64"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
	apiserverv1 "k8s.io/apiserver/pkg/apis/apiserver/v1"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheConfigurationIsOneOfTheAPIServer(t *testing.T) {
	key := keys.NewRoot([32]byte{1}, [32]byte{2}).EtcdEncryption()
	var c apiserverv1.EncryptionConfiguration
	if err := yaml.UnmarshalStrict(etcdencryption.Config(key), &c); err != nil {
		t.Fatal(err)
	}
	if len(c.Resources) != 1 || len(c.Resources[0].Resources) != 1 || c.Resources[0].Resources[0] != "secrets" {
		t.Fatalf("it encrypts %+v", c.Resources)
	}
	providers := c.Resources[0].Providers
	if len(providers) != 1 || providers[0].Secretbox == nil || len(providers[0].Secretbox.Keys) != 1 {
		t.Fatalf("providers: %d; a second one would let a Secret lie in etcd in the clear", len(providers))
	}
	got, err := base64.StdEncoding.DecodeString(providers[0].Secretbox.Keys[0].Secret)
	if err != nil || !bytes.Equal(got, key.Expose()) {
		t.Errorf("its key is not the derived one: %v", err)
	}
}

// etcd's pod mounts the folder pki/etcd: a process with the data must not have the key.
func TestEtcdDoesNotSeeTheKey(t *testing.T) {
	if dir := filepath.Dir(etcdencryption.File); dir != "/etc/kubernetes/pki" || filepath.Join(dir, etcdencryption.Name) != etcdencryption.File {
		t.Errorf("it lies in %s", dir)
	}
}
