// Package attack holds programs that attack muster-atls/1. Each is a client, a server or a machine in the middle that
// deliberately breaks the protocol. The other side is the real listener, transport, verifier and RPC server. Its
// tests are pairs: the attack, which ends with one exact reason code, and the same program with only the offending
// step corrected, which succeeds.
//
// The attackers implement the wire format themselves, from docs/attested-tls.md and the schemas: a mistake that the
// product makes on both sides is not hidden.
package attack
