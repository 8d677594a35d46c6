"""When a store uses 3FS, and what it says where it cannot. A stand-in plays 3FS."""
import errno
import io
import os
import shutil
import subprocess
import sys
import tempfile
import warnings

import pytest

import blocks
from blocks import Blocks, chain, open_store, put, readable
from kvio.errors import BackendUnavailable
from kvio.storage import usrbio

BEGIN = """
import os, sys, warnings
sys.path[:0] = {path!r}
from blocks import *
from kvio.errors import *
def refused(folder, backend="usrbio"):
    try:
        open_store(folder, backend).close()
    except BackendUnavailable as failed:
        return str(failed)
"""


def run(code, *, wrap=(), **environment):
    """Run in a process that has no library open; its output."""
    env = {**os.environ, **environment}
    env = {name: value for name, value in env.items() if value}
    ran = subprocess.run([*wrap, sys.executable, "-c", BEGIN.format(path=sys.path) + code],
                         capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.fixture
def elsewhere():
    """A folder that is not on 3FS, nor on what plays it."""
    folder = tempfile.mkdtemp(prefix="kvio-elsewhere-")
    yield folder
    shutil.rmtree(folder)


def test_auto_takes_3fs_where_the_path_lies_on_it(tmp_path, standin, elsewhere, monkeypatch):
    with open_store(tmp_path / "new", "auto") as store:
        assert store.backend == "usrbio" and standin.mount in store.backend_reason
        put(store, chain(3))
    with open_store(elsewhere, "auto") as store:
        assert store.backend != "usrbio"
    monkeypatch.delenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP")      # now only real mounts count
    with open_store(tmp_path / "new", "auto") as store:
        assert store.backend != "usrbio" and readable(store, chain(3)).all()


def test_another_place_is_refused(standin, elsewhere):
    with pytest.raises(BackendUnavailable, match="does not lie on a mount of 3FS") as failed:
        open_store(elsewhere, "usrbio")
    assert failed.value.errno == errno.ENODEV and not os.listdir(elsewhere)
    os.mkdir(os.path.join(elsewhere, "3fs-virt"))
    with pytest.raises(BackendUnavailable, match="there is no .*/3fs-virt/iovs"):
        open_store(elsewhere, "usrbio")
    with pytest.warns(RuntimeWarning, match="falls back .*3fs-virt/iovs"), \
            open_store(elsewhere, "auto") as store:
        assert store.backend != "usrbio" and "3fs-virt/iovs" in store.backend_reason


def test_a_mount_that_cannot_be_written(standin, elsewhere, monkeypatch):
    os.makedirs(os.path.join(elsewhere, "3fs-virt", "iovs"))
    monkeypatch.setattr(usrbio.os, "access", lambda *_: False)      # root may write anywhere
    with pytest.raises(BackendUnavailable, match="cannot be written by user"):
        open_store(elsewhere, "usrbio")


def test_without_the_library(tmp_path, standin):
    code = f"print(refused({str(tmp_path)!r}))"
    said = run(code, KVIO_HF3FS_LIB="/nowhere/lib.so")
    assert "/nowhere/lib.so" in said and "KVIO_HF3FS_LIB" in said and "lie" not in said
    said = run(code, KVIO_HF3FS_LIB="", HF3FS_LIB_DIR="/nowhere")
    assert "/nowhere/libhf3fs_api_shared.so" in said and "; libhf3fs_api_shared.so" in said
    said = run("print(refused('/dev/shm/no-such-folder'))", KVIO_HF3FS_LIB="/nowhere/lib.so")
    assert "/dev/shm/no-such-folder does not lie on 3FS" in said
    said = run(code, KVIO_HF3FS_LIB="libc.so.6")
    assert "no symbol hf3fs_" in said and "release" in said
    assert run(code, KVIO_HF3FS_LIB="", HF3FS_LIB_DIR=os.path.dirname(standin.path)) == "None"


def test_on_3fs_without_the_library_the_kernel_serves(tmp_path, standin):
    said = run(f"""
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    with open_store({str(tmp_path)!r}, "auto") as store:
        put(store, chain(3))
        print(store.backend != "usrbio", "/nowhere/lib.so" in store.backend_reason,
              [str(w.message) for w in found if "3FS" in str(w.message)])
""", KVIO_HF3FS_LIB="/nowhere/lib.so")
    assert said.startswith("True True") and said.count("falls back") == 1


def test_a_path_elsewhere_does_not_open_the_library(elsewhere, standin):
    assert run(f"""
open_store({elsewhere!r}, "auto").close()
print("hf3fs" in open("/proc/self/maps").read())
""") == "False"


def test_a_huge_limit_of_open_files_is_refused(tmp_path, standin):
    """The library would take memory for each of them."""
    source, library = tmp_path / "limit.c", tmp_path / "limit.so"
    source.write_text("""
#define _GNU_SOURCE
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
int getrlimit(__rlimit_resource_t which, struct rlimit *out)
{
    long rc = syscall(SYS_prlimit64, 0, which, 0, out);
    if (which == RLIMIT_NOFILE)
        out->rlim_max = 1073741816;
    return rc;
}
""")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True,
                   env={**os.environ, "LD_PRELOAD": ""})
    preload = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
    said = run(f"print(refused({str(tmp_path)!r}), 'hf3fs' in open('/proc/self/maps').read())",
               LD_PRELOAD=preload)
    assert "1073741816" in said and "ulimit -Hn" in said and said.endswith("False")


