"""The words: docstrings are sentences with a verb, classes have one name each, names in backticks exist."""

import ast
import builtins
import re
from collections import Counter
from functools import cache
from pathlib import Path

from darts_parallel.config._keys import all_keys
from darts_parallel.config.schema import Config
from tests.support.sources import FOLDERS, ROOT, SOURCES, nodes

FILES = [path for path in SOURCES if "golden" not in path.parts]
SETTINGS = [*sorted(ROOT.glob("conf/**/*.yaml")), ROOT / "pyproject.toml", ROOT / "Makefile"]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
VERBLESS = re.compile(r"(Of|By|What|That|Whose|The same)\b")
NOUN = re.compile(r"(The|An?|One|Whether|Which|Where)\b|`")
PRIVATE = re.compile(
    r"\b(bettered|mended|dearest|begin_near|LEFT_BEHIND|nearest legal)\b", re.IGNORECASE
)
OTHERS = {
    "AutoModel",
    "BertForMaskedLM",
    "DistributedDataParallel",
    "GPT2Config",
    "LlamaConfig",
    "NanotronModel",
    "LlamaForTraining",
    "ModernBertForMaskedLM",
    "RobertaForMaskedLM",
    "SummaryWriter",
    "T5Config",
    "ZeroRedundancyOptimizer",
    "__getattr__",
    "account_for_embedding_in_pipeline_split",
    "add_hparams",
    "get_block_compute_costs",
    "is_first_microbatch",
    "logsumexp",
    "noop",
    "target_modules",
    "search.lr",
}
"""Names of libraries and papers that docstrings cite and no code here uses, and a key that does not exist."""


@cache
def docstrings() -> list[tuple[Path, ast.Constant]]:
    """List every string that stands alone: of modules, functions, constants, fields."""
    alone = ((f, n.value) for f in FILES for n in nodes(f) if isinstance(n, ast.Expr))
    return [(f, n) for f, n in alone if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def place(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"


def known_names() -> set[str]:
    """Collect the words of code without its docstrings and comments, of the configuration, and of paths."""
    lines = {file: file.read_text().split("\n") for file in FILES}
    for file, text in docstrings():
        lines[file][text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    code = (re.sub(r"#.*", "", line) for own in lines.values() for line in own)
    paths = (
        str(path.relative_to(ROOT))
        for path in (*FILES, *SETTINGS, *ROOT.glob("experiments/**/*.*"))
    )
    texts = (*code, *paths, *(path.read_text() for path in SETTINGS))
    return {word for text in texts for word in re.findall(r"\w+", text)} | set(dir(builtins))


def test_no_docstring_begins_without_a_verb() -> None:
    broken = [f"{place(f, n)} {n.value[:40]!r}" for f, n in docstrings() if VERBLESS.match(n.value)]
    assert broken == [], "\n".join(broken)


def test_what_a_function_does_is_said_by_a_verb() -> None:
    found = []
    for file in (f for f in FILES if f.relative_to(ROOT).parts[0] in FOLDERS[:3]):
        for node in (n for n in nodes(file) if isinstance(n, ast.FunctionDef)):
            quantity = any("property" in ast.unparse(one) for one in node.decorator_list)
            if not quantity and NOUN.match(ast.get_docstring(node) or ""):
                found.append(f"{place(file, node)} {node.name}")
    assert found == []


def test_no_class_name_stands_twice() -> None:
    names = Counter(n.name for f in FILES for n in nodes(f) if isinstance(n, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


def test_names_in_backticks_exist() -> None:
    """A name is known by code or configuration that uses it, a key by the schema, a path by its file."""
    names, keys, broken = known_names() | OTHERS, set(all_keys(Config)), []
    prefixes = {
        key[:end] for key in keys for end in range(len(key) + 1) if key[end : end + 1] in (".", "")
    }
    groups = {key.partition(".")[0] for key in keys if "." in key} - {"tune"}  # keys of commands
    for file, node in docstrings():
        for span in re.findall(r"`([^`\n]+)`", node.value):
            if re.fullmatch(r"[\w./]+\.(py|yaml|md|json|csv)", span):
                ours = span.startswith(tuple(f"{folder}/" for folder in (*FOLDERS, "conf", "docs")))
                missing = ours and "NAME" not in span and not (ROOT / span).exists()
            elif (key := re.match(r"([a-z]\w*)\.[a-z]\w*", span)) and key[1] in groups:
                missing = key[0] not in prefixes | names
            else:
                plain = re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span)
                missing = plain is not None and not set(re.findall(r"\w+", span)) <= names
            broken += [f"{place(file, node)} `{span}`"] if missing else []
    assert broken == [], "\n".join(broken)


def test_the_words_are_those_of_the_field() -> None:
    files = [*(f for f in FILES if f.is_relative_to(ROOT / "darts_parallel")), *SETTINGS, *PAGES]
    found = [
        (str(f.relative_to(ROOT)), word) for f in files for word in PRIVATE.findall(f.read_text())
    ]
    assert found == []
