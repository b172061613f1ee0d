"""The help of the command: commands, groups, keys."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from darts_parallel.config import (
    EVERY_WORD,
    WORDS,
    KeyDoc,
    group_names,
    key_docs,
    other_names,
)
from darts_parallel.errors import ConfigError, closest

FLAGS = ("--help", "-h")
WIDTH = 100
MOST_KEYS = 8
"""Keys of one last name that are explained at once."""
COMMANDS = {
    "price": (
        "price a plan of your own, and say how far the best plan is",
        "darts-parallel price plan.json, or the degrees: darts-parallel price tp=4 pp=2 dp=4\n"
        "Keys that are not given are chosen by the search. It prints what fills the memory, and\n"
        "writes the best plan of the space to plan_best.json.\n"
        "For other layers of a stage edit stages in the plan.json that it wrote, and price the file.",
    ),
    "explain": (
        "say where every second and byte of a plan comes from",
        "darts-parallel explain plan.json [key=value ...]\n"
        "Overrides change the problem that the plan was made for.",
    ),
    "tune": (
        "choose plans to try on the machine, and learn from their times or from a log",
        "darts-parallel tune plan.json --top 3: three plans to try\n"
        "darts-parallel tune plan.json --from-log train.log: read the log of that plan's run\n"
        "tune.measured=FILE gives the times of plans that were tried.",
    ),
    "graph": ("split a module of your own over ranks, and write the program", ""),
    "design": ("find the machine for a budget, or the cheapest machine for a time", ""),
    "models": (
        "list the models with their sizes; also: clusters, devices, trainers",
        "The first word of a line is the NAME of model=NAME, cluster=NAME or trainer=NAME.",
    ),
    "profile": ("measure this machine, and write its device and cluster files", ""),
}
"""Summary and usage of each command; a command without a usage prints its own help."""
GROUPS = {
    "model": "the Transformer; model=hf model.path=config.json reads a Hugging Face file",
    "cluster": "node groups, links, devices, prices",
    "training": "batch, sequence length, precision, optimizer",
    "trainer": "who runs the plan: what the trainer can run, and which files are written",
    "space": "which plans are searched; a key pins a choice, null leaves it free",
    "search": "gradient, exact or auto, and the settings of the descent",
    "cost": "the cost model: analytic, profiled, searcher",
    "objective": "seconds, dollars, one under a limit of the other, or useful tokens (goodput)",
    "software": "a framework's measured habits (training.software=NAME)",
    "device": "GPUs that a cluster file may name",
    "bilevel": "the loop with a toy Transformer (experiment=bilevel)",
    "experiment": "named runs",
}


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
        summary, usage = COMMANDS[topic]
        usage = usage or f"darts-parallel {topic} --help lists its options."
        return [f"darts-parallel {topic}: {summary}.", *usage.splitlines()]
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
        *other_names("keys"),
        *(doc.key for doc in key_docs()),
    ]
    rule = "is no command, group or key"
    raise ConfigError(f"--help {topic} {rule}; try darts-parallel --help {closest(topic, known)}.")


def keys_about(topic: str) -> list[KeyDoc]:
    """Return the keys that a topic names: a word, a whole key, the last part of keys, or any part."""
    word = other_names("keys").get(topic, topic).partition("=")[0]
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
    for name, (summary, _) in COMMANDS.items():
        yield f"  {name:<11}{summary}"
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
    yield "  --help TOPIC         explain a command, a group, a word or a key"
    yield "  --config-dir=FOLDER  read files of your own, too"
    yield "  --multirun           run every combination of comma-separated values"
    yield "  --cfg job            print the configuration and stop"
    yield "  --version            print the version"


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
