// Package attack holds programs that attack muster-atls/1: each is a client, a server or a
// machine in the middle that does on purpose what the protocol forbids, against the real
// listener, transport, verifier and RPC server. Think of its tests as pairs: the attack,
// which ends with one exact reason code, and the same program with nothing but the
// offending step put right, which gets through.
//
// The attackers speak the wire format by themselves, from docs/attested-tls.md and the
// schemas: a mistake that the product makes on both sides does not hide here.
package attack
