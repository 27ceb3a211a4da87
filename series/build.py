# SPDX-License-Identifier: Apache-2.0
"""The build backend (PEP 517) that ``pip install .`` calls.

It needs no torch: the wheel is the pinned upstream one with the series landed in
it, and the host transport's small library if there is a compiler. pip shows what
a hook prints when it fails, or with -v.
"""

import functools
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

from series import editable, native, upstream, wheel
from series.environment import foreign_vllm, old_python
from series.errors import SeriesError
from series.landing import compute
from series.patch import load_series

Settings = Mapping[str, object] | None
P = ParamSpec("P")
T = TypeVar("T")


class UnsupportedOperation(SeriesError):
    """A hook that this backend cannot serve; pip asks for it by this name."""


def _in_words(hook: Callable[P, T]) -> Callable[P, T]:
    """End a refused hook with its words instead of a traceback."""

    @functools.wraps(hook)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return hook(*args, **kwargs)
        except UnsupportedOperation:
            raise
        except SeriesError as error:
            sys.exit(f"error: {error}")

    return wrapped


@_in_words
def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Refuse an old Python or a mixed environment; ask for the build tools it lacks."""
    faults = old_python() or foreign_vllm()
    if faults:
        raise SeriesError(
            faults[0].expected,
            found=" and ".join(fault.found for fault in faults),
            do=" && ".join(fault.do for fault in faults),
        )
    return native.requirements()


@_in_words
def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Write the metadata folder, for pip to resolve the requirements."""
    base = upstream.choose()
    folder = Path(metadata_directory) / wheel.dist_info(base)
    with zipfile.ZipFile(upstream.locate(base)) as archive:
        for name, data in wheel.metadata_files(base, archive, None).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder.name


@_in_words
def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Land the series and write the wheel; return its name."""
    base, reason = upstream.decide()
    print(f"building vllm {base.label} on {base.distribution}: {reason}")
    pristine = upstream.locate(base)
    landing = compute(upstream.reader(pristine), load_series())
    library = native.build()
    target = Path(wheel_directory) / wheel.wheel_name(base, library)
    wheel.write(base, pristine, landing, library, target)
    return target.name


@_in_words
def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """The same as for a wheel."""
    return get_requires_for_build_wheel(config_settings)


@_in_words
def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """The same as for a wheel."""
    return prepare_metadata_for_build_wheel(metadata_directory, config_settings)


@_in_words
def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Make the tree in build/, and a wheel that leads to it; return its name."""
    base, reason = upstream.decide()
    print(f"editable vllm {base.label} on {base.distribution}: {reason}")
    tree = editable.make(base)
    target = Path(wheel_directory) / wheel.wheel_name(base, b"")
    wheel.write_editable(base, upstream.locate(base), tree, target)
    return target.name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Refused: the source distribution of this project is its repository."""
    raise UnsupportedOperation(
        "a source distribution",
        found="a build that needs the whole repository and a pinned wheel",
        do="clone the repository and run `pip install .` or `pip wheel .` in it",
    )
