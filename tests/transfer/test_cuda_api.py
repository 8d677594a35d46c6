"""What kvio says of CUDA's driver interface (cuda_api.h) is what the real headers of CUDA 12 and 13
say: every value, every field, every signature in the version that is asked for."""
import os
import re
import subprocess
from pathlib import Path

import pytest

import cbuild
from require import cuda_include, need, skip_or_fail

HERE = Path(__file__).resolve().parent
EXT = HERE.parents[1] / "kvio" / "_ext"
API, CHECK = EXT / "cuda_api.h", HERE / "cuda_api_check.c"
FUNCTION = re.compile(r"^FUNCTION(?:_BUT)?\((\w+), (\w+), (\d+)", re.M)


@pytest.fixture(params=[12, 13])
def include(request):
    need("cuda-headers")
    folder = cuda_include(request.param)
    if not folder:
        skip_or_fail("cuda-headers", f"no cuda.h of CUDA {request.param}")
    return folder


def compiled(include, api=API, *flags):
    """The compiler over the check, beside that cuda.h."""
    return subprocess.run(
        [cbuild.compiler(), *cbuild.WARNINGS, "-isystem", include, f'-DCUDA_API_H="{api}"',
         *(flags or ["-fsyntax-only"]), str(CHECK)], capture_output=True, text=True,
        env={**os.environ, "LD_PRELOAD": ""})


def test_our_header_agrees_with_the_real_one(include):
    ran = compiled(include)
    assert ran.returncode == 0, ran.stderr


SPOILED = {
    "a value": ("CUDA_ILLEGAL_ADDRESS = 700", "CUDA_ILLEGAL_ADDRESS = 701"),
    "an attribute": ("CUDA_ATTR_SM_COUNT = 16", "CUDA_ATTR_SM_COUNT = 15"),
    "a field that moved": ("size_t src_pitch;\n\tsize_t dst_x, dst_y;",
                           "size_t dst_x;\n\tsize_t src_pitch, dst_y;"),
    "a narrow field": ("size_t width, height, depth;", "size_t width, height; int depth;"),
    "a field too few": ("void *dst_array, *reserved1;", "void *dst_array;"),
    "a lost location": ("int src_location[2], dst_location[2];", "int src_location[2];"),
    "a narrow argument": ("(*mem_alloc)(CUdeviceptr *, size_t)",
                          "(*mem_alloc)(CUdeviceptr *, unsigned int)"),
    "arguments that changed places": ("(*copy_h2d)(CUdeviceptr, const void *, size_t, CUstream)",
                                      "(*copy_h2d)(const void *, CUdeviceptr, size_t, CUstream)"),
    "a forgotten argument": ("(*stream_wait)(CUstream, CUevent, unsigned int)",
                             "(*stream_wait)(CUstream, CUevent)"),
    "the batched copy of CUDA 13 for 12": ("size_t *, size_t, size_t *,\n\t\t\t    CUstream);",
                                           "size_t *, size_t,\n\t\t\t    CUstream);"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_header_does_not_compile(include, tmp_path, what):
    old, new = SPOILED[what]
    text = API.read_text()
    assert text.count(old) == 1
    spoiled = tmp_path / "cuda_api.h"
    spoiled.write_text(text.replace(old, new))
    ran = compiled(include, spoiled)
    assert ran.returncode != 0 and "error" in ran.stderr


def bodies(kind, text):
    """(name, body) of every struct or enum of a header."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return re.findall(kind + r"\s*(\w*)\s*{(.*?)};", text, flags=re.S)


def test_everything_in_our_header_is_compared(include):
    """A name that is added to cuda_api.h has to be added to the check."""
    text, seen = API.read_text(), compiled(include, API, "-E", "-P").stdout
    check = CHECK.read_text()
    for _, body in bodies("enum", text):
        for name in re.findall(r"(\w+) =", body):
            assert f"VALUE({name}," in check, name
    structs = dict(bodies("struct", text))
    for name in ("cuda_memcpy2d", "cuda_memcpy3d", "cuda_memcpy_attributes"):
        for field in re.findall(r"(\w+)(?:\[\d\])?\s*[,;]", structs.pop(name)):
            assert f"struct {name}*)0)->{field})" in seen.replace(" *", "*"), (name, field)
    functions = re.findall(r"\(\*(\w+)\)\(", structs.pop("cuda_api"))
    assert sorted(functions) == sorted(field for field, _, _ in FUNCTION.findall(check))
    assert not structs


def test_the_versions_that_our_header_names_are_those_compared():
    checked = {field: int(version) for field, _, version in FUNCTION.findall(CHECK.read_text())}
    named = re.findall(r"\(\*(\w+)\)\([^/]*?/\* (\d+)\.(\d+) \*/", API.read_text())
    assert {field: int(major) * 1000 + int(minor) * 10 for field, major, minor in named} == checked


def test_the_driver_is_asked_for_the_functions_that_were_compared():
    """By the name and the version: of another version the signature may be another one."""
    asked = re.findall(r'"(cu\w+)",\s*(\w+),\s*&cuda\.(\w+)', (EXT / "cuda_lib.c").read_text())
    numbers = dict(re.findall(r"#define (\w+) (\d+)", (EXT / "cuda_lib.c").read_text()))
    checked = {field: (name, version) for field, name, version in FUNCTION.findall(
        CHECK.read_text())}
    assert {field: (name, numbers.get(version, version)) for name, version, field in asked} == \
        checked
