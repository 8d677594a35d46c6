"""What every guest of the lab starts from: Debian's kernel, its modules, an initramfs with busybox.

Needs qemu-system-x86, busybox-static, zstd, apt and dpkg (`.ci/lab-setup` installs them); neither
/dev/kvm nor root. KVIO_LAB_CACHE says where the kernel is kept (default: ~/.cache/kvio-lab).
"""
import ctypes
import glob
import lzma
import mmap
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import time

PACKAGE = "linux-image-6.12-amd64"
APPEND = ("console=ttyS0 panic=-1 loglevel=4 mitigations=off nokaslr tsc=reliable no_timer_check "
          "audit=0 apparmor=0 cryptomgr.notests random.trust_cpu=on rcupdate.rcu_expedited=1")
MACHINE = ["qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max,la57=off",
           "-machine", "pc", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
PROGRAMS = ("qemu-system-x86_64", "busybox", "zstd", "apt-get", "dpkg-deb")

_INIT = """#!/bin/busybox sh
bb() { /bin/busybox "$@"; }
bb mount -t devtmpfs dev /dev; bb mount -t proc proc /proc; bb mount -t sysfs sys /sys
while read -r m; do bb insmod /mods/$m || echo "cannot load $m"; done </mods/order
bb ln -s /proc/self/fd /dev/fd
"""


class LabMissing(Exception):
    """This machine cannot run the guest; the text says what it lacks."""


def find(program: str) -> str | None:
    """Where a program is, /usr/sbin included: not everybody has it in PATH."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


def missing(*more: str) -> str | None:
    """Why no guest can be run here, or None. more: programs that it needs besides."""
    lacking = [name for name in PROGRAMS + more if find(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: run .ci/lab-setup"
    return None


def append() -> str:
    """The kernel's command line."""
    khz = _tsc_khz()
    return f"{APPEND} tsc_early_khz={khz}" if khz else APPEND


# rdtsc; shl rdx, 32; or rax, rdx; ret
_RDTSC = b"\x0f\x31\x48\xc1\xe2\x20\x48\x09\xd0\xc3"


def _tsc_khz() -> int | None:
    """The rate of this machine's time stamp counter, which the emulator hands on; None if it is no
    x86. A guest finds it out from a timer chip; one that is held up meanwhile, as on a busy machine
    it is, can be wrong by a factor of ten, and then all its time-outs are."""
    if platform.machine() != "x86_64":
        return None
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_RDTSC)
    ticks = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))

    def now():
        """(ns, ticks) of one moment: of those tried, the one that was held up least."""
        tried = [(time.monotonic_ns(), ticks(), time.monotonic_ns()) for _ in range(20)]
        before, at, after = min(tried, key=lambda each: each[2] - each[0])
        return (before + after) // 2, at

    first = now()
    time.sleep(0.05)
    second = now()
    return round(1e6 * (second[1] - first[1]) / (second[0] - first[0]))


# ---- the kernel ----

def tree(package: str = PACKAGE) -> str:
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
        made = os.path.join(scratch, "tree")
        subprocess.run(["dpkg-deb", "-x", *glob.glob(f"{scratch}/*.deb"), made], check=True)
        with open(glob.glob(f"{made}/boot/vmlinuz-*")[0], "rb") as file:
            image = _elf_of(file.read())
        with open(f"{made}/vmlinux", "wb") as file:
            file.write(image)
        final = os.path.join(cache, f"tree-{real[1] if real else package}")
        if not os.path.exists(final):
            os.rename(made, final)
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


def initramfs(tree: str, modules, init: str, *, files=(), folders=(), texts=()) -> bytes:
    """An initramfs that loads these modules, then runs `init` (shell text; `bb` is busybox).

    It has these files of the host, at the same paths (links are followed), empty folders, and
    texts (of (name, contents)).
    """
    entries, made = [], set()

    def folder(path):
        if path and path not in made:
            folder(os.path.dirname(path))
            made.add(path)
            entries.append((path, stat.S_IFDIR | 0o755, 0, b""))

    def add(path, data, mode=0o755, mtime=0):
        folder(os.path.dirname(path))
        entries.append((path, stat.S_IFREG | mode, mtime, data))
    for name in ("dev", "proc", "sys", "tmp", *folders):
        folder(name)
    with open(find("busybox"), "rb") as file:
        busybox = file.read()
    if b"ld-linux" in busybox[:4096]:
        raise LabMissing("busybox is not static: install busybox-static")
    add("bin/busybox", busybox)
    add("init", (_INIT + init).encode())
    loaded = _modules(tree, modules)
    add("mods/order", "".join(f"{name}\n" for name in loaded).encode())
    for name, data in loaded.items():
        add(f"mods/{name}", data)
    for name, text in texts:
        add(name, text.encode())
    for path in sorted(set(files)):
        with open(path, "rb") as file:
            add(path.lstrip("/"), file.read(), mtime=os.stat(path).st_mtime)
    return _cpio(entries)
