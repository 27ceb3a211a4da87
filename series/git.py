# SPDX-License-Identifier: Apache-2.0
"""git, such that what it makes is the same for everyone."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from series.errors import SeriesError

# A patch and a commit must come out the same for everyone, so neither clock nor git's
# configuration has a say in it.
_IDENTITY = {
    "GIT_AUTHOR_NAME": "vLLM graph channels",
    "GIT_AUTHOR_EMAIL": "graph-channels@example.invalid",
    "GIT_AUTHOR_DATE": "2026-12-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "vLLM graph channels",
    "GIT_COMMITTER_EMAIL": "graph-channels@example.invalid",
    "GIT_COMMITTER_DATE": "2026-12-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


def commit(repository: Path, files: Mapping[str, bytes], message: str) -> None:
    """Write files into a repository and commit them."""
    for path, content in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(content)
    # An ignore rule among the files must not keep any of them out.
    git(repository, "add", "--all", "--force")
    git(repository, "commit", "--quiet", "--file=-", text=message)


def git(repository: Path, *command: str, text: str = "") -> str:
    """Run git in a repository and return what it prints.

    Raises:
        SeriesError: There is no git, or it failed.
    """
    try:
        done = subprocess.run(
            ["git", *command],
            cwd=repository,
            env=os.environ | _IDENTITY,
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError as error:
        raise SeriesError(
            f"git {command[0]}", found="no git on the PATH", do="install git"
        ) from error
    except subprocess.CalledProcessError as error:
        raise SeriesError(
            f"git {command[0]}", found=error.stderr.strip(), do="mend it, try again"
        ) from error
    return done.stdout


def git_folder(tree: Path) -> Path | None:
    """The git directory of a tree that is the root of a work tree."""
    command = ["git", "-C", str(tree), "rev-parse", "--show-toplevel"]
    command += ["--absolute-git-dir"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    if done.returncode != 0:
        return None
    root, folder = map(Path, done.stdout.splitlines())
    return folder if root == tree.resolve() else None
