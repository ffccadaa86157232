"""What the beats of the ranks mean: who has died, who is silent, who has ended early, whether all stand still.

Pure: no sockets, no clock. Time is what the caller says that it has watched, so that a caller which was held up itself
(a long call into C, a suspended job) does not take that for the silence of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from clap_zero.phases import PHASES

CLOSE_GRACE_S = 20.0
"""How long a rank that has said what went wrong may take to put its things away."""

LONG_PHASES = frozenset({*PHASES[: PHASES.index("data")], "checkpoint", "evaluation", "end"})
"""Phases that rightly last: without progress in them, a hang is called one only after LONG_FACTOR times as long."""

LONG_FACTOR = 4.0


@dataclass
class Peer:
    """What is known of one rank.

    Attributes:
        rank: Its number.
        host: Its machine.
        pid: Its process there.
        phase: What it was doing when it last said so: one of PHASES.
        step: Optimizer step at that time, 0 before the first.
        progress: Its counter of changes, see `phases.progress`.
        silent_s: Watched seconds since its last word.
        waits: Whether its main thread stood in a wait for others; known once stacks were asked for.
        frames: Innermost frames of its main thread; the same.
    """

    rank: int
    host: str = "?"
    pid: int = 0
    phase: str = "start"
    step: int = 0
    progress: int = -1
    silent_s: float = 0.0
    waits: bool = False
    frames: str = ""
    failure: str | None = None
    failing_s: float = 0.0
    lost: bool = False
    unwatched: bool = False
    goodbye: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def place(self) -> str:
        """What it was doing, in words."""
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    @property
    def watched(self) -> bool:
        """Whether it still has to be heard of."""
        return not (self.lost or self.goodbye or self.unwatched)


@dataclass(frozen=True)
class Verdict:
    """Why the run ends.

    Attributes:
        cause: One line for people.
        rank: The rank that is to blame, None if no single one is.
        is_told: Whether that rank says the same itself.
    """

    cause: str
    rank: int | None = None
    is_told: bool = False


class Judge:
    """Keeps what the ranks say and tells when the run is over."""

    def __init__(self, *, own_rank: int, heartbeat_timeout_s: float | None, hang_timeout_s: float | None) -> None:
        """Args:
        own_rank: The rank that judges; it is not judged for silence.
        heartbeat_timeout_s: A rank that says nothing for so long is gone; None: never.
        hang_timeout_s: All ranks together may be without progress for so long; None: for ever.
        """
        self._own_rank = own_rank
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._still_s = 0.0
        self._parting_s = 0.0
        self._losses: list[Peer] = []
        self.is_blind = False
        self.peers: dict[int, Peer] = {}

    # ---- what is heard

    def join(self, rank: int, *, host: str, pid: int) -> None:
        """A rank is there and is watched from now on."""
        self.peers[rank] = Peer(rank, host=host, pid=pid)

    def beat(self, rank: int, *, phase: str, step: int, progress: int) -> None:
        """A rank says what it is doing."""
        peer = self.peers[rank]
        peer.silent_s = 0.0
        if phase in PHASES:
            peer.phase, peer.step = phase, step
        if progress != peer.progress:
            peer.progress = progress
            self._still_s = 0.0

    def failing(self, rank: int, text: str) -> None:
        """A rank says that it ends with an error, and with which: `in backward of step 12: ...`."""
        peer = self.peers[rank]
        peer.failure = peer.failure or text

    def goodbye(self, rank: int) -> None:
        """A rank came to the end of the run, or to that of a run that a signal stopped, and ends in good order."""
        self.peers[rank].goodbye = True

    def lose(self, rank: int) -> None:
        """The connection to a rank ended."""
        peer = self.peers[rank]
        if peer.lost:
            return
        peer.lost = True
        # Its last packet may be lost with it: who was at its end has come to it.
        peer.goodbye |= peer.phase == "end" and peer.failure is None
        if not peer.unwatched:
            self._losses.append(peer)

    def unwatch(self, rank: int) -> None:
        """A rank neither beats nor watches any more, though it may be well: nothing is known of it."""
        self.peers[rank].unwatched = True

    def advance(self, seconds: float) -> None:
        """So much time was watched since the last call, everything that had come was heard, and now there is more."""
        for peer in self.peers.values():
            if peer.watched and peer.rank != self._own_rank:
                peer.silent_s += seconds
            if peer.failure is not None:
                peer.failing_s += seconds
        self._still_s += seconds
        ended = any(peer.goodbye for peer in self.peers.values())
        self._parting_s = self._parting_s + seconds if ended and self._under_way() else 0.0

    # ---- what it means

    def verdict(self) -> Verdict | None:
        """Why the run is over, None while it is not. The likeliest cause first, its echoes after it."""
        died = [p for p in self._losses if not p.goodbye and p.failure is None]
        for peer in died:
            return Verdict(
                f"{peer.name} died in {peer.place} without a word: killed, out of memory, or a crash", peer.rank
            )
        for peer in self.peers.values():
            if peer.failure is not None and (peer.lost or peer.goodbye or peer.failing_s > CLOSE_GRACE_S):
                return Verdict(f"{peer.name} failed {peer.failure}", peer.rank, is_told=True)
        return self._silence() or self._early_end()

    def _silence(self) -> Verdict | None:
        limit = self._heartbeat_timeout_s
        if limit is None:
            return None
        for peer in self.peers.values():
            if peer.watched and peer.silent_s > limit:
                cause = f"{peer.name} has not been heard of for {limit:g} s (last: {peer.place})"
                if self._own_rank == 0:
                    cause += ": its host or its network is gone, or it is stuck"
                else:
                    cause = f"no contact with {peer.name} for {limit:g} s (last: {peer.place})"
                    cause += ": its host, or the network between, is gone"
                return Verdict(cause, peer.rank)
        return None

    def _early_end(self) -> Verdict | None:
        if self._heartbeat_timeout_s is None or self._parting_s <= self._heartbeat_timeout_s:
            return None
        first = next(peer for peer in self.peers.values() if peer.goodbye)
        limit = self._heartbeat_timeout_s
        if all(peer.step == first.step for peer in self._under_way()):
            # All have come to the same step: what one still writes down after the last may take long.
            if self._hang_timeout_s is None or self._parting_s <= self._hang_timeout_s:
                return None
            limit = self._hang_timeout_s
        behind = min(self._under_way(), key=lambda peer: (peer.step, peer.rank))
        return Verdict(
            f"{first.name} came to its end {limit:g} s ago, while {behind.name} is still in {behind.place}", behind.rank
        )

    def hangs(self) -> bool:
        """Whether no rank has made progress for too long. Never where there is a rank that nothing is known of."""
        if self._hang_timeout_s is None or not any(peer.watched for peer in self.peers.values()):
            return False
        if self.is_blind or any(peer.unwatched for peer in self.peers.values()):
            return False
        long = any(peer.phase in LONG_PHASES for peer in self.peers.values() if peer.watched)
        return self._still_s > self._hang_timeout_s * (LONG_FACTOR if long else 1.0)

    def hang(self, where: str) -> Verdict:
        """The verdict on a hang, once every rank that could has sent its frames.

        Args:
            where: Directory with the stacks.
        """
        alive = [peer for peer in self.peers.values() if peer.watched]
        behind = one_behind(alive)
        places = "; ".join(f"{place}: {ranks}" for place, ranks in _by_place(alive))
        text = f"the run hangs: no rank has made progress for {self._still_s:.0f} s ({places})"
        if behind is None:
            return Verdict(f"{text}; all wait at the same point, so look at the network. Stacks of all ranks: {where}")
        text += f"; {behind.name} is behind, in {behind.place}. Stacks of all ranks: {where}"
        if behind.frames:
            return Verdict(f"{text}\ninnermost frames of rank {behind.rank}:\n{behind.frames}", behind.rank)
        return Verdict(f"{text}. It did not send its own: it is stuck outside Python", behind.rank)

    def _under_way(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.watched and peer.phase != "end"]


def one_behind(peers: Iterable[Peer]) -> Peer | None:
    """The rank that the others wait for.

    A rank that computes or reads while others wait in a collective comes first, then the earlier step, the earlier
    phase, the lower count of changes. None where all are alike.
    """

    def place(peer: Peer) -> tuple[bool, int, int, int]:
        return peer.waits, peer.step, PHASES.index(peer.phase), peer.progress

    ordered = sorted(peers, key=lambda peer: (*place(peer), peer.rank))
    if len(ordered) < 2:
        return ordered[0] if ordered else None
    # Equal to the last means equal to all; equal counts alone decide nothing between ranks that do different things.
    return None if place(ordered[0])[:3] == place(ordered[-1])[:3] else ordered[0]


def _by_place(peers: Iterable[Peer]) -> list[tuple[str, str]]:
    """The ranks by what they do, few words however many they are."""
    groups: dict[str, list[int]] = {}
    for peer in sorted(peers, key=lambda peer: peer.rank):
        groups.setdefault(peer.place, []).append(peer.rank)
    return [(place, told_ranks(ranks)) for place, ranks in sorted(groups.items(), key=lambda item: len(item[1]))][:4]


def told_ranks(ranks: list[int], *, most: int = 6) -> str:
    """`rank 3`, `ranks 0, 1, 4 and 60 others`."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} others" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
