# SPDX-License-Identifier: Apache-2.0
"""The one exception of the series tool, and how its words are laid out."""


class SeriesError(Exception):
    """Something that the tool was asked for cannot be done; nothing was written.

    Args:
        asked: What was to be done, with the patch, file and anchor it concerns.
        found: What stands there instead of what was expected.
        do: What the reader can do next.
    """

    def __init__(self, asked: str, *, found: str, do: str) -> None:
        super().__init__(asked, found, do)
        self.asked = asked
        self.found = found
        self.do = do

    def __str__(self) -> str:
        return f"{self.asked}\n  found: {self.found}\n  do:    {self.do}"
