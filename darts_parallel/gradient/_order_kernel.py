"""Compiled functions on pass orders: timing, the longest path, annealing along it, and a heuristic.

Micro-batches are alike, so the passes of a stage and kind may run in their order: exchanging any two
that do not delays nothing. A device's order is a word over symbols `kind * S + stage`. The j-th time
that a symbol stands in a word it is micro-batch j. The kinds are `FORWARD`, `INPUT_GRADIENT` and
`WEIGHT_GRADIENT`. Where backward passes are whole, `INPUT_GRADIENT` is all of them, and no word has a
weight gradient.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from darts_parallel.config import SPACES
from darts_parallel.cost import SOLVER_MEMORY_TOLERANCE, Array, Bools, Index

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
"""Kinds of passes."""
NUM_KINDS = 3
BACKWARD_FIRST, FORWARD_FIRST, ALTERNATE = range(3)
"""Priorities of `dispatch`: which of a ready forward and a ready backward pass goes first."""
STAGEWISE = SPACES.index("stagewise")
LAYERWISE = SPACES.index("layerwise")
UNIFORM = SPACES.index("uniform")

NEVER = 1e300
"""Seconds of an order that deadlocks."""
ALL_BATCHES = 0.3
"""Share of pass moves that move a pass of many micro-batches: they change the steady phase at once."""
GROWING = 0.2
"""Share of boundary moves that give the stage a unit of layers: most take one, because the stage lies
on the longest path."""
FARTHEST = 8
"""Largest distance of two passes that change places; near ones are drawn more often."""
COOLING = 0.001
"""Last temperature as a share of the first."""
REFUSED_PER_MOVE = 2
"""Refused orders per timed order after which annealing ends."""
TIE_SECONDS = 1e-12
"""Passes whose starts differ by less are ready together."""
BACKWARD_RANK = 0.5
"""Rank of a backward pass in `dispatch`; a forward pass has 0 or 1."""
STAGE_RANK = 0.01
"""Rank of the last stage above the first: decides between forward passes only."""


class Figures(NamedTuple):
    """Costs of layers under strategies in one pipeline configuration; axes as in `CostTable`."""

    forward: Array
    backward: Array
    weight_gradient: Array
    sync: Array
    per_iteration: Array
    static: Array
    before: Array
    """Bytes that a micro-batch holds before its backward pass."""
    for_weights: Array
    """Bytes that it holds between input and weight gradient."""
    working: Array
    reshard: Array
    p2p: Array
    legal: Bools
    """Whether a kind of stage runs a strategy, `(Q, C)`."""
    layout: Index
    fused_to_previous: Bools
    capacity: Array
    stage_kind: Index
    boundary_kind: Index
    stage_device: Index
    sources: Index
    """Symbol of the pass that gives the input of every symbol; -1: none, `(3 S,)`."""
    batches: int
    blocking: bool
    space: int
    """`UNIFORM`, `STAGEWISE` or `LAYERWISE`."""


class Stages(NamedTuple):
    """Costs of the stages of a plan."""

    seconds: Array
    """Seconds of a pass, by symbol, `(3 S,)`."""
    message: Array
    """Seconds of the message that brings its input, `(3 S,)`."""
    sync: Array
    """Seconds of a device after its last pass, `(P,)`."""
    more: Array
    """Bytes that a device holds more after a pass than before it, by symbol, `(3 S,)`."""
    room: Array
    """Bytes that a device has for micro-batches, `(P,)`."""

    @staticmethod
    def empty(stages: int, devices: int) -> "Stages":
        """Return costs to fill."""
        symbols = NUM_KINDS * stages
        sizes = (symbols, symbols, devices, symbols, devices)
        return Stages(*map(np.zeros, sizes))


@njit(cache=True)
def retime(words, lengths, stages, sources, end):
    """Return the seconds until all devices have synchronised; `NEVER` on deadlock.

    Args:
        words: Symbols of every device in order, `(P, N)`; `lengths` `(P,)` of them are read.
        stages: Costs of the stages.
        sources: Symbol of the pass that gives the input; -1: none, `(3 S,)`.
        end: Filled: ends of the passes, `(3 S, m)`.
    """
    devices = len(words)
    ran = np.zeros(len(sources), np.int64)
    places = np.zeros(devices, np.int64)
    free = np.zeros(devices)
    left = lengths.sum()
    before = -1
    while left and left != before:
        before = left
        for device in range(devices):
            place = places[device]
            now = free[device]
            while place < lengths[device]:
                symbol = words[device, place]
                batch = ran[symbol]
                source = sources[symbol]
                if source >= 0:
                    if ran[source] <= batch:
                        break
                    now = max(now, end[source, batch] + stages.message[symbol])
                now += stages.seconds[symbol]
                end[symbol, batch] = now
                ran[symbol] = batch + 1
                place += 1
                left -= 1
            places[device] = place
            free[device] = now
    if left:
        return NEVER
    return (free + stages.sync).max()


@njit(cache=True)
def critical(words, lengths, stages, sources, end, path):
    """Fill `path` `(passes, 2)` with device and place of the passes of a longest path, its end first.

    Other arguments: see `retime`; it must have run. Returns the number of passes.
    """
    batches = np.zeros_like(words)
    ran = np.zeros(len(sources), np.int64)
    places = np.zeros((*end.shape, 2), np.int64)
    device = 0
    latest = -1.0
    for other in range(len(words)):
        for place in range(lengths[other]):
            symbol = words[other, place]
            batch = ran[symbol]
            batches[other, place] = batch
            places[symbol, batch, 0] = other
            places[symbol, batch, 1] = place
            ran[symbol] += 1
        last = lengths[other] - 1
        ended = end[words[other, last], batches[other, last]] + stages.sync[other]
        if ended > latest:
            device = other
            latest = ended
    place = lengths[device] - 1
    number = 0
    while True:
        path[number, 0] = device
        path[number, 1] = place
        number += 1
        symbol = words[device, place]
        batch = batches[device, place]
        source = sources[symbol]
        ready = end[source, batch] + stages.message[symbol] if source >= 0 else 0.0
        if place > 0 and end[words[device, place - 1], batches[device, place - 1]] >= ready:
            place -= 1
        elif source >= 0:
            device = places[source, batch, 0]
            place = places[source, batch, 1]
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
def coin(state):
    """Return true or false with equal chance."""
    return draw(state) < 0.5


@njit(cache=True)
def below(limit, state):
    """Return a whole number in [0, limit)."""
    return int(draw(state) * limit)


@njit
def price_stage(f, first, choices, stage, stages, once):
    """Fill the costs of one stage; add its bytes and synchronisation to its device.

    Returns:
        `once` and the stage's seconds that are paid once an iteration, or `NEVER` where it cannot
        run a strategy; and the largest working bytes of its layers.
    """
    number = len(f.stage_kind)
    kind = f.stage_kind[stage]
    device = f.stage_device[stage]
    largest = 0.0
    forward = 0.0
    backward = 0.0
    weight = 0.0
    message = 0.0
    before = 0.0
    between = 0.0
    for layer in range(first[stage], first[stage + 1]):
        choice = choices[layer]
        if not f.legal[kind, choice]:
            return NEVER, largest
        forward += f.forward[kind, layer, choice]
        backward += f.backward[kind, layer, choice]
        weight += f.weight_gradient[kind, layer, choice]
        stages.sync[device] += f.sync[kind, layer, choice]
        before += f.before[layer, choice]
        between += f.for_weights[layer, choice]
        stages.room[device] -= f.static[layer, choice]
        largest = max(largest, f.working[layer, choice])
        once += f.per_iteration[layer, choice]
        if layer:
            held = f.layout[choices[layer - 1]]
            wanted = f.layout[choice]
            if layer > first[stage]:
                half = f.reshard[kind, layer - 1, held, wanted] / 2
                forward += half
                backward += half
            else:
                boundary = f.boundary_kind[stage - 1]
                message = f.p2p[boundary, layer - 1, held, wanted] / 2
    if f.blocking:
        forward += message
        backward += message
        message = 0.0
    stages.seconds[stage::number] = forward, backward - weight, weight
    stages.more[stage::number] = before, between - before, -between
    stages.message[stage] = message
    if stage:
        stages.message[number + stage - 1] = message
    return once, largest


@njit(cache=True)
def price(f, first, choices, stages):
    """Add up the costs of stages from the costs of layers.

    Args:
        f: `Figures` of layers.
        first: First layer of every stage, and L, `(S + 1,)`.
        choices: Strategies of layers, `(L,)`.
        stages: `Stages` to fill.

    Returns:
        Seconds that are paid once an iteration; `NEVER` where a stage cannot run a strategy.
    """
    once = 0.0
    largest = np.zeros(len(f.capacity))
    stages.sync[:] = 0.0
    stages.room[:] = f.capacity
    for stage in range(len(f.stage_kind)):
        once, working = price_stage(f, first, choices, stage, stages, once)
        if once >= NEVER:
            return NEVER
        device = f.stage_device[stage]
        largest[device] = max(largest[device], working)
    # a solver's tolerance: the order fits when its plan is priced again
    stages.room[:] = (stages.room - largest) * (1 + SOLVER_MEMORY_TOLERANCE)
    return once


@njit(cache=True)
def timed(f, words, lengths, stages, once, end):
    """Return the seconds of an iteration; `NEVER` where an order deadlocks or does not fit."""
    for device in range(len(words)):
        word = words[device, : lengths[device]]
        if once >= NEVER or not fits(word, stages.more, stages.room[device]):
            return NEVER
    return retime(words, lengths, stages, f.sources, end) + once


@njit
def exchange_batches(word, place, other, state):
    """Exchange two kinds of passes for all micro-batches, or for those from a random one on."""
    first = word[place]
    second = word[other]
    at = np.flatnonzero(word == first)
    to = np.flatnonzero(word == second)
    ahead = np.searchsorted(to, other) - np.searchsorted(at, place)
    begin = below(len(at), state) if coin(state) else 0
    for i in range(begin, len(at)):
        j = i + ahead
        if 0 <= j < len(to) and (at[i] < to[j]) == (place < other):
            word[at[i]] = second
            word[to[j]] = first


@njit(cache=True)
def move_pass(word, place, other, state):
    """Exchange two passes of a device, or put one at the other's place.

    A share `ALL_BATCHES` of the moves does it for many micro-batches.
    """
    first = word[place]
    if draw(state) < ALL_BATCHES:
        exchange_batches(word, place, other, state)
    elif coin(state):
        word[place] = word[other]
        word[other] = first
    else:
        step = 1 if other > place else -1
        for i in range(place, other, step):
            word[i] = word[i + step]
        word[other] = first


@njit(cache=True)
def shift_boundaries(f, first, low, high, step, layers):
    """Move the first layers of stages `low` to `high` by a unit; return whether stages keep a unit."""
    for place in range(low, high + 1):
        first[place] += step
        while 0 < first[place] < layers and f.fused_to_previous[first[place]]:
            first[place] += step
    legal = True
    for place in range(len(f.stage_kind)):
        legal = legal and first[place] < first[place + 1]
    return legal


@njit(cache=True)
def move_layers(f, first, choices, stage, state):
    """Move boundaries by a unit of layers, best those of `stage`, or change a strategy in it.

    A random strategy goes to a random layer of the stage, or to the stage where it has one for all.

    Returns:
        Whether stages keep a unit each.
    """
    number = len(f.stage_kind)
    if f.legal.shape[1] > 1 and f.space != UNIFORM and coin(state):
        choice = below(f.legal.shape[1], state)
        layer = first[stage] + below(first[stage + 1] - first[stage], state)
        if f.space == LAYERWISE:
            choices[layer] = choice
        else:
            choices[first[stage] : first[stage + 1]] = choice
        return True
    later = coin(state)
    edge = stage + 1 if later else stage
    step = -1 if later else 1
    if draw(state) < GROWING:
        step = -step
    low = edge
    high = edge
    while coin(state):
        if later:
            high += 1
        else:
            low -= 1
    if low < 1 or high >= number:
        return False
    by_stage = choices[first[:number]]
    if not shift_boundaries(f, first, low, high, step, len(choices)):
        return False
    if f.space == STAGEWISE:
        for place in range(number):
            choices[first[place] : first[place + 1]] = by_stage[place]
    return True


@njit(cache=True)
def anneal(f, words, lengths, first, choices, current, trial, moves, heat, share, state):
    """Anneal an order, and the layers of its stages, by moves along the longest path.

    A pass of the path is exchanged with one near it on its device (Nowicki and Smutnicki 1996), or a
    stage of the path loses a layer or changes a strategy. Moves that do not fit or that deadlock are
    refused.

    Args:
        f: Figures of layers.
        words, first, choices: The order and its stages; the best ones that are met replace them.
        lengths: Passes of every device, `(P,)`.
        current, trial: `Stages` to work with.
        moves: Orders that are timed.
        heat: First temperature as a share of the seconds.
        share: Share of layer moves.
        state: Of the random numbers, `(1,)` uint64.

    Returns:
        Seconds of the best.
    """
    end = np.zeros((len(f.sources), f.batches))
    path = np.zeros((lengths.sum() + 1, 2), np.int64)
    now = words.copy()
    edges = first.copy()
    strategies = choices.copy()
    old = words[0].copy()
    old_edges = first.copy()
    old_strategies = choices.copy()
    once = price(f, edges, strategies, current)
    fresh = once
    value = timed(f, now, lengths, current, once, end)
    if value >= NEVER:
        return value
    on_path = critical(now, lengths, current, f.sources, end, path)
    best = value
    temperature = value * heat
    tries = 0
    asked = 0
    while asked < moves and tries < (1 + REFUSED_PER_MOVE) * moves:
        tries += 1
        device, place = path[below(on_path, state)]
        of_layers = draw(state) < share
        found = NEVER
        word = now[device, : lengths[device]]
        if of_layers:
            old_edges[:] = edges
            old_strategies[:] = strategies
            if move_layers(f, edges, strategies, word[place] % len(f.stage_kind), state):
                fresh = price(f, edges, strategies, trial)
                found = timed(f, now, lengths, trial, fresh, end)
        else:
            reach = 1 + int(draw(state) * draw(state) * FARTHEST)
            other = place - reach if coin(state) else place + reach
            if other < 0 or other >= len(word) or word[other] == word[place]:
                continue
            old[:] = now[device]
            move_pass(word, place, other, state)
            if fits(word, current.more, current.room[device]):
                found = once + retime(now, lengths, current, f.sources, end)
        asked += found < NEVER
        cooled = temperature * COOLING ** (asked / moves)
        if found <= value - cooled * np.log(1.0 - draw(state)):
            value = found
            if of_layers:
                once = fresh
                current, trial = trial, current
            on_path = critical(now, lengths, current, f.sources, end, path)
            if value < best:
                best = value
                words[:] = now
                first[:] = edges
                choices[:] = strategies
        elif of_layers:
            edges[:] = old_edges
            strategies[:] = old_strategies
        else:
            now[device] = old
    return best


class Policy(NamedTuple):
    """Choices of the heuristic `dispatch`."""

    priority: int
    """`BACKWARD_FIRST`, `FORWARD_FIRST` or `ALTERNATE`: who goes first where both are ready."""
    gap: float
    """Idle seconds, as a share of the weight gradient's costs, that a weight gradient fills."""
    deep_first: bool
    """Whether forward passes of later stages come first."""


