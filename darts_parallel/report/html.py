"""`report.html`: a run on one page, in one file that needs no network and runs no script.

Its tables are those of the printed report, its figures those of `plan.json`; pictures are SVG.
"""

import base64
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from itertools import groupby
from math import floor, log10
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from darts_parallel.cost import CostBreakdown, Event
from darts_parallel.errors import DartsParallelError
from darts_parallel.exact import Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem
from darts_parallel.report.explanation import SIGNS, memory_parts
from darts_parallel.report.format import percent, seconds
from darts_parallel.report.journey import COLOURS, Journey, Pixels, journey, short_names, thinned
from darts_parallel.report.text import claim, layerwise_sentence
from darts_parallel.report.trace import CATEGORIES, Timeline, plan_timeline
from darts_parallel.schedules import SEARCHED

PASSES = dict(zip("FBIW", (COLOURS[0], COLOURS[1], COLOURS[1], COLOURS[2]), strict=True))
SYNC, IDLE = "#8a8a8a", "#eeeeee"
MEMORY = dict(zip(SIGNS, (*COLOURS[:3], SYNC), strict=True))
"""Colour of what fills the memory."""
SPREAD = "80 % of outcomes"
WIDTH, LEFT, BAR = 1000, 90, 260
"""Units of a picture, of its labels, and of a bar of memory."""
ROW = 18
MOST_NUMBERED = 300
"""Passes up to which each has its number."""
MOST_LABELS = 40
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#222;background:#fff}
body{max-width:1080px;margin:2em auto;padding:0 1em}
h1{font-size:22px;margin:0 0 .3em}h2{font-size:16px;margin:2em 0 .4em}p{margin:.3em 0}
.decision{font-size:16px}.bad{color:#c23b3b}.note,th{color:#666}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:2px 14px 2px 0}
th{font-weight:normal;text-align:left;vertical-align:bottom}td{border-top:1px solid #eee;vertical-align:top}
.r{text-align:right;white-space:nowrap}pre{background:#f6f6f6;padding:.6em;margin:.3em 0;white-space:pre-wrap}
svg{display:block;max-width:100%;font:11px system-ui}td svg{max-width:none}
.key{margin-right:1.2em;white-space:nowrap}
i{display:inline-block;width:11px;height:11px;margin-right:5px;background:#4878a8}
"""


def report_page(
    problem: Problem,
    result: SearchResult | None,
    plan: Plan,
    cost: CostBreakdown,
    answers: Sequence[Verification],
    data: Mapping[str, Any],
    tables: Sequence[Table],
    commands: Sequence[str],
) -> str:
    """Return the page.

    Args:
        problem: As it was searched.
        data: Content of `plan.json`.
        tables: Of the printed report, that of the stages first.
        commands: To go on with, one a line, after its label and a colon where it has one.
    """
    title = f"{problem.config.model.name} on {problem.config.cluster.name}"
    known = "given plan, not searched" if result is None else claim(problem, cost, answers)
    parts = [f"<h1>{escape(title)}, {problem.cluster.num_devices} GPUs</h1>"]
    known = "; ".join(filter(None, (known, layerwise_sentence(problem, cost, answers))))
    parts += _decision(problem, plan, cost, data["predicted"], known)
    bars = list(_memory_bars(problem, plan, cost, data["predicted"]))
    memory = _legend([*MEMORY.items(), (SPREAD, "#222;height:2px;vertical-align:4px")])
    for place, table in enumerate(tables):
        parts.append(f"<h2>{escape(str(table.title).strip())}</h2>")
        parts.append(_html_table(table, () if place else bars))
        parts += () if place else [memory, *_schedule(problem, plan, cost)]
    parts += _search(problem, plan, journey(result, plan))
    lines = (escape(line).rpartition(": ") for line in commands)
    parts += [
        "<h2>Go on</h2>",
        *(f'<p class="note">{label}</p><pre>{line}</pre>' for label, _, line in lines),
    ]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _decision(
    problem: Problem, plan: Plan, cost: CostBreakdown, predicted: Mapping[str, Any], known: str
) -> list[str]:
    """Say in two sentences what to run and what is known of it; the job stands below."""
    job, words = problem.config.training, plan.describe(problem.training.global_batch_size)
    sure, fits, means = "", "", ""
    if "iteration_time_interval_s" in predicted:
        width = predicted["iteration_time_interval_s"][1] / cost.iteration_time_s - 1.0
        sure = f" ± {percent(width, 0)}"
        fits = f", and the job fits its memory with {percent(1 - predicted['out_of_memory_probability'], 0)}"
        least = percent(predicted["indistinguishable_below"], 0)
        means = f"; ± holds with 80 %, and differences below {least} (≈) mean nothing"
    first = (
        f"Train by <b>{escape(words)}</b>: an iteration takes {seconds(cost.iteration_time_s)}{sure} "
        f"({cost.tokens_per_s:,.0f} tokens/s, MFU {percent(cost.mfu)}){fits}."
    )
    second = known[0].upper() + known[1:]
    by = problem.config.trainer.name
    trainer = "figures of an average framework" if by == "none" else f"figures of {by}"
    line = (
        f"{job.global_batch_size:,} sequences of {job.seq_len:,} tokens an iteration, {job.precision}, "
        f"{job.optimizer}; {trainer}{means}."
    )
    found = [
        f'<p class="decision">{first} {escape(second)}.</p>',
        f'<p class="note">{escape(line)}</p>',
    ]
    over = "This plan does not fit: a stage is over its memory or breaks a rule."
    return found if cost.feasible else [*found, f'<p class="bad">{over}</p>']


def _html_table(table: Table, bars: Sequence[str]) -> str:
    """Return a table of the report as HTML, with a last column of bars where there are any."""
    sides = ["" if column.justify == "left" else ' class="r"' for column in table.columns] + [""]
    columns = [[_html(cell) for cell in (column.header, *column.cells)] for column in table.columns]
    columns += [["memory of a device", *bars]] if bars else []
    lines = (
        "".join(f"<t{tag}{side}>{cell}</t{tag}>" for side, cell in zip(sides, cells, strict=False))
        for tag, cells in zip("h" + "d" * table.row_count, zip(*columns, strict=True), strict=True)
    )
    return f'<div class="wide"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'


def _html(cell: Any) -> str:
    words = cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
    return f'<i style="width:{6 * len(words)}px"></i>' if words.startswith("█") else escape(words)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    keys = (
        f'<span class="key"><i style="background:{c}"></i>{escape(name)}</span>'
        for name, c in entries
    )
    return f"<p>{''.join(keys)}</p>"


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}" {style}/>'
    )


def _words(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    shape = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {shape}>{"".join(parts)}</svg>'


def _memory_bars(
    problem: Problem, plan: Plan, cost: CostBreakdown, predicted: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a bar a stage: bytes by term over those of the largest device, and their 80 % interval."""
    most = max(*cost.capacity_bytes, *cost.memory_bytes)
    spread = predicted.get("memory_interval_bytes")
    for stage, filled in enumerate(memory_parts(problem, plan)):
        x, parts = 0.0, [_rect(0, 1, BAR * cost.capacity_bytes[stage] / most, 14, f'fill="{IDLE}"')]
        for part, colour in MEMORY.items():
            width = BAR * filled[part] / most
            parts.append(_rect(x, 1, width, 14, f'fill="{colour}"'))
            x += width
        if spread is not None:
            low, high = (min(BAR, BAR * value / most) for value in spread[stage])
            parts.append(
                f'<path d="M{low:.1f} 4v8m0-4H{high:.1f}m0-4v8" stroke="#222" fill="none"/>'
            )
        yield _svg(BAR + 2, 16, parts)


def _schedule(problem: Problem, plan: Plan, cost: CostBreakdown) -> Iterator[str]:
    """Yield the picture of an iteration; below a searched order that of the closest rule, on one scale."""
    if not cost.stage_times_s:
        return
    lines = [plan_timeline(plan, problem)]
    if plan.schedule_name == SEARCHED:
        with suppress(DartsParallelError):
            lines.append(plan_timeline(replace(plan, schedule=None), problem))
    count = plan.num_micro_batches
    shown = 2 * plan.pp if count > 3 * plan.pp else count
    ends = [
        max(e.end for e in line.events if e.device == 0 and e.operation.micro_batch < shown)
        if shown < count
        else max(end + sync for end, sync in zip(line.pipeline_ends_s, line.sync_s, strict=True))
        for line in lines
    ]
    part = f", the first {shown} of {count} micro-batches" if shown < count else ""
    yield "<h2>Schedule</h2>"
    for line in lines:
        last, name = seconds(max(line.pipeline_ends_s)), line.schedule.replace("_", " ")
        words = f"{name}, one iteration{part}; its passes end after {last}"
        yield f'<p class="note">{words}</p>' + _gantt(
            line, plan.pp, max(ends), numbered=shown * plan.pp
        )
    kinds = sorted({event.operation.kind for event in lines[0].events}, key="FBIW".index)
    entries = [(CATEGORIES[kind], PASSES[kind]) for kind in kinds]
    yield _legend(
        [
            *entries,
            ("gradient sync and optimizer", SYNC),
            ("idle", IDLE),
            ("longest path", "#fff;outline:1px solid #000;outline-offset:-1px"),
        ]
    )


def _gantt(line: Timeline, pp: int, end: float, numbered: int) -> str:
    """Draw the passes of every stage until `end`, one path for all of a kind."""
    scale, events = (WIDTH - LEFT - 10) / end, [e for e in line.events if e.start < end]
    parts = [_rect(LEFT, 0, end * scale, ROW * pp, f'fill="{IDLE}"')]

    def order(event: Event) -> tuple[str, int]:
        return event.operation.kind, min(event.operation.stage // pp, 3)

    def boxes(some: Sequence[Event]) -> str:
        spans = (
            (LEFT + e.start * scale, e.device, (min(e.end, end) - e.start) * scale) for e in some
        )
        return "".join(f"M{x:.1f} {ROW * k + 1}h{w:.2f}v{ROW - 2}h{-w:.2f}z" for x, k, w in spans)

    for (kind, chunk), run in groupby(sorted(events, key=order), key=order):
        paint = f'fill="{PASSES[kind]}" fill-opacity="{0.65**chunk:.2f}" stroke="#fff" stroke-width=".4"'
        parts.append(f'<path d="{boxes(list(run))}" {paint}/>')
    critical = [event for event in events if event.operation in line.critical]
    parts.append(f'<path d="{boxes(critical)}" fill="none" stroke="#000" stroke-width=".8"/>')
    for device, (last, sync) in enumerate(zip(line.pipeline_ends_s, line.sync_s, strict=True)):
        if last < end:
            x, width = LEFT + last * scale, min(sync, end - last) * scale
            parts.append(_rect(x, ROW * device + 1, width, ROW - 2, f'fill="{SYNC}"'))
    small = 'text-anchor="middle" fill="#fff" font-size="9"'
    for event in events if numbered <= MOST_NUMBERED else []:
        if (event.end - event.start) * scale > 12 and event.end <= end:
            middle = LEFT + (event.start + event.end) / 2 * scale
            parts.append(
                _words(middle, ROW * event.device + 12, str(event.operation.micro_batch), small)
            )
    parts += [_words(0, ROW * k + 13, f"stage {k}") for k in thinned(pp, MOST_LABELS)]
    unit = (1e3, " ms") if end < 1 else (1.0, " s")
    return _svg(WIDTH, ROW * pp + 20, [*parts, *_ticks(end, scale, ROW * pp + 14, *unit)])


def _ticks(end: float, scale: float, y: float, unit: float, name: str) -> Iterator[str]:
    """Yield about five round numbers of a unit below a picture."""
    rough = end * unit / 5
    step = 10.0 ** floor(log10(rough))
    step *= 5 if rough / step >= 5 else 2 if rough / step >= 2 else 1
    for i in range(int(end * unit / step) + 1):
        yield _words(LEFT + i * step / unit * scale, y, f"{i * step:g}{name}", 'fill="#666"')


def _search(problem: Problem, plan: Plan, search: Journey | None) -> list[str]:
    """Draw layers by steps in the colours of the leading strategies, and the plan in a last column."""
    if search is None:
        return []
    names = short_names([layer.name for layer in problem.model.layers])
    steps, row = search.winner.steps, min(12.0, max(4.0, 560 / len(names)))
    tall, wide = row * len(names), WIDTH - LEFT - 60
    scale = wide / search.end
    parts = [
        _image(search.pixels, LEFT, wide, tall),
        _image(search.plan, LEFT + wide + 12, 30, tall),
    ]
    for first in plan.boundaries[1:-1]:
        parts.append(
            f'<path d="M{LEFT} {row * first:.1f}h{wide + 42}" stroke="#000" stroke-width=".5"/>'
        )
    if search.hardened is not None:
        x = LEFT + search.hardened * scale
        parts.append(f'<path d="M{x:.1f} 0v{tall + 4:.1f}" stroke="#000" stroke-dasharray="4 3"/>')
        parts.append(
            _words(x, tall + 28, f"edges harden, step {search.hardened}", 'text-anchor="middle"')
        )
    parts += [_words(LEFT + wide + 27, tall + 14, "plan", 'text-anchor="middle"')]
    parts += _ticks(max(steps[-1], 1), scale, tall + 14, 1.0, "")
    shown = thinned(len(names), min(MOST_LABELS, int(tall / 12)))
    parts += [_words(0, row * (i + 0.5) + 4, names[i]) for i in shown]
    note = "Leading strategy of every layer by step, the paler, the less certain; "
    where = f"winning restart, {search.winner.name}; lines: stages of the plan."
    return [
        "<h2>Search, layer by layer</h2>",
        f'<p class="note">{note}{escape(where)}</p>',
        _svg(WIDTH, tall + 32, parts),
        _legend(search.legend()),
    ]


def _image(pixels: Pixels, x: float, width: float, height: float) -> str:
    """Return pixels `(rows, columns, 3)` as an image of the page (PNG: ISO/IEC 15948, colour type 2)."""
    rows, columns, _ = pixels.shape
    raw = b"".join(b"\0" + line.tobytes() for line in np.round(255 * pixels).astype(np.uint8))
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", head), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")):
        body = kind + content
        png += struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))
    shape = f'x="{x:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none"'
    source = base64.b64encode(png).decode()
    return (
        f'<image {shape} style="image-rendering:pixelated" href="data:image/png;base64,{source}"/>'
    )
