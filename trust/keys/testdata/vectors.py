#!/usr/bin/env python3
"""Computes vectors.json from RFC 5869 with nothing but hmac: a second, independent
implementation of what package keys derives. Run: python3 vectors.py > vectors.json"""

import hashlib
import hmac
import json


def hkdf(key: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    prk = hmac.new(salt, key, hashlib.sha256).digest()
    out, block, n = b"", b"", 1
    while len(out) < length:
        block = hmac.new(prk, block + info + bytes([n]), hashlib.sha256).digest()
        out, n = out + block, n + 1
    return out[:length]


vectors = []
for i, disk in enumerate((
    "00000000-0000-0000-0000-000000000000",
    "5f0c95b6-2a3d-4c7e-9f10-0123456789ab",
    "ffffffff-ffff-ffff-ffff-ffffffffffff",
)):
    root = hashlib.sha256(b"root %d" % i).digest()
    salt = hashlib.sha256(b"salt %d" % i).digest()
    measurement_salt = hashlib.sha256(b"measurement salt %d" % i).digest()
    version = (1, 2, 0x01020304)[i]
    disk_salt = hashlib.sha256(b"disk salt %d" % i).digest()
    of_version = b"\x00" + version.to_bytes(4, "big")
    measurement = hkdf(root, salt, b"muster/v2/measurement-secret" + of_version, 32)
    vectors.append({
        "version": version,
        "root": root.hex(),
        "salt": salt.hex(),
        "diskID": disk,
        "diskSalt": disk_salt.hex(),
        "diskKey": hkdf(root, salt, b"muster/v2/disk" + of_version + disk.encode() + disk_salt, 32).hex(),
        "etcdEncryptionKey": hkdf(root, salt, b"muster/v2/etcd-encryption" + of_version, 32).hex(),
        "measurementSalt": measurement_salt.hex(),
        "clusterID": hkdf(measurement, measurement_salt, b"muster/v2/cluster-id" + of_version, 32).hex(),
    })
print(json.dumps(vectors, indent=2))
