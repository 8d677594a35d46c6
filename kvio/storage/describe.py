"""kvio.json of a store: found, or made where there is none."""
import contextlib
import errno
import os

from kvio.errors import StoreError
from kvio.storage import format as fmt

__all__ = ["describe"]


def describe(path, layout, segment_bytes, create):
    """kvio.json of the store at `path`, made if there is none."""
    geometry = fmt.Geometry.choose(layout, segment_bytes)
    try:
        if create and not os.path.isdir(path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)                      # not its parents: a mount may be missing
        if not os.path.isdir(path):
            if os.path.exists(path):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory")
            raise FileNotFoundError(errno.ENOENT, "no such directory")      # create=False
    except (OSError, ValueError) as failed:             # ValueError: a zero byte in it
        raise StoreError(getattr(failed, "errno", errno.EINVAL),
                         f"cannot open a store at {path!r}: give a directory" +
                         ("" if create else " that exists, or create=True")) from failed
    description = fmt.read_description(path)
    if description is None:
        if not create:
            raise StoreError(errno.ENOENT, f"there is no store at {path} (no {fmt.JSON_NAME}); "
                             "create=True makes one")
        description = fmt.create_description(path, layout, geometry)
    fmt.check_layout(description, layout, path)
    return description
