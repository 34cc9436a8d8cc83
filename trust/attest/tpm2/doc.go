// Package tpm2 is evidence of the format TPM2: the attester that makes it and the
// verifier that checks it. docs/attested-tls.md specifies both.
//
// Think of the verifier as a chain in which each link is the only reason to believe the
// next. Roots vouch for the endorsement key (EK). The EK's TPM opened a credential for
// the attestation key (AK), whose whole public area is the one template that keeps it in
// that TPM and lets it sign nothing but what the TPM made. The AK signed this session's
// statement together with a digest of PCR values. Only values under that digest become
// claims (A2); whether they are acceptable is a policy's question, not this package's.
package tpm2
