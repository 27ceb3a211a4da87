# SPDX-License-Identifier: Apache-2.0
"""A receipt as JUnit XML, for whatever shows test results.

The receipt and not pytest writes it, so that it has the tests that were killed too.
"""

from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree as ET

from verification.receipt import Outcome, Receipt, Test

# The element that tells of an outcome; a pass has none.
_ELEMENTS = {
    Outcome.FAILED: "failure",
    Outcome.HUNG: "error",
    Outcome.NOT_RUN: "skipped",
    Outcome.SKIPPED: "skipped",
}


def write(receipt: Receipt, path: Path) -> None:
    """Write a test suite a file; what a file left behind is an error of it."""
    suites = ET.Element("testsuites")
    for file, tests in groupby(receipt.tests, lambda test: test.id.split("::")[0]):
        cases = [_case(test) for test in tests]
        for leak in receipt.leaks:
            if leak.file == file:
                what = [*leak.processes, *(f"{n} bytes" for n in leak.gpu_bytes if n)]
                case = ET.Element("testcase", classname=file, name="leaves nothing")
                ET.SubElement(case, "error", message="; ".join(what))
                cases.append(case)
        suite = ET.SubElement(suites, "testsuite", name=file, tests=str(len(cases)))
        for kind in ("failure", "error", "skipped"):
            suite.set(f"{kind}s".replace("skippeds", "skipped"), _count(cases, kind))
        suite.extend(cases)
    ET.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)


def _case(test: Test) -> ET.Element:
    file, _, name = test.id.partition("::")
    case = ET.Element("testcase", classname=file, name=name or file)
    case.set("time", f"{test.seconds:.3f}")
    if test.outcome in _ELEMENTS:
        ET.SubElement(case, _ELEMENTS[test.outcome], message=test.reason)
    return case


def _count(cases: list[ET.Element], kind: str) -> str:
    return str(sum(case.find(kind) is not None for case in cases))
