# SPDX-License-Identifier: Apache-2.0
"""``python -m series``: check and show the patch series, land it and take it off."""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

try:
    import libcst  # noqa: F401 (the first that is missing, said in place of a traceback)
    import packaging  # noqa: F401
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}; pip install -c constraints.txt libcst packaging ruff")

from series import editable, native, upstream
from series.errors import SeriesError
from series.export import diff, export
from series.landing import (
    RECEIPT,
    ROOT,
    Landing,
    Reader,
    attempt,
    compute,
    compute_modified,
    not_the_releases,
    pinned,
)
from series.patch import load_series
from series.repository import branch, demand_way_back
from series.survey import Before, State, demand_python, survey, version_of
from series.table import page
from series.tree import land, recover, revert

_TREE = "the folder that holds vllm/, such as site-packages"
_KEPT = "where the originals were kept"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 is success, 1 a refusal, 130 an interrupt."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except SeriesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; no tree is left half landed", file=sys.stderr)
        return 130


def _check(options: argparse.Namespace) -> int:
    if options.base is not None:
        return _check_release(options.base)
    for base in upstream.BASES.values():
        landing = compute(upstream.reader(upstream.locate(base)), load_series())
        if options.update:
            (ROOT / RECEIPT).write_bytes(landing.added[RECEIPT])
        _compare_receipt(base.filename, landing)
        edited, added = len(landing.changed), len(landing.added)
        print(f"{base.filename}: {edited} files edited, {added} added, receipt holds")
    return 0


def _compare_receipt(name: str, landing: Landing) -> None:
    committed = (ROOT / RECEIPT).read_bytes() if (ROOT / RECEIPT).exists() else b""
    if landing.added[RECEIPT] == committed:
        return
    now = json.loads(landing.added[RECEIPT])["files"]
    then = json.loads(committed or b'{"files": {}}')["files"]
    moved = ", ".join(sorted(p for p in {*now, *then} if now.get(p) != then.get(p)))
    raise SeriesError(
        f"the receipt {RECEIPT} reproduced from {name}",
        found=f"another outcome for {moved or 'the list of patches'}",
        do="if that is meant, run `python -m series check --update` and commit it",
    )


def _check_release(wheel: Path) -> int:
    """Say patch by patch whether it holds on some other release."""
    patches = load_series()
    errors = attempt(upstream.reader(wheel), patches).errors
    for patch in patches:
        edits = sum(len(edits) for edits in patch.edits.values())
        failed = len(errors[patch.name])
        verdict = f"{failed} of its {edits} edits fail" if failed else "holds"
        print(f"{patch.name}: {verdict}")
        for error in errors[patch.name]:
            print(textwrap.indent(str(error), "  "))
    return 1 if any(errors.values()) else 0


def _landing() -> Landing:
    """The whole series on the base that this machine uses."""
    base = upstream.choose()
    return compute(upstream.reader(upstream.locate(base)), load_series())


def _wheel() -> Reader:
    """The reader of the wheel of the base that this machine uses."""
    return upstream.reader(upstream.locate(upstream.choose()))


def _landing_on(before: Before, modified: bool) -> Landing:
    """The whole series on what a tree was before any landing."""
    version_of(before.tree)
    if modified:
        return compute_modified(before.demand, load_series())
    return compute(pinned([before.read], _wheel), load_series())


def _land(options: argparse.Namespace) -> int:
    tree: Path = options.tree
    demand_python(tree)
    recover(tree)
    before = Before(tree, options.backup)
    installed = before.distribution
    modified = options.modified or before.modified
    landing = _landing_on(before, modified)
    found = survey(tree, landing, options.backup)
    if modified and found.state is State.PRISTINE:
        demand_way_back(tree, options.backup)
    if not land(
        tree,
        landing,
        modified=modified,
        backup=options.backup,
        library=native.build_if_possible,
    ):
        print(f"{tree} is landed already; nothing changed")
        return 0
    if found.state is State.OLDER:
        print(f"taken off first: {found.series}, which had landed there")
    edited, added = len(landing.changed), len(landing.added)
    print(f"landed on {tree}: {edited} files edited, {added} added")
    if installed is not None:
        print(f"{installed.name} {installed.version} is vllm {version_of(tree)} now")
    kept_apart = options.backup is not None and installed is None
    apart = f"--backup {options.backup} " if kept_apart else ""
    print(f"the way back: python -m series revert {apart}{tree}")
    for path in not_the_releases(landing):
        rough = "; our lines in it are not laid out" if path in landing.rough else ""
        print(f"  not the release's: {path}{rough}")
    return 0


