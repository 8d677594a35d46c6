"""Which memory the rings have registered, by numbers that are never used twice."""
import itertools
import warnings
import weakref

from kvio.errors import errno_name

__all__ = ["Regions"]

_numbers = itertools.count(1)


class Regions:
    """A number for each pool's memory that no other memory ever gets: a registration must not
    outlive its pages. `rings`: the open rings, which are told when memory has gone."""

    def __init__(self, rings):
        self._rings, self._known, self._announced = rings, {}, False    # id(pool) -> (ref, number)

    def number(self, pool) -> int:
        """The pool's number. The caller holds the store's lock."""
        known = self._known.get(id(pool))
        if known is not None and known[0]() is pool:
            return known[1]
        number, owner = next(_numbers), weakref.ref(self)

        def gone(_, key=id(pool)):
            regions = owner()
            if regions is not None:
                if regions._known.get(key, (None, 0))[1] == number:
                    del regions._known[key]
                for ring in list(regions._rings):
                    ring._ring.forget(number)

        self._known[id(pool)] = weakref.ref(pool, gone), number
        return number

    def announce(self, ring) -> None:
        """Warn once if the kernel would not pin some pool's memory."""
        ring._announce()
        code = 0 if self._announced else ring._ring.register_errno
        if code:
            self._announced = True
            warnings.warn(f"pool memory could not be registered with io_uring "
                          f"({errno_name(code)}): plain buffers serve, at more CPU per byte; "
                          "raise the locked-memory limit (ulimit -l)", RuntimeWarning,
                          stacklevel=6)
