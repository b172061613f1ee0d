"""Compiled programmes on orders of passes: timing, the longest path, annealing along it, and a heuristic.

Micro-batches are alike, so the passes of a stage and kind may run in their order (exchange any two that do
not: nothing starts later), and a device's order is a word over symbols `kind * S + stage`; kinds are F, I, W
and the whole B, in this order. The j-th time that a symbol stands in a word it is micro-batch j.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

NEVER = 1e300
"""Seconds of an order that waits for itself."""
ROOM = 1e-12
"""Share of its room by which an order may pass it: less than what a plan may, which adds bytes otherwise."""


class Figures(NamedTuple):
    """Costs of layers under strategies for one outer choice, by kind of stage; axes as of `CostTable`."""

    forward: Array
    backward: Array
    weight: Array
    sync: Array
    per_iteration: Array
    static: Array
    before: Array
    between: Array
    working: Array
    activation: Array
    """Bytes of a micro-batch where the order stays: stages then hold `flying` of them."""
    reshard: Array
    p2p: Array
    legal: NDArray[np.bool_]
    """Whether a kind of stage runs a strategy, `(Q, C)`."""
    layout: Indices
    fused: NDArray[np.bool_]
    capacity: Array
    kinds: Indices
    boundaries: Indices
    devices: Indices
    flying: Array
    """Micro-batches of stages where the order stays; else zeros, `(S,)`."""
    sources: Indices
    """Symbol of the pass that gives the input of every symbol, its whole B as I; -1: none, `(4 S,)`."""
    batches: int
    blocking: bool
    space: int
    """0: strategies stay, 1: stages change theirs, 2: layers."""


class Stages(NamedTuple):
    """Figures of the stages of a plan."""

    seconds: Array
    """Seconds of a pass, by symbol, `(4 S,)`."""
    waits: Array
    """Seconds of the message that brings its input, `(4 S,)`."""
    after: Array
    """Seconds of a device behind its last pass, `(P,)`."""
    before: Array
    """Bytes of a micro-batch before its backward, `(S,)`."""
    between: Array
    """Bytes between the two parts of its backward, `(S,)`."""
    room: Array
    """Bytes of a device for both, `(P,)`."""

    @staticmethod
    def empty(stages: int, devices: int) -> "Stages":
        """Return figures to fill."""
        sizes = (4 * stages, 4 * stages, devices, stages, stages, devices)
        return Stages(*(np.zeros(size) for size in sizes))


@njit(cache=True)
def retime(words, lengths, seconds, waits, sources, after, count, end):
    """Return the seconds until all devices have synchronised; `NEVER` where some pass waits for ever.

    Args:
        words: Symbols of every device in order, `(P, N)`; `lengths` `(P,)` of them are read.
        seconds, waits: Of a pass, and of the message that brings its input, by symbol, `(4 S,)`.
        sources: Symbol of the pass that gives the input, its whole B as I; -1: none, `(4 S,)`.
        after: Seconds of a device behind its last pass, `(P,)`.
        count: Micro-batches.
        end: Filled: ends of the passes, whole B as I, `(3 S, m)`.
    """
    devices, symbols = len(words), len(seconds)
    stages = symbols // 4
    places, free = np.zeros(devices, np.int64), np.zeros(devices)
    ran = np.zeros(symbols, np.int64)
    left = lengths.sum()
    while left:
        before = left
        for device in range(devices):
            place, now = places[device], free[device]
            while place < lengths[device]:
                symbol = words[device, place]
                batch, giver = ran[symbol], sources[symbol]
                if giver >= 0:
                    whole = giver + 2 * stages if stages <= giver < 2 * stages else giver
                    if ran[giver] + (ran[whole] if whole != giver else 0) <= batch:
                        break
                    ready = end[giver, batch] + waits[symbol]
                    if ready > now:
                        now = ready
                now += seconds[symbol]
                row = symbol - 2 * stages if symbol >= 3 * stages else symbol
                end[row, batch] = now
                ran[symbol] = batch + 1
                place += 1
                left -= 1
            places[device], free[device] = place, now
        if left == before:
            return NEVER
    return (free + after).max()


@njit(cache=True)
def critical(words, lengths, waits, sources, after, count, end, path):
    """Fill `path` `(passes, 2)` with device and place of the passes of a longest path, its end first.

    Other arguments as of `retime`, which has filled them. Returns the number of passes.
    """
    stages, devices = len(waits) // 4, len(words)
    batches = np.zeros((devices, words.shape[1]), np.int64)
    ran = np.zeros(4 * stages, np.int64)
    places = np.zeros((3 * stages, count, 2), np.int64)
    device, latest = 0, -1.0
    for own in range(devices):
        for place in range(lengths[own]):
            symbol = words[own, place]
            batches[own, place] = ran[symbol]
            row = symbol - 2 * stages if symbol >= 3 * stages else symbol
            places[row, ran[symbol], 0], places[row, ran[symbol], 1] = own, place
            ran[symbol] += 1
        row = words[own, lengths[own] - 1]
        row = row - 2 * stages if row >= 3 * stages else row
        ended = end[row, batches[own, lengths[own] - 1]] + after[own]
        if ended > latest:
            device, latest = own, ended
    place, number = lengths[device] - 1, 0
    while True:
        path[number, 0], path[number, 1] = device, place
        number += 1
        symbol, batch = words[device, place], batches[device, place]
        ready, giver = 0.0, sources[symbol]
        if giver >= 0:
            ready = end[giver, batch] + waits[symbol]
        ahead = 0.0
        if place > 0:
            row = words[device, place - 1]
            row = row - 2 * stages if row >= 3 * stages else row
            ahead = end[row, batches[device, place - 1]]
        if place > 0 and ahead >= ready:
            place -= 1
        elif giver >= 0:
            device, place = places[giver, batch, 0], places[giver, batch, 1]
        else:
            return number


@njit(cache=True)
def fits(word, length, before, between, room):
    """Return whether a device has room for what stages hold before and between their backward passes."""
    stages, held = len(before), 0.0
    for place in range(length):
        kind, stage = word[place] // stages, word[place] % stages
        if kind == 0:
            held += before[stage]
        elif kind == 1:
            held += between[stage] - before[stage]
        elif kind == 2:
            held -= between[stage]
        else:
            held -= before[stage]
        if held > room:
            return False
    return True


@njit(cache=True)
def draw(state):
    """Return a number in [0, 1) (xorshift64*, Vigna 2016); `state` `(1,)` uint64 moves on."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return ((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True)
