// Package floods runs Muster's programs under the memory limit of their deployment, and floods their listeners as a
// client without a TPM can, while honest machines ask for tickets. Each row answers one question: during this flood,
// does the service survive, does every honest machine get what it asks for, and how much longer does that take than
// before?
//
// The floods are those of the program flooder, which runs beside it.
package floods
