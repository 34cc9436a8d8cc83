package joinservice

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// oldKeyService returns fixed answers.
type oldKeyService struct {
	kmsv1connect.UnimplementedKeyServiceHandler
	answer *kmsv1.DeriveDiskKeyResponse
}

func (s *oldKeyService) DeriveDiskKey(context.Context, *kmsv1.DeriveDiskKeyRequest) (*kmsv1.DeriveDiskKeyResponse, error) {
	return s.answer, nil
}

// K4: a key service of an older version of Muster knows neither salts nor versions, and its key would not be the disk's.
func TestAKeyThatFollowsFromAnotherVersionOfTheRootIsRefused(t *testing.T) {
	s := &oldKeyService{}
	mux := http.NewServeMux()
	mux.Handle(kmsv1connect.NewKeyServiceHandler(s))
	server := httptest.NewServer(mux)
	defer server.Close()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("token"), 0o600); err != nil {
		t.Fatal(err)
	}
	disk, err := keys.ParseDiskID(disk1)
	if err != nil {
		t.Fatal(err)
	}
	key := make([]byte, keys.Size)
	for name, tt := range map[string]struct {
		answer *kmsv1.DeriveDiskKeyResponse
		want   attestv1.Reason
	}{
		"the version that was asked for": {&kmsv1.DeriveDiskKeyResponse{Key: key, RootVersion: 2}, attestv1.Reason_REASON_ACCEPTED},
		"another version":                {&kmsv1.DeriveDiskKeyResponse{Key: key, RootVersion: 1}, attestv1.Reason_REASON_KMS_UNAVAILABLE},
		"no version":                     {&kmsv1.DeriveDiskKeyResponse{Key: key}, attestv1.Reason_REASON_KMS_UNAVAILABLE},
		"half a key":                     {&kmsv1.DeriveDiskKeyResponse{Key: key[:16], RootVersion: 2}, attestv1.Reason_REASON_INTERNAL},
	} {
		s.answer = tt.answer
		got, err := NewKeyService(server.Client(), server.URL, token).Disk(t.Context(), disk, enroll.Salt{Salt: keys.DiskSalt{3}, Root: 2})
		if reason := attest.ReasonOf(err); err != nil && reason != tt.want || err == nil != (tt.want == attestv1.Reason_REASON_ACCEPTED) || err != nil && got.Expose() != nil {
			t.Errorf("%s: got %v, want %s", name, err, attest.ReasonName(tt.want))
		}
	}
}
