"""The README's tour does what it says."""
import os
import pathlib
import re
import subprocess
import sys
import time

import kvio
from kvio import cli
from require import skip_or_fail

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "transfer"))

import fake_cuda                                                            # noqa: E402


def programs(folder):
    """The README's Python, with its store in `folder`."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(found) == 7 and all("/tmp/kv" in code for code in (*found[:3], found[4]))
    return [code.replace("/tmp/kv", str(folder)) for code in found]


def test_the_tour_runs_while_another_process_waits_for_its_blocks(tmp_path):
    tour, _, _, _, reader, *_ = programs(tmp_path / "kv")
    other = subprocess.Popen([sys.executable, "-c", reader], stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "kv" / "kvio.json").exists() and other.poll() is None:
        time.sleep(0.01)                # it has opened an empty store
    exec(compile(tour, "README.md", "exec"), {})
    assert other.communicate(timeout=60)[0].startswith("15 blocks, hit rate 1.0, ")
    assert other.returncode == 0


def test_one_process_reads_what_another_has_registered(tmp_path):
    _, owner, reader, *_ = programs(tmp_path / "kv")
    serving = subprocess.Popen([sys.executable, "-u", "-c", owner], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    with serving:
        assert serving.stdout.read(13) == "Enter ends it"
        done = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True)
        serving.stdin.write("\n")
    assert done.returncode == 0, done.stderr
    assert serving.returncode == 0
    assert not (tmp_path / "kv.sock").exists()


def test_blocks_move_between_host_and_gpu(tmp_path):
    """On the fake libcuda, in a process of its own: one process has one libcuda."""
    if fake_cuda.why_not():
        skip_or_fail("cuda-headers", fake_cuda.why_not())
    done = subprocess.run([sys.executable, "-W", "error", "-c", programs(tmp_path)[3]],
                          env={**os.environ, "KVIO_CUDA_LIBRARY": fake_cuda.build()},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    way, rest = done.stdout.split("]", 1)
    assert way[2:-1] in ("loop", "batch", "strided", "kernel")
    assert rest == " (64, 16, 512) 7\n"


def test_a_request_is_routed_over_both_sides(tmp_path, capsys):
    exec(compile(programs(tmp_path)[5], "README.md", "exec"), {})
    routed, moved = capsys.readouterr().out.splitlines()
    assert routed.startswith("split [('de', ") and "20000 (PE)" in routed
    assert " steps; " in moved and "snic_read" in moved


def test_a_cluster_finds_what_it_has_stored(tmp_path, capsys):
    exec(compile(programs(tmp_path / "kv")[6], "README.md", "exec"), {})
    line, = capsys.readouterr().out.splitlines()
    assert line.startswith("960 of 1224 tokens loaded: ")


def test_a_policy_of_ones_own_is_asked(capsys):
    text = (ROOT / "docs" / "policies.md").read_text().partition("## A policy of your own")[2]
    exec(compile(re.search(r"```python\n(.*?)```", text, re.S)[1], "policies.md", "exec"), {})
    line, = capsys.readouterr().out.splitlines()
    assert line.startswith("split (Part(side='de', tokens=(0, 448), node_id=1)")
    assert "half and half" in line


def test_the_commands_about_transfers_are_understood():
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^kvio ((?:analyze|bench|demo|qos) .*?)(?:  +#.*)?$", text, re.M)
    assert len(lines) == 9
    for line in lines:
        arguments = cli.parser().parse_args(line.split())
        if line.startswith(("qos", "analyze")):
            assert arguments.run(arguments) == 0


def test_the_commands_about_a_store_run(tmp_path):
    exec(compile(programs(tmp_path / "kv")[0], "README.md", "exec"), {})
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^kvio ((?:doctor|store) .*?DIR.*?)(?:  +#.*)?$", text, re.M)
    assert len(lines) == 5
    for line in lines:
        words = line.replace("DIR", str(tmp_path / "kv")).translate(str.maketrans("", "", "[]"))
        done = subprocess.run([sys.executable, "-m", "kvio", *words.split()],
                              capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, (line, done.stderr)


def test_every_public_name_is_there_and_says_what_it_is():
    for name in kvio.__all__:
        assert getattr(kvio, name) is not None
    for name in kvio.errors.__all__:
        assert getattr(kvio.errors, name).__doc__


def test_c_users_find_the_headers(tmp_path):
    source = tmp_path / "user.c"
    source.write_text('#include "kvio/gpu.h"\n#include "kvio/nic.h"\n#include "kvio/ring.h"\n'
                      "int main(void) { return (int)sizeof(struct kvio_wr) - 64; }\n")
    command = ["cc", "-std=c11", "-Wall", "-Werror", "-pedantic", "-D_GNU_SOURCE",
               f"-I{kvio.get_include()}", str(source), "-o", str(tmp_path / "user")]
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "user"]).returncode == 0
