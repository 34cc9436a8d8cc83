package hardwaretest

import (
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"

	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hcl"
)

// HCL makes an HCL report of 1,184 bytes of hardware report and a JSON text, with zeros after it as in
// the TPM's NV index.
func HCL(kind hcl.Kind, report, runtime []byte) []byte {
	le := binary.LittleEndian
	b := make([]byte, 0x20, 2600)
	copy(b, "HCLA")
	n := uint32(len(runtime))
	le.PutUint32(b[4:], 2)
	le.PutUint32(b[8:], 0x4C0+20+n)
	le.PutUint32(b[12:], 2)
	b = append(b, report...)
	for _, v := range []uint32{n + 20, 1, uint32(kind), 1, n} {
		b = le.AppendUint32(b, v)
	}
	return append(append(b, runtime...), make([]byte, 10)...)
}

// Runtime returns the JSON text that names a TPM's attestation key, and the report data to which it is
// bound.
func Runtime(ak *rsa.PublicKey, secureBoot bool) ([]byte, hardware.ReportData) {
	text := fmt.Appendf(nil, `{"keys":[{"kid":"HCLAkPub","kty":"RSA","n":%q,"e":"AQAB"}],"vm-configuration":{"secure-boot":%t,"vmUniqueId":"V"}}`, base64.RawURLEncoding.EncodeToString(ak.N.Bytes()), secureBoot)
	var data hardware.ReportData
	hash := sha256.Sum256(text)
	copy(data[:], hash[:])
	return text, data
}
