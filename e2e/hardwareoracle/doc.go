// Package hardwareoracle compares Muster's check of hardware reports with go-sev-guest and go-tdx-guest, on the captured reports of real
// processors. It is a package of tests in the root module, where the two libraries are already, for go-tpm-tools.
package hardwareoracle
