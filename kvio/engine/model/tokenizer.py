"""Byte-level BPE as the SmolLM2 models use it, read from a GGUF file's metadata.

Text is cut first at control tokens, then at every digit, then by the GPT-2 pattern; each word's
bytes are then merged by rank.
"""
import functools
import heapq

from kvio.engine.model.chat import END, START, render_chat
from kvio.engine.model.gguf import Gguf
from kvio.errors import InvalidArgument, ModelMissing

try:
    import regex                # `re` has no classes of Unicode letters and numbers
except ImportError as error:
    raise ModelMissing("the model's tokenizer needs regex; run: pip install regex") from error

_DIGIT = regex.compile(r"(\p{N})")
_WORD = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_CONTROL = 3            # the token type of control tokens in GGUF


def byte_chars():
    """The printable character that stands for each of the 256 bytes in a BPE vocabulary."""
    keep = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in keep else next(spare)) for byte in range(256)]


class Tokenizer:
    """`encode(text) -> list[int]` and `decode(ids) -> str`; safe to share between threads.

    `meta` holds `tokenizer.ggml.tokens`, `.merges`, `.token_type` and, where the model has them,
    `.unknown_token_id` and `.eos_token_id`. A byte the vocabulary lacks becomes the unknown token.
    """

    def __init__(self, meta):
        try:
            self._tokens = meta["tokenizer.ggml.tokens"]
            merges = meta["tokenizer.ggml.merges"]
            types = meta["tokenizer.ggml.token_type"]
        except KeyError as error:
            raise InvalidArgument(f"no tokenizer: metadata key {error} is missing") from None
        if len(types) != len(self._tokens):
            raise InvalidArgument(f"{len(self._tokens)} tokens but {len(types)} token types")
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        self._rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self._encoder = byte_chars()
        self._decoder = {char: byte for byte, char in enumerate(self._encoder)}
        self.control = {self._tokens[i]: i for i, kind in enumerate(types) if kind == _CONTROL}
        longest_first = sorted(self.control, key=len, reverse=True)
        self._control_re = regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")")
        self.unknown = meta.get("tokenizer.ggml.unknown_token_id", 0)
        self.eos = meta.get("tokenizer.ggml.eos_token_id")
        self._word = functools.lru_cache(65536)(self._merge)

    @classmethod
    def from_gguf(cls, path):
        with Gguf(path) as file:
            return cls(file.meta)

    @property
    def vocab(self):
        """Number of tokens."""
        return len(self._tokens)

    def encode(self, text, control=True):
        """Token ids of `text`. With `control` false, "<|im_end|>" in it is ordinary text."""
        if not control or not self.control:
            return self._encode_plain(text)
        ids = []
        for piece in self._control_re.split(text):
            if piece in self.control:
                ids.append(self.control[piece])
            else:
                ids += self._encode_plain(piece)
        return ids

    def encode_chat(self, messages, generate=False):
        """Token ids of (role, content) pairs as ChatML; text in them never acts as control."""
        ids = []
        for role, content in messages:
            ids += self.encode(START)
            ids += self.encode(f"{role}\n{content}", control=False)
            ids += self.encode(END + "\n")
        return ids + self.encode(render_chat((), generate))

    def decode(self, ids):
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        data = bytearray()
        for i in ids:
            if not 0 <= i < len(self._tokens):
                raise InvalidArgument(f"token id {i} is outside 0..{len(self._tokens) - 1}")
            token = self._tokens[i]
            if token in self.control:
                data += token.encode()
            else:
                data += bytes(self._decoder[char] for char in token)
        return data.decode("utf-8", "replace")

    def _encode_plain(self, text):
        ids = []
        for part in _DIGIT.split(text):         # digits first: each part is split on its own
            for word in _WORD.findall(part):
                ids += self._word(word)
        return ids

    def _merge(self, word):
        """Token ids of one word: merge the lowest-ranked pair, the leftmost first.

        A heap over a linked list: n log n, since a word may be a whole base64 attachment.
        """
        parts = [self._encoder[byte] for byte in word.encode("utf-8", "replace")]
        after = [*range(1, len(parts)), -1]
        before = [*range(-1, len(parts) - 1)]
        heap = []

        def consider(left, right):
            rank = self._rank.get((parts[left], parts[right]))
            if rank is not None:
                heapq.heappush(heap, (rank, left, right, parts[left], parts[right]))

        for left in range(len(parts) - 1):
            consider(left, left + 1)
        while heap:
            _, left, right, first, second = heapq.heappop(heap)
            if parts[left] != first or parts[right] != second or after[left] != right:
                continue                        # one of the two was merged meanwhile
            parts[left], parts[right] = first + second, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
                consider(left, after[left])
            if before[left] >= 0:
                consider(before[left], left)
        return [self._ids.get(part, self.unknown) for part in parts if part]