def price(f, first, choices, stages):
    """Fill the figures of stages from those of layers.

    Args:
        f: `Figures` of layers.
        first: First layer of every stage, and L, `(S + 1,)`.
        choices: Strategies of layers, `(L,)`.
        stages: `Stages` to fill.

    Returns:
        Seconds that are paid once an iteration; `NEVER` where a stage cannot run a strategy.
    """
    number, once = len(f.kinds), 0.0
    largest = np.zeros(len(f.capacity))
    stages.after[:], stages.room[:] = 0.0, f.capacity
    for stage in range(number):
        kind, device = f.kinds[stage], f.devices[stage]
        forward, backward, weight, message = 0.0, 0.0, 0.0, 0.0
        stages.before[stage], stages.between[stage] = 0.0, 0.0
        for layer in range(first[stage], first[stage + 1]):
            choice = choices[layer]
            if not f.legal[kind, choice]:
                return NEVER
            forward += f.forward[kind, layer, choice]
            backward += f.backward[kind, layer, choice]
            weight += f.weight[kind, layer, choice]
            stages.after[device] += f.sync[kind, layer, choice]
            stages.before[stage] += f.before[layer, choice]
            stages.between[stage] += f.between[layer, choice]
            stages.room[device] -= f.static[layer, choice] + f.flying[stage] * f.activation[layer, choice]
            largest[device] = max(largest[device], f.working[layer, choice])
            once += f.per_iteration[layer, choice]
            if layer:
                a, b = f.layout[choices[layer - 1]], f.layout[choice]
                if layer > first[stage]:
                    forward += f.reshard[kind, layer - 1, a, b] / 2
                    backward += f.reshard[kind, layer - 1, a, b] / 2
                else:
                    message = f.p2p[f.boundaries[stage - 1], layer - 1, a, b] / 2
        if f.blocking:
            forward, backward, message = forward + message, backward + message, 0.0
        stages.seconds[stage], stages.seconds[number + stage] = forward, backward - weight
        stages.seconds[2 * number + stage], stages.seconds[3 * number + stage] = weight, backward
        stages.waits[stage] = message
        if stage:
            stages.waits[number + stage - 1] = stages.waits[3 * number + stage - 1] = message
    stages.room[:] = (stages.room - largest) * (1 + ROOM)
    return once


@njit(cache=True)
def timed(f, words, lengths, stages, once, end):
    """Return the seconds of an iteration; `NEVER` where an order does not fit or waits for itself."""
    if once >= NEVER:
        return NEVER
    for device in range(len(words)):
        if not fits(words[device], lengths[device], stages.before, stages.between, stages.room[device]):
            return NEVER
    return (
        retime(words, lengths, stages.seconds, stages.waits, f.sources, stages.after, f.batches, end) + once
    )


