# SPDX-License-Identifier: Apache-2.0
"""The command line; the package says what it does."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import verification
from verification import claims, junit, receipt, session
from verification.machine import NoGpus, described, opened
from verification.run import run, summary

ROOT = Path(__file__).parents[1]
RECEIPTS, PAGE = Path("docs/receipts"), Path("docs/verified.md")


def main(arguments: list[str] | None = None) -> int:
    """Do what was asked: 0 if all was well, 1 if not, 2 if it could not be tried."""
    parser = argparse.ArgumentParser(
        description=verification.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run the GPU tests")
    runs.add_argument(
        "files", nargs="*", help="test files; all that need GPUs by default"
    )
    runs.add_argument("--out", type=Path, default=Path("build/test-gpu"))
    runs.add_argument("--deadline", type=_positive, default=300, help="seconds a test")
    runs.add_argument(
        "--at-once",
        type=_positive,
        default=1,
        metavar="N",
        help="files beside each other, which tests that profile memory cannot bear; "
        "on one GPU over MPS",
    )
    runs.set_defaults(command=_run)
    checks = commands.add_parser("check", help="are these files receipts")
    checks.add_argument("receipts", type=Path, nargs="+")
    checks.set_defaults(command=_check)
    pages = commands.add_parser("page", help=f"write {PAGE}")
    pages.add_argument("--check", action="store_true", help="only say if it differs")
    pages.set_defaults(command=_page)
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    try:
        return int(given.command(given))
    except (NoGpus, receipt.BadReceipt, OSError) as error:
        print(f"verification: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    files = [_file(named) for named in given.files] or session.test_files(ROOT)
    required = _required()
    given.out.mkdir(parents=True, exist_ok=True)
    # as Ctrl-C does, leaves no process and a receipt of what had run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with opened() as gpus:
        machine = described(gpus)
        made = run(
            ROOT,
            list(dict.fromkeys(files)),  # each once
            machine,
            gpus.used_bytes,
            required_gpus=required,
            deadline=given.deadline,
            at_once=given.at_once,
        )
    with _undisturbed():
        receipt.write(made, given.out / "receipt.json")
        junit.write(made, given.out / "junit.xml")
    print(f"{summary(made)}\n{given.out / 'receipt.json'}")
    return 0 if made.green else 1


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Not stopped, however often somebody asks."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _file(named: str) -> str:
    """As pytest calls it, and with it the claims: from the repository on."""
    path = Path(named)
    if not path.is_file():
        raise FileNotFoundError(f"no such test file: {named}")
    path = path.resolve()
    return os.fspath(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _positive(said: str) -> int:
    if not said.isdecimal() or not int(said):
        raise argparse.ArgumentTypeError(f"{said!r} is no whole number above 0")
    return int(said)


def _required() -> int:
    said = os.environ.get("REQUIRE_GPUS", "0")
    if not said.isdecimal():
        raise NoGpus(f"REQUIRE_GPUS is {said!r}; a number of GPUs is wanted, such as 2")
    return int(said)


def _check(given: argparse.Namespace) -> int:
    for path in given.receipts:
        found = receipt.read(path)
        print(f"{path}: {'green' if found.green else 'NOT green'}")
    return 0


def _page(given: argparse.Namespace) -> int:
    found = {path.name: receipt.read(path) for path in sorted(RECEIPTS.glob("*.json"))}
    linked = {f"{RECEIPTS.name}/{name}": made for name, made in found.items()}
    page = claims.page(linked)
    if given.check:
        if PAGE.read_text() == page:
            return 0
        print(f"{PAGE} is not what the receipts say: python -m verification page")
        return 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
