"""Spoil one word or one file of the other commands: verbs, plans, designs, histograms, models, modules."""

import io
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

from darts_parallel.cli import main
from tests.fuzz.case import FuzzCase, FuzzOutcome
from tests.fuzz.inputs import BAD

JOB = (
    "model=toy cluster=toy training=toy search.num_steps=3 search.num_restarts=1 output.tensorboard=false "
    "cluster.nodes.0.count=1 space.num_micro_batches=[2,4]"
)
DESIGN = {
    "unit": "USD",
    "budget": 900.0,
    "budgets": [1.2],
    "tolerance": 1e-3,
    "options": {"two": {"overrides": ["cluster=toy"], "fixed": {"gpu": 10, "node": 5}}},
    "jobs": [
        {"overrides": ["model=toy", "training=toy", "space=uniform", "space.pp=1"], "weight": 1.0}
    ],
    "knobs": {
        "device.memory": {"price": 30, "bounds": [0.5, 2.0]},
        "inter_node.bandwidth": {"price": 25, "per": "node", "exponent": 1.1},
    },
}
HF = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
FILES = {
    "mine.yaml": json.dumps(DESIGN),
    "config.json": json.dumps(HF),
    "lengths.csv": "length,count\n64,3\n128,1\n",
    "trials.csv": "plan,seconds\nplan.json,0.1\n",
}
READERS = {
    "plan.json": ("price FILE", "explain FILE", "tune FILE", "plan=FILE", "design design=FILE"),
    "mine.yaml": ("design design=FILE",),
    "config.json": (f"{JOB} model=hf model.path=FILE",),
    "lengths.csv": (f"{JOB} training.lengths=FILE",),
    "trials.csv": ("tune plan.json tune.measured=FILE",),
}
"""Commands that read a file, which is spoilt."""
COMMANDS = (
    f"{JOB} price pp=1 tp=2 dp=1 num_micro_batches=2 zero_stage=0 recompute=none",
    f"{JOB} trainer=torch space.out_of_memory=0.2 space.schedules=[1f1b] space.tp=2 explain=true",
    "tune plan.json --top 2 tune.measured=null",
    "design design=mine.yaml budget=900 tolerance=0.01",
    "graph module=tests.graph.test_script:products inputs=[[2,64,2048]] mesh=[2] cluster=toy "
    "descent=false verify=false",
)
"""Commands of which one word is spoilt."""


@cache
def plan_text() -> str:
    """Return the plan file of a small job."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        assert run((*JOB.split(), "hydra.run.dir=out"))[0] == 0
        return Path("out/plan.json").read_text()


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the command in this process; return its exit status and what it said of errors."""
    sys.argv = ["darts-parallel", *arguments]
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0), said.getvalue().strip()
    return 0, said.getvalue().strip()


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every entry of a tree with what holds it."""
    for key in (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from entries(value[key])


def spoilt(text: str, rng: random.Random) -> str:
    """Return a file with one byte, or one value or key of its tree, changed or removed."""
    if rng.random() < 0.3 or not text.startswith("{"):
        place = rng.randrange(len(text))
        return (
            text[:place]
            + rng.choice(["", "\x00", '"', "\n", "é,", "}", *BAD])
            + text[place + rng.choice([0, 1, 9]) :]
        )
    value = json.loads(text)
    bad = rng.choice(BAD)
    parent, key = rng.choice(list(entries(value)))
    old = parent.pop(key)
    if isinstance(parent, dict) and rng.random() < 0.8:
        parent |= rng.choice([{key: bad}, {key: -1}, {key: None}, {key: []}, {bad: old}])
    return json.dumps(value)


def answer(seed: str) -> FuzzOutcome:
    """Run one command with one thing spoilt: one sentence and no folder, or a result."""
    rng = random.Random(seed)
    files = FILES | {"plan.json": plan_text()}
    if rng.random() < 0.5:
        file = rng.choice(list(READERS))
        files[file] = spoilt(files[file], rng)
        words = rng.choice(READERS[file]).replace("FILE", file).split()
    else:
        words = rng.choice(COMMANDS).split()
        place = rng.randrange(len(words))
        words[place] = f"{words[place].partition('=')[0]}={rng.choice(BAD)}"
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for file, text in files.items():
            Path(file).write_text(text)
        try:
            status, said = run([*words, "hydra.run.dir=out"])
        except Exception as error:  # any error is what this test looks for
            return FuzzOutcome(f"{seed}: {' '.join(words)}", f"{type(error).__name__}: {error}")
        good = not status or (
            status == 2 and "\n" not in said and said.endswith(".") and not Path("out").exists()
        )
    return FuzzOutcome(
        f"{seed}: {' '.join(words)}",
        ("refused" if status else "accepted") if good else f"{status}: {said[-300:]}",
    )


def cases(count: int, seed: int) -> Iterator[FuzzCase]:
    """Yield commands with one word, or one entry of a file, spoilt."""
    for number in range(count):
        yield "spoilt words and files", partial(answer, f"{seed}/{number}")
