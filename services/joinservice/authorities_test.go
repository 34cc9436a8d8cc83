package joinservice

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// While control planes differ, a node would take the authorities of one, and then those of another.
func TestNodesGetTheAuthoritiesWhileControlPlanesAgree(t *testing.T) {
	a, b := []byte(attesttest.NewCA(t).PEM()), []byte(attesttest.NewCA(t).PEM())
	sum := func(text []byte) []byte {
		list, err := cert.ParseCertsPEM(text)
		if err != nil {
			t.Fatal(err)
		}
		s := sha256.Sum256(list[0].Raw)
		return s[:]
	}
	in := func(key clusterinfo.RotatedKey, phase clusterinfo.RotationPhase) *clusterinfo.Rotation {
		return &clusterinfo.Rotation{Key: key, Phase: phase}
	}
	both := slices.Concat(b, a)
	for name, tt := range map[string]struct {
		rotation   *clusterinfo.Rotation
		disk       []byte
		reported   [][]byte
		sent       []byte
		unreadable bool // the cluster's description
	}{
		"the same":                               {nil, a, [][]byte{sum(a)}, nil, false},
		"an older bootstrapper":                  {nil, a, nil, a, false},
		"another one":                            {nil, b, [][]byte{sum(a)}, b, false},
		"the end of a rotation":                  {nil, b, [][]byte{sum(b), sum(a)}, b, false},
		"another order":                          {nil, both, [][]byte{sum(a), sum(b)}, both, false},
		"all control planes use the new one":     {in(clusterinfo.ClusterCA, clusterinfo.RotationSettled), both, [][]byte{sum(a)}, both, false},
		"they begin to accept it":                {in(clusterinfo.ClusterCA, clusterinfo.RotationAccept), both, [][]byte{sum(a)}, nil, false},
		"they begin to use it":                   {in(clusterinfo.ClusterCA, clusterinfo.RotationUse), both, [][]byte{sum(a)}, nil, false},
		"they begin to drop the old one":         {in(clusterinfo.ClusterCA, clusterinfo.RotationFinish), b, [][]byte{sum(b), sum(a)}, nil, false},
		"another key is rotated":                 {in(clusterinfo.EtcdCA, clusterinfo.RotationUse), b, [][]byte{sum(a)}, b, false},
		"the cluster's description is not known": {nil, b, [][]byte{sum(a)}, nil, true},
		"kubeadm keeps it elsewhere":             {nil, nil, [][]byte{sum(a)}, nil, false},
		"half a file":                            {nil, b[:40], [][]byte{sum(a)}, nil, false},
	} {
		dir := t.TempDir()
		cross := []byte("the cross certificate")
		if tt.disk != nil {
			if err := errors.Join(os.WriteFile(filepath.Join(dir, "ca.crt"), tt.disk, 0o600), os.WriteFile(filepath.Join(dir, "muster-cross.crt"), cross, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		s := &Service{cfg: Config{PKI: dir, Log: slog.New(slog.DiscardHandler), Cluster: func() (*clusterinfo.Info, error) {
			if tt.unreadable {
				return nil, errors.New("no")
			}
			return &clusterinfo.Info{Rotation: tt.rotation}, nil
		}}}
		resp := &joinv1.ReattestResponse{}
		s.addAuthorities(t.Context(), &joinv1.ReattestRequest{Authorities: tt.reported}, resp)
		if !bytes.Equal(resp.GetCaCertificate(), tt.sent) || (tt.sent == nil) != (len(resp.GetCrossCertificate()) == 0) {
			t.Errorf("%s: sent %s", name, resp.GetCaCertificate())
		}
	}
}

func TestAReportOfAuthoritiesHasItsForm(t *testing.T) {
	one, two := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	for name, tt := range map[string]struct {
		req *joinv1.ReattestRequest
		ok  bool
	}{
		"none":                    {&joinv1.ReattestRequest{}, true},
		"some":                    {&joinv1.ReattestRequest{Authorities: [][]byte{one, two}, KubeletAuthorities: [][]byte{one}}, true},
		"a short one":             {&joinv1.ReattestRequest{Authorities: [][]byte{one[1:]}}, false},
		"one twice":               {&joinv1.ReattestRequest{Authorities: [][]byte{one, one}}, false},
		"too many":                {&joinv1.ReattestRequest{Authorities: [][]byte{one, two, bytes.Repeat([]byte{3}, 32), bytes.Repeat([]byte{4}, 32), bytes.Repeat([]byte{5}, 32)}}, false},
		"a short kubelet's":       {&joinv1.ReattestRequest{KubeletAuthorities: [][]byte{{1}}}, false},
		"too many of a kubelet's": {&joinv1.ReattestRequest{KubeletAuthorities: [][]byte{one, two, bytes.Repeat([]byte{3}, 32)}}, false},
	} {
		var st v1alpha1.AttestedNodeStatus
		err := setAuthorities(tt.req, &st)
		if (err == nil) != tt.ok || err != nil && attest.ReasonOf(err) != attestv1.Reason_REASON_REQUEST_INVALID {
			t.Errorf("%s: %v", name, err)
		}
		if tt.ok && (len(st.Authorities) != len(tt.req.GetAuthorities()) || len(st.KubeletAuthorities) != len(tt.req.GetKubeletAuthorities())) {
			t.Errorf("%s: %+v", name, st)
		}
	}
}
