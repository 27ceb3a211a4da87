# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks` runs every benchmark, and says what it did not run."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import plots
from benchmarks.b12x_all_reduce import flashinfers

FOLDER = Path(benchmarks.__file__).parent


def test_every_benchmark_is_listed():
    there = {path.stem for path in FOLDER.glob("*.py")} - {"__main__", "plots"}
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


BY_SIZE = """\
2 ranks, and some words

| host time | us |
|---|---:|
| the bare pool | 9.1 |

| bytes | way | eager / NCCL | graph / NCCL |
|---:|---|---:|---:|
| 1024 | b12x | 0.50 | 0.25 |
| 1024 | vLLM's custom | not here | 0.75 |
| 2048 | b12x | 0.60 | 0.30 |
| 2048 | vLLM's custom | not here | 0.80 |
"""


def test_what_is_measured_by_size_is_drawn(monkeypatch, tmp_path, capsys):
    drawn = [plot for plot in map(plots._plot, plots._tables(BY_SIZE)) if plot]
    ((over, lines),) = drawn
    assert over == "bytes"
    assert lines["b12x, eager / NCCL"] == {1024: 0.5, 2048: 0.6}
    assert lines["vLLM's custom, graph / NCCL"] == {1024: 0.75, 2048: 0.8}
    assert all(map(math.isnan, lines["vLLM's custom, eager / NCCL"].values()))

    one = (benchmarks.Benchmark("one", "One"), benchmarks.Benchmark("other", "Other"))
    said = {"one": BY_SIZE, "other": "no table"}
    monkeypatch.setattr(benchmarks, "ALL", one)
    monkeypatch.setattr(benchmarks, "run", lambda each, rounds: said[each.module])
    folder = tmp_path / "plots"
    assert benchmarks.main(["--plots", str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == ["one.svg"]
    picture = (folder / "one.svg").read_text()
    assert picture.startswith("<?xml") and len(picture) > 10_000
    assert f"![One]({folder / 'one.svg'})" in capsys.readouterr().out


class Workspace:
    """Stands for FlashInfer's, which wants several GPUs and a compiler."""

    def __init__(self, group, max_numel, dtype):
        if group == "of too many":
            raise RuntimeError("world size 3 unsupported")
        self.said = []

    def rebind_stream(self):
        self.said.append("rebound")

    def all_reduce(self, tensor):
        self.said.append("reduced")
        return tensor, self.said

    def destroy(self):
        self.said.append("destroyed")


def test_flashinfers_pcie_ipc_is_compared_where_it_is(monkeypatch, capsys):
    def found(comm, group="of two"):
        monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
        return flashinfers(group)

    for older in (None, SimpleNamespace()):  # not installed, and before 0.7
        with found(older) as way:
            assert way is None
    newer = SimpleNamespace(PcieIpcAllReduceWorkspace=Workspace)
    with found(newer, "of too many") as way:
        assert way is None
    assert "world size 3 unsupported" in capsys.readouterr().err
    with found(newer) as way:
        _, said = way(torch.zeros(8))
    assert said == ["rebound", "reduced", "destroyed"]


def test_without_matplotlib_plots_are_refused_and_tables_are_made(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(benchmarks, "ALL", ())
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "benchmarks.plots")
    monkeypatch.delattr("benchmarks.plots")
    assert benchmarks.main([]) == 0
    folder = tmp_path / "plots"
    with pytest.raises(SystemExit, match="pip install .* matplotlib"):
        benchmarks.main(["--plots", str(folder)])
    assert not folder.exists()
