"""Signals to other processes of a test."""
import glob
import os
import signal
import time


def send_signal(pid, number):
    """SIGSTOP is under way for a while: it has arrived when every thread of the process stands."""
    os.kill(pid, number)
    while number == signal.SIGSTOP and not all(map(_stands, glob.glob(f"/proc/{pid}/task/*/stat"))):
        time.sleep(0.001)


def _stands(stat):
    try:
        with open(stat) as file:
            return file.read().rpartition(")")[2].split()[0] in "TZX"
    except OSError:                     # the thread is gone
        return True
