"""The words: docstrings have verbs, classes have one name, names exist, private words stay away."""

import ast
import builtins
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from darts_parallel.config._keys import all_keys
from darts_parallel.config.schema import Config
from tests.support.sources import FOLDERS, ROOT, SOURCES, nodes

FILES = [path for path in SOURCES if "golden" not in path.parts]
SETTINGS = [*sorted(ROOT.glob("conf/**/*.yaml")), ROOT / "pyproject.toml", ROOT / "Makefile"]
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "docs/maintaining.md"]
"""Pages for maintainers: the names that they cite in backticks exist, as in docstrings."""
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("conf/*.md"),
    *ROOT.glob("clients/*.md"),
    *ROOT.glob("experiments/*.md"),
    *ROOT.glob("experiments/data/*.md"),
]
VERBLESS = re.compile(r"(Of|By|What|That|Whose|The same)\b")
NOUN = re.compile(r"(The|An?|One|Whether|Which|Where)\b|`")
PRIVATE_WORDS = {
    "anew": "again",
    "bettered": "improved",
    "mended|mends": "fixed",
    "dearer|dearest|a dear": "more expensive, most expensive",
    "unburdened": "without offloadable memory",
    "nearest (legal|valid|value)": "closest valid value",
    "ways? of training|way_of": "training mode, schedule",
    "felt\\(": "training_key",
    "the house|rooms of the house": "architecture, packages",
    "searcher report|seed report": "closed-form 3D-parallel searcher",
    "told to": "asked to, or: which the user set",
    "reads? (hard|soft) or (hard|soft)|reads? hard(?! plans)": "prices hard plans, or soft weights",
    "log steps(?!\\()": "log slowdown",
    "LEFT_BEHIND|begin_near|most_even|raise_to_least|unmoved|tidied|MoveScreen": "see the glossary",
    "softwares": "frameworks",
    "the attack|cramped places": "fuzz test, resource-limited environments",
    "waits? for ever": "deadlocks",
    "fits? not": "does not fit",
    "that fit not|holds? fast": "does not fit; records",
    "taken anew|planned anew": "chosen again, planned again",
    "says theirs|in the night of|too easy to count": "say what it is",
    "the paler": "pale: undecided",
}
"""Words that only this project used, as regular expressions, and the field's word for each."""
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


def cited_names() -> list[tuple[str, str]]:
    """List the spans in backticks of docstrings and of pages for maintainers, each with its place."""
    texts = [(place(file, node), node.value) for file, node in docstrings()]
    for page in GUIDES:
        texts.append((page.name, re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)))
    return [(where, span) for where, text in texts for span in re.findall(r"`([^`\n]+)`", text)]


def test_names_in_backticks_exist() -> None:
    """A name is known by code or configuration that uses it, a key by the schema, a path by its file."""
    names = known_names() | OTHERS
    keys = all_keys(Config)
    prefixes = {
        key[:end] for key in keys for end in range(len(key) + 1) if key[end : end + 1] in (".", "")
    }
    groups = {key.partition(".")[0] for key in keys if "." in key} - {"tune"}  # keys of commands
    folders = tuple(f"{folder}/" for folder in (*FOLDERS, "conf", "docs"))
    broken = []
    for where, span in cited_names():
        if re.fullmatch(r"[\w./]+\.(py|yaml|md|json|csv)", span):
            ours = span.startswith(folders)
            missing = ours and "NAME" not in span and not (ROOT / span).exists()
        elif (key := re.match(r"([a-z]\w*)\.[a-z]\w*", span)) and key[1] in groups:
            missing = key[0] not in prefixes | names
        else:
            plain = re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span)
            missing = plain is not None and not set(re.findall(r"\w+", span)) <= names
        if missing:
            broken.append(f"{where} `{span}`")
    assert not broken, "\n".join(broken)


def pattern_of(words: str) -> str:
    """Write words as a regular expression: a phrase may go on in the next line, behind a comment's mark."""
    pattern = words.replace(" ", r"[\s#]+")
    ends = r"(?![A-Za-z])" if words[-1].isalpha() else ""
    return rf"\b({pattern}){ends}"


ANY_PRIVATE_WORD = re.compile("|".join(map(pattern_of, PRIVATE_WORDS)), re.IGNORECASE)


def private_words(text: str) -> list[str]:
    """Return the words of a text that only this project uses, each with the field's word."""
    found = []
    for words, plain in PRIVATE_WORDS.items() if ANY_PRIVATE_WORD.search(text) else ():
        match = re.search(pattern_of(words), text, re.IGNORECASE)
        if match:
            found.append(f"{' '.join(match[0].split())!r}: say {plain!r}")
    return found


def test_the_words_are_those_of_the_field() -> None:
    own = Path(__file__).resolve()
    files = [*(file for file in FILES if file != own), *SETTINGS, *PAGES]
    found = [
        f"{file.relative_to(ROOT)} has {word}"
        for file in files
        for word in private_words(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Choose all strategies anew.", 1),
        ("# names the nearest\n    # legal value", 1),
        ('f"{key}: nearest legal: {value}"', 1),
        ("The Searcher report, in two ways of training", 2),
        ("part = felt(strategy)", 1),
        ("the cost table, read hard or soft", 1),
        ("Read hard plans from their table, once again; a house of renewals", 0),
        ("the node nearest to the last one, and the logarithm of steps", 0),
    ],
)
def test_the_rule_sees_private_words(text: str, count: int) -> None:
    assert len(private_words(text)) == count


def test_the_table_of_a_cost_table_lists_every_field() -> None:
    tree = nodes(ROOT / "darts_parallel/cost/cost_table.py")
    (table,) = (n for n in tree if isinstance(n, ast.ClassDef) and n.name == "CostTable")
    fields = {n.target.id for n in table.body if isinstance(n, ast.AnnAssign)}
    page = (ROOT / "docs/maintaining.md").read_text().partition("| field |")[2]
    rows = [line for line in page.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} == fields
