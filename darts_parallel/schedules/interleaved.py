"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2; order of Megatron-LM).

Device k holds the stages k, k + pp, k + 2 pp, ... and runs them by groups of pp micro-batches.
"""

from darts_parallel.schedules._schedule import Operation, Passes, PerStage, Schedule


def _warm_up(device: int, pp: int, chunks: int) -> int:
    """Return the forward passes before the first backward pass."""
    later_devices = pp - device - 1
    return 2 * later_devices + (chunks - 1) * pp


class Interleaved(Schedule):
    """1F1B over several chunks a device."""

    name = "interleaved"
    pytorch = "Interleaved1F1B"
    chunks = None

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Passes:
        """Run ahead, then alternate, one chunk after the other in groups of pp micro-batches."""
        total = count * chunks
        ahead = min(_warm_up(device, pp, chunks), total)

        def step(kind: str, number: int) -> Operation:
            group, place = divmod(number, pp * chunks)
            chunk = place // pp if kind == "F" else chunks - 1 - place // pp
            return Operation(kind, chunk * pp + device, group * pp + number % pp)

        for number in range(ahead):
            yield step("F", number)
        for number in range(total):
            if ahead + number < total:
                yield step("F", ahead + number)
            yield step("B", number)

    def count_rule(self, pp: int, count: int) -> tuple[str, int]:
        """Demand whole groups of pp micro-batches."""
        groups = max(round(count / pp), 1)
        return f"a multiple of pp={pp} when stages are interleaved", groups * pp

    def in_flight(self, pp: int, count: int, chunks: int) -> PerStage:
        """Return the warm-up of each device and one more, `2 (pp - k - 1) + (v - 1) pp + 1` passes.

        They are counted where the warm-up puts them, pp micro-batches a stage in turn. Later the
        earlier stages may hold one more and the later ones one less: with equal stages the sum is
        exact.
        """
        result = [0] * (pp * chunks)
        for device in range(pp):
            total = min(_warm_up(device, pp, chunks) + 1, chunks * count)
            # whole turns through all chunks, and what the last turn has begun
            turns, begun = divmod(total, chunks * pp)
            for chunk in range(chunks):
                of_chunk = min(max(begun - chunk * pp, 0), pp)
                result[chunk * pp + device] = turns * pp + of_chunk
        return tuple(result)


SCHEDULE = Interleaved()
