#!/usr/bin/env python3
"""Writes vectors.json: test vectors of muster-atls/1 (docs/attested-tls.md).

It shares no code with the Go implementation and follows the text of the specification:
only hashlib and hmac are used, and the protobuf of the two Offer frames is put together by
hand. Run it in this folder:

    python3 vectors.py > vectors.json

The output is deterministic. The Go test reads vectors.json alone.
"""

import hashlib
import hmac
import json
import struct

ROLES = {"client": b"\x01", "server": b"\x02"}
PURPOSES = ["machine", "joinservice", "kms", "public"]


def sha256(b: bytes) -> bytes:
    return hashlib.sha256(b).digest()


# ---- protobuf by hand (https://protobuf.dev/programming-guides/encoding/) ----

def varint(n: int) -> bytes:
    out = bytearray()
    while True:
        if n < 0x80:
            out.append(n)
            return bytes(out)
        out.append(n & 0x7F | 0x80)
        n >>= 7


def field_bytes(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def packed(number: int, values) -> bytes:
    return field_bytes(number, b"".join(varint(v) for v in values)) if values else b""


def offer_frame(gives, accepts, extra=b"") -> bytes:
    """Offer {gives = 1, accepts = 2} as field 1 of Frame, length in front."""
    offer = packed(1, gives) + packed(2, accepts)
    body = field_bytes(1, offer + extra)
    return struct.pack(">I", len(body)) + body


# ---- the formulas ----

def binding(role: str, ekm: bytes, offers: bytes) -> bytes:
    return sha256(b"muster-atls/1 binding" + b"\x00" + ROLES[role] + ekm + offers)


def statement(purpose: str, b: bytes) -> bytes:
    p = purpose.encode()
    return sha256(b"muster-atls/1 statement" + b"\x00" + bytes([len(p)]) + p + b)


def response(secret: bytes, b: bytes) -> bytes:
    return hmac.new(secret, b"muster-atls/1 activation" + b"\x00" + b, hashlib.sha256).digest()


# ---- Merkle tree of RFC 6962, section 2.1, with the hashes of the specification ----

def leaf(s: bytes) -> bytes:
    return sha256(b"\x00" + s)


def split(n: int) -> int:
    """The largest power of two that is smaller than n."""
    k = 1
    while k * 2 < n:
        k *= 2
    return k


def root(statements) -> bytes:
    if len(statements) == 1:
        return leaf(statements[0])
    k = split(len(statements))
    return sha256(b"\x01" + root(statements[:k]) + root(statements[k:]))


def path(m: int, statements):
    """Siblings from the leaf to the root: PATH(m, D[n]) of RFC 6962, section 2.1.1."""
    if len(statements) == 1:
        return []
    k = split(len(statements))
    if m < k:
        return path(m, statements[:k]) + [root(statements[k:])]
    return path(m - k, statements[k:]) + [root(statements[:k])]


def seq(label: str, i: int = 0) -> bytes:
    """32 bytes that look random and are not."""
    return sha256(b"muster-atls/1 test vector" + label.encode() + struct.pack(">I", i))


def sessions():
    # Unknown format numbers, and a field that this version does not know, are hashed as they came.
    unknown_field = field_bytes(1000, b"from a later version")
    cases = [
        ("mutual", offer_frame([1], [1]), offer_frame([1], [1])),
        ("client does not attest", offer_frame([], [1]), offer_frame([1], [])),
        ("formats and fields of a later version", offer_frame([9, 1], [1, 300], unknown_field), offer_frame([1], [1])),
        ("empty offers", offer_frame([], []), offer_frame([], [])),
    ]
    for i, (name, client, server) in enumerate(cases):
        ekm = seq("ekm", i)
        offers = sha256(client + server)
        secret = seq("activation secret", i)
        v = {
            "name": name,
            "ekm": ekm.hex(),
            "client_offer": client.hex(),
            "server_offer": server.hex(),
            "offers": offers.hex(),
            "activation_secret": secret.hex(),
            "sides": [],
        }
        for role in ROLES:
            b = binding(role, ekm, offers)
            v["sides"].append({
                "role": role,
                "binding": b.hex(),
                "statements": {p: statement(p, b).hex() for p in PURPOSES},
                "response": response(secret, b).hex(),
            })
        yield v


def trees():
    for n in [1, 2, 3, 4, 5, 7, 8, 9, 64, 65, 1023, 1024]:
        statements = [seq("statement", i) for i in range(n)]
        picked = sorted({0, 1, n // 2, n - 2, n - 1} & set(range(n)))
        yield {
            "statements": n,
            "root": root(statements).hex(),
            "leaves": [
                {
                    "index": i,
                    "statement": statements[i].hex(),
                    "path": [h.hex() for h in path(i, statements)],
                }
                for i in picked
            ],
        }


def main():
    doc = {
        "about": "Vectors of muster-atls/1, written by vectors.py. All values are hexadecimal. Statement i of "
                 "every tree is SHA-256('muster-atls/1 test vector' || 'statement' || uint32 big-endian i).",
        "exporter_label": "EXPERIMENTAL-muster-atls/1",
        "sessions": list(sessions()),
        "trees": list(trees()),
    }
    print(json.dumps(doc, indent=1))


if __name__ == "__main__":
    main()
