#!/usr/bin/env python3
"""Writes vectors.json: test vectors of machine IDs (docs/endorsements.md).

It shares no code with the Go implementation and follows the text of that page: only hashlib is
used, and DER and CBOR are read by hand. Run it in this folder:

    python3 vectors.py > vectors.json

The output is deterministic. The Go test reads vectors.json, and the captured evidence named in it.
"""

import base64
import hashlib
import json
import os
import struct

TPM2 = ".."
ENDORSEMENT = os.path.join("..", "..", "..", "..", "internal", "endorsement")


def sha256(b: bytes) -> bytes:
    return hashlib.sha256(b).digest()


# ---- DER (X.690), of what certificates have ----

def element(b: bytes, at: int = 0):
    """The tag, the content and the whole of one element, and where the next one begins."""
    tag, length, begin = b[at], b[at + 1], at + 2
    if length & 0x80:
        n = length & 0x7F
        length, begin = int.from_bytes(b[begin:begin + n], "big"), begin + n
    end = begin + length
    return tag, b[begin:end], b[at:end], end


def elements(b: bytes):
    out, at = [], 0
    while at < len(b):
        tag, content, whole, at = element(b, at)
        out.append((tag, content, whole))
    return out


def certificate(path: str) -> bytes:
    """The first certificate of a file in PEM."""
    text = open(path, encoding="utf-8").read()
    body = text.split("-----BEGIN CERTIFICATE-----")[1].split("-----END")[0]
    return base64.b64decode("".join(body.split()))


def tbs(der: bytes):
    """Fields of TBSCertificate, the optional version left out (RFC 5280, 4.1)."""
    fields = elements(elements(elements(der)[0][1])[0][1])
    return fields[1:] if fields[0][0] == 0xA0 else fields


def spki(der: bytes) -> bytes:
    """The SubjectPublicKeyInfo, with its header: the sixth field."""
    return tbs(der)[5][2]


GCE = bytes.fromhex("060a2b06010401d679020115")  # 1.3.6.1.4.1.11129.2.1.21


def gce(der: bytes):
    """Project number and instance ID in Google's extension."""
    for tag, content, _ in tbs(der):
        if tag != 0xA3:
            continue
        for _, one, _ in elements(elements(content)[0][1]):
            parts = elements(one)
            if parts[0][2] == GCE:
                fields = elements(elements(parts[-1][1])[0][1])
                return int.from_bytes(fields[1][1], "big"), int.from_bytes(fields[3][1], "big")
    raise ValueError("no such extension")


# ---- the formulas ----

def ek(public: bytes) -> bytes:
    return sha256(public)


def platform(provider: str, public: bytes, project: int, instance: int) -> bytes:
    return sha256(b"muster platform key\x00" + provider.encode() + b"\x00" + sha256(public) + struct.pack(">QQ", project, instance))


def nitro(module: str) -> bytes:
    return sha256(b"muster nitro tpm\x00" + module.encode())


# ---- P-256 (SEC 2, 2.4.2), for a key whose every byte is known ----

P = 0xFFFFFFFF00000001000000000000000000000000FFFFFFFFFFFFFFFFFFFFFFFF
G = (0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
     0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5)


def double(p):
    m = (3 * p[0] * p[0] - 3) * pow(2 * p[1], -1, P) % P
    x = (m * m - 2 * p[0]) % P
    return x, (m * (p[0] - x) - p[1]) % P


def p256(point) -> bytes:
    head = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")
    return head + point[0].to_bytes(32, "big") + point[1].to_bytes(32, "big")


def module(document: bytes) -> str:
    """module_id of a Nitro document: a text string of 24 to 255 bytes (RFC 8949, 3)."""
    at = document.index(b"\x69module_id") + 10
    assert document[at] == 0x78
    return document[at + 2:at + 2 + document[at + 1]].decode()


def main():
    out = {"about": "Vectors of machine IDs, written by vectors.py. All values are hexadecimal; file names are below trust.", "ek_certificate": [], "bare_ek": [], "platform_ak": [], "nitro_tpm": []}
    for name in ["intel-ptt", "stm-ecc", "stm-rsa"]:
        public = spki(certificate(os.path.join(TPM2, "ek", name + ".pem")))
        out["ek_certificate"].append({"file": "attest/tpm2/testdata/ek/" + name + ".pem", "id": ek(public).hex()})
    point = G
    for _ in range(3):
        public = p256(point)
        out["bare_ek"].append({"public": public.hex(), "id": ek(public).hex()})
        point = double(point)
    for provider, name in [("gcp", "gcp-snp"), ("gcp", "gcp-tdx"), ("gcp", "gcp-2022-ecc-sign"), ("gcp", "gcp-2022-rsa-sign"), ("gcp", "gcp-older-ecc-sign"), ("azure", "azure-trustedlaunch"), ("azure", "azure-trustedlaunch-03"), ("azure", "azure-confidential")]:
        der = certificate(os.path.join(ENDORSEMENT, "platformak", "testdata", name + ".pem"))
        project, instance = gce(der) if provider == "gcp" else (0, 0)
        out["platform_ak"].append({"file": "internal/endorsement/platformak/testdata/" + name + ".pem", "id": platform(provider, spki(der), project, instance).hex()})
    modules = [module(open(os.path.join(ENDORSEMENT, "nitrotpm", "testdata", "nitrotpm.cbor"), "rb").read()), "i-0123456789abcdef0-tpm0000000000000000", "i-0123456789abcdef0-tpm0000000000000001"]
    out["nitro_tpm"] = [{"module": m, "id": nitro(m).hex()} for m in modules]
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
