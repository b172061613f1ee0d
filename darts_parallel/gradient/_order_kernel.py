"""Compiled programmes on orders of passes: timing, the longest path, annealing along it, and a heuristic.

Micro-batches are alike, so the passes of a stage and kind may run in their order (exchange any two that do
not: nothing starts later), and a device's order is a word over symbols `kind * S + stage`; kinds are F, I and
W, in this order. The j-th time that a symbol stands in a word it is micro-batch j. Where backward passes are
whole, I is all of them, and no W is in any word.
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
    """Symbol of the pass that gives the input of every symbol; -1: none, `(3 S,)`."""
    batches: int
    blocking: bool
    space: int
    """0: strategies stay, 1: stages change theirs, 2: layers."""


class Stages(NamedTuple):
    """Figures of the stages of a plan."""

    seconds: Array
    """Seconds of a pass, by symbol, `(3 S,)`."""
    waits: Array
    """Seconds of the message that brings its input, `(3 S,)`."""
    after: Array
    """Seconds of a device behind its last pass, `(P,)`."""
    more: Array
    """Bytes that a device holds more after a pass than before it, by symbol, `(3 S,)`."""
    room: Array
    """Bytes of a device for what it so holds, `(P,)`."""

    @staticmethod
    def empty(stages: int, devices: int) -> "Stages":
        """Return figures to fill."""
        sizes = (3 * stages, 3 * stages, devices, 3 * stages, devices)
        return Stages(*(np.zeros(size) for size in sizes))


@njit(cache=True)
def retime(words, lengths, stages, sources, end):
    """Return the seconds until all devices have synchronised; `NEVER` where some pass waits for ever.

    Args:
        words: Symbols of every device in order, `(P, N)`; `lengths` `(P,)` of them are read.
        stages: Their seconds.
        sources: Symbol of the pass that gives the input; -1: none, `(3 S,)`.
        end: Filled: ends of the passes, `(3 S, m)`.
    """
    devices, ran = len(words), np.zeros(len(sources), np.int64)
    places, free = np.zeros(devices, np.int64), np.zeros(devices)
    left, before = lengths.sum(), -1
    while left and left != before:
        before = left
        for device in range(devices):
            place, now = places[device], free[device]
            while place < lengths[device]:
                symbol = words[device, place]
                batch, giver = ran[symbol], sources[symbol]
                if giver >= 0:
                    if ran[giver] <= batch:
                        break
                    now = max(now, end[giver, batch] + stages.waits[symbol])
                now += stages.seconds[symbol]
                end[symbol, batch] = now
                ran[symbol] = batch + 1
                place += 1
                left -= 1
            places[device], free[device] = place, now
    return NEVER if left else (free + stages.after).max()


@njit(cache=True)
def critical(words, lengths, stages, sources, end, path):
    """Fill `path` `(passes, 2)` with device and place of the passes of a longest path, its end first.

    Other arguments as of `retime`, which has filled them. Returns the number of passes.
    """
    batches, ran = np.zeros_like(words), np.zeros(len(sources), np.int64)
    places = np.zeros((*end.shape, 2), np.int64)
    device, latest = 0, -1.0
    for own in range(len(words)):
        for place in range(lengths[own]):
            symbol = words[own, place]
            batch = batches[own, place] = ran[symbol]
            places[symbol, batch, 0], places[symbol, batch, 1] = own, place
            ran[symbol] += 1
        last = lengths[own] - 1
        ended = end[words[own, last], batches[own, last]] + stages.after[own]
        if ended > latest:
            device, latest = own, ended
    place, number = lengths[device] - 1, 0
    while True:
        path[number, 0], path[number, 1] = device, place
        number += 1
        symbol, batch = words[device, place], batches[device, place]
        giver = sources[symbol]
        ready = end[giver, batch] + stages.waits[symbol] if giver >= 0 else 0.0
        if place > 0 and end[words[device, place - 1], batches[device, place - 1]] >= ready:
            place -= 1
        elif giver >= 0:
            device, place = places[giver, batch, 0], places[giver, batch, 1]
        else:
            return number


@njit(cache=True)
def fits(word, more, room):
    """Return whether a device has room for what it holds after every pass."""
    held = 0.0
    for symbol in word:
        held += more[symbol]
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
        forward, backward, weight, message, before, between = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for layer in range(first[stage], first[stage + 1]):
            choice = choices[layer]
            if not f.legal[kind, choice]:
                return NEVER
            forward += f.forward[kind, layer, choice]
            backward += f.backward[kind, layer, choice]
            weight += f.weight[kind, layer, choice]
            stages.after[device] += f.sync[kind, layer, choice]
            before += f.before[layer, choice]
            between += f.between[layer, choice]
            stages.room[device] -= (
                f.static[layer, choice] + f.flying[stage] * f.activation[layer, choice]
            )
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
        stages.seconds[stage::number] = forward, backward - weight, weight
        stages.more[stage::number] = before, between - before, -between
        stages.waits[stage] = message
        if stage:
            stages.waits[number + stage - 1] = message
    stages.room[:] = (stages.room - largest) * (1 + ROOM)
    return once


@njit(cache=True)
def timed(f, words, lengths, stages, once, end):
    """Return the seconds of an iteration; `NEVER` where an order does not fit or waits for itself."""
    for device in range(len(words)):
        word = words[device, : lengths[device]]
        if once >= NEVER or not fits(word, stages.more, stages.room[device]):
            return NEVER
    return retime(words, lengths, stages, f.sources, end) + once


@njit(cache=True)
def move_pass(word, place, other, state):
    """Exchange two passes of a device, or put one at the other's place, alone or for all micro-batches."""
    first, second = word[place], word[other]
    if draw(state) < 0.3:
        at, to = np.flatnonzero(word == first), np.flatnonzero(word == second)
        ahead = np.searchsorted(to, other) - np.searchsorted(at, place)
        begin = int(draw(state) * len(at)) if draw(state) < 0.5 else 0
        for i in range(begin, len(at)):
            j = i + ahead
            if 0 <= j < len(to) and (at[i] < to[j]) == (place < other):
                word[at[i]], word[to[j]] = second, first
    elif draw(state) < 0.5:
        word[place], word[other] = second, first
    else:
        step = 1 if other > place else -1
        for i in range(place, other, step):
            word[i] = word[i + step]
        word[other] = first


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
    end, path = np.zeros((len(f.sources), f.batches)), np.zeros((lengths.sum() + 1, 2), np.int64)
    now, edges, ways = words.copy(), first.copy(), choices.copy()
    old, old_edges, old_ways = words[0].copy(), first.copy(), choices.copy()
    once = fresh = price(f, edges, ways, current)
    value = timed(f, now, lengths, current, once, end)
    if value >= NEVER:
        return value
    on_path = critical(now, lengths, current, f.sources, end, path)
    best, scale, tries, asked = value, value * heat, 0, 0
    while asked < moves and tries < 3 * moves:
        tries += 1
        device, place = path[int(draw(state) * on_path)]
        if blind:
            device = int(draw(state) * len(words))
            place = int(draw(state) * lengths[device])
        layers, found, word = draw(state) < share, NEVER, now[device, : lengths[device]]
        if layers:
            old_edges[:], old_ways[:] = edges, ways
            if move_layers(f, edges, ways, word[place] % len(f.kinds), state):
                fresh = price(f, edges, ways, trial)
                found = timed(f, now, lengths, trial, fresh, end)
        else:
            reach = 1 + int(draw(state) * draw(state) * 8)
            other = place - reach if draw(state) < 0.5 else place + reach
            if other < 0 or other >= len(word) or word[other] == word[place]:
                continue
            old[:] = now[device]
            move_pass(word, place, other, state)
            if fits(word, current.more, current.room[device]):
                found = once + retime(now, lengths, current, f.sources, end)
        asked += found < NEVER
        if found <= value - scale * 0.001 ** (asked / moves) * np.log(1.0 - draw(state)):
            value = found
            if layers:
                once, current, trial = fresh, trial, current
            on_path = critical(now, lengths, current, f.sources, end, path)
            if value < best:
                best, words[:], first[:], choices[:] = value, now, edges, ways
        elif layers:
            edges[:], ways[:] = old_edges, old_ways
        else:
            now[device] = old
    return best


