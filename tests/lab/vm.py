"""A small Linux guest in QEMU's emulator: Debian's kernel, an initramfs with exactly the files that
a command needs, a disk, a serial line to talk over. Neither /dev/kvm nor root is needed.

Needs qemu-system-x86, busybox-static, zstd, apt and dpkg (`.ci/lab-setup` installs them).
KVIO_LAB_CACHE says where the kernel is kept (default: ~/.cache/kvio-lab).
"""
import contextlib
import ctypes
import glob
import json
import lzma
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time

KERNEL = "linux-image-6.12-amd64"
MODULES = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"]
_APPEND = ("console=ttyS0 panic=-1 loglevel=4 mitigations=off nokaslr tsc=reliable no_timer_check "
           "audit=0 apparmor=0 cryptomgr.notests random.trust_cpu=on rcupdate.rcu_expedited=1 "
           "8250.nr_uarts=2")
_INIT = """#!/bin/busybox sh
bb() {{ /bin/busybox "$@"; }}
bb mount -t devtmpfs dev /dev; bb mount -t proc proc /proc; bb mount -t sysfs sys /sys
while read -r m; do bb insmod /mods/$m || echo "cannot load $m"; done </mods/order
bb ln -s /proc/self/fd /dev/fd
{command}
echo "the command ended with $?"
bb poweroff -f
"""


class LabMissing(Exception):
    """This machine cannot run the guest; the text says what it lacks."""


def missing() -> str | None:
    """Why no guest can be run here, or None."""
    lacking = [name for name in ("qemu-system-x86_64", "busybox", "zstd", "mkfs.ext4", "apt-get",
                                 "dpkg-deb") if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: run .ci/lab-setup"
    return None


# ---- the kernel ----

def kernel_tree(package: str = KERNEL) -> str:
    """The unpacked kernel package, with its ELF image as `vmlinux`; fetched on first use."""
    cache = os.environ.get("KVIO_LAB_CACHE") or os.path.expanduser("~/.cache/kvio-lab")
    os.makedirs(cache, exist_ok=True)
    link = os.path.join(cache, package)
    if os.path.exists(os.path.join(link, "vmlinux")):
        return os.path.realpath(link)
    depends = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True)
    real = re.search(r"Depends: (linux-image-\d\S+)", depends.stdout)
    scratch = tempfile.mkdtemp(dir=cache)
    try:
        done = subprocess.run(["apt-get", "download", "-qq", real[1] if real else package],
                              cwd=scratch, capture_output=True, text=True)
        if done.returncode:
            raise LabMissing(f"cannot fetch {package}: {done.stderr.strip()[-300:]}")
        tree = os.path.join(scratch, "tree")
        subprocess.run(["dpkg-deb", "-x", *glob.glob(f"{scratch}/*.deb"), tree], check=True)
        with open(glob.glob(f"{tree}/boot/vmlinuz-*")[0], "rb") as file:
            image = _elf_of(file.read())
        with open(f"{tree}/vmlinux", "wb") as file:
            file.write(image)
        final = os.path.join(cache, f"tree-{real[1] if real else package}")
        if not os.path.exists(final):
            os.rename(tree, final)
        if not os.path.lexists(link):
            os.symlink(os.path.basename(final), link)
        return final
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _elf_of(image):
    """The ELF kernel in a bzImage: QEMU enters it directly, which spares the guest seconds of
    emulated decompression."""
    for magic, unpack in (
            (b"\xfd7zXZ\0", lambda data: lzma.LZMADecompressor().decompress(data)),
            (b"\x28\xb5\x2f\xfd", lambda data: subprocess.run(      # complains about the tail
                ["zstd", "-dcq"], input=data, capture_output=True).stdout)):
        at = image.find(magic)
        elf = unpack(image[at:]) if at >= 0 else b""
        if elf[:4] == b"\x7fELF":
            return elf
    raise LabMissing("this kernel is packed in an unknown way")


def _modules(tree, wanted):
    """{file name: contents} of the wanted modules and what they depend on, in loading order."""
    paths = {os.path.basename(path).split(".ko")[0].replace("-", "_"): path
             for path in glob.glob(f"{tree}/lib/modules/**/*.ko*", recursive=True)}
    order = {}

    def add(name):
        path = paths.get(name.replace("-", "_"))
        if path is None or os.path.basename(path) in order:         # built in, or there already
            return
        with open(path, "rb") as file:
            data = file.read()
        if path.endswith(".xz"):
            data = lzma.decompress(data)
        elif path.endswith(".zst"):
            data = subprocess.run(["zstd", "-dcq"], input=data, capture_output=True,
                                  check=True).stdout
        for other in re.search(rb"\0depends=([^\0]*)\0", data)[1].decode().split(","):
            add(other)
        order[os.path.basename(path)] = data
    for name in wanted:
        add(name)
    return order


# ---- the initramfs ----

def _cpio(entries):
    """A newc archive of (name, mode, mtime, contents)."""
    out = bytearray()
    for number, (name, mode, mtime, data) in enumerate([*entries, ("TRAILER!!!", 0, 0, b"")], 1):
        raw = name.encode() + b"\0"
        figures = (number, mode, 0, 0, 1, int(mtime), len(data), 0, 0, 0, 0, len(raw), 0)
        out += b"070701" + b"".join(b"%08x" % figure for figure in figures) + raw
        out += bytes(-len(out) % 4) + data
        out += bytes(-len(out) % 4)
    return bytes(out + bytes(-len(out) % 512))


