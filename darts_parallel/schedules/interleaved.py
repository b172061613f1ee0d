"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2; order of Megatron-LM).

Device k holds the stages k, k + pp, k + 2 pp, ..., and goes through them by groups of pp micro-batches.
"""

from collections.abc import Iterator

from darts_parallel.schedules._schedule import Operation, Schedule


class Interleaved(Schedule):
    """1F1B over several chunks a device."""

    name = "interleaved"
    pytorch = "Interleaved1F1B"
    chunks = None

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Iterator[Operation]:
        """Run ahead, then alternate, one chunk after the other in groups of pp micro-batches."""
        total = count * chunks
        ahead = min(2 * (pp - device - 1) + (chunks - 1) * pp, total)

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
        return f"a multiple of pp={pp} when stages are interleaved", max(round(count / pp), 1) * pp

    def frame_batches(self, pp: int) -> int:
        """Return one group."""
        return pp

    def longest_period(self, pp: int) -> int:
        """Return one frame: a group passes all stages."""
        return 1

    def in_flight(self, pp: int, count: int, chunks: int) -> tuple[int, ...]:
        """Return the warm-up of each device and one more, `2 (pp - k - 1) + (v - 1) pp + 1` passes.

        They are counted where the warm-up puts them, pp micro-batches a stage in turn. Later the earlier
        stages may hold one more and the later ones one less: with equal stages the sum is exact.
        """
        held = [min(2 * (pp - k - 1) + (chunks - 1) * pp + 1, chunks * count) for k in range(pp)]
        # whole turns through all chunks, and what the last turn has begun
        return tuple(
            total // (chunks * pp) * pp + min(max(total % (chunks * pp) - chunk * pp, 0), pp)
            for chunk in range(chunks)
            for total in held
        )


SCHEDULE = Interleaved()