class Written(NamedTuple):
    """An order that is being written: which passes have run, and the state of the devices."""

    end: Array
    """Ends of the passes, `(3 S, m)`."""
    ran: Index
    """Passes of every symbol, `(3 S,)`."""
    free: Array
    """Seconds at which a device has ended its last pass, `(P,)`."""
    held: Array
    """Bytes that it holds, `(P,)`."""
    last: Index
    """Kind of its last pass that is no weight gradient, `(P,)`."""
    later: Array
    """Bytes that a forward pass leaves free for later stages of its device, `(S,)`."""


class Ready(NamedTuple):
    """A forward or input-gradient pass that a device can begin."""

    start: float
    symbol: int
    """-1: none is ready."""
    short: bool
    """Whether memory kept a forward pass back."""


@njit
def pass_rank(symbol, stages, last, policy):
    """Return the rank of a ready pass among those that can begin at the same time; most goes first.

    Args:
        last: Kind of the device's last pass.
    """
    if symbol >= stages:
        return BACKWARD_RANK
    alternates = policy.priority == ALTERNATE and last > FORWARD
    first = 1.0 if policy.priority == FORWARD_FIRST or alternates else 0.0
    depth = STAGE_RANK if policy.deep_first else -STAGE_RANK
    return first + depth * symbol / stages


