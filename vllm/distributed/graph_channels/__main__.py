# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm.distributed.graph_channels``: what is here, and channels at work."""

import argparse
import sys

from vllm.distributed.graph_channels import demo, doctor

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
    show.set_defaults(command=lambda given: demo.run(given.ranks, given.rounds))
    examine = commands.add_parser(
        "doctor",
        help="say which backend this machine would use, and why not the others",
        description=doctor.__doc__,
    )
    examine.add_argument(
        "--ranks",
        type=int,
        choices=range(1, doctor.MOST_RANKS + 1),
        metavar="N",
        help="the tensor parallel size in question; by default all GPUs, or 2",
    )
    examine.add_argument("--json", action="store_true", help="for programs")
    examine.set_defaults(
        command=lambda given: doctor.run(given.ranks, as_json=given.json)
    )
    options = parser.parse_args(arguments)
    status: int = options.command(options)
    return status


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_ROUNDS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 1 to {_MOST_ROUNDS}"
        )
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
