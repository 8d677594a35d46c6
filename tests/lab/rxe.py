"""Runs a command in a throw-away guest that has two RDMA devices and a cable between them.

    python tests/lab/rxe.py [--net wire] [--timeout S] -- COMMAND [ARG...]

The guest's root is this machine's own file system, shared read-only by 9p below a tmpfs, so paths,
interpreters and virtual environments work as they are, and what the guest writes is gone
afterwards. Its devices rxe0 (10.9.0.1) and rxe1 (10.9.0.2) are Soft-RoCE, the kernel's own RDMA
stack; real RoCEv2 packets cross the cable (wire.sh), so that they can be captured and shaped.
Output is passed on as it comes. The exit status is the command's; 124 after --timeout, 125 if the
guest ended or did not start, with the end of its console.
"""
import argparse
import ctypes
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(HERE))

from lab import kernel                                                      # noqa: E402

TIMED_OUT, DIED = 124, 125
MODULES = {
    None: ["9p", "9pnet_virtio", "virtio_pci", "virtio_console", "overlay"],
    "none": [],
    "wire": ["veth", "crc32_generic", "rdma_rxe", "ib_uverbs", "sch_tbf", "sch_prio", "cls_u32"],
}
_PORTS = ("control", "out", "err")
_INIT = """
die() { echo "lab: $*"; bb poweroff -f; }
bb mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose host /lower ||
	die "cannot mount the host's files"
bb mount -t tmpfs -o size=75% tmp /upper; bb mkdir /upper/u /upper/w
bb mount -t overlay -o lowerdir=/lower,upperdir=/upper/u,workdir=/upper/w root /mnt ||
	die "cannot mount the overlay"
bb mount -t proc proc /mnt/proc; bb mount -t sysfs sys /mnt/sys
bb mount -t devtmpfs dev /mnt/dev
bb mkdir -p /mnt/dev/shm /mnt/dev/pts
bb mount -t tmpfs -o size=75% shm /mnt/dev/shm; bb mount -t tmpfs run /mnt/run
bb mount -t devpts pts /mnt/dev/pts
for p in /sys/class/virtio-ports/vport*; do read n <$p/name; eval "P_$n=/dev/${p##*/}"; done
bb cp /command /mnt/run/command
exec 3>$P_control </dev/null
bb chroot /mnt /bin/sh -e /run/command >$P_out 2>$P_err
echo exit $? >&3; bb sleep 60
"""


def missing() -> str | None:
    """Why this guest cannot be run here, or None."""
    lacking = kernel.missing("ip", "rdma", "tc")
    if lacking:
        return lacking
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return f"{error}: run .ci/lab-setup"
    return None


def _command(options):
    """Shell text for the guest, once it is up."""
    quote = shlex.quote
    lines = ["export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
             f"export HOME={quote(os.path.expanduser('~'))} KVIO_LAB=1", "ulimit -l unlimited",
             "echo 1 >/proc/sys/vm/nr_hugepages", "echo up >&3"]
    if options.net == "wire":
        lines.append(f"{quote(HERE)}/wire.sh make")
    lines += [f"export {quote(pair)}" for pair in options.env]
    lines += [f"cd {quote(options.cwd)}", "echo start >&3", "set +e",
              f"{shlex.join(options.command)} 3>&-", "rc=$?", "echo end >&3", "exit $rc"]
    return "\n".join(lines) + "\n"


