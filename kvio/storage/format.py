"""The store's bytes on disk, docs/format.md in code: what Python encodes and decodes.

The rings have their own encoder in C (`_ext/ring_format.c`); a test compares the two.
"""
import errno
import json
import os
import re
import stat
import uuid
from dataclasses import dataclass

import numpy as np

from kvio._ext.block import crc32c
from kvio.errors import FormatError, InvalidArgument, LayoutMismatch, StoreError
from kvio.layout import KEY_DTYPE, BlockLayout, any_array

__all__ = ["BITMAP_BYTES", "BLOCK_IO", "Description", "Geometry", "HEADER", "PAGE", "PAGE0",
           "PAGE1", "VERSION", "as_keys", "check_page0", "check_touches", "encode_page0",
           "encode_page1", "encode_touches", "key_list", "parse_segment_name",
           "parse_touch_name", "seal", "segment_name", "touch_name"]

VERSION = 1
PAGE = 4096
HEADER_NBYTES = 128
HEADERS_PER_PAGE = 32
FIRST_HEADER_PAGE = 2
MAX_HEADER_PAGES = 15_000
BITMAP_BYTES = 1880
JSON_NAME = "kvio.json"
_TOUCH_NAME = re.compile(r"touch-([0-9a-f]{32})\Z")
_SEGMENT_NAME = re.compile(r"segment-([0-9a-f]{32})-(0|[1-9][0-9]{0,17})\Z")


def _struct(nbytes, *fields):
    """A packed little-endian struct from (offset, name, type)."""
    offsets, names, formats = zip(*fields)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": nbytes})


PAGE0 = _struct(
    PAGE, (0, "magic", "S8"), (8, "version", "<u4"), (12, "page_nbytes", "<u4"),
    (16, "store", "V16"), (32, "writer", "V16"), (48, "segment", "V16"), (64, "number", "<u8"),
    (72, "layout", "V16"), (88, "block_nbytes", "<u8"), (96, "slot_stride", "<u8"),
    (104, "slots", "<u4"), (108, "header_pages", "<u4"), (112, "payload_offset", "<u8"),
    (120, "segment_nbytes", "<u8"), (4092, "crc", "<u4"))
PAGE1 = _struct(
    PAGE, (0, "magic", "S8"), (8, "version", "<u4"), (12, "header_pages", "<u4"),
    (16, "segment", "V16"), (32, "heartbeat", "<u8"), (40, "epoch", "<u8"),
    (48, "others", "<u8"), (128, "changed", f"V{BITMAP_BYTES}"),
    (2048, "changed_before", f"V{BITMAP_BYTES}"), (4092, "crc", "<u4"))
TOUCH = _struct(
    PAGE, (0, "magic", "S8"), (8, "version", "<u4"), (12, "count", "<u4"), (16, "store", "V16"),
    (32, "writer", "V16"), (48, "sequence", "<u8"), (4088, "keys_crc", "<u4"),
    (4092, "crc", "<u4"))
HEADER = _struct(
    HEADER_NBYTES, (0, "magic", "S4"), (4, "version", "<u4"), (8, "segment", "V16"),
    (24, "key", "V16"), (40, "parent", "V16"), (56, "generation", "<u8"), (64, "nbytes", "<u8"),
    (72, "slot", "<u4"), (76, "tokens", "<u4"), (80, "payload_crc", "<u4"),
    (84, "flags", "<u4"), (124, "crc", "<u4"))

HEARTBEAT_CLOSED = 2**64 - 1                # heartbeat: nobody writes this segment any more
MAX_TOUCHES = 65_536
BLOCK_DURABLE, HEADER_DURABLE = 4, 1        # the same flag in BLOCK_IO and on disk

# struct kvio_block_io of include/kvio/ring.h: one block of a batch, and where a block is stored.
BLOCK_IO = np.dtype([("addr", "<u8"), ("generation", "<u8"), ("segment", "<u4"), ("slot", "<u4"),
                     ("crc", "<u4"), ("tokens", "<u4"), ("flags", "<u4"), ("status", "<i4"),
                     ("key", "V16"), ("parent", "V16")])


def seal(record: np.ndarray) -> bytes:
    """The bytes of one struct with its last field, the CRC of all before it, filled in."""
    data = record.tobytes()
    return data[:-4] + crc32c(data[:-4]).to_bytes(4, "little")


def is_sealed(data: bytes) -> bool:
    """True if the CRC at the end fits."""
    return crc32c(data[:-4]) == int.from_bytes(data[-4:], "little")


