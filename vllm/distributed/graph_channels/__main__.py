# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm.distributed.graph_channels``: see the channels at work."""

import argparse
import sys

from vllm.distributed.graph_channels import demo

_MOST_ROUNDS = 1_000_000


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 if all was as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm.distributed.graph_channels", description=__doc__
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser(
        "demo",
        help="replay the life of graph channels between processes on this machine",
        description=demo.__doc__,
    )
    show.add_argument(
        "--ranks", type=int, default=2, choices=demo.RANKS, help="how many processes"
    )
    show.add_argument(
        "--rounds",
        type=_positive,
        default=200,
        help="how often the graphs are replayed against each other",
    )
    options = parser.parse_args(arguments)
    return demo.run(options.ranks, options.rounds)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_ROUNDS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 1 to {_MOST_ROUNDS}"
        )
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