@njit(cache=True)
def move_pass(word, length, place, other, state, at, to):
    """Exchange two passes of a device, or put one at the other's place, alone or for all micro-batches."""
    if draw(state) < 0.3:
        first, second, a, b, own, near = word[place], word[other], 0, 0, 0, 0
        for i in range(length):
            if word[i] == first:
                at[a] = i
                own = a if i == place else own
                a += 1
            if word[i] == second:
                to[b] = i
                near = b if i == other else near
                b += 1
        begin = int(draw(state) * a) if draw(state) < 0.5 else 0
        for i in range(begin, a):
            j = i + near - own
            if 0 <= j < b and (at[i] < to[j]) == (place < other):
                word[at[i]], word[to[j]] = second, first
    elif draw(state) < 0.5:
        word[place], word[other] = word[other], word[place]
    else:
        symbol, step = word[place], 1 if other > place else -1
        for i in range(place, other, step):
            word[i] = word[i + step]
        word[other] = symbol


@njit(cache=True)
def move_layers(f, first, choices, stage, state):
    """Move boundaries by a unit of layers, at best those of `stage`, or change a strategy in it.

    Returns:
        Whether stages keep a unit each.
    """
    number, layers = len(f.kinds), len(choices)
    strategies = f.legal.shape[1]
    if strategies > 1 and f.space and draw(state) < 0.5:
        choice = int(draw(state) * strategies)
        layer = first[stage] + int(draw(state) * (first[stage + 1] - first[stage]))
        if f.space == 2:
            choices[layer] = choice
        else:
            choices[first[stage] : first[stage + 1]] = choice
        return True
    later = draw(state) < 0.5
    edge = stage + 1 if later else stage
    step = -1 if later else 1
    if draw(state) < 0.2:
        step = -step
    low, high = edge, edge
    while draw(state) < 0.5:
        low, high = (low, high + 1) if later else (low - 1, high)
    if low < 1 or high >= number:
        return False
    own = choices[first[:number]]
    for place in range(low, high + 1):
        first[place] += step
        while 0 < first[place] < layers and f.fused[first[place]]:
            first[place] += step
    for place in range(number):
        if first[place] >= first[place + 1]:
            return False
    if f.space == 1:
        for place in range(number):
            choices[first[place] : first[place + 1]] = own[place]
    return True


@njit(cache=True)
def anneal(f, words, lengths, first, choices, current, trial, moves, heat, share, blind, state):
    """Anneal an order, and the layers of its stages, by moves along the longest path.

    A pass of the path is exchanged with one near it on its device (Nowicki and Smutnicki 1996), or a stage of
    the path loses a layer or changes a strategy. What does not fit or waits for itself is refused.

    Args:
        f: Figures of layers.
        words, first, choices: Of the order and its stages; become those of the best one met.
        lengths: Passes of every device, `(P,)`.
        current, trial: `Stages` to work with.
        moves: Orders that are timed; as many as two times more are refused.
        heat: First temperature as a share of the seconds; it falls to a thousandth.
        share: Of moves of layers.
        blind: Take any pass and stage, not those of the longest path.
        state: Of the random numbers, `(1,)` uint64.

    Returns:
        Seconds of the best.
    """
    number, end = len(f.kinds), np.zeros((3 * len(f.kinds), f.batches))
    path = np.zeros((lengths.sum() + 1, 2), np.int64)
    now, edges, ways = words.copy(), first.copy(), choices.copy()
    kept, at, to = (
        np.zeros(words.shape[1], np.int64),
        np.zeros(f.batches, np.int64),
        np.zeros(f.batches, np.int64),
    )
    old_edges, old_ways = first.copy(), choices.copy()
    once = price(f, edges, ways, current)
    value = timed(f, now, lengths, current, once, end)
    if value >= NEVER:
        return value
    on_path = critical(now, lengths, current.waits, f.sources, current.after, f.batches, end, path)
    best, scale, tries, asked = value, value * heat, 0, 0
    while asked < moves and tries < 3 * moves:
        tries += 1
        chosen = int(draw(state) * on_path)
        device, place = path[chosen, 0], path[chosen, 1]
        if blind:
            device = int(draw(state) * len(words))
            place = int(draw(state) * lengths[device])
        layers, found = draw(state) < share, NEVER
        if layers:
            fresh, old_edges[:], old_ways[:] = once, edges, ways
            if move_layers(f, edges, ways, now[device, place] % number, state):
                fresh = price(f, edges, ways, trial)
                found = timed(f, now, lengths, trial, fresh, end)
        else:
            reach = 1 + int(draw(state) * draw(state) * 8)
            other = place - reach if draw(state) < 0.5 else place + reach
            if other < 0 or other >= lengths[device] or now[device, other] == now[device, place]:
                continue
            kept[:] = now[device]
            move_pass(now[device], lengths[device], place, other, state, at, to)
            if fits(now[device], lengths[device], current.before, current.between, current.room[device]):
                found = once + retime(
                    now, lengths, current.seconds, current.waits, f.sources, current.after, f.batches, end
                )
        asked += found < NEVER
        limit = value - scale * 0.001 ** (asked / moves) * np.log(1.0 - draw(state))
        if found <= limit:
            value = found
            if layers:
                once, current, trial = fresh, trial, current
            on_path = critical(now, lengths, current.waits, f.sources, current.after, f.batches, end, path)
            if value < best:
                best, words[:], first[:], choices[:] = value, now, edges, ways
        elif layers:
            edges[:], ways[:] = old_edges, old_ways
        else:
            now[device] = kept
    return best


