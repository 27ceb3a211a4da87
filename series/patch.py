# SPDX-License-Identifier: Apache-2.0
"""What a patch is: a commit message, edits by file, and the files it adds."""

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from series.edit import Edit
from series.errors import SeriesError
from series.patches import ORDER

SECTIONS = ("Why", "Upstream", "Drop-when")
_SUBJECT_WIDTH = 72
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}): ", re.MULTILINE)


@dataclass(frozen=True)
class Message:
    """A patch's docstring, which is its commit message.

    Attributes:
        subject: One line, at most 72 characters, no full stop.
        why: What is wrong without the patch, and what it does about it.
        upstream: What upstream does today, or where the patch was sent.
        drop_when: The event after which the patch is to be removed.
    """

    subject: str
    why: str
    upstream: str
    drop_when: str

    def __str__(self) -> str:
        sections = zip(SECTIONS, (self.why, self.upstream, self.drop_when), strict=True)
        body = "\n\n".join(f"{name}: {text}" for name, text in sections)
        return f"{self.subject}\n\n{body}\n"


@dataclass(frozen=True)
class Patch:
    """One logical change to vLLM.

    Attributes:
        name: The module's name in series/patches.
        message: The commit message.
        edits: Edits by the path of the upstream file they change.
        adds: Paths of the files that the patch brings along from vllm/.
    """

    name: str
    message: Message
    edits: Mapping[str, tuple[Edit, ...]]
    adds: tuple[str, ...]


def load_series() -> tuple[Patch, ...]:
    """The patches of ORDER, in order.

    Raises:
        SeriesError: A module is missing, or its docstring is no commit message.
    """
    return tuple(_load(name) for name in ORDER)


def parse_message(name: str, docstring: str | None) -> Message:
    """Read a patch's docstring.

    Args:
        name: The patch, for the error.
        docstring: A subject line, a blank line, then ``Why:``, ``Upstream:``
            and ``Drop-when:`` in this order, each going on over indented lines.

    Raises:
        SeriesError: It has another form.
    """
    text = inspect.cleandoc(docstring or "")
    subject, _, body = text.partition("\n\n")
    _, *parts = _SECTION.split(body)
    found = tuple(parts[0::2])
    values = [" ".join(part.split()) for part in parts[1::2]]
    if found != SECTIONS or not all(values) or not _is_subject(subject):
        raise SeriesError(
            f"the docstring of patch {name} as a commit message",
            found=f"subject {subject!r}, sections {', '.join(found) or 'none'}",
            do=f"give it a subject of at most {_SUBJECT_WIDTH} characters without a "
            f"full stop, a blank line, then {', '.join(SECTIONS)}, none empty",
        )
    return Message(subject, *values)


def _is_subject(line: str) -> bool:
    one_line = "\n" not in line and 0 < len(line) <= _SUBJECT_WIDTH
    return one_line and not line.endswith(".")


def _load(name: str) -> Patch:
    module = _import(name)
    return Patch(
        name=name,
        message=parse_message(name, module.__doc__),
        edits=module.EDITS,
        adds=module.ADDS,
    )


def _import(name: str) -> ModuleType:
    qualified = f"series.patches.{name}"
    try:
        return importlib.import_module(qualified)
    except ModuleNotFoundError as error:
        if error.name != qualified:
            raise
        raise SeriesError(
            f"the patch {name} that ORDER lists",
            found=f"no module series/patches/{name}.py",
            do="add the module, or take the name out of ORDER",
        ) from error
