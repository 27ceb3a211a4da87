# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that writes each step to a file as it happens, a JSON object a line.

pytest itself tells results at the end of a session, which a killed one never reaches.
"""

import json
from typing import IO, Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take ``--steps-to FILE``."""
    parser.addoption("--steps-to", metavar="FILE", required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Begin."""
    file = open(config.getoption("--steps-to"), "w")  # noqa: SIM115 (until the end)
    config.add_cleanup(file.close)
    config.pluginmanager.register(_Reporter(file))


class _Reporter:
    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(error=_reason(report))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(
            id=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            seconds=report.duration,
            reason="" if report.passed else _reason(report),
        )

    def _write(self, **step: Any) -> None:
        self._file.write(json.dumps(step) + "\n")
        self._file.flush()


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """In a line, why a test was skipped, or what was raised."""
    said: Any = report.longrepr
    if isinstance(said, tuple):  # file, line, reason
        said = said[-1].removeprefix("Skipped: ")
    elif crash := getattr(said, "reprcrash", None):
        said = crash.message
    lines = [line for line in str(said).splitlines() if line.strip()]
    return lines[0][:500] if lines else "no reason given"