@njit(cache=True)
def dispatch(f, own, forward_first, gap, deep_first, keys):
    """Write an order pass by pass as the heuristic of Qi et al. 2023 (arXiv 2401.10241, section 3.1) does.

    Devices run forward passes within their memory until a backward one is there, then both in turn; weights'
    gradients fill what would be idle, make room where memory is short, and come at the end. A forward pass
    leaves room for those of its micro-batch in later stages of the device, so that nothing waits for ever.

    Args:
        f, own: Figures of the problem and of its stages.
        forward_first: 1: a ready forward pass precedes a backward one; 0: it follows; 2: both in turn.
        gap: Idle seconds, as a share of those of the weights' gradient, that this one fills.
        deep_first: Whether forward passes of later stages come first.
        keys: Which ready pass comes first in place of all this, the least, `(3 S, m)`; none: no entries.

    Returns:
        Symbols of every device, `(P, passes)`; the length of each is 0 where the memory is too small.
    """
    stages, number, devices, count = len(f.kinds), len(f.capacity), f.devices, f.batches
    before, between = own.before, own.between
    words, lengths = np.zeros((number, 3 * stages * count // number), np.int64), np.zeros(number, np.int64)
    end, ran = np.zeros((3 * stages, count)), np.zeros(3 * stages, np.int64)
    free, held, last = np.zeros(number), np.zeros(number), np.zeros(number, np.int64)
    left, mine = 3 * stages * count, np.zeros((number, stages // number), np.int64)
    for device in range(number):
        mine[device] = np.nonzero(devices == device)[0]
    while left:
        least, chosen = NEVER, -1
        for device in range(number):
            start, best, wanted, weight, short = NEVER, -1, -1e9, -1, False
            for stage in mine[device]:
                if ran[2 * stages + stage] < ran[stages + stage]:
                    weight = 2 * stages + stage
                for kind in range(2):
                    symbol = kind * stages + stage
                    batch, giver = ran[symbol], f.sources[symbol]
                    if batch == count or (giver >= 0 and ran[giver] <= batch):
                        continue
                    if kind == 0:
                        later = 0.0
                        for other in mine[device]:
                            if other > stage and before[other] > later:
                                later = before[other]
                        if held[device] + before[stage] + later > own.room[device]:
                            short = True
                            continue
                    elif held[device] + between[stage] - before[stage] > own.room[device]:
                        short = True
                        continue
                    ready = end[giver, batch] + own.waits[symbol] if giver >= 0 else 0.0
                    ready = max(ready, free[device])
                    first = forward_first == 1 or (forward_first == 2 and last[device] > 0)
                    rank = 0.5 if kind else 1.0 * first + (0.01 if deep_first else -0.01) * stage / stages
                    rank = -keys[symbol, batch] if len(keys) else rank
                    if ready < start - 1e-12 or (ready <= start + 1e-12 and rank > wanted):
                        start, best, wanted = ready, symbol, rank
            if weight >= 0:
                fills = start - free[device] > gap * own.seconds[weight] or (
                    short and best >= stages and gap < 1
                )
                if len(keys) and best >= 0:
                    fills = start > free[device] or keys[weight, ran[weight]] < -wanted
                if best < 0 or fills:
                    start, best = free[device], weight
            if best >= 0 and start < least:
                least, chosen = start, best
        if chosen < 0:
            return words, np.zeros(number, np.int64)
        kind, stage = chosen // stages, chosen % stages
        device = devices[stage]
        end[chosen, ran[chosen]] = free[device] = least + own.seconds[chosen]
        ran[chosen] += 1
        words[device, lengths[device]] = chosen
        lengths[device] += 1
        left -= 1
        last[device] = kind if kind < 2 else last[device]
        held[device] += before[stage] if kind == 0 else 0.0
        held[device] += between[stage] - before[stage] if kind == 1 else 0.0
        held[device] -= between[stage] if kind == 2 else 0.0
    return words, lengths
