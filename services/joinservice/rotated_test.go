package joinservice

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/client-go/rest"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// elliptic public keys
const (
	newPublic   = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEFcj9vGSJtSdC69SACXutjPPTqXVC\nj+DPac7QbLwTOBhNU9JxMlKxxmxj2Hu11L42tzfUJ1nnjSt1bO80QE+xQw==\n-----END PUBLIC KEY-----\n"
	otherPublic = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEWvL9E2VuaKZFx4UtHZcDqUYh5ixK\ngRX49XcrgYZ1dKjdx7rZ/x3BNi85FCsug7lp6aP5bcmaCoCNuQ8jaiSkgw==\n-----END PUBLIC KEY-----\n"
)

// Who can write the cluster's description must not have a control plane that reboots accept a key.
func TestOnlyWhatAControlPlaneAcceptsItselfIsAdded(t *testing.T) {
	block, _ := pem.Decode([]byte(newPublic))
	sum := sha256.Sum256(block.Bytes)
	id := hex.EncodeToString(sum[:])
	const own = "old\n"
	for name, tt := range map[string]struct {
		phase            clusterinfo.RotationPhase
		has, public      string
		wantFile, wantIt string
	}{
		"not accepted here yet":              {clusterinfo.RotationAccept, own, newPublic, own, newPublic},
		"accepted here":                      {clusterinfo.RotationUse, own + newPublic, newPublic, own + newPublic, newPublic},
		"finished, and not here yet":         {clusterinfo.RotationFinish, newPublic + own, newPublic, newPublic, newPublic + own},
		"finished, and not accepted here":    {clusterinfo.RotationFinish, own, newPublic, own, newPublic},
		"another key's":                      {clusterinfo.RotationAccept, own, otherPublic, own, ""},
		"another key's, accepted here":       {clusterinfo.RotationFinish, own + otherPublic, otherPublic, own + otherPublic, ""},
		"another key's, in the last phase":   {clusterinfo.RotationFinish, own, otherPublic, own, ""},
		"a key that has none, or not yet":    {clusterinfo.RotationAccept, own, "", own, ""},
		"the genuine one and another behind": {clusterinfo.RotationAccept, own, newPublic + otherPublic, own, ""},
	} {
		in := []*joinv1.ControlPlaneFile{{Path: "ca.crt", Content: []byte("ca")}, {Path: "sa.pub", Content: []byte(tt.has)}}
		files, r := withRotation(in, &clusterinfo.Rotation{Key: clusterinfo.ServiceAccountKey, Phase: tt.phase, ID: id, Public: tt.public})
		if len(files) != 2 || string(files[0].GetContent()) != "ca" || string(files[1].GetContent()) != tt.wantFile || string(in[1].GetContent()) != tt.has {
			t.Errorf("%s: it has to accept %q", name, files)
		}
		if string(r.GetKeep()) != tt.wantIt || r.GetKey() != "service-account-key" || r.GetId() != id {
			t.Errorf("%s: it may keep %v", name, r)
		}
	}
	if files, r := withRotation(nil, nil); files != nil || r != nil {
		t.Error("without a rotation there is one")
	}
}

// Machines take the authorities of a joinservice. They are those of its control plane's disk: an object of the API can be changed by who can write objects.
func TestTheAuthorityIsThatOfTheControlPlanesDisk(t *testing.T) {
	const disk, object = "-----BEGIN CERTIFICATE-----\n", "of an object"
	ca := attesttest.NewCA(t).PEM()
	dir := t.TempDir()
	api := &rest.Config{TLSClientConfig: rest.TLSClientConfig{CAData: []byte(object)}}
	if got, err := caOf(dir, api); err != nil || string(got) != object { // kubeadm keeps it elsewhere
		t.Errorf("%q, %v", got, err)
	}
	for content, want := range map[string]string{ca: ca, ca + ca: ca + ca, disk: "", "": ""} {
		if err := os.WriteFile(filepath.Join(dir, "ca.crt"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := caOf(dir, api); string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", content, got, err)
		}
	}
}
