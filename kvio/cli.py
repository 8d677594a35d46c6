"""The command `kvio`: every line of it can be had from the library as well."""
import argparse
import sys

import kvio
from kvio import doctor


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="kvio", description=kvio.__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=f"kvio {kvio.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = commands.add_parser("doctor", help="what this machine has, and what it lacks")
    command.add_argument("--json", action="store_true", help="for programs")
    command.set_defaults(run=doctor.run)
    return top


def main(argv=None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:                 # the reader of our output went away: `| head`
        sys.stdout = None
        return 141
