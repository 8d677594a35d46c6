"""Which memory the rings have registered, by numbers that are never used twice."""
import itertools
import warnings
import weakref

from kvio._ext import ring as _ring
from kvio.errors import errno_name

__all__ = ["Regions"]

_numbers = itertools.count(1)
_STAGED = ("a pool without a name in /dev/shm is out of reach for 3FS: payload is copied through "
           "the ring's own memory; make it with BlockPool(..., named=True)")


class Regions:
    """A number for each pool's memory that no other memory ever gets: a registration must not
    outlive its pages. `rings`: the open rings, which are told when memory has gone."""

    def __init__(self, rings, backend):
        self._rings, self._known, self._announced = rings, {}, False    # id(pool) -> (ref, number)
        self._usrbio, self.staging_reason = backend == "usrbio", None

    def number(self, pool) -> int:
        """The pool's number. The caller holds the store's lock."""
        known = self._known.get(id(pool))
        if known is not None and known[0]() is pool:
            return known[1]
        number, owner = next(_numbers), weakref.ref(self)
        named = self._usrbio and pool.shm_path is not None

        def gone(_, key=id(pool)):
            regions = owner()
            if regions is not None:
                if regions._known.get(key, (None, 0))[1] == number:
                    del regions._known[key]
                for ring in list(regions._rings):
                    ring._ring.forget(number)
            if named:
                _ring.usrbio_name_region(number, None)

        if named:
            _ring.usrbio_name_region(number, pool.shm_path)
        elif self._usrbio:
            self.staging_reason = _STAGED
        self._known[id(pool)] = weakref.ref(pool, gone), number
        return number

    def announce(self, ring) -> None:
        """Warn once if some pool's memory cannot be used as it is."""
        ring._announce()
        code = 0 if self._announced else ring._ring.register_errno
        if not code and (self._announced or not self.staging_reason):
            return
        self._announced = True
        if not self._usrbio:
            text = (f"pool memory could not be registered with io_uring ({errno_name(code)}): "
                    "plain buffers serve, at more CPU per byte; raise the locked-memory limit "
                    "(ulimit -l)")
        elif code:
            text = (f"pool memory could not be registered with 3FS ({errno_name(code)}): payload "
                    "is copied through the ring's own memory; see the log of the 3FS daemon")
        else:
            text = _STAGED
        warnings.warn(text, RuntimeWarning, stacklevel=6)
