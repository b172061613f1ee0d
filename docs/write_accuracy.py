"""Write the figures of `docs/explanation/accuracy.md` and of README from pages of `experiments/results`.

`python docs/write_accuracy.py`, after `experiments.validate_cost_model` or `experiments.answers` wrote
its page.
"""

import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from darts_parallel.config import NEWEST
from experiments.data.runs import read_runs

ROOT = Path(__file__).parents[1]
VALIDATION = ROOT / "experiments" / "results" / "validation.md"
PAGE = Path(__file__).parent / "explanation" / "accuracy.md"
README = ROOT / "README.md"
BLOCK = re.compile(r"(?<=<!-- figures -->\n\n).*?(?=\n\n<!-- end of figures -->)", re.DOTALL)
PROGRAMS = re.compile(r"(?<=<!-- programs -->\n\n).*?(?=\n\n<!-- end of programs -->)", re.DOTALL)
KINDS = {"all dense": "dense models", "all mixtures": "MoE models"}
TRAINERS = re.compile(r"(?<=<!-- trainers -->\n\n).*?(?=\n\n<!-- end of trainers -->)", re.DOTALL)
ANSWERS = ROOT / "experiments" / "results" / "answers.md"
PLANNED = re.compile(r"are \d+ pairs; \[\d+ have a plan\]")
MEDIAN = re.compile(r"(?<=The median error is )[0-9.]+ %")
LEFT_OUT = {"source": "one publication", "house": "one publisher with its framework"}
OWN, AVERAGE = "the framework's own efficiencies", "average efficiencies"


def rows(text: str) -> dict[tuple[str, str, str], list[str]]:
    """Return the cells of the summary rows by fold, name of the row and figure."""
    found = {}
    for fold in LEFT_OUT:
        part = text.partition(f"Held out by {fold}.")[2].partition("Held out by")[0]
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0].startswith("all"):
                found[fold, cells[0], cells[1]] = cells[2:]
    return found


def other_cells(text: str, fold: str, name: str) -> list[str]:
    """Return the cells of a row of the tables of intervals and refusals, which begin with the fold."""
    match = re.search(rf"^\| {fold} \| {re.escape(name)} \|(.+)\|$", text, re.MULTILINE)
    assert match is not None, (fold, name)
    return [cell.strip() for cell in match[1].split("|")]


