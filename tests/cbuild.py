"""Compiling C for the tests: stand-ins for libraries, and programs that check them."""
import os
import shutil
import subprocess

WARNINGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]


def compiler():
    """The C compiler, or None."""
    return shutil.which(os.environ.get("CC", "cc"))


def sanitizer():
    """Flags for the sanitizer that this process runs under: what it opens needs the same one."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    return [flag for name, flag in (("libasan", "-fsanitize=address,undefined"),
                                    ("libtsan", "-fsanitize=thread")) if name in preloaded]


def compile_c(target, sources, *flags):
    """Build `target` of the sources; CalledProcessError shows what the compiler says."""
    subprocess.run([compiler(), *WARNINGS, *sanitizer(), *map(str, sources), *flags, "-pthread",
                    "-o", str(target)], check=True, env={**os.environ, "LD_PRELOAD": ""})
    return str(target)


def shared_library(target, sources, *flags):
    """Build a shared library that only exports what its source says."""
    return compile_c(target, sources, "-fvisibility=hidden", "-shared", "-fPIC", *flags)


def has_header(name):
    """Does the compiler find `#include <name>`?"""
    found = compiler() and subprocess.run(
        [compiler(), "-E", "-xc", "-"], input=f"#include <{name}>\n", text=True,
        capture_output=True, env={**os.environ, "LD_PRELOAD": ""})
    return bool(found) and found.returncode == 0
