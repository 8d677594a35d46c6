"""A skip of a part that KVIO_REQUIRE names is a failure, however the test skips itself."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MARKED = "import pytest\n@pytest.mark.needs('lab')\ndef test_a():\n    pass\n"
CALLED = "from require import need\ndef test_a():\n    need('lab')\n"
SKIPPED = "import pytest\ndef test_a():\n    pytest.skip('lab: not here')\n"
FIXTURE = ("import pytest\nfrom conftest import skip_or_fail\n@pytest.fixture\ndef lab():\n"
           "    skip_or_fail('lab', 'not here')\ndef test_a(lab):\n    pass\n")
MODULE = "import pytest\npytest.skip('lab: not here', allow_module_level=True)\n"
OTHER = "import pytest\ndef test_a():\n    pytest.skip('cuda: not here')\ndef test_b():\n    pass\n"


def outcome(folder, text, require, **environment):
    """Exit status and output of a run of `text` as the only tests there are."""
    tests = folder / "tests"
    tests.mkdir()
    for name in ("conftest.py", "require.py", "cbuild.py"):
        shutil.copy(HERE / name, tests)
    shutil.copy(HERE.parent / "pyproject.toml", folder)
    (tests / "test_sample.py").write_text(text)
    environment = os.environ | {"KVIO_REQUIRE": require, "KVIO_LAB": ""} | environment
    ran = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], cwd=folder,
                         env=environment, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("text", [MARKED, CALLED, SKIPPED, FIXTURE, MODULE])
def test_a_skip_fails_where_the_part_is_required(tmp_path, text):
    code, output = outcome(tmp_path, text, "lab")
    assert code and "lab" in output, output


@pytest.mark.parametrize("text", [MARKED, FIXTURE])
def test_a_skip_is_a_skip_elsewhere(tmp_path, text):
    code, output = outcome(tmp_path, text, "")
    assert code == 0 and "1 skipped" in output, output


def test_a_required_part_has_to_be_asked_for(tmp_path):
    code, output = outcome(tmp_path, OTHER, "lab", KVIO_LAB="1")
    assert code and "no test needs it" in output, output


def test_a_required_part_that_is_here_passes(tmp_path):
    code, output = outcome(tmp_path, MARKED + OTHER.replace("test_a", "test_c"), "lab",
                           KVIO_LAB="1")
    assert code == 0 and "2 passed, 1 skipped" in output, output


def test_an_unknown_part_is_an_error(tmp_path):
    code, output = outcome(tmp_path, MARKED, "urin")
    assert code and "no part is called 'urin'" in output, output
