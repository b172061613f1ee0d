"""Hooks of the site: linked pages of other folders become its pages, and commands show what they print."""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
FOLDERS = ("experiments", "conf", "clients")
"""Folders whose Markdown and pictures belong to the site."""
OUTPUT = ROOT / "build" / "docs_output.json"
"""What `make docs-test` has printed, by command; the site is built without it, too."""
RUN = re.compile(r"<!-- run -->\n\n((?:    .+\n)+)")
DETAILS = (
    "more/experiments/",
    "more/clients/",
    "more/CHANGELOG",
    "calibration-notes",
    "what-did-not-help",
    "reference/api",
)
"""Pages that the search lists below the guides."""
DETAILS_BOOST = 0.1
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and pictures of other folders under `more/`, and the guides of the top level."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for folder in FOLDERS:
        found += [*ROOT.glob(f"{folder}/**/*.md"), *ROOT.glob(f"{folder}/**/*.png")]
    for path in found:
        name = f"more/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave `docs/` to the pages under `more/`; links to code become text."""
    inside = page.file.src_uri
    if inside.startswith(DETAILS):
        page.meta["search"] = {"boost": DETAILS_BOOST}
    own = inside.removeprefix("more/") if inside.startswith("more/") else f"docs/{inside}"

    def replaced(match: re.Match[str]) -> str:
        words, link = match.groups()
        target, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
        new = path.removeprefix("docs/") if path.startswith("docs/") else f"more/{path}"
        if files.get_file_from_path(new) is None:
            # a link inside docs/ must be right; one to code has no page here
            return match[0] if path.startswith("docs/") else words
        relative = posixpath.relpath(new, posixpath.dirname(inside) or ".")
        return f"[{words}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(replaced, _with_outputs(markdown))


def _with_outputs(markdown: str) -> str:
    """Fold what a command printed below its block, if it was run."""
    printed = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {}

    def folded(match: re.Match[str]) -> str:
        command = "\n".join(line[4:] for line in match[1].rstrip().splitlines())
        if command not in printed:
            return match[0]
        lines = "\n".join(f"    {line}" for line in printed[command].splitlines())
        return f'{match[0]}\n??? example "What it prints"\n\n    ```text\n{lines}\n    ```\n\n'

    return RUN.sub(folded, markdown)
