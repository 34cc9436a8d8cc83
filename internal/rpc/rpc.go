// Package rpc is the common part of all RPCs of Muster: access rights, errors, metrics, logs, and the server.
//
// A call passes four checks, in this order, and none of them trusts the call's own data:
//
//   - its access level, which comes from the connection alone ([Level], J1): one table,
//     and an RPC that is not in it is refused;
//   - limits of size and time;
//   - the handler, which returns an [attest.Refusal] for a deliberate refusal;
//   - one table from reasons to codes ([Error]): any other error is sent as an opaque
//     internal error, and its cause stays in the log (R1).
//
// A [Server] combines them with the listener of attested TLS, health and reflection.
package rpc
