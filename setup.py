"""Builds the extension modules; everything else about the package stands in pyproject.toml."""
import concurrent.futures
import glob
import os
import subprocess
import tempfile

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

INCLUDE = ["include", "kvio/_ext"]
WARNINGS = ["-std=gnu11", "-O3", "-g", "-Wall", "-Wextra", "-Wshadow", "-Wno-unused-parameter",
            "-fvisibility=hidden"]
if not os.path.exists("PKG-INFO"):      # in an sdist a newer compiler's warning must stop nobody
    WARNINGS.append("-Werror")
EXTRA = os.environ.get("KVIO_CFLAGS", "").split()
# Any header may be in any extension: a change of one rebuilds all of them, which takes seconds.
HEADERS = [path for pattern in ("include/kvio/*.h", "kvio/_ext/*.h", "kvio/_ext/*.px[di]")
           for path in glob.glob(pattern)]


def liburing():
    """The static liburing if there is one, else the shared one, else none: `threads` serves."""
    for flag in ("-l:liburing.a", "-luring"):
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "probe.c")
            with open(source, "w") as file:
                file.write("#include <liburing.h>\nint main(void) { struct io_uring r; "
                           "return io_uring_queue_init(1, &r, 0); }\n")
            command = [os.environ.get("CC", "cc"), source, "-o", source + ".out", flag]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return flag
    print("liburing-dev is not installed: building without io_uring, the store will use threads")
    return None


def extension(name, sources, macros=(), link=()):
    assert f"{name}.c" not in sources, f"Cython would write over {name}.c in build/cython"
    return Extension(
        f"kvio._ext.{name}", [f"kvio/_ext/{name}.pyx", *(f"kvio/_ext/{s}" for s in sources)],
        include_dirs=INCLUDE, depends=HEADERS, define_macros=[("_GNU_SOURCE", None), *macros],
        extra_compile_args=WARNINGS + EXTRA, extra_link_args=[*link, *EXTRA, "-pthread"])


class BuildExt(build_ext):
    """Generated C is not ours to mend: it shadows names of Python's headers (3.10: `digit`). The
    files of a module are compiled side by side: --parallel alone would leave the largest one, nic,
    to a single CPU."""

    def compile_all(self, sources, output_dir=None, macros=None, include_dirs=None, debug=False,
                    extra_preargs=None, extra_postargs=None, depends=None):
        """CCompiler.compile, but for the loop over what has to be built."""
        compiler = self.compiler
        macros, objects, extra, options, build = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs)
        flags = compiler._get_cc_args(options, debug, extra_preargs)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda target: compiler._compile(target, *build[target], flags, extra,
                                                           options), build))
        return objects

    def build_extensions(self):
        compile_one = self.compiler._compile

        def compile_file(target, source, kind, first, last, macros):
            stem = os.path.splitext(os.path.basename(source))[0]
            generated = os.path.exists(f"kvio/_ext/{stem}.pyx")
            last = [*last, "-Wno-shadow"] if generated else last
            compile_one(target, source, kind, first, last, macros)
        self.compiler._compile, self.compiler.compile = compile_file, self.compile_all
        super().build_extensions()


def sources(*patterns):
    """Names of the C files that a module is made of."""
    return sorted(os.path.basename(path) for pattern in patterns
                  for path in glob.glob(f"kvio/_ext/{pattern}"))


CRC32C = "crc32c*.c"        # the file for another CPU compiles to nothing
uring = liburing()
modules = [
    extension("block", sources("blake2b.c", CRC32C, "geometry.c")),
    extension("index", sources("trie*.c")),
    extension("nic", sources("nicbase.c", "nic_*.c", "batch*.c", "soft*.c", "verbs*.c",
                             "cuda*.c"),
              link=["-ldl"]),
    extension("ring", sources("ring_*.c", CRC32C),
              macros=[("KVIO_HAVE_URING", "1")] if uring else [],
              link=[*([uring] if uring else []), "-ldl"]),
]
setup(cmdclass={"build_ext": BuildExt}, ext_modules=cythonize(
    modules, language_level=3, build_dir="build/cython", include_path=["kvio/_ext"],
    compiler_directives={"binding": True, "embedsignature": True}))
