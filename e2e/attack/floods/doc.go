// Package floods runs Muster's programs under the memory that they are deployed with, floods their listeners as a
// client without a TPM can, and has honest machines ask for tickets meanwhile. Think of each of its rows as one
// question: with this flood, is the service alive, does every honest machine get what it asks for, and how much
// longer does that take than before?
//
// The floods are those of the program flooder, which runs beside it.
package floods