class Written(NamedTuple):
    """An order that is being written: what has run, and how the devices stand."""

    end: Array
    """Ends of the passes, `(3 S, m)`."""
    ran: Indices
    """Passes of every symbol, `(3 S,)`."""
    free: Array
    """Seconds at which a device has ended its last pass, `(P,)`."""
    held: Array
    """Bytes that it holds, `(P,)`."""
    last: Indices
    """Kind of its last pass, F or I, `(P,)`."""


@njit(cache=True)
def first_ready(f, own, done, device, later, ahead, deep_first, keys):
    """Return the forward or input-gradient pass that a device can begin first.

    Args:
        done: What is written.
        later: Bytes that a forward pass leaves free, `(S,)`.
        ahead, deep_first, keys: As of `dispatch`.

    Returns:
        Seconds at which it begins, its symbol (-1: none is ready), its rank, whether memory is short.
    """
    stages, start, best, wanted, short = len(f.kinds), NEVER, -1, -1e9, False
    for stage in range(stages):
        for kind in range(2):
            symbol = kind * stages + stage
            batch, giver = done.ran[symbol], f.sources[symbol]
            waits = batch == f.batches or (giver >= 0 and done.ran[giver] <= batch)
            if f.devices[stage] != device or waits:
                continue
            spared = 0.0 if kind else later[stage]
            if done.held[device] + own.more[symbol] + spared > own.room[device]:
                short = short or kind == 0
                continue
            ready = max(
                done.end[giver, batch] + own.waits[symbol] if giver >= 0 else 0.0, done.free[device]
            )
            first = ahead == 1 or (ahead == 2 and done.last[device] > 0)
            rank = 0.5 if kind else 1.0 * first + (0.01 if deep_first else -0.01) * stage / stages
            rank = -keys[symbol, batch] if len(keys) else rank
            if ready < start - 1e-12 or (ready <= start + 1e-12 and rank > wanted):
                start, best, wanted = ready, symbol, rank
    return start, best, wanted, short


