"""The command `kvio`: every line of it can be had from the library as well."""
import argparse
import signal
import sys
import threading

import kvio
from kvio import bench_transfer, cli_analyze, cli_qos, cli_store, doctor
from kvio.errors import KvioError


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="kvio", description=kvio.__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=f"kvio {kvio.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = commands.add_parser("doctor", help="what this machine has, and what it lacks")
    command.add_argument("path", nargs="*", help="directories: which back end, queue depth and "
                         "way of reading a store there would get")
    command.add_argument("--json", action="store_true", help="for programs")
    command.set_defaults(run=doctor.run)
    command = commands.add_parser(
        "demo", help="a real model over both read paths, then a timed run: two paths against one",
        description="A real model over both read paths, then a timed run of two paths against "
        "one; under 2 minutes in all. Emulated bandwidths are labelled so. Exits 0 when all modes "
        "generate the same tokens and every hit is as predicted.")
    command.add_argument("--json", action="store_true", help="figures for programs: real.MODE, "
                         "timed.MODE (the first --nodes), timed_1p2d.MODE (further ones), "
                         "collectives.one_class and .two_classes")
    command.add_argument("--only", action="append", choices=["real", "timed", "collectives"],
                         help="one of the parts; may be repeated (default: real and timed; with a "
                         "seeded model real alone)")
    command.add_argument("--collectives", action="store_true", help="the engines exchange "
                         "collectives beside KV, in one traffic class and in two: their latency "
                         "and TPOT (alone, or beside what --only names)")
    command.add_argument("--model", metavar="NAME", help="of the part real: "
                         "smollm2 (default), or seeded:LAYERS, a tiny one that needs no package "
                         "and little CPU")
    command.add_argument("--nic", metavar="DEVICE", help="what all engines' NICs "
                         "are opened on: soft (default), or verbs:HCA, whose links are not paced")
    command.add_argument("--device", metavar="cuda:0", help="the GPU whose memory is all engines' "
                         "HBM, and whose copy engines move all KV, not paced (default: host "
                         "memory); the arithmetic stays on the CPU")
    command.add_argument("--exact", action="store_true", help="real model: arithmetic that is "
                         "bit for bit the same for any split of the tokens (slower)")
    command.add_argument("--nodes", action="append", metavar="1P2D", help="timed run: prefill and "
                         "decode nodes; may be repeated (default: 1P1D, then 1P2D)")
    command.add_argument("--turns", type=int, help="timed run: turns of each of 32 agents "
                         "(default: 3)")
    command.add_argument("--policy", action="append", metavar="NAME", choices=[
                         "shorter_queue", "split", "any_node", "push", "round_robin", "oracle"],
                         help="timed run: what is held against Basic: shorter_queue (default: "
                         "DualPath), split, any_node, push, round_robin, or oracle, where nothing "
                         "but computing takes time; may be repeated")
    command.add_argument("--link-time", action="store_true", help="timed run: no disk, and the "
                         "links' own clock: the same figures on any machine")
    command.add_argument("--trace-out", metavar="FILE", help="what overlapped, as a Chrome trace "
                         "(ui.perfetto.dev): of the last policy of the first timed run, or of the "
                         "real model's last mode")
    command.add_argument("--dir", help="where the stores are made (default: the temporary "
                         "directory); removed afterwards")
    command.add_argument("--quiet", action="store_true", help="no progress on stderr")
    command.set_defaults(run=_demo)
    bench_transfer.add_command(commands)
    cli_analyze.add_command(commands)
    cli_qos.add_command(commands)
    cli_store.add_commands(commands)
    return top


def _demo(arguments) -> int:
    from kvio.engine import demo        # needs the demo's packages, which the rest does not
    return demo.run(arguments)


class Terminated(KeyboardInterrupt):
    """SIGTERM, on the way that Ctrl-C takes: transfers drain, temporary files go."""


def _terminate(_, frame):
    """asyncio.run handles SIGINT by cancelling its main task, so that no other is torn."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)       # once; then it cleans up in peace
    _terminate.came = True
    on_interrupt = signal.getsignal(signal.SIGINT)
    if not callable(on_interrupt) or on_interrupt is signal.default_int_handler:
        raise Terminated
    on_interrupt(signal.SIGINT, frame)


_terminate.came = False


def _take_sigterm():
    """The handler that there was, to be put back; None where it stays (ignored, or no main
    thread)."""
    if threading.current_thread() is not threading.main_thread() or \
            signal.getsignal(signal.SIGTERM) in (signal.SIG_IGN, None):
        return None
    return signal.signal(signal.SIGTERM, _terminate)


def main(argv=None) -> int:
    if not (sys.argv[1:] if argv is None else argv):
        parser().print_help()
        return 2
    arguments = parser().parse_args(argv)
    before, _terminate.came = _take_sigterm(), False
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("terminated" if _terminate.came else "interrupted", file=sys.stderr)
        return 143 if _terminate.came else 130
    except KvioError as error:              # says itself what to do; a traceback adds nothing
        print(f"kvio: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:                 # the reader of our output went away: `| head`
        sys.stdout = None
        return 141
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