def tables(text: str) -> str:
    """Return the tables of errors, and of how often an interval or a refusal is right."""
    found = rows(text)
    kinds = ("all dense", "all mixtures", "all")
    lines = [
        "| left out of the calibration | figure | dense models | MoE models | all |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for figure in ("seconds", "memory"):
        for fold, words in LEFT_OUT.items():
            medians = [f"{found[fold, kind, figure][1]} %" for kind in kinds]
            lines.append(f"| {words}; {OWN} | {figure} | {' | '.join(medians)} |")
            if figure == "seconds":
                names = [f"{kind}, averaged frameworks" for kind in kinds]
                medians = [f"{found[fold, name, figure][1]} %" for name in names]
                lines.append(f"| {words}; {AVERAGE} | {figure} | {' | '.join(medians)} |")
    simple = [f"{found['source', f'{kind}, one MFU a device', 'seconds'][1]} %" for kind in kinds]
    lines += [
        f"| one publication; one MFU for each GPU type | seconds | {' | '.join(simple)} |",
        "",
    ]
    lines += ["| question | publication left out | publisher left out |", "| --- | ---: | ---: |"]
    asked = {
        "Runs inside the interval `±`, which should be 80 %": ("seconds, all", 2),
        "Half the width of this interval (median)": ("seconds, all", 9),
        "Runs that fitted, of those with a 90 % chance to fit": ("memory, all", 8),
        "Runs that are refused although they ran": ("all", 2),
    }
    for question, (name, index) in asked.items():
        cells = [f"{other_cells(text, fold, name)[index]} %" for fold in LEFT_OUT]
        lines.append(f"| {question} | {' | '.join(cells)} |")
    regrets = [
        re.search(rf"Held out by {fold}\..*?regret of the first choice ([0-9.]+) %", text)
        for fold in LEFT_OUT
    ]
    cells = [f"{match[1]} %" for match in regrets if match]
    lines.append(
        f"| First choice against the fastest measured plan (mean of 23 jobs) | {' | '.join(cells)} |"
    )
    date = re.search(r"^Commit \w+, ([0-9-]+)", text, re.MULTILINE)
    used = re.search(r"^(\d+) of (\d+) rows used", text, re.MULTILINE)
    assert date is not None
    assert used is not None
    seconds, memory = (found["source", "all", figure][0] for figure in ("seconds", "memory"))
    ran = other_cells(text, "source", "all")[0]
    lines += [
        "",
        f"The figures are of {date[1]}. Of {used[2]} collected runs {used[1]} can be used:",
        f"{seconds} print their seconds and {memory} their memory.",
        f"{ran} of them ran; the others ran out of memory.",
    ]
    return "\n".join(lines)


def trainer_rows(text: str) -> str:
    """Return the table of trainers: their efficiencies, and the errors on runs of left-out publishers."""
    part = text.partition("Held out by house.")[2].partition("Held out by")[0]
    errors = {}
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[1:2] in (["seconds"], ["memory"]):
            errors[cells[0], cells[1]] = cells
    gpus: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for run in read_runs():
        if not run.skipped:
            gpus[run.framework, run.house][f"{' and '.join(run.devices)} {run.precision}"] += 1
    lines = [
        "| trainer | `training.software` | publisher left out | GPUs and precisions: runs "
        "| seconds: runs | median | 90 % below | memory: runs | median |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for trainer in NEWEST:
        record = (ROOT / "conf" / "trainer" / f"{trainer}.yaml").read_text(encoding="utf-8")
        known: dict[str, Any] = yaml.safe_load(record)  # type: ignore[no-untyped-call]
        usual = known["training"]["software"]
        others = known["trainer"].get("software", [])
        for software in dict.fromkeys([usual, *others]):
            name = f"{software}{' (default)' * (software == usual)}"
            houses = [house for own, house in gpus if own == software]
            if software is None:
                name = "the average (default)"
            for house in sorted(houses) or ["all, averaged frameworks"]:
                seconds = errors.get((house, "seconds"), ["", "", "0", "", "", "", ""])
                memory = errors.get((house, "memory"), ["", "", "0", ""])
                known_gpus = gpus.get((software, house), Counter())
                shown = ", ".join(f"{gpu}: {count}" for gpu, count in known_gpus.most_common())
                lines.append(
                    f"| {trainer} | {name} | {house} | {shown or 'all'} | {seconds[2]} | {seconds[3]} % "
                    f"| {seconds[6]} % | {memory[2]} | {f'{memory[3]} %' * (memory[3] != '')} |"
                )
    return "\n".join(lines)


def other_programs(text: str) -> str:
    """Return the table of other cost models, each next to this one on the runs that it can express."""
    part = text.partition("| seconds of |")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in part.splitlines()[2:]]
    lines = [
        "| runs | this model: median error | other program | its median error |",
        "| --- | ---: | --- | ---: |",
    ]
    for own, other in pairwise(cells):
        if own[0] == "ours":
            kind = KINDS[own[1]]
            lines.append(f"| {own[2]} of {kind} | {own[3]} % | {other[0]} | {other[3]} % |")
    return "\n".join(lines)


def page() -> str:
    """Return the text of the page."""
    text = VALIDATION.read_text(encoding="utf-8")
    shown = BLOCK.sub(lambda _: tables(text), PAGE.read_text(encoding="utf-8"))
    shown = TRAINERS.sub(lambda _: trainer_rows(text), shown)
    return PROGRAMS.sub(lambda _: other_programs(text), shown)


def readme() -> str:
    """Return README with the median error, and with the number of pairs that have a plan."""
    error = rows(VALIDATION.read_text(encoding="utf-8"))["source", "all", "seconds"][1]
    pairs = re.search(r"(\d+) of (\d+) pairs have a plan", ANSWERS.read_text(encoding="utf-8"))
    assert pairs is not None
    text = PLANNED.sub(
        f"are {pairs[2]} pairs; [{pairs[1]} have a plan]", README.read_text(encoding="utf-8")
    )
    return MEDIAN.sub(f"{error} %", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