def test_too_few_open_files(tmp_path, standin, monkeypatch):
    used = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(usrbio.resource, "getrlimit", lambda which: (used + 10, 1 << 20))
    with pytest.raises(BackendUnavailable, match="ulimit -n"):
        open_store(tmp_path, "usrbio")


SMALL = """
import resource
{code}
with open_store({folder!r}, "usrbio") as store:
    keys = chain(200)
    warnings.simplefilter("ignore")
    put(store, keys)
    assert readable(store, keys).all()
    print(store._default.stats()["staging_bytes"], store._default.stats()["failed_blocks"])
try:
    Blocks(300).pool
    import blocks
    blocks.NAMED = True
    Blocks(300).pool
except MappingFailed as failed:
    print(failed)
"""


def shm_of(nbytes):
    """A command that runs another one with such a /dev/shm, or a skip."""
    wrap = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size={nbytes} tmpfs /dev/shm && "
            'exec "$@"', "sh"]
    if subprocess.run([*wrap, "true"], capture_output=True).returncode:
        pytest.skip("a small /dev/shm needs the right to mount one")
    return wrap


def test_a_small_shm_gives_small_staging_and_no_signal(tmp_path, standin):
    said = run(SMALL.format(code="", folder=str(tmp_path)), wrap=shm_of(3 << 20)).split("\n")
    staging, failed = map(int, said[0].split())
    assert 64 << 10 <= staging <= 3 << 20 and failed == 0
    assert "does not fit into /dev/shm" in said[1] and "shm-size" in said[1]


def test_a_shm_too_small_for_rings_is_refused(tmp_path, standin):
    said = run(f"print(refused({str(tmp_path)!r}))", wrap=shm_of(256 << 10))
    assert "/dev/shm has" in said and "--shm-size" in said and "ENOSPC" in said


def test_a_limit_of_file_sizes_gives_small_staging(tmp_path, standin):
    code = "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))"
    said = run(SMALL.format(code=code, folder=str(tmp_path))).split("\n")
    staging, failed = map(int, said[0].split())
    assert 64 << 10 <= staging <= 3_000_000 and failed == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_library_is_the_parents(tmp_path, standin, monkeypatch):
    monkeypatch.setattr(blocks, "NAMED", True)
    keys = chain(4)
    source = Blocks(4, keys=keys)
    with open_store(tmp_path, "usrbio") as store:
        store.write(keys, source.pool, source.ids).wait()
        links = standin.links()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(BackendUnavailable, match="spawned"):
                    open_store(tmp_path, "usrbio")
                warnings.simplefilter("ignore")
                with open_store(tmp_path, "auto") as second:    # without it, it goes on
                    code = 0 if second.backend != "usrbio" and second.match(keys) == 4 else 2
                store.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert standin.links() == links and os.path.exists(source.pool.shm_path)
        assert readable(store, keys).all()


def test_mounts_are_those_of_the_kernels_table(monkeypatch):
    table = ("36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw\n"
             "40 35 0:50 / /3fs/one\\040two rw,relatime shared:2 - fuse.hf3fs hf3fs rw\n"
             "41 35 0:51 /3fs-virt /3fs/sub/3fs-virt rw - fuse.hf3fs hf3fs rw\n")
    real = open

    def fake(path, *args, **options):
        if path == "/proc/self/mountinfo":
            return io.StringIO(table)
        return real(path, *args, **options)
    monkeypatch.setattr("builtins.open", fake)
    assert usrbio.mount_points() == ["/3fs/one two", "/3fs/sub"]
    monkeypatch.setattr(usrbio.os.path, "exists", lambda path: True)
    assert usrbio.on_3fs("/3fs/sub/store") and usrbio.on_3fs("/3fs/one two")
    assert not usrbio.on_3fs("/3fs/subway") and not usrbio.on_3fs("/mnt")
