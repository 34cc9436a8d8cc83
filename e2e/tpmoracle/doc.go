// Package tpmoracle compares Muster's TPM code with other implementations: the TPM 2.0 reference code in
// go-tpm-tools' simulator, swtpm, and go-tpm-tools' client and server. Each side must accept what the other makes;
// both must refuse what was changed on the way.
//
// It is a package of tests in the root module, since the simulator needs cgo and OpenSSL's headers (libssl-dev),
// which no shipped program does.
package tpmoracle
