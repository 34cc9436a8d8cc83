package joinservice

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io/fs"
	"slices"

	"k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// crossFile is the file below PKI with the cross certificate, while the cluster's authority is rotated.
	crossFile = "muster-cross.crt"
	// maxAuthorities and maxKubeletAuthorities bound what a machine reports.
	maxAuthorities, maxKubeletAuthorities = 4, 2
)

// nodeAuthorities returns the authorities that nodes have to trust, and the cross certificate, if there is one, in PEM; nil while control planes differ: a
// node would take those of one, and then those of another. They are those of this control plane's disk, never of an object of the API: who has the old
// authority's key can write these.
func (s *Service) nodeAuthorities(ctx context.Context) (ca, cross []byte) {
	info, err := s.cfg.Cluster()
	if err != nil {
		return nil, nil // the next call tries again
	}
	if r := info.Rotation; r != nil && r.Key == clusterinfo.ClusterCA && r.Phase != clusterinfo.RotationSettled {
		return nil, nil
	}
	return s.diskAuthorities(ctx)
}

// diskAuthorities returns the authorities of this control plane's disk, and the cross certificate, if there is one, in PEM; nil if they can't be read. Who trusts
// them accepts each certificate that any control plane uses or signs in this phase of a rotation.
func (s *Service) diskAuthorities(ctx context.Context) (ca, cross []byte) {
	files, err := readPKI(s.cfg.PKI, []string{caFile})
	if errors.Is(err, fs.ErrNotExist) { // kubeadm keeps it elsewhere, and it can't be rotated
		return nil, nil
	}
	if err != nil {
		s.cfg.Log.ErrorContext(ctx, "the cluster's authorities can't be read, so nodes do not get them", "err", err)
		return nil, nil
	}
	ca = files[0].GetContent()
	if files, err = readPKI(s.cfg.PKI, []string{crossFile}); err == nil {
		cross = files[0].GetContent()
	} else if !errors.Is(err, fs.ErrNotExist) {
		s.cfg.Log.ErrorContext(ctx, "the cross certificate can't be read, so nodes do not get it", "err", err)
	}
	return ca, cross
}

// addAuthorities adds the authorities to an answer, if the machine trusts others.
func (s *Service) addAuthorities(ctx context.Context, req *joinv1.ReattestRequest, to *joinv1.ReattestResponse) {
	ca, cross := s.nodeAuthorities(ctx)
	list, err := cert.ParseCertsPEM(ca)
	if err != nil {
		return // there are none to send
	}
	same := slices.EqualFunc(list, req.GetAuthorities(), func(c *x509.Certificate, reported []byte) bool {
		sum := sha256.Sum256(c.Raw)
		return bytes.Equal(sum[:], reported)
	})
	if !same {
		to.CaCertificate, to.CrossCertificate = ca, cross
	}
}

// setAuthorities reads what a machine reports of its authorities into its status; an older bootstrapper reports none. It refuses with REQUEST_INVALID.
func setAuthorities(req *joinv1.ReattestRequest, to *v1alpha1.AttestedNodeStatus) (err error) {
	if to.Authorities, err = digests("authorities", req.GetAuthorities(), maxAuthorities); err == nil {
		to.KubeletAuthorities, err = digests("kubelet_authorities", req.GetKubeletAuthorities(), maxKubeletAuthorities)
	}
	return err
}

func digests(field string, list [][]byte, most int) (out []string, err error) {
	if len(list) > most {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "%s: %d of them, want at most %d", field, len(list), most)
	}
	for _, d := range list {
		text := hex.EncodeToString(d)
		if len(d) != sha256.Size || slices.Contains(out, text) {
			return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "%s: one has %d bytes, want %d, or is there twice", field, len(d), sha256.Size)
		}
		out = append(out, text)
	}
	return out, nil
}
