package tpm

import (
	"encoding/binary"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// retryFor bounds how long a TPM may postpone one command.
const retryFor = 30 * time.Second

// patient sends a command again while the TPM responds that it has not started the command: for
// instance before the first use of a key under dictionary attack protection, when the TPM has to
// write NV first. A kernel driver does the same; a socket has no driver.
type patient struct{ transport.TPM }

// Send implements [transport.TPM].
func (p patient) Send(cmd []byte) ([]byte, error) {
	deadline := time.Now().Add(retryFor)
	for wait := time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		rsp, err := p.TPM.Send(cmd)
		if err != nil || len(rsp) < 10 || time.Now().After(deadline) {
			return rsp, err
		}
		switch gotpm.TPMRC(binary.BigEndian.Uint32(rsp[6:10])) {
		case gotpm.TPMRCRetry, gotpm.TPMRCYielded, gotpm.TPMRCTesting:
		default:
			return rsp, nil
		}
		<-time.After(wait)
	}
}
