"""Requests that wait, in the order in which they came; and items in the order of a figure."""
from bisect import insort
from collections import deque
from heapq import heapify, heappop, heappush
from operator import attrgetter

__all__ = ["Queue", "Ranking", "Waiting"]

_place = attrgetter("place")


class Waiting:
    """A request without a route. `place` grows with every submission. `prefill` and `decode`
    are its engines, None until it has them, `group` the decode group whose queue it is in."""

    __slots__ = ("request", "place", "num_tokens", "prefill", "decode", "group",
                 "prefill_reason", "decode_reason", "left")

    def __init__(self, request, place: int):
        self.request, self.place, self.num_tokens = request, place, request.num_tokens
        self.prefill = self.decode = self.group = None
        self.prefill_reason = self.decode_reason = None
        self.left = False


class Queue:
    """First in, first out. Leaving from the middle is O(1): the entry is passed over later."""

    __slots__ = ("_entries", "_num_left", "num_tokens")

    def __init__(self):
        self._entries, self._num_left, self.num_tokens = deque(), 0, 0

    def __len__(self) -> int:
        return len(self._entries) - self._num_left

    def __iter__(self):
        for entry in self._entries:
            if not entry.left:
                yield entry

    def append(self, entry: Waiting) -> None:
        self._entries.append(entry)
        self.num_tokens += entry.num_tokens

    def popleft(self) -> Waiting:
        while True:
            entry = self._entries.popleft()
            if not entry.left:
                self.num_tokens -= entry.num_tokens
                return entry
            self._num_left -= 1

    def pop(self) -> Waiting:
        """The last one."""
        while True:
            entry = self._entries.pop()
            if not entry.left:
                self.num_tokens -= entry.num_tokens
                return entry
            self._num_left -= 1

    def leave(self, entry: Waiting) -> None:
        """`entry`, which is in here, has gone for good."""
        entry.left = True
        self.num_tokens -= entry.num_tokens
        self._num_left += 1
        if self._num_left > len(self._entries) // 2:    # O(1) for each that has left
            self._entries = deque(self)
            self._num_left = 0

    def insert(self, entry: Waiting) -> None:
        """To where it belongs: nearly always the end."""
        if self._entries and entry.place < self._entries[-1].place:
            insort(self._entries, entry, key=_place)
            self.num_tokens += entry.num_tokens
        else:
            self.append(entry)

    def put_back(self, entries) -> None:
        """Entries that were in a queue before, to the places where they belong."""
        self._entries = deque(sorted((*self, *entries), key=_place))
        self._num_left = 0
        self.num_tokens = sum(entry.num_tokens for entry in self._entries)

    def drain(self) -> list:
        """All entries, which are then no longer in here."""
        entries = list(self)
        self._entries.clear()
        self._num_left = self.num_tokens = 0
        return entries


class Ranking:
    """Items by a figure that changes often, the least first; ties by id.

    `touch` says that an item's figure may have changed and costs nothing else until somebody
    asks for the order. The first k items cost O(k log k), however many there are.
    """

    def __init__(self, item_id: str, figure: str):
        self._id, self._figure = attrgetter(item_id), attrgetter(figure)
        self._heap, self._current, self._touched, self._num_pushed = [], {}, {}, 0

    def touch(self, item) -> None:
        self._touched[self._id(item)] = item

    def remove(self, item) -> None:
        self._touched.pop(self._id(item), None)
        self._current.pop(self._id(item), None)

    def __iter__(self):
        """Ascending. Figures must not change while one iterates."""
        self._settle()
        heap, current = self._heap, self._current
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            entry, at = heappop(ahead)
            if current.get(entry[1]) is entry:
                yield entry[3]
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(ahead, (heap[child], child))

    def _settle(self):
        """Bring the heap up to date. Entries that another of the same item has replaced stay
        in it until they come to its top or outnumber the items."""
        heap, current = self._heap, self._current
        for item_id, item in self._touched.items():
            figure, entry = self._figure(item), current.get(item_id)
            if entry is None or entry[0] != figure:
                self._num_pushed += 1
                # The running number makes entries comparable without looking at the items.
                current[item_id] = entry = (figure, item_id, self._num_pushed, item)
                heappush(heap, entry)
        self._touched.clear()
        while heap and current.get(heap[0][1]) is not heap[0]:
            heappop(heap)
        if len(heap) > 2 * len(current) + 16:
            self._heap = list(current.values())
            heapify(self._heap)
