# SPDX-License-Identifier: Apache-2.0
"""Walks over all of vLLM's classes, for rules that hold for each of them."""

import importlib
import pkgutil
from types import ModuleType

# Optional dependencies of vLLM that a machine may lack; modules that need one
# cannot be imported there. Any other missing module is an error.
OPTIONAL = {"flashinfer", "ray"}


def import_all(package: ModuleType) -> None:
    """Import every module below a package, so that all subclasses are known."""
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert error.name in OPTIONAL, found.name


def with_subclasses(cls: type) -> list[type]:
    """A class and all of vLLM's that inherit from it, each once.

    Tests make up subclasses of their own, which are there for as long as they like.
    """
    found = {cls: None}
    for sub in cls.__subclasses__():
        found |= dict.fromkeys(with_subclasses(sub))
    return [one for one in found if one.__module__.startswith("vllm.")]
