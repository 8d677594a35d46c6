"""`kvio qos`: prints what a fabric has to be told about traffic classes."""
import argparse
import json

from kvio import qos
from kvio.errors import InvalidArgument
from kvio.transfer.classes import TrafficClass


def add_command(commands) -> None:
    command = commands.add_parser(
        "qos", help="the fabric set-up for traffic classes",
        description="Prints the set-up of a fabric for a list of traffic classes, each line with "
        "its meaning; runs nothing. opensm: lines for opensm.conf. mlnx: mlnx_qos commands for a "
        "RoCE port. tc: Linux commands for a device that Soft-RoCE sends through. What the fabric "
        "will not honour is said in comments; what is impossible is one error and status 2.")
    command.add_argument("kind", choices=["opensm", "mlnx", "tc"])
    command.add_argument("--class", dest="classes", action="append", metavar="NAME:SL:TCLASS:SHARE",
                         type=_share, help="a class and its share (1 to 100, against the others'); "
                         "may be repeated (default: collective:0:184:99 and kv:2:32:1)")
    command.add_argument("--device", help="mlnx, tc: the network device")
    command.add_argument("--rate", help="tc: slow the device down to this, 24mbit say")
    command.add_argument("--scheduler", choices=["prio", "ets"], default="prio", help="tc: the "
                         "larger share always first (prio, default), or by the shares (ets)")
    command.add_argument("--json", action="store_true", help="for programs")
    command.set_defaults(run=run)


def _share(text):
    fields = text.rsplit(":", 3)
    try:
        name, numbers = fields[0], [int(field, 0) for field in fields[1:]]
        sl, tclass, share = numbers
        return qos.Share(TrafficClass(name, sl, tclass), share)
    except ValueError as wrong:
        why = str(wrong) if isinstance(wrong, InvalidArgument) else \
            f"{text!r} is not NAME:SL:TCLASS:SHARE, like kv:2:32:1"
        raise argparse.ArgumentTypeError(why) from None


def run(arguments) -> int:
    """The command. 0, warnings or not."""
    if arguments.kind != "tc" and (arguments.rate is not None or arguments.scheduler != "prio"):
        raise InvalidArgument("--rate and --scheduler are for tc")
    if arguments.kind == "opensm" and arguments.device is not None:
        raise InvalidArgument("opensm sets up the whole subnet: --device is for mlnx and tc")
    shares = tuple(arguments.classes or qos.DEFAULT_SHARES)
    if arguments.kind == "opensm":
        setup = qos.opensm(shares)
    elif arguments.kind == "mlnx":
        setup = qos.mlnx(arguments.device, shares)
    else:
        setup = qos.tc(arguments.device, shares, arguments.rate, arguments.scheduler)
    print(json.dumps(setup.to_dict(), indent=2) if arguments.json else setup.text())
    return 0
