"""Files that docstrings, messages and pages cite exist: a rename that forgets one fails here."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import FOLDERS, ROOT, SOURCES, nodes

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("conf/*.md")),
    *sorted(ROOT.glob("data/*.md")),
    *sorted(ROOT.glob("experiments/**/*.md")),
]
CITED = re.compile(r"(?<![\w/*.{}-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|toml)\b(?![\w{(])")
"""A file of code, of prose or of settings, with or without its folders."""
PLACEHOLDER = re.compile(r"\b(NAME|CLUSTER_SOFTWARE)\.\w+$|^mine/")
"""A name to be filled in, such as `conf/design/NAME.yaml`, or a file of a user's folder."""
WRITTEN = {
    "cluster/measured.yaml",
    "config.py",
    "device/measured.yaml",
    "multirun.yaml",
    "links.py",
    "my_calibrated.yaml",
    "outputs/tuned/cluster/a10_8x4_common.yaml",
    "parallel_plan.py",
    "report.md",
    "results.md",
    "tensor_plan.py",
    "train.py",
}
"""Files that commands, Hydra or users write."""
OTHER_PROJECTS = {
    "config_registry.py",
    "deepspeed/runtime/config.py",
    "deepspeed/runtime/pipe/module.py",
    "examples/bert/pretrain_bert.py",
    "examples/t5/pretrain_t5.py",
    "galvatron/core/runtime/hybrid_parallel_config.py",
    "galvatron/core/runtime/models/builder.py",
    "integrations/deepspeed.py",
    "megatron/core/datasets/data_schedule.py",
    "megatron/core/datasets/data_schedule_utils.py",
    "megatron/core/models/hybrid/hybrid_layer_allocation.py",
    "megatron/training/arguments.py",
    "parallelism_config.py",
    "pretrain_gpt.py",
    "pretrain_hybrid.py",
    "pytorch/module/layernorm_linear.py",
    "pytorch/module/linear.py",
    "run_train.py",
    "runtime/engine.py",
    "scripts/train_dist.yaml",
    "src/accelerate/parallelism_config.py",
    "src/nanotron/nn/moe.py",
    "src/nanotron/models/llama.py",
    "src/nanotron/models/qwen.py",
    "src/nanotron/trainer.py",
    "torchtitan/config/configs.py",
    "torchtitan/config/job_config.py",
    "torchtitan/distributed/activation_checkpoint.py",
    "torchtitan/models/__init__.py",
    "torchtitan/models/common/decoder.py",
    "torchtitan/models/llama3/config_registry.py",
    "train_dist.py",
}
"""Sources that the formulas and exporters cite from other projects."""


@cache
def files() -> set[str]:
    """List the project's files, without what runs have written."""
    folders = (*FOLDERS, "conf", "docs", "data", "examples")
    inside = (path for folder in folders for path in ROOT.glob(f"{folder}/**/*"))
    every = (*inside, *ROOT.glob("*"))
    return {path.relative_to(ROOT).as_posix() for path in every if path.is_file()}


def exists(name: str, folder: Path) -> bool:
    """Return whether a cited name is a file: from the page's folder, or as the end of a path."""
    if (folder / name).is_file():
        return True
    below = name.replace("../", "")  # sources write pages of other folders
    return any(f"/{path}".endswith(f"/{below}") for path in files())


def missing(text: str, folder: Path) -> set[str]:
    """Return the cited names that are no files."""
    names = {name for name in CITED.findall(text) if not PLACEHOLDER.search(name)}
    known = WRITTEN | OTHER_PROJECTS
    return {name for name in names - known if not exists(name, folder)}


def sentences() -> dict[str, list[str]]:
    """List the strings of sources outside tests, and pages, by file."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("tests/"):
            strings = (node.value for node in nodes(path) if isinstance(node, ast.Constant))
            found[name] = [text for text in strings if isinstance(text, str)]
    for page in PAGES:
        found[page.relative_to(ROOT).as_posix()] = [page.read_text(encoding="utf-8")]
    return found


def test_every_file_that_is_cited_exists() -> None:
    wrong = [
        f"{place} cites {name}"
        for place, texts in sentences().items()
        for name in sorted(missing("\n".join(texts), (ROOT / place).parent))
    ]
    assert not wrong


def test_files_from_elsewhere_are_still_cited() -> None:
    text = "\n".join(line for texts in sentences().values() for line in texts)
    assert not {name for name in WRITTEN | OTHER_PROJECTS if name not in text}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("as `resharding.py` says", {"resharding.py"}),
        (
            "see cost/table_of_costs.py and docs/no_page.md.",
            {"cost/table_of_costs.py", "docs/no_page.md"},
        ),
        ("the link (../conf/READ.md) leads nowhere", {"../conf/READ.md"}),
        ("`conf/design/NAME.yaml`, `README.md`, megatron/training/arguments.py, a.b.py.x", set()),
    ],
)
def test_the_rule_sees_a_missing_file(text: str, names: set[str]) -> None:
    assert missing(text, ROOT / "docs") == names
