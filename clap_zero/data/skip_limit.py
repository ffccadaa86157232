"""Whether so many samples of an epoch are unusable, over all ranks, that the run has to end."""

from __future__ import annotations

from collections.abc import Sequence

from clap_zero.data.skips import BLACKLISTED, EpochFaults, bad_limit, count_kind
from clap_zero.distributed import collectives


class SkipLimit:
    """Judges the samples of all ranks together, and so comes to the same end on all of them.

    The samples of one rank are too few to judge: on 4,096 ranks an epoch of a million is 244 samples a rank, of which
    a share of 5 % is 12, and chance gives some rank many more.
    """

    def __init__(self, *, num_samples: int, max_bad_fraction: float, largest_shard: int = 1) -> None:
        """Args:
        num_samples: samples of an epoch, over all ranks.
        max_bad_fraction: `data.max_bad_fraction`.
        largest_shard: samples of the largest shard: faults come by whole shards.
        """
        self._num_samples, self._max_bad_fraction = num_samples, max_bad_fraction
        self._largest_shard = largest_shard
        self._faults = EpochFaults()

    def see(self, epoch: int, *, num_slots: int, num_bad: int, skipped: Sequence[tuple[str, str]]) -> None:
        """Takes note of a step. Collective where it raises: all ranks must call with the same counts.

        Args:
            epoch: 0-based epoch of the step's samples.
            num_slots: samples of the step, over all ranks.
            num_bad: unusable ones that others replaced, over all ranks.
            skipped: key and reason of those of this rank.

        Raises:
            DataError: there were too many in the epoch; the same on all ranks, rank 0 reports it.
        """
        faults = self._faults
        faults.begin(epoch)
        faults.num_slots += num_slots
        faults.num_bad += num_bad
        for key, reason in skipped:
            if reason != BLACKLISTED:
                faults.keep(key, reason)
        limit = bad_limit(
            faults.num_slots,
            num_samples=self._num_samples,
            max_bad_fraction=self._max_bad_fraction,
            largest_shard=self._largest_shard,
        )
        if faults.num_bad <= limit:
            return
        of_ranks = collectives.all_gather_objects((faults.reasons, faults.latest))
        faults.reasons.clear()
        for reasons, _ in of_ranks:
            for reason, number in reasons.items():
                count_kind(faults.reasons, reason, number)
        # The latest of each rank, of as many ranks as a message has room for.
        faults.latest = [latest[-1] for _, latest in of_ranks if latest][:10]
        error = faults.error("over all ranks", self._max_bad_fraction)
        error.reported_elsewhere = collectives.rank_and_size()[0] != 0
        raise error
