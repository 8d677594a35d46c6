"""Other writers for the sharing tests: fabricated segments, and real ones in other processes."""
import os
import signal
import subprocess
import sys
import time
import uuid

import numpy as np

from blocks import LAYOUT, chain, open_store, payload, put, readable
from kvio._ext.block import crc32c
from kvio.storage import format as fmt
from kvio.storage.format import PAGE


class Foreign:
    """A segment written by hand: each step of a writer by itself, damage included."""

    def __init__(self, folder, description, n=0, writer=None, layout=LAYOUT, whole=True):
        self.geometry, self.layout = description.geometry, layout
        self.writer, self.uuid = writer or uuid.uuid4().bytes, uuid.uuid4().bytes
        self.heartbeat, self.epoch, self.others = 0, 1, 0
        self.changed, self.before = set(), set()
        self.generation = 0
        self.path = os.path.join(folder, fmt.segment_name(self.writer, n))
        self.page0 = fmt.encode_page0(description, self.writer, n, self.uuid)
        with open(self.path, "wb") as file:
            file.truncate(self.geometry.segment_nbytes)
        if whole:
            self.publish()
            self.write(0, self.page0)

    def write(self, offset, data):
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(data)

    def header(self, slot, key):
        block = np.zeros((), fmt.BLOCK_IO)
        self.generation += 1
        block["slot"], block["generation"] = slot, self.generation
        block["key"], block["parent"] = np.void(key["key"].tobytes()), np.void(
            key["parent"].tobytes())
        block["tokens"] = self.layout.block_tokens
        block["crc"] = crc32c(payload(key, self.layout))
        return fmt.encode_header(block, self.uuid, self.geometry.block_nbytes)

    def put(self, slot, key):
        """Payload and header, and the mark for the next page 1."""
        self.write(self.geometry.payload_offset + slot * self.geometry.slot_stride,
                   payload(key, self.layout).tobytes())
        self.write(2 * PAGE + 128 * slot, self.header(slot, key))
        self.changed.add(slot // 32)

    def clear(self, slot):
        self.write(2 * PAGE + 128 * slot, bytes(128))
        self.changed.add(slot // 32)

    def next_epoch(self):
        self.before, self.changed, self.epoch = self.changed, set(), self.epoch + 1

    def page1(self):
        maps = []
        for pages in (self.changed, self.before):
            bits = np.zeros(8 * fmt.BITMAP_BYTES, np.uint8)
            bits[list(pages)] = 1
            maps.append(np.packbits(bits, bitorder="little").tobytes())
        return fmt.encode_page1(self.uuid, self.geometry.header_pages, self.heartbeat, self.epoch,
                                self.others, *maps)

    def publish(self, beat=True):
        """Rewrite page 1."""
        self.heartbeat += beat
        self.write(PAGE, self.page1())

    def close(self):
        self.heartbeat = fmt.HEARTBEAT_CLOSED
        self.write(PAGE, self.page1())


def many_headers(folder, description, count, seed=0):
    """`count` valid headers in sparse segments of one closed writer; returns their keys."""
    rng, writer, keys = np.random.default_rng(seed), uuid.uuid4().bytes, []
    geometry = description.geometry
    for n, first in enumerate(range(0, count, geometry.slots)):
        slots = min(geometry.slots, count - first)
        segment = uuid.uuid4().bytes
        rows = np.zeros(slots, fmt.HEADER)
        rows["magic"], rows["version"], rows["segment"] = b"KVBH", 1, np.void(segment)
        rows["key"] = np.frombuffer(rng.bytes(16 * slots), "V16")
        rows["generation"], rows["slot"] = np.arange(1, slots + 1), np.arange(slots)
        rows["nbytes"], rows["tokens"] = geometry.block_nbytes, 1
        data = bytearray(rows.tobytes())
        view = memoryview(data)
        for at in range(0, len(data), 128):
            view[at + 124:at + 128] = crc32c(view[at:at + 124]).to_bytes(4, "little")
        path = os.path.join(folder, fmt.segment_name(writer, n))
        with open(path, "wb") as file:
            file.truncate(geometry.segment_nbytes)
            file.write(fmt.encode_page0(description, writer, n, segment))
            file.write(fmt.encode_page1(segment, geometry.header_pages, fmt.HEARTBEAT_CLOSED))
            file.write(data)
        keys.append(rows["key"])
    return np.concatenate(keys)


def serve(path, backend="threads", options=()):
    """Runs in a child: a store that does what its standard input says, until that ends."""
    with open_store(path, backend, **dict(options)) as store:
        print("open", store._writer.uuid.hex(), flush=True)
        for line in sys.stdin:
            word, *numbers = line.split()
            numbers = [int(number) for number in numbers if number.isdigit()]
            answer = "ok"
            if word == "write":                     # seed, count
                put(store, chain(numbers[1], numbers[0]))
                answer = time.monotonic()
            elif word == "match":
                answer = store.match(chain(numbers[1], numbers[0]))
            elif word == "read":
                answer = int(readable(store, chain(numbers[1], numbers[0])).sum())
            elif word == "forget":
                store.forget(chain(numbers[1], numbers[0]))
            elif word == "sharing":
                answer = store.stats()["sharing"][line.split()[1]]
            print(answer, flush=True)


class Child:
    """A function of a test module in another process; it talks through its pipes, line by line."""

    def __init__(self, module, function, *arguments):
        given = [str(a) if isinstance(a, os.PathLike) else a for a in arguments]
        code = (f"import sys; sys.path[:0] = {sys.path!r}; import {module} as m; "
                f"m.{function}(*{given!r})")
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def say(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def hear(self):
        line = self.process.stdout.readline()
        assert line, f"the child has ended with {self.process.wait()}"
        return line.split()

    def ask(self, *words):
        self.say(*words)
        return self.hear()

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        """Close its standard input and wait."""
        self.process.stdin.close()
        code = self.process.wait(60)
        self.process.stdout.close()
        assert code == 0, f"the child has ended with {code}"

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.process.poll() is None and kind is not None:
            self.signal(signal.SIGCONT)
            self.kill()
        elif self.process.returncode is None:
            self.end()


def until(true, seconds=20.0, step=0.002):
    """Wait for it; how long it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it did not happen"
        time.sleep(step)
    return time.monotonic() - began
