"""The help of the command: commands, groups, keys."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from darts_parallel.config import (
    EVERY_WORD,
    NAMES,
    WORDS,
    KeyDoc,
    group_names,
    key_docs,
    module_data,
)
from darts_parallel.errors import ConfigError, Entries, closest

FLAGS = ("--help", "-h")
WIDTH = 100
MOST_KEYS = 8
"""Keys of one last name that are explained at once."""
HELP: Entries = module_data(__file__)
COMMANDS: dict[str, dict[str, str]] = HELP["commands"]
"""Summary and usage of each command; a command without a usage prints its own help."""
GROUPS: dict[str, str] = HELP["groups"]


def help_asked(arguments: Sequence[str]) -> bool:
    """Return whether the arguments ask for help: by a flag, or by the word `help` first."""
    return bool({*FLAGS} & {*arguments}) or arguments[:1] == ["help"]


def help_lines(arguments: Sequence[str]) -> list[str]:
    """Return the help that arguments with `--help` ask for.

    Errors:
        ConfigError: the topic is no command, group, key or word.
    """
    words = arguments[arguments[:1] == ["help"] :]
    topics = [word for word in words if not word.startswith("-") and "=" not in word]
    if not topics:
        return list(_overview())
    topic = topics[0]
    if topic in COMMANDS:
        own = COMMANDS[topic]
        usage = own.get("usage", f"darts-parallel {topic} --help lists its options.")
        return [f"darts-parallel {topic}: {own['summary']}.", *usage.splitlines()]
    if topic in GROUPS:
        return list(_group(topic))
    if topic == "gpu":
        return list(_gpu())
    docs = keys_about(topic)
    if docs:
        return [line for doc in docs for line in _entry(doc)]
    known = [
        *COMMANDS,
        *GROUPS,
        *WORDS,
        "gpu",
        *NAMES["keys"],
        *(doc.key for doc in key_docs()),
    ]
    rule = "is no command, group or key"
    groups = [name for name in GROUPS if topic in group_names(name)]
    near = groups[0] if groups else closest(topic, known)
    raise ConfigError(f"--help {topic} {rule}; try darts-parallel --help {near}.")


def keys_about(topic: str) -> list[KeyDoc]:
    """Return the keys that a topic names: a word, a whole key, the last part of keys, or any part."""
    word = NAMES["keys"].get(topic, topic).partition("=")[0]
    key = EVERY_WORD.get(word, word)
    pattern = key.replace(".0.", "[].")
    known = key_docs()
    whole = [doc for doc in known if doc.key == pattern]
    last = [doc for doc in known if doc.key.endswith(f".{pattern}")]
    docs = whole or last or [doc for doc in known if pattern in doc.key]
    return docs[:MOST_KEYS]


def _overview() -> Iterator[str]:
    yield "darts-parallel searches a plan for training a Transformer in parallel."
    yield ""
    yield "usage: darts-parallel [COMMAND] [group=NAME ...] [key=value ...]"
    yield "e.g.   darts-parallel model=llama3_8b cluster=h100_1x8 trainer=megatron tp=4"
    yield ""
    yield "Commands; without one, a plan is searched, checked and written to plan.json:"
    for name, own in COMMANDS.items():
        yield f"  {name:<11}{own['summary']}"
    yield ""
    yield "Groups; group=NAME takes a file, --help GROUP lists its files and keys:"
    for name, meaning in GROUPS.items():
        yield f"  {name:<11}{meaning}"
    yield ""
    yield "Short words for keys; --help WORD explains one:"
    for word, key in WORDS.items():
        yield f"  {word:<11}{key}"
    yield "  gpu        GPU of cluster=box"
    yield ""
    yield "Flags:"
    for flag, meaning in HELP["flags"].items():
        yield f"  {flag:<21}{meaning}"


def _gpu() -> Iterator[str]:
    """Explain the word that stands for no key: it chooses a file, and links follow it."""
    yield "gpu (with cluster=box)"
    yield "  GPU of every node; the links follow from its class. `darts-parallel devices` has the sizes."
    names = ", ".join(group_names("device"))
    line = f"default none, the word is required there; one of {names}"
    yield from wrap(line, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _group(name: str) -> Iterator[str]:
    """Explain a group: its files, and a line for each key."""
    yield f"{name}: {GROUPS[name]}."
    yield from wrap(f"files: {', '.join(group_names(name))}", WIDTH, subsequent_indent="  ")
    root = "cluster.devices.*" if name == "device" else name
    docs = [doc for doc in key_docs() if doc.key.startswith(f"{root}.")]
    if docs:
        yield "keys; --help KEY says more:"
    for doc in docs:
        line = f"  {doc.key} ({doc.default}): {doc.meaning}"
        yield line if len(line) <= WIDTH else f"{line[: WIDTH - 3].rstrip()}..."


def _entry(doc: KeyDoc) -> Iterator[str]:
    """Explain a key, wrapped."""
    words = [word for word, key in WORDS.items() if key.replace(".0.", "[].") == doc.key]
    first, *lines = doc.lines()
    yield f"{first} (or {words[0]})" if words else first
    for line in lines:
        yield from wrap(line, WIDTH, initial_indent="  ", subsequent_indent="  ")
