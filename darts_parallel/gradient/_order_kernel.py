"""Compiled programmes on orders of passes: timing, the longest path, annealing along it, and a first order.

Micro-batches are alike, so the passes of a stage and kind may run in their order (exchange any two that do not:
nothing starts later), and a device's order is a word over symbols `kind * S + stage`; kinds are F, I, W and the
whole B, in this order. The j-th time that a symbol stands in a word it is micro-batch j.
"""

import numpy as np
from numba import njit

NEVER = 1e300
"""Seconds of an order that waits for itself."""


@njit(cache=True)
def retime(words, lengths, seconds, waits, sources, after, count, end):  # type: ignore[no-untyped-def]
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
def critical(words, lengths, seconds, waits, sources, after, count, end, path):  # type: ignore[no-untyped-def]
    """Fill `path` `(passes, 2)` with device and place of the passes of a longest path, its end first.

    Other arguments as of `retime`, which has filled them. Returns the number of passes.
    """
    stages, devices = len(seconds) // 4, len(words)
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
def fits(word, length, before, between, room):  # type: ignore[no-untyped-def]
    """Return whether a device has room for what it holds: bytes by stage before and between backward passes."""
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
def draw(state):  # type: ignore[no-untyped-def]
    """Return a number in [0, 1) (xorshift64*, Vigna 2016); `state` `(1,)` uint64 moves on."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return ((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True)
def anneal(  # type: ignore[no-untyped-def]
    words, lengths, seconds, waits, sources, after, count, before, between, room, moves, heat, blind, state
):
    """Anneal an order by moves of passes along its longest path (Nowicki and Smutnicki 1996).

    A pass of the path is exchanged with another of its device, or put before or behind it, alone or with the same
    passes of all micro-batches. What does not fit or waits for itself is refused.

    Args:
        words: Changed into the best order; other arguments as of `retime` and `fits`, `room` `(P,)`.
        moves: Number of orders that are timed or refused.
        heat: First temperature as a share of the seconds; it falls to a thousandth.
        blind: Take any pass, not those of the longest path.
        state: Of the random numbers, `(1,)` uint64.

    Returns:
        Seconds of the best order.
    """
    stages = len(seconds) // 4
    end = np.zeros((3 * stages, count))
    path = np.zeros((lengths.sum() + 1, 2), np.int64)
    now = words.copy()
    value = retime(now, lengths, seconds, waits, sources, after, count, end)
    number = critical(now, lengths, seconds, waits, sources, after, count, end, path)
    best, scale = value, value * heat
    kept, at, to = np.zeros(words.shape[1], np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    for move in range(moves):
        if blind:
            device = int(draw(state) * len(words))
            place = int(draw(state) * lengths[device])
        else:
            chosen = int(draw(state) * number)
            device, place = path[chosen, 0], path[chosen, 1]
        length = lengths[device]
        reach = 1 + int(draw(state) * draw(state) * 8)
        other = place - reach if draw(state) < 0.5 else place + reach
        if other < 0 or other >= length or now[device, other] == now[device, place]:
            continue
        word = now[device]
        kept[:length] = word[:length]
        if draw(state) < 0.3:
            # the passes of all micro-batches that are as far apart
            first, second, a, b, seen_a, seen_b = word[place], word[other], 0, 0, 0, 0
            for i in range(length):
                if word[i] == first:
                    at[a] = i
                    seen_a = a if i == place else seen_a
                    a += 1
                if word[i] == second:
                    to[b] = i
                    seen_b = b if i == other else seen_b
                    b += 1
            begin = int(draw(state) * a) if draw(state) < 0.5 else 0
            for i in range(begin, a):
                j = i + seen_b - seen_a
                if 0 <= j < b and (at[i] < to[j]) == (place < other):
                    word[at[i]], word[to[j]] = second, first
        elif draw(state) < 0.5:
            word[place], word[other] = word[other], word[place]
        else:
            symbol, step = word[place], 1 if other > place else -1
            for i in range(place, other, step):
                word[i] = word[i + step]
            word[other] = symbol
        found = NEVER
        if fits(word, length, before, between, room[device]):
            found = retime(now, lengths, seconds, waits, sources, after, count, end)
        limit = value - scale * 0.001 ** (move / moves) * np.log(1.0 - draw(state))
        if found <= limit:
            value = found
            number = critical(now, lengths, seconds, waits, sources, after, count, end, path)
            if value < best:
                best = value
                words[:] = now
        else:
            word[:length] = kept[:length]
    return best


@njit(cache=True)
def dispatch(seconds, waits, sources, devices, count, before, between, room, forward_first, gap, deep_first):  # type: ignore[no-untyped-def]
    """Write an order pass by pass as the heuristic of Qi et al. 2023 (arXiv 2401.10241, section 3.1) does.

    Devices run forward passes within their memory until a backward one is there, then both in turn; weights'
    gradients fill what would be idle, make room where memory is short, and come at the end. A forward pass leaves
    room for those of its micro-batch in later stages of the device, so that nothing waits for ever.

    Args:
        devices: Of every stage, `(S,)`; other arguments as of `anneal`.
        forward_first: 1: a ready forward pass precedes a backward one; 0: it follows; 2: both in turn.
        gap: Idle seconds, as a share of those of the weights' gradient, that this one fills.
        deep_first: Whether forward passes of later stages come first.

    Returns:
        Symbols of every device, `(P, passes)`; the length of each is 0 where the memory is too small.
    """
    stages, number = len(devices), devices.max() + 1
    words, lengths = np.zeros((number, 3 * stages * count), np.int64), np.zeros(number, np.int64)
    end, ran = np.zeros((3 * stages, count)), np.zeros(3 * stages, np.int64)
    free, held, last = np.zeros(number), np.zeros(number), np.zeros(number, np.int64)
    left = 3 * stages * count
    while left:
        least, chosen = NEVER, -1
        for device in range(number):
            start, best, wanted, weight, short = NEVER, -1, -1e9, -1, False
            for stage in range(stages):
                if devices[stage] != device:
                    continue
                if ran[2 * stages + stage] < ran[stages + stage]:
                    weight = 2 * stages + stage
                for kind in range(2):
                    symbol = kind * stages + stage
                    batch, giver = ran[symbol], sources[symbol]
                    if batch == count or (giver >= 0 and ran[giver] <= batch):
                        continue
                    if kind == 0:
                        later = 0.0
                        for other in range(stage + 1, stages):
                            if devices[other] == device and before[other] > later:
                                later = before[other]
                        if held[device] + before[stage] + later > room[device]:
                            short = True
                            continue
                    elif held[device] + between[stage] - before[stage] > room[device]:
                        short = True
                        continue
                    ready = end[giver, batch] + waits[symbol] if giver >= 0 else 0.0
                    ready = max(ready, free[device])
                    rank = float(forward_first == 1 or (forward_first == 2 and last[device])) if kind == 0 else 0.5
                    rank += (0.01 if deep_first else -0.01) * stage / stages * (1 - kind)
                    if ready < start - 1e-12 or (ready <= start + 1e-12 and rank > wanted):
                        start, best, wanted = ready, symbol, rank
            idle = start - free[device]
            if weight >= 0 and (best < 0 or idle > gap * seconds[weight] or (short and best >= stages and gap < 1)):
                start, best = free[device], weight
            if best >= 0 and start < least:
                least, chosen = start, best
        if chosen < 0:
            return words, np.zeros(number, np.int64)
        kind, stage = chosen // stages, chosen % stages
        device = devices[stage]
        end[chosen, ran[chosen]] = free[device] = least + seconds[chosen]
        ran[chosen] += 1
        words[device, lengths[device]] = chosen
        lengths[device] += 1
        left -= 1
        last[device] = kind if kind < 2 else last[device]
        held[device] += before[stage] if kind == 0 else 0.0
        held[device] += between[stage] - before[stage] if kind == 1 else 0.0
        held[device] -= between[stage] if kind == 2 else 0.0
    return words, lengths
