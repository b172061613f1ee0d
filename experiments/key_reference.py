"""Write the reference of all configuration keys, `docs/reference/keys.md`, from the schema.

python -m experiments.key_reference
"""

from itertools import groupby
from pathlib import Path

from darts_parallel.config import WORDS, KeyDoc, key_docs
from darts_parallel.plans import write_text

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "keys.md"
HEAD = """\
# Every configuration key

`darts-parallel key=value` sets a key. `darts-parallel --help KEY` prints its row.
`python -m experiments.key_reference` writes this page from the schema (`darts_parallel/config/`).

- `[]` in a key stands for the number of an entry, counted from 0: `cluster.nodes.0.gpus`.
- A *required* key must be there if its object is. The object itself may be missing (`inter_node`).
- `*` stands for a name: `cluster.devices.h100.memory_GiB`.
- The default is the one of the schema. A file of the group may set another value:
  `darts-parallel --cfg job` shows it.
"""


def page() -> str:
    """Return the text of the reference."""
    words = {key.replace(".0.", "[]."): word for word, key in WORDS.items()}
    parts = [HEAD]
    for group, docs in groupby(key_docs(), lambda doc: doc.key.partition(".")[0]):
        rows = [_row(doc, words.get(doc.key, "")) for doc in docs]
        head = ["| key | meaning | default | values |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"## `{group}`", "", *head, *rows, ""]))
    return "\n".join(parts)


def _row(doc: KeyDoc, word: str) -> str:
    """Return a line of the table; a bar inside a cell would end it."""
    key = f"`{doc.key}`, `{word}`" if word else f"`{doc.key}`"
    values = f"{doc.allowed}; {doc.unit}" if doc.unit else doc.allowed
    cells = (key, doc.meaning, doc.default, values)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    write_text(REFERENCE, page())
