// Package rpc is what every RPC of Muster's has in common: who may call it, what a caller
// learns of an error, what is counted and logged, and the server that serves it.
//
// Think of a call as passing four gates, in this order, and none of them trusts what the
// call says of itself:
//
//   - its access level, which comes from the connection alone ([Level], J1): one table,
//     and what is not in it is refused;
//   - limits of size and time;
//   - the handler, which returns an [attest.Refusal] for what it refuses on purpose;
//   - one table from reasons to codes ([Error]): what is not a refusal leaves as an opaque
//     internal error, and its cause stays in our log (R1).
//
// A [Server] puts them together with the listener of attested TLS, health and reflection.
package rpc
