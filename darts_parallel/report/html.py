"""`report.html`: a run on one page, in one file that needs no network and runs no script.

It repeats the tables of the printed report and the figures of `plan.json`; pictures are SVG.
"""

import base64
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from io import BytesIO
from itertools import groupby
from math import floor, log10
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from darts_parallel.cost import Event
from darts_parallel.errors import DartsParallelError
from darts_parallel.report.explanation import memory_parts
from darts_parallel.report.format import seconds
from darts_parallel.report.journey import COLOURS, Journey, Pixels, journey, short_names, thinned
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.screen import headline
from darts_parallel.report.text import report_notes
from darts_parallel.report.trace import CATEGORIES, Timeline, plan_timeline
from darts_parallel.schedules import SEARCHED

PASSES = {"F": COLOURS[0], "B": COLOURS[1], "I": COLOURS[1], "W": COLOURS[2]}
"""Colour of a pass by its kind."""
SYNC = "#8a8a8a"
IDLE = "#eeeeee"
MEMORY = {"state": COLOURS[0], "activations": COLOURS[1], "workspace": COLOURS[2], "reserve": SYNC}
"""Colour of what fills the memory."""
SPREAD = "80 % of outcomes"
WIDTH = 1000
"""Units of a picture."""
LEFT = 90
"""Units of the labels to its left."""
BAR = 260
"""Units of a full bar of memory."""
ROW = 18
MOST_NUMBERED = 300
"""Passes up to which each has its number."""
MOST_LABELS = 40
MOST_ROUNDS = 3
"""Micro-batches a stage up to which a picture shows the whole iteration."""
SHOWN_ROUNDS = 2
"""Micro-batches a stage that a picture of a longer iteration shows."""
PALEST_CHUNK = 3
"""Chunk from which on a stage's passes are as pale as they get."""
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#222;background:#fff}
body{max-width:1080px;margin:2em auto;padding:0 1em}
h1{font-size:22px;margin:0 0 .3em}h2{font-size:16px;margin:2em 0 .4em}p{margin:.3em 0}
.bold{font-size:16px;font-weight:bold}.red{color:#c23b3b}.yellow{color:#96700a}.note,th{color:#666}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:2px 14px 2px 0}
th{font-weight:normal;text-align:left;vertical-align:bottom}td{border-top:1px solid #eee;vertical-align:top}
.r{text-align:right;white-space:nowrap}pre{background:#f6f6f6;padding:.6em;margin:.3em 0;white-space:pre-wrap}
svg{display:block;max-width:100%;font:11px system-ui}td svg{max-width:none}
.key{margin-right:1.2em;white-space:nowrap}
i{display:inline-block;width:11px;height:11px;margin-right:5px;background:#4878a8}
"""


def report_page(outcome: Outcome, tables: Sequence[Table], commands: Sequence[str]) -> str:
    """Return the page.

    Args:
        outcome: The plan and what is known of it.
        tables: Tables of the printed report, the table of stages first.
        commands: Next commands, each after its label and a colon; sentences have no colon.
    """
    job, *lines = headline(outcome)
    parts = [f"<h1>{escape(job.plain)}</h1>"]
    parts += [_line(line) for line in lines]
    parts += [_line(Text(note, "note")) for note in report_notes(outcome)]
    for place, table in enumerate(tables):
        title = str(table.title or table.columns[0].header).strip()
        parts.append(f"<h2>{escape(title[0].upper() + title[1:])}</h2>")
        if place == 0:
            parts.append(_html_table(table, list(_memory_bars(outcome))))
            parts.append(_legend([*MEMORY.items(), (SPREAD, "#222;height:2px;vertical-align:4px")]))
            parts += _schedule(outcome)
        else:
            parts.append(_html_table(table))
    parts += _search(outcome, journey(outcome.result, outcome.plan))
    parts.append("<h2>Next commands</h2>" if commands else "")
    for command in commands:
        label, _, line = escape(command).rpartition(": ")
        parts.append(f'<p class="note">{label or line}</p>')
        if label:
            parts.append(f"<pre>{line}</pre>")
    head = f'<meta charset="utf-8"><title>{escape(job.plain)}</title>\n<style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _line(line: Text) -> str:
    """Return a line of the printed report as a paragraph; its style is a class of `STYLE`."""
    return f'<p class="{line.style}">{escape(line.plain)}</p>'


def _html_table(table: Table, bars: Sequence[str] = ()) -> str:
    """Return a table of the report as HTML, with a last column of bars where there are any."""
    sides = ["" if column.justify == "left" else ' class="r"' for column in table.columns]
    columns = []
    for column in table.columns:
        cells = (column.header, *column.cells)
        columns.append([_html(cell) for cell in cells])
    if bars:
        sides.append("")
        columns.append(["memory of a device", *bars])
    lines = []
    for number, cells in enumerate(zip(*columns, strict=True)):
        tag = "th" if number == 0 else "td"
        pairs = zip(sides, cells, strict=True)
        lines.append("".join(f"<{tag}{side}>{cell}</{tag}>" for side, cell in pairs))
    return f'<div class="wide"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'


def _html(cell: Any) -> str:
    text = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
    words = text.plain
    return f'<i style="width:{6 * len(words)}px"></i>' if words.startswith("█") else escape(words)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    keys = []
    for name, colour in entries:
        square = f'<i style="background:{colour}"></i>'
        keys.append(f'<span class="key">{square}{escape(name)}</span>')
    return f"<p>{''.join(keys)}</p>"


def _rect(
    x: float,
    y: float,
    width: float,
    height: float,
    style: str,
) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}" {style}/>'
    )


def _words(
    x: float,
    y: float,
    words: str,
    style: str = "",
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    shape = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {shape}>{"".join(parts)}</svg>'


def _memory_bars(outcome: Outcome) -> Iterator[str]:
    """Yield a bar a stage: bytes by part over the largest device's, with their 80 % interval."""
    capacity = outcome.cost.capacity_bytes
    most = max(*capacity, *outcome.cost.memory_bytes)
    for stage, filled in enumerate(memory_parts(outcome.problem, outcome.plan)):
        parts = [_rect(0, 1, BAR * capacity[stage] / most, 14, f'fill="{IDLE}"')]
        x = 0.0
        for part, colour in MEMORY.items():
            width = BAR * filled[part] / most
            parts.append(_rect(x, 1, width, 14, f'fill="{colour}"'))
            x += width
        if outcome.sure is not None:
            low, high = (min(BAR, BAR * value / most) for value in outcome.sure.memory_bytes[stage])
            line = f"M{low:.1f} 4v8m0-4H{high:.1f}m0-4v8"
            parts.append(f'<path d="{line}" stroke="#222" fill="none"/>')
        yield _svg(BAR + 2, 16, parts)


def _schedule(outcome: Outcome) -> Iterator[str]:
    """Yield the picture of an iteration; below a searched schedule the closest rule's, to scale."""
    plan = outcome.plan
    if not outcome.cost.stage_times_s:
        return
    lines = [plan_timeline(plan, outcome.problem)]
    if plan.schedule_name == SEARCHED:
        with suppress(DartsParallelError):
            lines.append(plan_timeline(replace(plan, schedule=None), outcome.problem))
    count = plan.num_micro_batches
    shown = count
    part = ""
    if count > MOST_ROUNDS * plan.pp:
        shown = SHOWN_ROUNDS * plan.pp
        part = f", the first {shown} of {count} micro-batches"
    end = max(_end_of(line, shown, count) for line in lines)
    yield "<h2>Schedule</h2>"
    for line in lines:
        last = seconds(max(line.pipeline_ends_s))
        name = line.schedule.replace("_", " ")
        words = f"{name}, one iteration{part}; its passes end after {last}"
        yield f'<p class="note">{words}</p>' + _gantt(line, _Frame(plan.pp, end), shown * plan.pp)
    kinds = sorted({event.operation.kind for event in lines[0].events}, key="FBIW".index)
    entries = [(CATEGORIES[kind], PASSES[kind]) for kind in kinds]
    entries += [
        ("gradient sync and optimizer", SYNC),
        ("idle", IDLE),
        ("longest path", "#fff;outline:1px solid #000;outline-offset:-1px"),
    ]
    yield _legend(entries)


def _end_of(line: Timeline, shown: int, count: int) -> float:
    """Return the seconds at which the picture of a schedule ends.

    Args:
        shown: Micro-batches that the picture shows.
        count: All micro-batches of the iteration.
    """
    if shown == count:
        ends = zip(line.pipeline_ends_s, line.sync_s, strict=True)
        return max(last + sync for last, sync in ends)
    first_stage = (event for event in line.events if event.device == 0)
    return max(e.end for e in first_stage if e.operation.micro_batch < shown)


@dataclass(frozen=True)
class _Frame:
    """Size of the picture of a schedule, and where its passes stand."""

    pp: int
    end: float
    """Seconds at the right edge."""

    @property
    def scale(self) -> float:
        """Return units of the picture a second."""
        return (WIDTH - LEFT - 10) / self.end

    def boxes(self, events: Sequence[Event]) -> str:
        """Return the path of the boxes of passes."""
        path = []
        for event in events:
            x = LEFT + event.start * self.scale
            y = ROW * event.device + 1
            width = (min(event.end, self.end) - event.start) * self.scale
            path.append(f"M{x:.1f} {y}h{width:.2f}v{ROW - 2}h{-width:.2f}z")
        return "".join(path)


def _gantt(line: Timeline, frame: _Frame, num_passes: int) -> str:
    """Draw the passes of every stage until the end of the frame, one path for all of a kind."""
    events = [event for event in line.events if event.start < frame.end]
    height = ROW * frame.pp
    parts = [_rect(LEFT, 0, frame.end * frame.scale, height, f'fill="{IDLE}"')]

    def kind_and_chunk(event: Event) -> tuple[str, int]:
        return event.operation.kind, min(event.operation.stage // frame.pp, PALEST_CHUNK)

    events.sort(key=kind_and_chunk)
    for (kind, chunk), run in groupby(events, key=kind_and_chunk):
        opacity = 0.65**chunk
        paint = f'fill="{PASSES[kind]}" fill-opacity="{opacity:.2f}"'
        edge = 'stroke="#fff" stroke-width=".4"'
        parts.append(f'<path d="{frame.boxes(list(run))}" {paint} {edge}/>')
    critical = frame.boxes([event for event in events if event.critical])
    parts.append(f'<path d="{critical}" fill="none" stroke="#000" stroke-width=".8"/>')
    parts += _sync_boxes(line, frame)
    if num_passes <= MOST_NUMBERED:
        parts += _numbers(events, frame)
    for stage in thinned(frame.pp, MOST_LABELS):
        parts.append(_words(0, ROW * stage + 13, f"stage {stage}"))
    unit = (1e3, " ms") if frame.end < 1 else (1.0, " s")
    parts += _ticks(frame.end, frame.scale, height + 14, *unit)
    return _svg(WIDTH, height + 20, parts)


def _sync_boxes(line: Timeline, frame: _Frame) -> Iterator[str]:
    """Draw the gradient synchronisation of each device after its last pass."""
    for device, last in enumerate(line.pipeline_ends_s):
        if last < frame.end:
            x = LEFT + last * frame.scale
            width = min(line.sync_s[device], frame.end - last) * frame.scale
            yield _rect(x, ROW * device + 1, width, ROW - 2, f'fill="{SYNC}"')


def _numbers(events: Sequence[Event], frame: _Frame) -> Iterator[str]:
    """Write the micro-batch into every pass that is wide enough and wholly shown."""
    style = 'text-anchor="middle" fill="#fff" font-size="9"'
    for event in events:
        wide = (event.end - event.start) * frame.scale > 12
        if wide and event.end <= frame.end:
            middle = LEFT + (event.start + event.end) / 2 * frame.scale
            number = str(event.operation.micro_batch)
            yield _words(middle, ROW * event.device + 12, number, style)


def _ticks(
    end: float,
    scale: float,
    y: float,
    unit: float,
    name: str,
) -> Iterator[str]:
    """Yield about five round numbers of a unit below a picture."""
    rough = end * unit / 5
    step = 10.0 ** floor(log10(rough))
    step *= 5 if rough / step >= 5 else 2 if rough / step >= 2 else 1
    for i in range(int(end * unit / step) + 1):
        yield _words(LEFT + i * step / unit * scale, y, f"{i * step:g}{name}", 'fill="#666"')


def _search(outcome: Outcome, search: Journey | None) -> list[str]:
    """Draw layers by steps in the colours of the leading strategies, and the plan in a last column."""
    if search is None:
        return []
    plan = outcome.plan
    names = short_names(outcome.problem.model.layer_names)
    row = min(12.0, max(4.0, 560 / len(names)))
    tall = row * len(names)
    wide = WIDTH - LEFT - 60
    scale = wide / search.end
    parts = [
        _image(search.pixels, LEFT, wide, tall),
        _image(search.plan, LEFT + wide + 12, 30, tall),
    ]
    for first in plan.boundaries[1:-1]:
        line = f"M{LEFT} {row * first:.1f}h{wide + 42}"
        parts.append(f'<path d="{line}" stroke="#000" stroke-width=".5"/>')
    middle = 'text-anchor="middle"'
    if search.hardened is not None:
        x = LEFT + search.hardened * scale
        parts += [
            f'<path d="M{x:.1f} 0v{tall + 4:.1f}" stroke="#000" stroke-dasharray="4 3"/>',
            _words(x, tall + 28, f"edges harden, step {search.hardened}", middle),
        ]
    parts.append(_words(LEFT + wide + 27, tall + 14, "plan", middle))
    parts += _ticks(max(search.steps[-1], 1), scale, tall + 14, 1.0, "")
    for place in thinned(len(names), min(MOST_LABELS, int(tall / 12))):
        parts.append(_words(0, row * (place + 0.5) + 4, names[place]))
    note = "Most likely strategy of every layer by step (pale: undecided). "
    where = "The restart that led. Lines: stages of the plan."
    if not search.own:
        where += " The plan has another pipeline degree, which left the descent earlier."
    return [
        "<h2>Search, layer by layer</h2>",
        f'<p class="note">{note}{escape(where)}</p>',
        _svg(WIDTH, tall + 32, parts),
        _legend(search.legend()),
    ]


def _image(
    pixels: Pixels,
    x: float,
    width: float,
    height: float,
) -> str:
    """Return pixels `(rows, columns, 3)` from 0 to 1 as an image of the page."""
    from PIL import Image

    png = BytesIO()
    Image.fromarray(np.round(255 * pixels).astype(np.uint8)).save(png, "PNG")
    source = base64.b64encode(png.getvalue()).decode()
    shape = f'x="{x:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none"'
    style = "image-rendering:pixelated"
    return f'<image {shape} style="{style}" href="data:image/png;base64,{source}"/>'
