package tpm

import (
	"context"
	"errors"
	"slices"

	gotpm "github.com/google/go-tpm/tpm2"
)

// hclReport is the NV index in which the paravisor of Azure's confidential virtual machines stores its
// report.
const hclReport = gotpm.TPMHandle(0x01400001)

// maxHCLReport is the largest such report, in bytes.
const maxHCLReport = 8 << 10

// ErrNoHCLReport means that the TPM has no report of a paravisor: it is not that of a confidential virtual
// machine of Azure.
var ErrNoHCLReport = errors.New("the TPM has no HCL report")

// HCLReport returns the report that the paravisor of an Azure virtual machine has stored at boot, as it is
// in the TPM. The error wraps [ErrNoHCLReport] if there is none.
func (t *TPM) HCLReport(ctx context.Context) (out []byte, err error) {
	err = t.sequence(ctx, "HCL report", func(c *conn) error {
		indices, err := c.handles(hclReport, 1)
		if err != nil {
			return err
		}
		if !slices.Contains(indices, hclReport) {
			return ErrNoHCLReport
		}
		out, err = c.readNV(hclReport, maxHCLReport)
		return err
	})
	return out, err
}
