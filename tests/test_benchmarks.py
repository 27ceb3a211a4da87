# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks` runs every benchmark, and says what it did not run."""

from pathlib import Path
from types import SimpleNamespace

from benchmarks import __main__ as benchmarks

FOLDER = Path(benchmarks.__file__).parent


def test_every_benchmark_is_listed():
    there = {path.stem for path in FOLDER.glob("*.py")} - {"__main__"}
    assert {benchmark.module for benchmark in benchmarks.ALL} == there


def test_what_needs_a_gpu_is_named_as_not_run(monkeypatch, capsys):
    begun = []
    without = SimpleNamespace(is_cuda=lambda: False)
    monkeypatch.setattr(benchmarks, "current_platform", without)
    monkeypatch.setattr(
        benchmarks,
        "run",
        lambda each, rounds: begun.append(each.module) or "| a table |",
    )
    assert benchmarks.main([]) == 0
    page = capsys.readouterr().out
    assert begun == [each.module for each in benchmarks.ALL if not each.needs_gpu]
    assert page.count("Not run: no GPU here.") == len(benchmarks.ALL) - len(begun)
    assert "| torch | " in page and page.count("| a table |") == len(begun)


def test_one_that_fails_is_told_and_the_others_run(monkeypatch, capsys):
    broken = benchmarks.Benchmark("nowhere", "A broken one")
    monkeypatch.setattr(benchmarks, "ALL", (broken, broken))
    assert benchmarks.main(["--rounds", "1"]) == 1
    assert capsys.readouterr().out.count("Failed; see what it said.") == 2
