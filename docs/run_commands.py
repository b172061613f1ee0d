"""Run the commands of the documents: `python docs/run_commands.py [--write] [PAGE]`, or `make docs-test`.

Every command of README runs, and every block of another page below the line `<!-- run -->`. They run
in a new folder that holds the `plan.json` of the default job, the examples, a log of a run, a
histogram of lengths and a `config.json` of Hugging Face. What each one prints is written to
`build/docs_output.json`, from which the site shows it. With `--write` the lines that a page shows below
`<!-- lines FIRST to LAST -->` are written into it. The exit status is 1 if a command fails.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "build" / "docs_output.json"
BLOCK = re.compile(r"<!-- run -->\n\n((?:    .+\n)+)")
"""An indented block below a line that no reader sees."""
OF_README = re.compile(r"^(?:    |\| .*?`)(darts-parallel [^`\n]+)", re.MULTILINE)
SHOWN = re.compile(
    r"<!-- run -->\n\n((?:    .+\n)+)\n<!-- lines (-?\d+) to (-?\d+) -->\n\n```text\n([\s\S]*?)\n```"
)
"""A block that runs, and the lines of its output that the page shows; negative ones count from the end."""
LENGTHS = {512: 5000, 1024: 3000, 2048: 1500, 4096: 400, 8192: 100}
"""Sequences by their length, in `lengths.csv`."""
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
"""`config.json`: Qwen3-0.6B, as huggingface.co/Qwen/Qwen3-0.6B has it."""
LIMIT = 240.0
"""Seconds of one block."""
WORKERS = 2


def blocks() -> list[tuple[str, str]]:
    """Return page and text of every block that runs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = [("README.md", command) for command in OF_README.findall(readme)]
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        for text in BLOCK.findall(page.read_text(encoding="utf-8")):
            lines = [line.removeprefix("    ") for line in text.rstrip().splitlines()]
            found.append((page.relative_to(ROOT / "docs").as_posix(), "\n".join(lines)))
    return found


def run(text: str, folder: Path) -> tuple[int, str]:
    """Return the exit status and what the block prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    try:
        done = subprocess.run(
            ["bash", "-euc", text],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return 1, f"longer than {LIMIT:.0f} s"
    return done.returncode, done.stdout.replace(str(folder), ".")


def supply(folder: Path) -> None:
    """Write the files that commands of the pages read."""
    for name in ("examples", "conf"):
        (folder / name).symlink_to(ROOT / name)
    run("darts-parallel hydra.run.dir=.", folder)
    rows = "".join(f"{length},{count}\n" for length, count in LENGTHS.items())
    (folder / "lengths.csv").write_text(f"length,count\n{rows}", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
    steps = (
        f" iteration {i}/ 100 | elapsed time per iteration (ms): {131e3 + i}" for i in range(12)
    )
    (folder / "train.log").write_text("\n".join(steps), encoding="utf-8")


def write_shown(page: Path, printed: dict[str, str]) -> None:
    """Write the lines of outputs that a page shows, without seconds of wall-clock and dates."""

    def filled(match: re.Match[str]) -> str:
        command = "\n".join(line.removeprefix("    ") for line in match[1].rstrip().splitlines())
        if command not in printed:
            return match[0]
        lines = [line.rstrip() for line in printed[command].splitlines()]
        first, last = (
            len(lines) + int(at) if int(at) < 0 else int(at) - 1 for at in match.group(2, 3)
        )
        shown = "\n".join(lines[first : last + 1])
        shown = re.sub(r"((?: %|variables)[;,] )[0-9.]+ s\b", r"\1… s", shown)
        shown = re.sub(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d(_\d+)?", "outputs/DATE/TIME", shown)
        begin = match.start(4) - match.start()
        return f"{match[0][:begin]}{shown}\n```"

    text = page.read_text(encoding="utf-8")
    page.write_text(SHOWN.sub(filled, text), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run the blocks of some pages, or of all, two at a time; print a line for each."""
    pages = [name for name in arguments if name != "--write"]
    printed: dict[str, str] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        supply(folder)

        def timed(block: tuple[str, str]) -> tuple[float, int, str]:
            began = time.monotonic()
            status, text = run(block[1], folder)
            return time.monotonic() - began, status, text

        found = [block for block in blocks() if not pages or block[0] in pages]
        with ThreadPoolExecutor(WORKERS) as pool:
            for (page, text), done in zip(found, pool.map(timed, found), strict=True):
                seconds, status, output = done
                printed[text] = output
                failed += status != 0
                words = "ok" if status == 0 else f"exit status {status}: {output[-400:]}"
                print(f"{page:<28} {seconds:6.1f} s  {text[:90]!r} {words}", flush=True)
    if "--write" in arguments:
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")):
            write_shown(path, printed)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(printed, indent=1), encoding="utf-8")
    print(f"{len(found)} blocks, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