@dataclass(frozen=True)
class Geometry:
    """How a segment is divided; the same for all segments of a store."""

    block_nbytes: int
    slot_stride: int
    slots: int

    @classmethod
    def choose(cls, layout: BlockLayout, segment_bytes: int) -> "Geometry":
        """As many slots as fit in `segment_bytes`, at least one."""
        if segment_bytes <= 0:
            raise InvalidArgument(f"segment_bytes must be positive, not {segment_bytes}")
        slots = max(1, (segment_bytes - 3 * PAGE) // (layout.stride + HEADER_NBYTES))
        slots = min(slots, MAX_HEADER_PAGES * HEADERS_PER_PAGE)
        return cls(layout.full_block_nbytes, layout.stride, int(slots))

    @property
    def header_pages(self) -> int:
        """Pages of 32 headers each, from page 2 on."""
        return -(-self.slots // HEADERS_PER_PAGE)

    @property
    def payload_offset(self) -> int:
        """Where slot 0 starts."""
        return (FIRST_HEADER_PAGE + self.header_pages) * PAGE

    @property
    def segment_nbytes(self) -> int:
        """Length of a full segment file."""
        return self.payload_offset + self.slots * self.slot_stride

    def to_dict(self) -> dict:
        """As in kvio.json."""
        return {name: getattr(self, name) for name in _GEOMETRY}


_GEOMETRY = ("block_nbytes", "slot_stride", "slots", "header_pages", "payload_offset",
             "segment_nbytes")


@dataclass(frozen=True)
class Description:
    """What kvio.json says."""

    store: bytes
    layout: BlockLayout
    geometry: Geometry

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({
            "format": "kvio-store", "version": VERSION, "store": self.store.hex(),
            "layout": self.layout.to_dict(), "layout_fingerprint": self.layout.fingerprint.hex(),
            "segment": self.geometry.to_dict()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, path: str) -> "Description":
        """The inverse; FormatError for anything that docs/format.md does not describe."""
        damaged = f"{path} is damaged: restore it, or move the directory away and start anew"
        try:
            data = json.loads(text)
            if data["format"] != "kvio-store" or not isinstance(data["version"], int):
                raise ValueError("not a kvio store")
            if data["version"] != VERSION:
                raise FormatError(errno.EPROTO, f"{path} has format version {data['version']}, "
                                  f"this kvio reads version {VERSION}: use a newer kvio")
            layout = BlockLayout.from_dict(data["layout"])
            segment = data["segment"]
            geometry = Geometry(*(segment[name] for name in _GEOMETRY[:3]))
            store = bytes.fromhex(data["store"])
            sane = (geometry.to_dict() == segment and len(store) == 16 and geometry.slots > 0
                    and geometry.header_pages <= MAX_HEADER_PAGES
                    and geometry.block_nbytes == layout.full_block_nbytes
                    and geometry.slot_stride == layout.stride
                    and data["layout_fingerprint"] == layout.fingerprint.hex())
            if not sane:
                raise ValueError("its figures contradict each other")
        except (KeyError, TypeError, ValueError, MemoryError, RecursionError) as wrong:
            raise FormatError(errno.EBADMSG, f"{damaged} ({wrong})") from None
        return cls(store, layout, geometry)


def read_description(folder: str) -> Description | None:
    """kvio.json of a store, or None if there is none."""
    path = os.path.join(folder, JSON_NAME)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):     # to open a FIFO would block
            raise OSError(errno.EINVAL, "not a regular file")
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise FormatError(errno.EBADMSG, f"{path} is damaged: it is not text") from None
    except OSError as failed:
        raise StoreError(failed.errno, f"cannot read {path}: {failed.strerror}") from failed
    return Description.from_json(text, path)


def create_description(folder: str, layout: BlockLayout, geometry: Geometry) -> Description:
    """Write kvio.json whole or not at all; of two that race, one wins and both return it."""
    mine = Description(uuid.uuid4().bytes, layout, geometry)
    path = os.path.join(folder, JSON_NAME)
    draft = f"{path}.{mine.store.hex()}"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(mine.to_json())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:                     # a file system without hard links
            if not os.path.exists(path):
                os.rename(draft, path)
        if os.path.exists(draft):
            os.unlink(draft)
        sync_folder(folder)
    except OSError as failed:
        raise StoreError(failed.errno, f"cannot create {path}: give a directory that can be "
                         "written and has space") from failed
    return read_description(folder)


def check_layout(description: Description, layout: BlockLayout, folder: str) -> None:
    """LayoutMismatch unless the store was made for this layout."""
    if description.layout != layout:
        raise LayoutMismatch(
            f"the store at {folder} holds blocks of {description.layout}, not of {layout}: open it "
            "with its own layout, or use another directory")


def sync_folder(folder: str) -> None:
    """Make names in a directory durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def segment_name(writer: bytes, number: int) -> str:
    """File name of a writer's n-th segment."""
    return f"segment-{writer.hex()}-{number}"


def parse_segment_name(name: str) -> tuple[bytes, int] | None:
    """(writer, number), or None for a file that is no segment."""
    found = _SEGMENT_NAME.match(name)
    return (bytes.fromhex(found[1]), int(found[2])) if found else None


def touch_name(writer: bytes) -> str:
    """File name of a reader's touches."""
    return f"touch-{writer.hex()}"


def parse_touch_name(name: str) -> bytes | None:
    """The reader's uuid, or None for a file that holds no touches."""
    found = _TOUCH_NAME.match(name)
    return bytes.fromhex(found[1]) if found else None


def _page0(description: Description, writer: bytes, number: int, segment: bytes) -> np.ndarray:
    page = np.zeros((), PAGE0)
    page["magic"], page["version"], page["page_nbytes"] = b"KVIOSEG1", VERSION, PAGE
    for name, value in (("store", description.store), ("writer", writer), ("segment", segment),
                        ("layout", description.layout.fingerprint)):
        page[name] = np.void(value)
    page["number"] = number
    for name, value in description.geometry.to_dict().items():
        page[name] = value
    return page


def encode_page0(description: Description, writer: bytes, number: int, segment: bytes) -> bytes:
    """Page 0 of a segment: written once, never changed."""
    return seal(_page0(description, writer, number, segment))


def check_page0(data: bytes, description: Description, name: str) -> bytes | str:
    """The segment's uuid (bytes), or why the file must be ignored (str)."""
    writer, number = parse_segment_name(name)
    if len(data) < PAGE:
        return "shorter than page 0"
    if data[:8] != b"KVIOSEG1":
        return "not a segment file"
    if not is_sealed(data):
        return "page 0 fails its CRC"
    page = np.frombuffer(data, PAGE0)[0]
    if page["version"] != VERSION:
        return f"segment format version {page['version']}"
    segment = bytes(page["segment"])
    if bytes(page["store"]) != description.store:
        return "belongs to another store"
    if data != encode_page0(description, writer, number, segment):
        return "page 0 disagrees with kvio.json or the file name"
    return segment


def encode_page1(segment: bytes, header_pages: int, heartbeat: int = 0, epoch: int = 1,
                 others: int = 0, changed: bytes = bytes(BITMAP_BYTES),
                 changed_before: bytes = bytes(BITMAP_BYTES)) -> bytes:
    """Page 1: heartbeat, epoch and the header pages changed in this and the previous epoch."""
    page = np.zeros((), PAGE1)
    page["magic"], page["version"], page["header_pages"] = b"KVIOPG1", VERSION, header_pages
    page["segment"], page["heartbeat"], page["epoch"] = np.void(segment), heartbeat, epoch
    page["others"] = others
    page["changed"], page["changed_before"] = np.void(changed), np.void(changed_before)
    return seal(page)


def encode_touches(store: bytes, writer: bytes, sequence: int, keys: bytes) -> bytes:
    """A touch file: keys are those touched last, 16 bytes each, the newest first."""
    page = np.zeros((), TOUCH)
    page["magic"], page["version"], page["count"] = b"KVIOTCH1", VERSION, len(keys) // 16
    page["store"], page["writer"], page["sequence"] = np.void(store), np.void(writer), sequence
    page["keys_crc"] = crc32c(keys)
    return seal(page) + keys + bytes(-len(keys) % PAGE)


def check_touches(data: bytes, store: bytes, name: str) -> tuple[int, int, int] | None:
    """(sequence, number of keys, their CRC) from the first page of a touch file, if it fits."""
    if len(data) < PAGE or data[:8] != b"KVIOTCH1" or not is_sealed(data[:PAGE]):
        return None
    page = np.frombuffer(data, TOUCH)[0]
    if page["version"] != VERSION or bytes(page["store"]) != store or \
            bytes(page["writer"]) != parse_touch_name(name) or page["count"] > MAX_TOUCHES:
        return None
    return int(page["sequence"]), int(page["count"]), int(page["keys_crc"])


def encode_header(block: np.void, segment: bytes, nbytes: int) -> bytes:
    """The header of a block (a row of BLOCK_IO)."""
    header = np.zeros((), HEADER)
    header["magic"], header["version"], header["segment"] = b"KVBH", VERSION, np.void(segment)
    for name in ("key", "parent", "generation", "slot", "tokens"):
        header[name] = block[name]
    header["nbytes"], header["payload_crc"] = nbytes, block["crc"]
    header["flags"] = HEADER_DURABLE if block["flags"] & BLOCK_DURABLE else 0
    return seal(header)


def as_keys(keys) -> np.ndarray:
    """Keys in any accepted form as a contiguous array of (key, parent).

    Rows of `block_keys`; or bare keys (uint8 `[n, 16]`, or a sequence of 16-byte strings), which
    are roots: their parent is 16 zero bytes.
    """
    if isinstance(keys, (list, tuple)) and all(isinstance(key, bytes) for key in keys):
        wrong = next((len(key) for key in keys if len(key) != 16), 16)
        if wrong != 16:
            raise InvalidArgument(f"a key is 16 bytes, not {wrong}")
        keys = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
    array = any_array(keys, "keys")
    if array.dtype == KEY_DTYPE and array.ndim == 1:
        return np.ascontiguousarray(array)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != 16:
        raise InvalidArgument("keys must be rows of block_keys(), a uint8 array [n, 16] or a list "
                              f"of 16-byte strings, not {array.dtype} of shape {array.shape}")
    rows = np.zeros(len(array), KEY_DTYPE)
    rows["key"] = array
    return rows


def key_list(keys: np.ndarray) -> list[bytes]:
    """The keys of an array of (key, parent), as bytes."""
    return np.ascontiguousarray(keys["key"]).view("V16").ravel().tolist()
