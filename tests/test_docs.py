"""The commands in the documents: their keys, groups and words exist."""

import importlib
import re
import shlex
import sys
from typing import Any

import pytest

from darts_parallel.cli._arguments import deferred_overrides, flags_first, with_keys
from darts_parallel.config import composed_config, to_config, with_own_job
from tests.support.sources import ROOT

PAGES = [ROOT / "README.md", ROOT / "conf" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
COMMAND = re.compile(r"^(?:    |\| .*?`)(darts-parallel [^`\n]+)", re.MULTILINE)
"""A command in an indented block or in a cell of a table."""
OTHERS = {"graph", "design", "profile", "help", "--help", "--version"}
"""First words of commands that compose no job."""
OPTIONAL = (
    "hydra/",
    "hydra.launcher",
    "hydra.sweeper",
    "--multirun",
    "model.path=",
    "training.lengths=",
)
"""Beginnings of arguments that need a plugin or a file of the reader, or stand for several jobs."""

OF_THE_READER = re.compile(r"=(.*\b(NAME|FILE|FOLDER|KEY)\b.*|mine|my_cluster|measured)$")
"""Values that stand for a name or a file of the reader."""


def commands() -> list[tuple[str, str]]:
    """Return page and text of every command of the documents that composes a job."""
    found = []
    for page in PAGES:
        joined = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for (text,) in map(re.Match.groups, COMMAND.finditer(joined)):
            if shlex.split(text)[1] not in OTHERS and "..." not in text:
                found.append((page.name, text))
    return found


@pytest.mark.parametrize(("page", "text"), commands())
def test_a_command_of_the_documents_composes(page: str, text: str) -> None:
    text = re.sub(r"--(config-dir|cfg)[= ]\S+", "", text)
    text = re.sub(r"\bmodel=(hf|module)\b", "model=llama3_8b", text)
    given = [a for a in shlex.split(text)[1:] if not a.startswith(OPTIONAL)]
    swept = [re.sub(r"^([\w.]+=)([^\[{,]+),.*$", r"\1\2", argument) for argument in given]
    own = [argument for argument in swept if not OF_THE_READER.search(argument)]
    for_hydra, _ = deferred_overrides(with_own_job(with_keys(flags_first(own))))
    overrides = [argument for argument in for_hydra if not argument.startswith("--")]
    config = to_config(composed_config(overrides), overrides)
    assert config.model.num_layers > 0


def test_there_are_commands_on_every_how_to_page() -> None:
    pages = {page for page, _ in commands()} | {"python.md", "design.md"}
    for path in ROOT.glob("docs/how-to/*.md"):
        assert path.name in pages, path
    assert "README.md" in pages


def test_the_page_of_commands_is_what_their_help_prints() -> None:
    _assert_written("write_commands")


def test_the_page_of_what_trainers_cannot_run_is_what_their_files_say() -> None:
    _assert_written("write_trainer_limits")


def test_an_eager_block_launches_as_many_kernels_as_the_notes_say() -> None:
    pytest.importorskip("transformers")
    script = _script("count_launches")
    forward, backward, _ = script.eager(*script.parts()["whole block"])
    notes = (ROOT / "docs" / "calibration-notes.md").read_text(encoding="utf-8")
    assert f"\n| whole block | {forward.count} | {backward.count} |" in notes


def _script(name: str) -> Any:
    """Import `docs/NAME.py`."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def _assert_written(name: str) -> None:
    """Compare a page with what `python docs/NAME.py` writes."""
    script = _script(name)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), f"python docs/{name}.py"


def test_the_pages_of_trainers_show_what_their_exporters_write() -> None:
    script = _script("write_excerpts")
    for name in script.EXCERPTS:
        written = (script.FOLDER / name).read_text(encoding="utf-8")
        assert written == script.page(name), "python docs/write_excerpts.py"


def test_every_block_of_printed_lines_is_filled() -> None:
    shown = _script("run_commands").SHOWN
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = [match[4] for match in shown.finditer(text)]
        assert len(blocks) == text.count("<!-- lines "), page
        assert all(len(block) > 1 for block in blocks), page


def test_the_errors_of_predictions_are_those_of_the_validation() -> None:
    script = _script("write_accuracy")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "python docs/write_accuracy.py"
    written = script.README.read_text(encoding="utf-8")
    assert written == script.readme(), "python docs/write_accuracy.py"