def _in_the_child(realtime):
    """Of QEMU, before it becomes QEMU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)                                  # dies with us
    if realtime:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            os.write(2, b"lab: no CAP_SYS_NICE: what else runs here shows in the guest's times\n")


class Guest:
    """A running guest. `seconds`: since its start, at "up", "start" and "end" of the command."""

    def __init__(self, options, folder):
        self.status, self.seconds, self.console = None, {}, os.path.join(folder, "console")
        tree, initrd = kernel.tree(), os.path.join(folder, "initrd")
        with open(initrd, "wb") as file:
            file.write(kernel.initramfs(
                tree, MODULES[None] + MODULES[options.net], _INIT,
                folders=("lower", "upper", "mnt"), texts=[("command", _command(options))]))
        reads, writes = zip(*(os.pipe() for _ in _PORTS))
        self.pipes = dict(zip(reads, _PORTS))
        arguments = [
            *kernel.MACHINE, "-smp", str(options.smp), "-m", str(options.mem),
            "-kernel", f"{tree}/vmlinux", "-initrd", initrd,
            "-append", kernel.append() + " 8250.nr_uarts=1",
            "-serial", f"file:{self.console}", "-device", "virtio-serial-pci",
            "-fsdev", "local,id=host,path=/,security_model=none,multidevs=remap,readonly=on",
            "-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]
        for end, name in zip(writes, _PORTS):
            arguments += ["-chardev", f"file,id={name},path=/dev/fd/{end}",
                          "-device", f"virtserialport,chardev={name},name={name}"]
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, pass_fds=writes,
            preexec_fn=lambda: _in_the_child(options.realtime))
        for end in writes:
            os.close(end)

    def heard(self, line):
        """What the guest says of itself."""
        word, *more = line.split()
        self.seconds[word] = time.monotonic() - self._started
        if word == "exit":
            self.status = int(more[0])

    def close(self):
        self.process.kill()
        self.process.wait()
        for end in self.pipes:
            os.close(end)


def forward(guest, timeout_s: float) -> int:
    """Pass the output on until the command has ended; the exit status."""
    selector, until = selectors.DefaultSelector(), time.monotonic() + timeout_s
    for end, name in guest.pipes.items():
        selector.register(end, selectors.EVENT_READ, name)
    to = {"out": sys.stdout.buffer, "err": sys.stderr.buffer}
    while True:
        # What was written before the guest said "exit" is in the pipes by then.
        ready = selector.select(0.2 if guest.status is None else 0)
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fd)
            elif key.data == "control":
                for line in data.decode().splitlines():
                    guest.heard(line)
            else:
                to[key.data].write(data)
                to[key.data].flush()
        if not ready and guest.status is not None:
            return guest.status
        if not ready and guest.process.poll() is not None:
            print("lab: the guest ended by itself", file=sys.stderr)
            return DIED
        if time.monotonic() > until:
            print(f"lab: timed out after {timeout_s:g} s", file=sys.stderr)
            return TIMED_OUT


def run(options) -> int:
    """Start a guest, run the command in it, end it."""
    folder, guest, status = tempfile.mkdtemp(prefix="kvio-lab."), None, DIED
    try:
        guest = Guest(options, folder)
        status = forward(guest, options.timeout)
        if options.times:
            print("lab: seconds since the start:", *(f"{word} {at:.1f}" for word, at
                                                     in guest.seconds.items()), file=sys.stderr)
        return status
    finally:
        if guest is not None:
            guest.close()
            if status == DIED and os.path.exists(guest.console):
                with open(guest.console, errors="replace") as file:
                    sys.stderr.write(file.read()[-3000:])
        shutil.rmtree(folder, ignore_errors=True)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=["wire", "none"], default="wire")
    parser.add_argument("--timeout", type=float, default=120, metavar="S")
    parser.add_argument("--smp", type=int, default=2, help="processors (%(default)s)")
    parser.add_argument("--mem", type=int, default=1024, metavar="MIB")
    parser.add_argument("--cwd", default=os.getcwd(), metavar="DIR")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--realtime", action="store_true", help="the guest's processors go before "
                        "this machine's other work (SCHED_RR, where CAP_SYS_NICE allows it)")
    parser.add_argument("--times", action="store_true", help="say how long the guest took to start")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    options.command = options.command[options.command[:1] == ["--"]:]
    if not options.command:
        parser.error("no command")
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reason = missing()
    try:
        if reason:
            raise kernel.LabMissing(reason)
        return run(options)
    except kernel.LabMissing as lacking:
        print(f"lab: {lacking}", file=sys.stderr)
        return DIED


if __name__ == "__main__":
    sys.exit(main())
