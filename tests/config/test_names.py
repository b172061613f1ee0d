"""Names do nothing outside the tool but be read."""

import ast
import json
import subprocess
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from darts_parallel.config import run_folder, without_words
from darts_parallel.config.checks import quoted
from darts_parallel.errors import ConfigError
from darts_parallel.export import export_plan
from darts_parallel.problem.problem import Problem
from tests.support.commands import QUIET, TOY, Command
from tests.support.export_plans import CASES, NAMES

BREAKING = [
    "x\ntouch PWNED #",
    "x\rtouch PWNED #",
    "x\u2028y",
    "x\x85y",
    "x\x00y",
    "x\x1b[2J",
    "x\u202ey",
    "x\ud800",
]
"""Names that end a line, a comment or a terminal's patience."""
STRANGE = [
    '"; touch PWNED; "',
    "'; touch PWNED; '",
    "$(touch PWNED)",
    "`touch PWNED`",
    "../../PWNED",
    "[/red]",
    "[link=file:///]",
    '""" + open("PWNED", "w").name + """',
    "coding: utf_7 +AAo-open('PWNED','w')",
    "a: {b: [c",
    "# -*- x -*-",
    "\\",
    "{0} %s ${now:}",
    "モデル 7B",
]
"""Names that must stay inside their comment, string or cell."""


def renamed(problem: Problem, name: str) -> Problem:
    """The problem with the name on its model, its cluster and its devices."""
    config = problem.config
    (device,) = config.cluster.devices.values()
    cluster = replace(
        config.cluster,
        name=name,
        nodes=[replace(group, device=name) for group in config.cluster.nodes],
        devices={name: device},
    )
    return Problem.from_config(
        replace(config, model=replace(config.model, name=name), cluster=cluster)
    )


@pytest.mark.parametrize("name", BREAKING)
def test_a_name_with_a_control_character_is_refused_in_one_sentence(name: str) -> None:
    problem, _ = CASES["replicas"].build()
    with pytest.raises(ConfigError, match=r"must hold printable characters only.*; try ") as caught:
        renamed(problem, name)
    assert str(caught.value).isprintable()
    with pytest.raises(ConfigError):
        quoted(name)


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_name_changes_nothing_of_an_exported_file_but_its_comments(name: str) -> None:
    for case, target in NAMES:
        problem, plan = CASES[case].build()
        for file, text in export_plan(renamed(problem, name), plan, target).files.items():
            assert meaning(file, text) == plain_meaning(case, target)[file], (target, file)


@cache
def plain_meaning(case: str, target: str) -> dict[str, object]:
    files = export_plan(*CASES[case].build(), target).files
    return {file: meaning(file, text) for file, text in files.items()}


def meaning(file: str, text: str) -> object:
    """Return what the reader of a file makes of it, without comments and the values that are names."""
    if file.endswith(".py"):
        return ast.dump(ast.parse(text.encode()))
    if file.endswith((".sh", ".toml")):
        return [line for line in text.splitlines() if not line.startswith("#")]
    values = yaml.safe_load(text)
    values.pop("config", None)  # of a plan file: names are what it is to keep
    if "general" in values:  # nanotron's run and tokenizer are named after the model
        values["general"].pop("run")
        values["tokenizer"].pop("tokenizer_name_or_path")
    return values


@pytest.mark.parametrize("name", [*STRANGE[:6], STRANGE[8]])
def test_no_line_of_a_name_is_run_by_the_shell_or_by_python(name: str, tmp_path: Path) -> None:
    problem, _ = CASES["replicas"].build()
    strange = renamed(problem, name)
    plan = CASES["replicas"].build()[1]
    script = tmp_path / "megatron.sh"
    script.write_text(export_plan(strange, plan, "megatron").files["megatron.sh"], encoding="utf-8")
    stub = tmp_path / "torchrun"
    stub.write_text("#!/bin/sh\n")
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    program = export_plan(strange, plan, "torch").files["train_torch.py"].encode()
    tree = ast.parse(program)
    assert not [
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "PWNED"
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"megatron.sh", "torchrun"}


def test_plan_and_hugging_face_files_with_a_line_break_in_a_name_are_refused(
    command: Command,
) -> None:
    problem, plan = CASES["uneven_pipeline"].build()
    names = tuple(layer.name for layer in problem.model.layers)
    config = asdict(problem.config)
    config["model"]["name"] = "y\nimport os; os.system('touch PWNED')\n#"
    data = {"schema": "darts-parallel/plan/1", **plan.to_dict(names, range(8)), "config": config}
    (command.folder / "plan.json").write_text(json.dumps(data))
    llama = {
        "model_type": "llama",
        "_name_or_path": "x\ntouch PWNED #",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 256,
        "max_position_embeddings": 64,
    }
    (command.folder / "config.json").write_text(json.dumps(llama))
    for given in (
        ["plan=plan.json", "export=torch"],
        ["model=hf", "model.path=config.json", *TOY[1:], *QUIET, "export=megatron"],
    ):
        outcome = command(*given)
        assert outcome.status == 2, outcome.out
        assert "printable" in outcome.err
        assert outcome.err.count("\n") == 1
        assert set(outcome.files) == {"config.json", "plan.json"}


def test_brackets_and_quotes_in_names_and_folders_are_printed_as_they_are(command: Command) -> None:
    outcome = command(
        *TOY,
        *QUIET,
        "model.name='[/red] $(touch PWNED)'",
        "hydra.run.dir='[bold]$(x)/[/red]'",
        "export=megatron",
    )
    assert outcome.status == 0, outcome.err
    assert "[/red] $(touch PWNED) (220,544 parameters) on toy" in outcome.out
    assert "explain '[bold]$(x)/[/red]/plan.json'" in outcome.out
    assert "PWNED" not in "".join(outcome.files)


def test_the_users_folder_is_written_out_where_a_shell_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a key with a dot a shell leaves `~`, and a folder of that name was made."""
    monkeypatch.setenv("HOME", "/home/ü")
    given = [
        "hydra.run.dir=~/a",
        "plan='~/b=c/plan.json'",
        "model.path=a~/b",
        "~model.path",
        "tp=2",
    ]
    written = ["hydra.run.dir=/home/ü/a", "plan='/home/ü/b=c/plan.json'", *given[2:4], "space.tp=2"]
    assert without_words(given) == written
    assert str(run_folder(["hydra.run.dir=~/a"])) == "/home/ü/a"
