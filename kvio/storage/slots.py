"""Which slots of a segment are free, kept as runs: adjacent slots are one large read.

Every call costs a few operations per run it touches, whatever the segment's size. Runs hang in
lists by length (exact below 64, then by powers of two); a run writes its length at both of its
ends, so that neighbours which become free join without a search. 13 bytes a slot.
"""
import numpy as np

__all__ = ["Slots"]

UNUSED, FREE, FLYING, VALID, UNBACKED, RETIRED = range(6)
_CODE, STALE = 7, 8             # a slot's state; set: its header may be valid on disk
_EXACT, _CLASSES = 64, 96
_LOOK = 8                       # runs of a list that are compared before one is taken
_PAGE = 32                      # headers of one page, which are written together


def _class_of(length):
    return length if length < _EXACT else length.bit_length() + _EXACT - 7


def _pages(start, count):
    return (start + count - 1) // _PAGE - start // _PAGE


class Slots:
    """The slots of one segment. Each is unused, free, flying (handed out), valid, unbacked (the
    disk had no space for it) or retired (its device failed). Not thread-safe."""

    def __init__(self, count: int):
        self.count, self.next = count, 0        # `next`: the first slot that was never used
        self.num_free = self.num_flying = self.num_valid = 0
        self.unbacked: list[int] = []
        self.lengths = 0                        # bit n: there is a run of class n
        self._states = np.zeros(count, np.uint8)
        self._state = memoryview(self._states)
        self._length, self._after, self._before = (
            memoryview(np.zeros(count, np.int32)) for _ in range(3))
        self._first = [0] * _CLASSES            # start + 1 of a run of that class, 0: none

    @property
    def tail(self) -> int:
        """Slots that were never used: one run at the end."""
        return self.count - self.next

    def fit(self, count: int) -> int:
        """Length of a short run with room for `count`, the shortest if count < 64; 0: none."""
        number = _class_of(count)
        if number >= _EXACT:
            start = self._choose(number, count)
            if start >= 0 and self._length[start] >= count:
                return self._length[start]
            number += 1
        longer = self.lengths >> number
        if not longer:
            return 0
        number += (longer & -longer).bit_length() - 1
        return number if number < _EXACT else self._length[self._choose(number, count)]

    def longest(self) -> int:
        """Length of a long run, the longest if that is < 64; 0: none is free."""
        number = max(0, self.lengths.bit_length() - 1)
        return number if number < _EXACT else self._length[self._choose(number, self.count)]

    def take(self, count: int) -> tuple[int, int]:
        """Hand out up to `count` adjacent slots of the run that `fit` names, or else of the one
        that `longest` does. (first slot, how many)."""
        start = self._choose(_class_of(self.fit(count) or self.longest()), count)
        length = self._length[start]
        self._unlink(start, length)
        count = min(count, length)
        rest = length - count
        if rest:                        # from its end if that spares a header page
            back = start + rest
            if _pages(back, count) < _pages(start, count):
                self._link(start, rest)
                start = back
            else:
                self._link(start + count, rest)
        self.num_free -= count
        self._fly(start, count)
        return start, count

    def extend(self, count: int) -> tuple[int, int]:
        """Hand out `count` slots that were never used."""
        start = self.next
        self.next += count
        self._fly(start, count)
        return start, count

    def flags(self, start: int, count: int) -> np.ndarray:
        """Of each slot, true where its header has to be invalidated first."""
        return self._states[start:start + count] & STALE != 0

    def stored(self, slots: np.ndarray) -> None:
        """Blocks that were written are valid."""
        self._states[slots] = VALID
        self.num_flying -= len(slots)
        self.num_valid += len(slots)

    def free(self, slots: np.ndarray, stale) -> None:
        """Slots come back from their blocks or from a write. `stale`, one for all or one each:
        their headers may be valid on disk."""
        self._leave(slots)
        self._states[slots] |= np.where(stale, STALE, 0).astype(np.uint8)
        for first, count in _runs(np.sort(slots)):
            self._join(first, count)

    def shelve(self, slots: np.ndarray, state: int) -> None:
        """Slots go out of use: UNBACKED until `unshelve`, or RETIRED."""
        self._leave(slots)
        self._states[slots] = self._states[slots] & STALE | state
        if state == UNBACKED:
            self.unbacked += slots.tolist()

    def unshelve(self) -> None:
        """Slots without disk space may be tried again."""
        slots, self.unbacked = np.array(sorted(self.unbacked), np.int64), []
        for first, count in _runs(slots):
            self._join(first, count)

    # ---- runs

    def _leave(self, slots):
        """Valid and flying slots are neither any more."""
        states = self._states[slots]
        valid = int(np.count_nonzero(states & _CODE == VALID))
        assert valid + int(np.count_nonzero(states & _CODE == FLYING)) == len(slots), \
            "a slot was given back that nobody had"
        self.num_valid -= valid
        self.num_flying -= len(slots) - valid

    def _fly(self, start, count):
        span = self._states[start:start + count]
        span &= STALE
        span |= FLYING
        self.num_flying += count

    def _join(self, start, count):
        """Slots become a free run, joined to its free neighbours."""
        span = self._states[start:start + count]
        span &= STALE
        span |= FREE
        self.num_free += count
        end = start + count
        if start and self._state[start - 1] & _CODE == FREE:
            length = self._length[start - 1]
            start -= length
            self._unlink(start, length)
        if end < self.count and self._state[end] & _CODE == FREE:
            length = self._length[end]
            self._unlink(end, length)
            end += length
        self._link(start, end - start)

    def _choose(self, number, count):
        """The start of a run of this class, -1 if there is none: of the first few the shortest
        with room, or else the longest; of equal ones one that lies in one header page."""
        at = best = self._first[number]
        if number < _EXACT:
            looks = _LOOK if number == count <= _PAGE else 0
            while at and looks and (at - 1) % _PAGE + count > _PAGE:
                at, looks = self._after[at - 1], looks - 1
            return (at if at and looks else best) - 1
        looks = _LOOK
        while at and looks:
            length, chosen = self._length[at - 1], self._length[best - 1]
            if count <= length < chosen or chosen < min(length, count):
                best = at
            at, looks = self._after[at - 1], looks - 1
        return best - 1

    def _link(self, start, length):
        number = length if length < _EXACT else _class_of(length)
        first = self._first[number]
        self._after[start], self._before[start] = first, 0
        if first:
            self._before[first - 1] = start + 1
        self._first[number] = start + 1
        self._length[start] = self._length[start + length - 1] = length
        self.lengths |= 1 << number

    def _unlink(self, start, length):
        number = length if length < _EXACT else _class_of(length)
        after, before = self._after[start], self._before[start]
        if before:
            self._after[before - 1] = after
        else:
            self._first[number] = after
            if not after:
                self.lengths &= ~(1 << number)
        if after:
            self._before[after - 1] = before


def _runs(slots):
    """(first, count) of each run of adjacent slots in a sorted array."""
    slots = slots.astype(np.int64)
    if len(slots) == 0:
        return []
    starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    counts = np.diff(starts, append=len(slots))
    return list(zip(slots[starts].tolist(), counts.tolist()))
