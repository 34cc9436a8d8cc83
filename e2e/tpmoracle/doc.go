// Package tpmoracle holds Muster's TPM code against that of others: the TPM 2.0 reference
// code as go-tpm-tools' simulator runs it, swtpm, and go-tpm-tools' client and server.
// What one side makes, the other must accept; what was changed on the way, both refuse.
//
// It is a package of tests in the root module, since the simulator needs cgo and OpenSSL's
// headers (libssl-dev), which nothing that ships does.
package tpmoracle
