# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ say is so: commands, files, switches, words of the log."""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

import vllm.envs as envs
from series.__main__ import _parser as series_parser
from tests.distributed.picture import drawn, picture
from vllm.distributed.graph_channels import switches
from vllm.distributed.graph_channels.__main__ import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
GAP = "\N{HORIZONTAL ELLIPSIS}"
SWITCHES = {
    "VLLM_PCIE_ALLREDUCE_BACKEND",
    "VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE",
    "VLLM_PCIE_ONESHOT_FUSED_ADD_RMS_NORM_MAX_SIZE",
    "VLLM_B12X_ALLOW_UNVALIDATED_DEVICE",
    "VLLM_DCP_A2A_MAX_TOKENS",
    "VLLM_GRAPH_CHANNELS_DEADLINE",
}
# Of the build, which is not there any more when vLLM runs.
OF_THE_BUILD = {"VLLM_TARGET_DEVICE", "VLLM_PRECOMPILED_WHEEL_LOCATION"}


def section(title):
    """The text below a heading, up to the next one of its rank."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title):
    """The cells of a section's first table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]
    ]


def test_the_picture_is_drawn_from_what_happens():
    assert f"```\n{picture()}```" in README
    assert README.index(picture()) < README.index("\n## ")  # on the first screen


def test_the_picture_of_what_did_not_go_well_is_refused():
    with pytest.raises(RuntimeError, match="NOT as it should be"):
        drawn("NOT as it should be (1.0 s)")


# Words of the log -----------------------------------------------------------


@cache
def said_by_the_sources():
    """Every string of what is built and of the tool, gaps where values go in."""
    modules = [*ROOT.glob("vllm/**/*.py"), *ROOT.glob("series/**/*.py")]
    return [text for module in modules for text in strings(module)]


def strings(module):
    tree = ast.parse(module.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else GAP
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sd]|%\.\df", GAP, node.value)


def occurs(line):
    """Whether one string has a line's words, in their order."""
    wanted = ".*".join(re.escape(piece) for piece in line.split(GAP))
    found = re.compile(wanted, re.DOTALL)
    return any(found.search(text) for text in said_by_the_sources())


def test_each_line_of_the_log_occurs_in_the_sources():
    lines = [re.findall(r"`(.*)`", said) for said, _ in rows("When something is wrong")]
    assert len(lines) > 20
    for (line,) in lines:
        assert len(line.replace(GAP, "").strip()) > 10, line
        assert occurs(line), line


def test_a_line_that_nothing_says_would_be_found():
    assert occurs(f"{GAP} goes on without graph channels: {GAP}")
    assert not occurs(f"{GAP} goes on with graph channels: {GAP}")


def test_every_warning_and_error_of_ours_is_in_the_table():
    table = section("When something is wrong")
    for module in ROOT.glob("vllm/distributed/**/*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Name("logger"),
                        attr="error" | "warning",
                    ),
                    args=[ast.Constant(str() as text), *_],
                ):
                    assert text.replace("%s", GAP) in table, text


# Commands -------------------------------------------------------------------


def commands(page):
    """What stands in code, in a line or in a block."""
    text = page.read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return inline + [
        line.partition("  #")[0] for block in blocks for line in block.splitlines()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_there(page, capsys):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands(page):
        match command.split():
            case ["make", target, *_] if "=" not in target:
                assert target in targets, command
            case ["python", "-m", "series", name, *_]:
                assert f"{name} " in series_parser().format_help() + " ", command
                assert name in re.findall(
                    r"^ {4}(\w+)", series_parser().format_help(), re.M
                )
            case ["python", "-m", "vllm.distributed.graph_channels", name, *_]:
                with pytest.raises(SystemExit) as ended:
                    main([name, "--help"])
                assert ended.value.code == 0, command
            case ["python", "-m", module, *_] if module != "pip":
                path = ROOT / module.replace(".", "/")
                there = path.with_suffix(".py"), path / "__main__.py"
                assert any(file.exists() for file in there), command
    capsys.readouterr()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(
        r"\b(?:tests|docs|series|benchmarks)/[\w/]+\.(?:py|md)", text
    ):
        assert (ROOT / path).exists(), path


# Switches -------------------------------------------------------------------


def test_every_switch_has_its_line():  # R-F3
    named = {re.findall(r"`(\w+)`", row[0])[0] for row in rows("Switches")}
    assert named == SWITCHES <= set(envs.environment_variables)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_that_are_named_exist(page):
    known = set(envs.environment_variables) | set(switches._OUTDATED) | OF_THE_BUILD
    assert set(re.findall(r"\bVLLM_[A-Z0-9_]+\b", page.read_text())) <= known


def test_what_becomes_of_each_variable_of_community_builds(monkeypatch):  # R-F3
    table = section("Coming from a community build")
    for name, reason in switches._OUTDATED.items():
        assert f"`{name}` | not read, and a warning says so" in table
        monkeypatch.setenv(name, "1")
        assert any(
            note.startswith(name) and reason in note
            for note in switches.outdated_variables()
        )
    for value, reason in switches._NOT_HERE.items():
        assert f"`VLLM_PCIE_ALLREDUCE_BACKEND={value}` | refused: {reason}" in table


def test_it_is_short():
    assert len(README.splitlines()) <= 220
    assert os.path.getsize(ROOT / "README.md") < 20_000
