"""A small conversation of three agents with their tools, written for this project.

Each agent opens with a prompt of some 240..255 tokens; three later turns append some 95..120 tokens
of tool output each. With 16 generated tokens a turn, contexts end between 600 and 625 tokens.
The agents share their system prompt, so the first two blocks of all three hold the same KV.
"""
import typing


class Agent(typing.NamedTuple):
    """`turns` are what comes before each answer: the task, then the outputs of tools. Plain text;
    `kvio.engine.model.turn_texts` puts it into the model's prompt format."""
    name: str
    system: str
    turns: tuple[str, ...]


_SYSTEM = """\
You are a careful software agent who works on a Linux machine. You reach it by tools alone: \
`read` shows a file, `search` finds text, `edit` replaces lines, and `run` starts a command and \
shows what it printed. Take one step at a time. Before each step, say in one short sentence what \
you expect to see. Never guess the content of a file that you have not read, never edit a file \
that the task does not name, and stop as soon as the task is done. When a tool fails, read its \
message before you try again."""

_BUG = (
    """\
Our parcel service rounds prices the wrong way. The test below fails since last week. Find the \
cause in pricing.py and fix it there; do not touch the test.

def test_half_cents_round_up():
    assert price(weight_kg=2.5, zone=1) == 1038
    assert price(weight_kg=0.5, zone=3) == 713

FAILED test_half_cents_round_up: 1037 == 1038""",
    """\
Output of read pricing.py:
BASE = {1: 415.0, 2: 610.0, 3: 1425.0}

def price(weight_kg, zone):
    cents = BASE[zone] * weight_kg
    if weight_kg > 20:
        cents += 250
    return int(round(cents))

def refund(cents):
    return -cents""",
    """\
Output of edit pricing.py, lines 4 to 7:
-    cents = BASE[zone] * weight_kg
+    cents = Decimal(BASE[zone]) * Decimal(weight_kg)
-    return int(round(cents))
+    return cents.quantize(Decimal(1), ROUND_HALF_UP)
Edited 2 lines. The import of Decimal is there already.""",
    """\
Output of run pytest -q test_pricing.py:
..F.
test_pricing.py:31: in test_type_of_a_price
    assert type(price(21.5, 2)) is int
E   AssertionError: Decimal is not int
1 failed, 3 passed in 0.08s
The price has to be an int again before it is returned.""",
)

_LOG = (
    """\
The night backup of the photo archive stopped half-way, twice in a row. Here is its log. Tell me \
which step failed first and which file to look at next; change nothing.

02:10 backup start, 611 GiB
02:31 copied 9000 files
02:47 warning: target is slow
02:47 retry 1: part 93
02:49 backup stopped, code 28""",
    """\
Output of search "code 28" in /etc/backup:
codes.txt:14: 28  no space left on the target, or quota reached
codes.txt:15: 29  target went away
backup.conf:7: # code 28 pages nobody before 08:00
3 matches in 2 files. The owner of the target says that it is never full.""",
    """\
Output of read backup.conf:
source = archive
target = vault:/photo
user = photo
parts = 160
part_size = 4G
# code 28 pages nobody before 08:00
retries = 3
keep = 14 nights
on_error = stop
The file was last changed two years ago, and nobody remembers why.""",
    """\
Output of run quota --target vault:
user   used  soft  hard  grace
photo  729G  700G  730G  none
mail    88G  200G  220G  -
Output of run df -h /vault:
Size  Used  Avail  Use%
4.0T  1.1T   2.9T   28%
The second run stopped there too.""",
)

_CONFIG = (
    """\
Move our reading room's web server to the new port and let it keep more connections. Edit \
server.toml alone: port 8443 in place of 8080, at most 400 connections, and time-outs that suit \
slow telephone lines. Then check the file and show me the difference.

The room has 60 terminals, each opens up to 6 connections, and a page takes up to 25 seconds on \
the slowest line.""",
    """\
Output of read server.toml:
[listen]
address = "0.0.0.0"
port = 8080
backlog = 64

[limits]
connections = 128
header_timeout_s = 5
body_timeout_s = 10
idle_timeout_s = 15

[log]
level = "info\"""",
    """\
Output of edit server.toml, lines 3 to 9:
-port = 8080
+port = 8443
-connections = 128
+connections = 400
-header_timeout_s = 5
+header_timeout_s = 30
-body_timeout_s = 10
+body_timeout_s = 60
Edited 4 lines. The idle time-out is as it was.""",
    """\
Output of run checkconf server.toml:
server.toml:3: port 8443 needs [tls] with certificate and key
server.toml:4: warning: backlog 64 is small for 400 connections
server.toml:8: ok, header_timeout_s = 30
1 error, 1 warning
The certificate is /etc/room/cert.pem, the key is beside it.""",
)


AGENTS: tuple[Agent, ...] = (
    Agent("fix a bug", _SYSTEM, _BUG), Agent("read a log", _SYSTEM, _LOG),
    Agent("edit a config", _SYSTEM, _CONFIG))
