// Package tpm2 makes and verifies evidence of the format TPM2. docs/attested-tls.md specifies both.
//
// The verifier follows a chain of trust. A root certifies the endorsement key (EK). The EK's TPM
// opened a credential for the attestation key (AK). The AK's whole public area equals the one
// template that keeps it in that TPM and lets it sign only structures that the TPM made. The AK
// signed this session's statement together with a digest of PCR values. Only values under that
// digest become claims (A2). Whether they are acceptable is decided by a policy, not by this
// package.
package tpm2