@njit
def first_ready(f, costs, done, device, policy):
    """Return the forward or input-gradient pass that a device can begin first.

    Args:
        done: Order that is being written.
        policy: See `dispatch`.
    """
    stages = len(f.stage_kind)
    start = NEVER
    best = -1
    wanted = -1e9
    short = False
    for stage in range(stages):
        if f.stage_device[stage] != device:
            continue
        for kind in range(2):
            symbol = kind * stages + stage
            batch = done.ran[symbol]
            source = f.sources[symbol]
            if batch == f.batches or (source >= 0 and done.ran[source] <= batch):
                continue
            spared = done.later[stage] if kind == FORWARD else 0.0
            if done.held[device] + costs.more[symbol] + spared > costs.room[device]:
                short = short or kind == FORWARD
                continue
            arrived = done.end[source, batch] + costs.message[symbol] if source >= 0 else 0.0
            ready = max(arrived, done.free[device])
            rank = pass_rank(symbol, stages, done.last[device], policy)
            tie = ready <= start + TIE_SECONDS and rank > wanted
            if ready < start - TIE_SECONDS or tie:
                start = ready
                best = symbol
                wanted = rank
    return Ready(start, best, short)


@njit
def next_pass(f, costs, done, device, policy):
    """Return when a device begins its next pass, and its symbol; -1: it must wait for others."""
    ready = first_ready(f, costs, done, device, policy)
    stages = len(f.stage_kind)
    weight = -1  # a weight gradient that can run
    for stage in range(stages):
        symbol = WEIGHT_GRADIENT * stages + stage
        before = INPUT_GRADIENT * stages + stage
        if f.stage_device[stage] == device and done.ran[symbol] < done.ran[before]:
            weight = symbol
    if weight < 0:
        return ready.start, ready.symbol
    if ready.symbol >= 0:
        idle = ready.start - done.free[device]
        backward = ready.symbol >= stages
        makes_room = ready.short and backward and policy.gap < 1
        if idle <= policy.gap * costs.seconds[weight] and not makes_room:
            return ready.start, ready.symbol
    return done.free[device], weight


