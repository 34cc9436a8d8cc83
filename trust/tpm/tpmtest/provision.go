package tpmtest

import (
	"bytes"
	"testing"

	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Provision does the work of a TPM's vendor: it makes the endorsement key of a template, has ca
// certify it, and stores the certificate in the NV index that the TCG EK Credential Profile assigns
// to it, and its issuers from 0x01C00100 on.
func Provision(t testing.TB, dev transport.TPM, ca *attesttest.CA, index uint32, template gotpm.TPMTPublic) {
	t.Helper()
	key := must(gotpm.CreatePrimary{
		PrimaryHandle: gotpm.AuthHandle{Handle: gotpm.TPMRHEndorsement, Auth: gotpm.PasswordAuth(nil)},
		InPublic:      gotpm.New2B(template),
	}.Execute(dev))(t)
	must(gotpm.FlushContext{FlushHandle: key.ObjectHandle}.Execute(dev))(t)
	public := must(gotpm.Pub(*must(key.OutPublic.Contents())(t)))(t)
	chain := ca.Issue(t, public, nil)
	WriteNV(t, dev, index, append(chain[0], make([]byte, 10)...)) // vendors pad
	if len(chain) > 1 {
		WriteNV(t, dev, 0x01C00100, bytes.Join(chain[1:], nil))
	}
}

// WriteNV defines an NV index that every caller may read, and fills it.
func WriteNV(t testing.TB, dev transport.TPM, index uint32, data []byte) {
	t.Helper()
	owner := gotpm.AuthHandle{Handle: gotpm.TPMRHOwner, Auth: gotpm.PasswordAuth(nil)}
	must(gotpm.NVDefineSpace{
		AuthHandle: owner,
		PublicInfo: gotpm.New2B(gotpm.TPMSNVPublic{
			NVIndex:    gotpm.TPMHandle(index),
			NameAlg:    gotpm.TPMAlgSHA256,
			Attributes: gotpm.TPMANV{OwnerWrite: true, OwnerRead: true, AuthRead: true, NoDA: true},
			DataSize:   uint16(len(data)),
		}),
	}.Execute(dev))(t)
	for offset := 0; offset < len(data); {
		// The name changes with the first write.
		public := must(gotpm.NVReadPublic{NVIndex: gotpm.TPMHandle(index)}.Execute(dev))(t)
		n := min(512, len(data)-offset)
		must(gotpm.NVWrite{
			AuthHandle: owner,
			NVIndex:    gotpm.NamedHandle{Handle: gotpm.TPMHandle(index), Name: public.NVName},
			Data:       gotpm.TPM2BMaxNVBuffer{Buffer: data[offset : offset+n]},
			Offset:     uint16(offset),
		}.Execute(dev))(t)
		offset += n
	}
}

// Extend extends one PCR in one bank by a computed digest, as firmware does. The other banks keep their
// values, so nothing but a test does this (B1).
func Extend(t testing.TB, dev transport.TPM, bank tpm.Bank, pcr int, digest []byte) {
	t.Helper()
	must(gotpm.PCRExtend{
		PCRHandle: gotpm.AuthHandle{Handle: gotpm.TPMHandle(pcr), Auth: gotpm.PasswordAuth(nil)},
		Digests:   gotpm.TPMLDigestValues{Digests: []gotpm.TPMTHA{{HashAlg: gotpm.TPMIAlgHash(bank), Digest: digest}}},
	}.Execute(dev))(t)
}
