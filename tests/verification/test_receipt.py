# SPDX-License-Identifier: Apache-2.0
"""Receipts keep what they were given, refuse what is none, and make the page."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from verification import __main__ as command
from verification import claims, junit, receipt
from verification.machine import Gpus, NoGpus, described, tree_digest
from verification.receipt import BadReceipt, Gpu, Leak, Machine, Outcome, Receipt, Test

ROOT = Path(__file__).parents[2]
H200 = Gpu("NVIDIA H200", 139 << 30, "9.0")
RTX = Gpu("NVIDIA RTX PRO 6000", 96 << 30, "12.0")
TESTS = [
    Test("tests/a.py::test_x[2]", Outcome.PASSED, 1.5),
    Test("tests/a.py::test_x[4]", Outcome.PASSED, 2.5),
    Test("tests/b.py::test_y", Outcome.HUNG, 300.0, "still running after 300 s"),
    Test("tests/b.py::test_z", Outcome.SKIPPED, 0.1, "one GPU"),
]
BOTH = claims.Claim("sums", ("tests/a.py::*",))


def made(gpus=(H200,), tests=TESTS, leaks=(), started="2026-12-02T10:00:00+00:00"):
    machine = Machine(list(gpus), {"torch": "2.13.0"})
    return Receipt(started, "0" * 64, machine, 0, list(tests), list(leaks))


def test_a_receipt_is_read_as_it_was_written(tmp_path):
    given = made(leaks=[Leak("tests/a.py", ["sleep 9"], [5])])
    receipt.write(given, tmp_path / "r.json")
    assert receipt.read(tmp_path / "r.json") == given


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found.update(version=2), r"\$\.version"),
        (lambda found: found.pop("tests"), "'tests' is a required property"),
        (
            lambda found: found["tests"][0].update(outcome="fine", reason="x"),
            r"tests\[0\]\.outcome",
        ),
        (lambda found: found["tests"][2].update(reason=""), r"tests\[2\]\.reason"),
        (lambda found: found.update(more=1), "more"),
        (lambda found: found.update(started="yesterday"), r"\$\.started"),
    ],
)
def test_what_is_no_receipt_is_refused_in_words(tmp_path, change, said):
    receipt.write(made(), path := tmp_path / "r.json")
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(BadReceipt, match=said):
        receipt.read(path)
    path.write_text("{")
    with pytest.raises(BadReceipt, match="no JSON"):
        receipt.read(path)


def test_green_is_all_passed_and_nothing_left():
    good = TESTS[:2]
    assert made(tests=good).green
    assert made(tests=[*good, TESTS[3]]).green
    assert not made().green
    assert not made(tests=[TESTS[3]]).green
    assert not made(tests=good, leaks=[Leak("tests/a.py", [], [1])]).green


def test_junit_has_killed_tests_and_what_was_left(tmp_path):
    left = Leak("tests/a.py", ["sleep 9"], [0])
    junit.write(made(leaks=[left]), tmp_path / "j.xml")
    first, second = ET.parse(tmp_path / "j.xml").getroot()
    assert (first.get("tests"), first.get("errors")) == ("3", "1")
    assert (second.get("errors"), second.get("skipped")) == ("1", "1")
    assert second.find("testcase/error").get("message") == "still running after 300 s"


def test_a_claim_needs_every_one_of_its_tests():
    other = claims.Claim("", ("tests/b.py::*",))
    missing = claims.Claim("", (*BOTH.tests, "tests/c.py::*"))
    skipped = claims.Claim("", (*BOTH.tests, "tests/b.py::test_z"))
    left = made(leaks=[Leak("tests/a.py", [], [9])])
    assert claims.verdict(made(), BOTH) is claims.Verdict.SHOWN
    assert claims.verdict(made(), other) is claims.Verdict.FAILED
    assert claims.verdict(made(), missing) is None
    both = claims.Claim("", (*BOTH.tests, *other.tests))
    assert claims.verdict(made(), both) is claims.Verdict.FAILED
    assert claims.verdict(made(), skipped) is None
    assert claims.verdict(left, BOTH) is claims.Verdict.LEFT
    assert claims.verdict(made(leaks=[Leak("tests/b.py", [], [9])]), BOTH) == ""


def test_the_page_says_what_failed_until_it_passes():
    broken = made(tests=[replace(TESTS[0], outcome=Outcome.FAILED, reason="x")])
    older = made(started="2026-11-01T10:00:00+00:00")
    page = claims.page({"old.json": older, "new.json": broken}, (BOTH,))
    assert "| sums | **failed** [2026-12-02](new.json), 1 × NVIDIA H200 |" in page
    newer = made(started="2026-12-03T10:00:00+00:00")
    page = claims.page({"old.json": broken, "new.json": newer}, (BOTH,))
    assert "| sums | [2026-12-03](new.json), 1 × NVIDIA H200 |" in page
    newer.leaks.append(Leak("tests/a.py", ["sleep 9"], [0]))
    page = claims.page({"old.json": broken, "new.json": newer}, (BOTH,))
    assert "| sums | passed, **left something** [2026-12-03](new.json), 1" in page


def test_the_page_says_where_each_claim_was_shown_last():
    older = made(started="2026-11-01T10:00:00+00:00")
    page = claims.page({"old.json": older, "new.json": made()}, (BOTH,))
    shown = "[2026-12-02](new.json), 1 × NVIDIA H200"
    assert f"| sums | {shown} | no receipt | no receipt |" in page
    page = claims.page({"rtx.json": made((RTX, RTX))}, (BOTH,))
    shown = "[2026-12-02](rtx.json), 2 × NVIDIA RTX PRO 6000"
    assert f"| sums | no receipt | {shown} | {shown} |" in page
    page = claims.page({"both.json": made((H200, RTX))}, (BOTH,))
    assert page.rstrip().endswith("| no receipt |")  # ranks may have been on the H200
    shared = replace(made(), machine=Machine([H200], {}, mps=True))
    page = claims.page({"new.json": shared}, (BOTH,))
    assert "1 × NVIDIA H200 with MPS | no receipt |" in page


def test_each_claim_names_tests_that_exist():
    for claim in claims.CLAIMS:
        for pattern in claim.tests:
            file, _, name = pattern.partition("::")
            parts = [part for part in name.split("*") if part]
            functions = [
                line
                for line in (ROOT / file).read_text().splitlines()
                if "def test" in line
            ]
            assert any(all(part in line for part in parts) for line in functions), (
                pattern
            )


def test_the_pages_receipts_are_whole_and_the_page_is_theirs():
    assert command.main(["page", "--check"]) == 0


def test_the_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    assert command.main(["check", str(tmp_path / "none.json")]) == 2
    assert command.main(["run", "tests/no_such_test.py"]) == 2
    assert "no such test file: tests/no_such_test.py" in capsys.readouterr().err
    monkeypatch.setenv("REQUIRE_GPUS", "two")
    some = "tests/verification/test_receipt.py::test_each"  # would show a claim of all
    assert command.main(["run", some]) == 2
    assert f"no such test file: {some}" in capsys.readouterr().err
    assert command.main(["run"]) == 2
    assert "REQUIRE_GPUS is 'two'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["run", "--at-once", "0"])
    assert "'0' is no whole number above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["run", "--deadline", "-1"])
    (tmp_path / "taken").touch()
    monkeypatch.delenv("REQUIRE_GPUS")
    assert command.main(["run", "--out", str(tmp_path / "taken")]) == 2
    assert "File exists" in capsys.readouterr().err


class Nvml:
    """What NVML says of a machine with two GPUs."""

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return [H200, RTX][index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-rtx": RTX}[uuid]

    def nvmlDeviceGetName(self, gpu):
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return type("Info", (), {"total": gpu.memory_bytes, "used": 3})

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return tuple(int(part) for part in gpu.capability.split("."))

    def nvmlSystemGetDriverVersion(self):
        return "580.1"


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, [H200, RTX]), ("1", [RTX]), ("GPU-rtx,0", [RTX, H200]), ("", [])],
)
def test_the_machine_is_the_gpus_that_ranks_see(monkeypatch, visible, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = Gpus(Nvml())
    assert described(found).gpus == gpus
    assert described(found).versions["driver"] == "580.1"
    assert found.used_bytes() == [3] * len(gpus)


def test_the_machine_says_whether_mps_serves_it(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not described(Gpus(Nvml())).mps
    (tmp_path / "control").touch()
    assert described(Gpus(Nvml())).mps


def test_the_tree_is_known_by_its_content(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "a.py").write_text("1")
    before = tree_digest(tmp_path)
    (tmp_path / "vllm" / "__pycache__").mkdir()
    (tmp_path / "vllm" / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "notes").write_text("x")
    assert tree_digest(tmp_path) == before
    (tmp_path / "vllm" / "a.py").write_text("2")
    assert tree_digest(tmp_path) != before


def test_a_machine_without_gpus_is_told_so(monkeypatch):
    class Dead(Exception):
        pass

    def refuse():
        raise Dead("Driver Not Loaded")

    fake = type("pynvml", (), {"NVMLError": Dead, "nvmlInit": staticmethod(refuse)})
    monkeypatch.setattr("verification.machine.import_module", lambda name: fake)
    from verification.machine import opened

    with pytest.raises(NoGpus, match="Driver Not Loaded"), opened():
        pass