@njit
def begun(f, costs):
    """Return an order without passes."""
    stages = len(f.stage_kind)
    devices = len(f.capacity)
    symbols = len(f.sources)
    later = np.zeros(stages)
    for stage in range(stages):
        for other in range(stage + 1, stages):
            if f.stage_device[other] == f.stage_device[stage]:
                later[stage] = max(later[stage], costs.more[other])
    end = np.zeros((symbols, f.batches))
    ran = np.zeros(symbols, np.int64)
    last = np.zeros(devices, np.int64)
    return Written(end, ran, np.zeros(devices), np.zeros(devices), last, later)


@njit(cache=True)
def dispatch(f, costs, policy):
    """Write an order pass by pass, as Qi et al. 2023 (arXiv 2401.10241, section 3.1).

    Devices run forward passes within their memory until a backward one is ready, then both. Weight
    gradients fill idle time, make room where memory is short, and come at the end. A forward pass
    leaves room for its micro-batch in later stages of the device. It leaves none for an input
    gradient that holds more than it frees: the order is given up where none of those has room.

    Args:
        f, costs: Figures of the problem and costs of its stages.
        policy: Choices of the heuristic.

    Returns:
        Symbols of every device, `(P, passes)`; and the length of each, 0 where memory is too small.
    """
    stages = len(f.stage_kind)
    devices = len(f.capacity)
    passes = len(f.sources) * f.batches
    words = np.zeros((devices, passes // devices), np.int64)
    lengths = np.zeros(devices, np.int64)
    done = begun(f, costs)
    for _ in range(passes):
        least = NEVER
        chosen = -1
        for device in range(devices):
            start, best = next_pass(f, costs, done, device, policy)
            if best >= 0 and start < least:
                least = start
                chosen = best
        if chosen < 0:
            return words, np.zeros(devices, np.int64)
        kind = chosen // stages
        device = f.stage_device[chosen % stages]
        ended = least + costs.seconds[chosen]
        done.end[chosen, done.ran[chosen]] = ended
        done.free[device] = ended
        done.ran[chosen] += 1
        words[device, lengths[device]] = chosen
        lengths[device] += 1
        if kind != WEIGHT_GRADIENT:
            done.last[device] = kind
        done.held[device] += costs.more[chosen]
    return words, lengths
