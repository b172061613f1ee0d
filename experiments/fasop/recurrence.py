"""FASOP's 1F1B recurrence: blocking sends, unequal stages, thousands of pipelines at once.

The program steps through micro-batches and stages one by one; here a micro-batch passes all stages in one
scan: once the sums are taken out, "the later of two, plus a duration" along the stages is a running maximum.
"""

import numpy as np

from baselines.fasop import Floats


def stage_ends(
    seconds: Floats, send_forward: Floats, send_backward: Floats, num_micro_batches: int
) -> Floats:
    """When every stage has ended its last backward pass.

    Forward is a third of the stage's seconds, backward two thirds. Stage i runs `min(pp - i - 1, m)`
    forwards, then one forward and one backward in turn, then the remaining backwards. A send ends at the
    later of "computed" and "peer ready to receive", plus its seconds, and blocks the sender. As in the
    program, sends cost only from the first stage forward and from the last backward, and a steady forward
    send waits for no peer.

    Args:
        seconds: Forward and backward of a micro-batch, `(B, pp)`, pp at least 2.
        send_forward: Seconds from stage 0 to stage 1, `(B,)`.
        send_backward: Seconds from the last stage to the one before, `(B,)`.
        num_micro_batches: m.

    Returns:
        Seconds, `(B, pp)`.
    """
    count, stages = num_micro_batches, seconds.shape[1]
    forward = np.ascontiguousarray(seconds.T) / 3
    backward = 2 * forward
    sent = np.zeros(forward.shape)
    sent[0] = send_forward
    returned = np.zeros(forward.shape)
    returned[-1] = send_backward
    free, arrived = _warm_up(forward, sent, count)
    # as in the program, a stage that has no steady forward begins its backwards whenever a gradient comes
    free[: max(0, stages - count)] = 0.0
    return np.ascontiguousarray(_steady(forward, backward, sent, returned, free, arrived, count).T)


def _warm_up(forward: Floats, sent: Floats, count: int) -> tuple[Floats, Floats]:
    """Forwards before the first backward.

    Returns:
        When a stage is free after them, and when the first steady input of a stage has arrived; `(pp, B)`.
    """
    stages = len(forward)
    free = np.zeros(forward.shape)
    arrived = np.zeros(forward.shape)
    computed = np.zeros(forward.shape)
    duration = forward + sent
    before = np.cumsum(duration, axis=0) - duration
    for micro_batch in range(min(count, stages - 1)):
        # stages that still warm up; the one after them receives its first steady input
        width = stages - 1 - micro_batch
        begin = free[:width].copy()
        peer = computed[1 : width + 1].copy() if micro_batch else np.zeros((width, forward.shape[1]))
        # the receiver of a stage's last warm-up input is ready at any time
        peer[width - 1] = 0.0
        # a send that waits for its peer delays the next stage
        np.maximum(begin[1:], peer[:-1] + sent[: width - 1], out=begin[1:])
        computed[:width] = (
            np.maximum.accumulate(begin - before[:width], axis=0) + before[:width] + forward[:width]
        )
        free[:width] = np.maximum(computed[:width], peer) + sent[:width]
        arrived[1 : width + 1] = free[:width]
    return free, arrived


def _steady(
    forward: Floats,
    backward: Floats,
    sent: Floats,
    returned: Floats,
    free: Floats,
    arrived: Floats,
    count: int,
) -> Floats:
    """One forward and one backward in turn, then the remaining backwards; when the last of them ends."""
    stages = len(forward)
    step = backward + returned
    after = np.cumsum(step[::-1], axis=0)[::-1] - step  # seconds of the stages behind
    ended = np.zeros(forward.shape)
    computed = np.zeros(forward.shape)
    for index in range(count):
        first = max(0, stages - count + index)  # stages before it have no forward left
        if index:
            arrived = np.concatenate([arrived[:1] * 0, computed[:-1] + sent[:-1]])
        computed[first:] = np.maximum(free[first:], arrived[first:]) + forward[first:]
        peer = ended.copy()
        peer[first:] = computed[first:]
        begin = free.copy()
        begin[first:] = computed[first:]
        np.maximum(begin[:-1], peer[:-1] + returned[1:], out=begin[:-1])
        ended = np.maximum.accumulate((begin - after)[::-1], axis=0)[::-1] + after + backward
        free = ended.copy()
        free[1:] = np.maximum(ended[1:], peer[:-1]) + returned[1:]
    return ended