def _revert(options: argparse.Namespace) -> int:
    if revert(options.tree, options.backup):
        print(f"{options.tree} is what it was: vLLM {version_of(options.tree)}")
    else:
        print(f"nothing has landed on {options.tree}; nothing changed")
    return 0


def _status(options: argparse.Namespace) -> int:
    before = Before(options.tree, options.backup)
    landing = _landing_on(before, before.modified)
    found = survey(options.tree, landing, options.backup)
    print(f"{options.tree}: vLLM {found.version}, {found.state.value}")
    if found.series is not None:
        print(f"  the series named by its receipt: {found.series}")
    if before.modified:
        print("  on files that were not the release's")
    if found.state is State.OTHER:
        for path, what in found.unlike.items():
            print(f"  {path}: {what}")
    return 0


def _branch(options: argparse.Namespace) -> int:
    wheel = upstream.locate(upstream.choose())
    for commit in branch(wheel, load_series(), options.folder):
        print(f"{commit.tree} {commit.subject}")
    return 0


def _editable(options: argparse.Namespace) -> int:
    for tree in editable.refresh():
        print(f"brought up to date: {tree}")
    return 0


def _show(options: argparse.Namespace) -> int:
    sys.stdout.write(diff(_landing(), options.path))
    return 0


def _export(options: argparse.Namespace) -> int:
    base = upstream.choose()
    read = upstream.reader(upstream.locate(base))
    for path in export(read, load_series(), options.folder):
        print(path)
    return 0


def _patches(options: argparse.Namespace) -> int:
    sys.stdout.write(page(_landing(), load_series()))
    return 0


def _folder(text: str) -> Path:
    # An unset variable of a shell would otherwise mean the current folder.
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder is wanted, not nothing")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m series", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser(
        "check", help="every anchor of every patch on both bases, and the receipt"
    )
    check.set_defaults(command=_check)
    which = check.add_mutually_exclusive_group()
    which.add_argument("--base", type=Path, metavar="WHEEL", help="another release")
    which.add_argument("--update", action="store_true", help="write the receipt anew")

    land_ = commands.add_parser(
        "land", help="land on a pristine tree or an installed vLLM"
    )
    land_.set_defaults(command=_land)
    land_.add_argument("tree", type=Path, help=_TREE)
    land_.add_argument(
        "--modified", action="store_true", help="also on files that differ, as a fork's"
    )
    land_.add_argument(
        "--backup", type=_folder, metavar="DIR", help="where to keep the originals"
    )

    revert_ = commands.add_parser("revert", help="put back what was there before")
    revert_.set_defaults(command=_revert)
    revert_.add_argument("tree", type=Path, help=_TREE)
    revert_.add_argument("--backup", type=_folder, metavar="DIR", help=_KEPT)

    status = commands.add_parser("status", help="say what a tree is to the series")
    status.set_defaults(command=_status)
    status.add_argument("tree", type=Path, help=_TREE)
    status.add_argument("--backup", type=_folder, metavar="DIR", help=_KEPT)

    branch_ = commands.add_parser("branch", help="a git repository, a commit a patch")
    branch_.set_defaults(command=_branch)
    branch_.add_argument("folder", type=Path, help="a new or empty folder")

    editable_ = commands.add_parser(
        "editable", help="after a change of a patch: the tree of `pip install -e .`"
    )
    editable_.set_defaults(command=_editable)

    show = commands.add_parser("show", help="the diff of one file")
    show.set_defaults(command=_show)
    show.add_argument("path", help="such as vllm/distributed/parallel_state.py")

    export_ = commands.add_parser("export", help="patches that `git am` takes")
    export_.set_defaults(command=_export)
    export_.add_argument("folder", type=Path, help="a new or empty folder")

    patches = commands.add_parser("patches", help="docs/patches.md, from the patches")
    patches.set_defaults(command=_patches)
    return parser


if __name__ == "__main__":
    sys.exit(main())
