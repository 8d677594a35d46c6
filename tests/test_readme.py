"""The README's tour does what it says."""
import pathlib
import re
import subprocess

import kvio

ROOT = pathlib.Path(__file__).parent.parent


def test_the_tour_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert "/tmp/kv" in code
    exec(compile(code.replace("/tmp/kv", str(tmp_path)), "README.md", "exec"), {})


def test_every_public_name_is_there_and_says_what_it_is():
    for name in kvio.__all__:
        assert getattr(kvio, name) is not None
    for name in kvio.errors.__all__:
        assert getattr(kvio.errors, name).__doc__


def test_c_users_find_the_headers(tmp_path):
    source = tmp_path / "user.c"
    source.write_text('#include "kvio/nic.h"\n#include "kvio/ring.h"\n'
                      "int main(void) { return (int)sizeof(struct kvio_wr) - 64; }\n")
    command = ["cc", "-std=c11", "-Wall", "-Werror", "-pedantic", "-D_GNU_SOURCE",
               f"-I{kvio.get_include()}", str(source), "-o", str(tmp_path / "user")]
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "user"]).returncode == 0
