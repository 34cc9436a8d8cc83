package tpm

import (
	"context"
	"fmt"
	"slices"

	gotpm "github.com/google/go-tpm/tpm2"
)

// CertificateIndex is the NV index by whose certificate a TPM is known.
type CertificateIndex struct {
	Index uint32
	// PlatformCreated reports that the TPM's maker, the firmware or a cloud has defined the index, before an operating system
	// ran (TPMA_NV_PLATFORMCREATE). Otherwise whoever knows the owner's authorization value, which is empty, may have done so
	// in any boot: root on the machine, too.
	PlatformCreated bool
}

// CertificateIndex returns the index that decides by which key the machine is known: the first that exists of those of platform
// keys, then of endorsement keys, whatever is in it. The error wraps [ErrNoCertificate] if there is none. It is for diagnosis: the key
// does not depend on it.
func (t *TPM) CertificateIndex(ctx context.Context) (out CertificateIndex, err error) {
	err = t.sequence(ctx, "index of the certificate", func(c *conn) error {
		var order []gotpm.TPMHandle
		for _, s := range platformSlots {
			order = append(order, s.certificate)
		}
		for _, s := range ekSlots {
			order = append(order, s.index)
		}
		indices, err := c.handles(nvEndorsement, 64) // and all behind them
		if err != nil {
			return err
		}
		i := slices.IndexFunc(order, func(h gotpm.TPMHandle) bool { return slices.Contains(indices, h) })
		if i < 0 {
			return ErrNoCertificate
		}
		public, err := gotpm.NVReadPublic{NVIndex: order[i]}.Execute(c.tpm)
		if err != nil {
			return fmt.Errorf("NV index 0x%08x: read public area: %w", uint32(order[i]), err)
		}
		info, err := public.NVPublic.Contents()
		if err != nil {
			return fmt.Errorf("NV index 0x%08x: decode public area: %w", uint32(order[i]), err)
		}
		out = CertificateIndex{Index: uint32(order[i]), PlatformCreated: info.Attributes.PlatformCreate}
		return nil
	})
	return out, err
}
