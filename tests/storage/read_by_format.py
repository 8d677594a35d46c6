"""Reads a store with nothing of kvio: written against docs/format.md alone.

    python read_by_format.py DIRECTORY [KEY_IN_HEX]     list the keys, or write one payload out
"""
import json
import os
import re
import struct
import sys

TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc(data):
    value = 0xFFFFFFFF
    for byte in data:
        value = TABLE[(value ^ byte) & 255] ^ value >> 8
    return value ^ 0xFFFFFFFF


def blocks(folder):
    """(key, parent, tokens, path, offset, nbytes, crc) of every valid header."""
    with open(os.path.join(folder, "kvio.json"), encoding="utf-8") as file:
        about = json.load(file)
    assert about["format"] == "kvio-store" and about["version"] == 1
    names = ("block_nbytes", "slot_stride", "slots", "header_pages", "payload_offset",
             "segment_nbytes")
    nbytes, stride, slots, header_pages, start, _ = geometry = [about["segment"][n] for n in names]
    for name in sorted(os.listdir(folder)):
        found = re.fullmatch(r"segment-([0-9a-f]{32})-(0|[1-9][0-9]*)", name)
        if not found:
            continue
        path = os.path.join(folder, name)
        with open(path, "rb") as file:
            data = file.read(start)
        uuid, expected = data[48:64], struct.pack(
            "<8sII16s16s16sQ16sQQIIQQ3964x", b"KVIOSEG1", 1, 4096, bytes.fromhex(about["store"]),
            bytes.fromhex(found[1]), data[48:64], int(found[2]),
            bytes.fromhex(about["layout_fingerprint"]), *geometry)
        if data[:4096] != expected + crc(expected).to_bytes(4, "little"):
            continue
        for slot in range(slots):
            header = data[8192 + 128 * slot:8192 + 128 * (slot + 1)]
            if len(header) < 128 or not any(header):
                continue
            magic, version, segment, key, parent, generation, size, place, tokens, check = \
                struct.unpack("<4sI16s16s16sQQIII", header[:84])
            if (magic, version, segment, size, place) == (b"KVBH", 1, uuid, nbytes, slot) \
                    and generation and crc(header[:124]).to_bytes(4, "little") == header[124:] \
                    and start + (slot + 1) * stride <= os.path.getsize(path):
                yield key, parent, tokens, path, start + slot * stride, nbytes, check


def payload(path, offset, nbytes, check):
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(nbytes)
    return data if crc(data) == check else None


if __name__ == "__main__":
    for key, parent, tokens, *where in blocks(sys.argv[1]):
        if len(sys.argv) == 2:
            print(key.hex(), parent.hex(), tokens, "bad" if payload(*where) is None else "good")
        elif key.hex() == sys.argv[2]:
            sys.stdout.buffer.write(payload(*where) or b"")
