"""Handles of transfers (see kvio.completion) that a test completes by hand."""
import contextlib
import errno
import os

import numpy as np


def event_fd(number=None):
    """An eventfd of that number, which is free."""
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    if number is not None and fd != number:
        os.dup2(fd, number, inheritable=False)
        os.close(fd)
        fd = number
    return fd


class Handle:
    """The handle protocol, completed by `finish`. With a `fabric`, whoever polls drives that."""

    def __init__(self, count=3, fabric=None, fd=None):
        self.status = np.full(count, -errno.EINPROGRESS, np.int32)
        self.fd, self.fabric, self.canceled = event_fd(fd), fabric, False

    def finish(self, *status):
        self.status[:] = status or 0
        os.eventfd_write(self.fd, 1)

    def poll(self):
        if self.fabric is not None:
            self.fabric.drive()
        return bool((self.status != -errno.EINPROGRESS).all())

    def wait(self, timeout_s):
        return self.poll()

    def cancel(self):
        self.canceled = True
        self.finish(-errno.ECANCELED)

    def fileno(self):
        return self.fd

    def drive_fd(self):
        return self.fabric.fd if self.fabric else -1

    def succeeded(self):
        return not self.status.any()

    def stats(self):
        return {"nbytes": 1}

    def __del__(self):
        os.close(self.fd)


class Fabric:
    """What completes handles when it is driven; its descriptor is readable while it could."""

    def __init__(self, fd=None):
        self.fd, self.due = event_fd(fd), []

    def make_due(self, *handles):
        self.due += handles
        os.eventfd_write(self.fd, 1)

    def drive(self):
        due, self.due = self.due, []
        with contextlib.suppress(BlockingIOError):      # nobody has said so
            os.eventfd_read(self.fd)
        for handle in due:
            handle.finish()

    def __del__(self):
        os.close(self.fd)