@njit(cache=True)
def next_pass(f, own, done, device, later, ahead, gap, deep_first, keys):
    """Return when a device begins its next pass, and its symbol; -1: it must wait for others."""
    stages, weight = len(f.kinds), -1
    start, best, wanted, short = first_ready(f, own, done, device, later, ahead, deep_first, keys)
    for stage in range(stages):
        if f.devices[stage] == device and done.ran[2 * stages + stage] < done.ran[stages + stage]:
            weight = 2 * stages + stage
    if weight >= 0 and best >= 0:
        idle = start - done.free[device]
        fills = idle > gap * own.seconds[weight] or (short and best >= stages and gap < 1)
        if len(keys):
            fills = idle > 0 or keys[weight, done.ran[weight]] < -wanted
        return (done.free[device], weight) if fills else (start, best)
    return (done.free[device], weight) if weight >= 0 else (start, best)


@njit(cache=True)
def dispatch(f, own, ahead, gap, deep_first, keys):
    """Write an order pass by pass as the heuristic of Qi et al. 2023 (arXiv 2401.10241, section 3.1) does.

    Devices run forward passes within their memory until a backward one is there, then both in turn; weights'
    gradients fill what would be idle, make room where memory is short, and come at the end. A forward pass
    leaves room for those of its micro-batch in later stages of the device, so that nothing waits for ever.

    Args:
        f, own: Figures of the problem and of its stages.
        ahead: 1: a ready forward pass precedes a backward one; 0: it follows; 2: both in turn.
        gap: Idle seconds, as a share of those of the weights' gradient, that this one fills.
        deep_first: Whether forward passes of later stages come first.
        keys: Which ready pass comes first in place of all this, the least, `(3 S, m)`; none: no entries.

    Returns:
        Symbols of every device, `(P, passes)`; the length of each is 0 where the memory is too small.
    """
    stages, number, symbols = len(f.kinds), len(f.capacity), len(f.sources)
    words, lengths = (
        np.zeros((number, symbols * f.batches // number), np.int64),
        np.zeros(number, np.int64),
    )
    ran, last, later = np.zeros(symbols, np.int64), np.zeros(number, np.int64), np.zeros(stages)
    done = Written(np.zeros((symbols, f.batches)), ran, np.zeros(number), np.zeros(number), last)
    for stage in range(stages):
        for other in range(stage + 1, stages):
            if f.devices[other] == f.devices[stage]:
                later[stage] = max(later[stage], own.more[other])
    for _ in range(symbols * f.batches):
        least, chosen = NEVER, -1
        for device in range(number):
            start, best = next_pass(f, own, done, device, later, ahead, gap, deep_first, keys)
            if best >= 0 and start < least:
                least, chosen = start, best
        if chosen < 0:
            return words, np.zeros(number, np.int64)
        kind, stage = chosen // stages, chosen % stages
        device = f.devices[stage]
        done.end[chosen, done.ran[chosen]] = done.free[device] = least + own.seconds[chosen]
        done.ran[chosen] += 1
        words[device, lengths[device]] = chosen
        lengths[device] += 1
        done.last[device] = kind if kind < 2 else done.last[device]
        done.held[device] += own.more[chosen]
    return words, lengths