def initramfs(tree: str, files, command: str) -> bytes:
    """An initramfs with these files of the host at the same paths (links are followed), which runs
    `command` (shell text) when it is up. Its /data is empty."""
    entries, folders = [], set()

    def folder(path):
        if path and path not in folders:
            folder(os.path.dirname(path))
            folders.add(path)
            entries.append((path, stat.S_IFDIR | 0o755, 0, b""))

    def add(path, data, mode=0o755, mtime=0):
        folder(os.path.dirname(path))
        entries.append((path, stat.S_IFREG | mode, mtime, data))
    for name in ("dev", "proc", "sys", "tmp", "data"):
        folder(name)
    with open(shutil.which("busybox"), "rb") as file:
        busybox = file.read()
    if b"ld-linux" in busybox[:4096]:
        raise LabMissing("busybox is not static: install busybox-static")
    add("bin/busybox", busybox)
    add("init", _INIT.format(command=command).encode())
    modules = _modules(tree, MODULES)
    add("mods/order", "".join(f"{name}\n" for name in modules).encode())
    for name, data in modules.items():
        add(f"mods/{name}", data)
    for path in sorted(set(files)):
        with open(path, "rb") as file:
            add(path.lstrip("/"), file.read(), mtime=os.stat(path).st_mtime)
    return _cpio(entries)


def libraries(paths) -> set:
    """Shared libraries, and the loader, that these executables and libraries need."""
    found = set()
    for path in paths:
        text = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        found |= set(re.findall(r"(/[^\s()]+)", text))
    return {path for path in found if os.path.exists(path)}


# ---- the guest ----

class Guest:
    """A running guest. Lines from its /dev/ttyS1 come from `line`, `tell` writes to it. `state`: a
    file that `save` wrote; the guest goes on from there, with the disk as it is now."""

    def __init__(self, tree, initrd, *, disk: str, folder: str, mem_mib=512, state=None):
        self.console = os.path.join(folder, "console")
        line, self._control = os.path.join(folder, "line"), os.path.join(folder, "control")
        for path in (line, self._control):
            if os.path.exists(path):
                os.unlink(path)
        arguments = [
            "qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max,la57=off",
            "-machine", "pc", "-smp", "1", "-m", str(mem_mib), "-nodefaults", "-no-user-config",
            "-no-reboot", "-display", "none", "-kernel", f"{tree}/vmlinux", "-initrd", initrd,
            "-append", _APPEND, "-serial", f"file:{self.console}",
            "-chardev", f"socket,id=line,path={line},server=on,wait=off", "-serial", "chardev:line",
            "-drive", f"driver=nbd,server.type=unix,server.path={disk},cache.direct=on,"
            "if=none,id=disk", "-device", "virtio-blk-pci,drive=disk,write-cache=on",
            "-qmp", f"unix:{self._control},server=on,wait=off"]
        if state:
            arguments += ["-incoming", f"exec:cat {shlex.quote(state)}"]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))      # dies with us
        self._socket, self._rest = None, b""
        try:
            self._socket = self._connect(line)
            if state:
                self._wait_running()
        except BaseException:
            self.kill()
            raise

    def _connect(self, path):
        """QEMU makes its sockets one after the other."""
        until = time.monotonic() + 60
        while True:
            one = socket.socket(socket.AF_UNIX)
            try:
                one.connect(path)
                return one
            except OSError:
                one.close()
                if self.process.poll() is not None or time.monotonic() > until:
                    raise LabMissing("QEMU did not start: " + self.problem()) from None
                time.sleep(0.01)

    def line(self, timeout_s: float) -> str | None:
        """The next line; None if there is none in time, EOFError when the guest has ended."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            try:
                more = self._socket.recv(1 << 16)
            except TimeoutError:
                return None
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace").strip()

    def tell(self, line: str) -> None:
        """One line to the guest."""
        self._socket.settimeout(30)
        self._socket.sendall(line.encode() + b"\n")

    @contextlib.contextmanager
    def _commands(self):
        """A function that sends QEMU a command and returns its answer."""
        with self._connect(self._control) as control:
            control.settimeout(120)
            with control.makefile("rw") as lines:
                def command(name, **arguments):
                    lines.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
                    lines.flush()
                    while True:
                        answer = json.loads(lines.readline())
                        if "error" in answer:
                            raise LabMissing(f"{name}: {answer['error']['desc']}")
                        if "return" in answer:
                            return answer["return"]
                command("qmp_capabilities")
                yield command

    def _wait_running(self):
        """What is written to the serial line while the state is being loaded would be lost."""
        with self._commands() as command:
            while not command("query-status")["running"]:
                time.sleep(0.02)

    def save(self, path: str) -> None:
        """The guest's state goes to a file, and the guest ends."""
        with self._commands() as command:
            command("migrate-set-parameters", **{"max-bandwidth": 1 << 33})
            command("migrate", uri=f"exec:cat > {shlex.quote(path)}")
            while (state := command("query-migrate").get("status")) != "completed":
                if state == "failed":
                    raise LabMissing("QEMU cannot save the guest's state")
                time.sleep(0.05)
        self.close()

    def kill(self) -> None:
        """SIGKILL: the guest's memory is gone."""
        self.process.kill()
        self.process.wait()

    def problem(self) -> str:
        """QEMU's complaints and the end of the console, once the guest has ended."""
        errors = self.process.stderr.read().decode(errors="replace") if \
            self.process.poll() is not None else ""
        with open(self.console, errors="replace") as file:
            return errors + file.read()[-3000:]

    def close(self) -> None:
        self.kill()
        self._socket.close()
        self.process.stderr.close()
