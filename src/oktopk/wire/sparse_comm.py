"""Collectives on sparse vectors: the wire format over a communicator, for one bucket in one step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import IntEnum

from torch import Tensor

from ..comm import Communicator, Digest, Operation
from ..comm.messages import broadcast_relays, gather_relays
from ..comm.transport import format_ranks
from ..errors import WireError
from ..metrics.traffic import Stopwatch
from .codecs import ValueCodec, Values
from .message import FRAME_BYTES, Tag, ValueCode, decode, encode, max_message_bytes
from .sparse_vector import MisplacedPart, SparseVector, all_finite

Region = tuple[int, int]


class Phase(IntEnum):
    """The phase of an algorithm that a message belongs to."""

    SPLIT = 0
    BALANCE = 1
    GATHER = 2
    TREE = 3
    BROADCAST = 4


_OPERATIONS = {
    Phase.SPLIT: Operation("all_to_all", "split"),
    Phase.BALANCE: Operation("all_to_all", "balance"),
    Phase.GATHER: Operation("all_gather", "gather"),
    Phase.TREE: Operation("recv", "tree"),
    Phase.BROADCAST: Operation("broadcast", "broadcast"),
}
"""The transport's name for each phase, for error messages."""


class SparseCommunicator:
    """Sends and receives the sparse vectors of one bucket in one step.

    Every message carries a flag: the sender saw a non-finite number, in its own data or in a message it received.
    After a round that involves all ranks, every rank knows, and all of them skip the step.

    Attributes:
        nonfinite: This rank saw or was told of a non-finite number.
        blocked_sent: Seconds that this rank was blocked by other ranks, as last sent to them: in this reduction so
            far or, in its first messages, in the reduction before.
        blocked_received: The same for the other ranks, by rank.
        digest: Of all messages that every rank has received, the same on all of them.
    """

    def __init__(
        self,
        comm: Communicator,
        size: int,
        *,
        step: int = 0,
        bucket: int = 0,
        values: Values = ValueCode.FP32,
        raw_indices: bool = False,
        stopwatch: Stopwatch | None = None,
        blocked_before: float = 0.0,
    ) -> None:
        self.transport, self.size, self.step, self.bucket, self.values = comm, size, step, bucket, values
        self.raw_indices = raw_indices
        self._plugin = values if isinstance(values, ValueCodec) else None
        self.nonfinite = False
        self.stopwatch = stopwatch or Stopwatch()
        self._blocked_before = blocked_before
        self.blocked_sent = 0.0
        self.blocked_received: dict[int, float] = {}
        self.digest = Digest()

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world(self) -> int:
        return self.transport.world

    def check_finite(self, finite: bool) -> None:
        """Set the non-finite flag of all further messages unless `finite`."""
        self.nonfinite = self.nonfinite or not finite

    def exchange(
        self, parts: Sequence[SparseVector], edges: Sequence[int], limit: int
    ) -> tuple[list[SparseVector], Iterator[SparseVector]]:
        """Send parts[j], at most `limit` entries in [edges[j], edges[j+1]), to rank j.

        Returns the parts as their receivers decode them (this rank's own part unchanged), and an iterator over the
        received parts in the order r-1, r-2, …
        """
        regions = list(itertools.pairwise(edges))
        sent = list(parts)
        messages: list[Tensor | None] = [None] * self.world
        for peer in self._others():
            messages[peer], sent[peer] = self._encode(parts[peer], Phase.SPLIT, regions[peer])
        capacity = max_message_bytes(limit, max(stop - start for start, stop in regions), self.values)
        incoming = self.transport.exchange(messages, capacity, "split")
        return sent, (self._decode(m, Phase.SPLIT, peer, regions[self.rank], limit) for peer, m in incoming)

    def rearrange(
        self, parts: Sequence[SparseVector], counts: Sequence[int], edges: Sequence[int], limit: int
    ) -> tuple[list[SparseVector], SparseVector]:
        """Send parts[j], at most `limit` entries, to rank j unless it is empty; join what arrives with parts[r].

        Rank j sends counts[j] entries to this rank, out of its region [edges[j], edges[j+1]).

        Returns the parts as their receivers decode them (this rank's own part unchanged), and the joined vector.
        """
        regions = list(itertools.pairwise(edges))
        sent = list(parts)
        messages: list[Tensor | None] = [None] * self.world
        for peer in self._others():
            if len(parts[peer]):
                messages[peer], sent[peer] = self._encode(parts[peer], Phase.BALANCE, regions[self.rank])
        capacity = max_message_bytes(limit, self.size, self.values)
        sources = [count > 0 for count in counts]
        arrived = {self.rank: parts[self.rank]}
        for peer, message in self.transport.exchange(messages, capacity, "balance", sources=sources):
            arrived[peer] = self._decode(message, Phase.BALANCE, peer, regions[peer], counts[peer], exact=True)
        return sent, SparseVector.join([arrived[peer] for peer in sorted(arrived)])

    def all_gather(
        self,
        part: SparseVector,
        capacity: int,
        edges: Sequence[int] | None = None,
        limit: int | None = None,
        counts: Sequence[int] | None = None,
    ) -> list[SparseVector]:
        """Gather the parts of all ranks, in rank order, this rank's own included, as receivers decode them.

        With `edges`, rank j's part lies in [edges[j], edges[j+1]): its indices then take fewer bytes. A part has
        at most `limit` entries or, with `counts`, that of rank j has counts[j].
        """
        if self.world == 1:
            return [part]
        regions = [self._whole] * self.world
        if edges is not None:
            regions = list(itertools.pairwise(edges))
        message, own = self._encode(part, Phase.GATHER, regions[self.rank])
        gathered = self.transport.all_gather(message, capacity, "gather")
        parts = [own] * self.world
        for peer in self._others():
            most = self.size if limit is None else limit
            parts[peer] = self._decode(
                gathered[peer], Phase.GATHER, peer, regions[peer],
                most if counts is None else counts[peer], exact=counts is not None,
            )  # fmt: skip
        self._digest(gathered)
        return parts

    def join(self, parts: Sequence[SparseVector]) -> SparseVector:
        """Concatenate the gathered parts of all ranks, whose index ranges must follow one another."""
        try:
            return SparseVector.join(parts)
        except MisplacedPart as error:
            ends = parts[error.places[0]].indices[-1], parts[error.places[1]].indices[0]
            first, behind = (self.transport.global_rank(rank) for rank in error.places)
            raise WireError(
                f"{_OPERATIONS[Phase.GATHER]}: the part from rank {behind} begins at index {int(ends[1])}, not "
                f"behind the part from rank {first}, which ends at {int(ends[0])}"
            ) from error

    def send(self, part: SparseVector, peer: int) -> SparseVector:
        """Send to one peer. Returns the part as the peer decodes it."""
        message, seen = self._encode(part, Phase.TREE, self._whole)
        self.transport.send(message, peer, "tree")
        return seen

    def recv(self, peer: int, limit: int) -> SparseVector:
        """Receive at most `limit` entries from one peer."""
        message = self.transport.recv(max_message_bytes(limit, self.size, self.values), peer, "tree")
        return self._decode(message, Phase.TREE, peer, self._whole, limit)

    def broadcast(self, part: SparseVector | None, limit: int) -> SparseVector:
        """Broadcast rank 0's part, at most `limit` entries. Returns it as receivers decode it, on rank 0 too."""
        if part is not None and self.world == 1:
            return part
        message = None if part is None else self._encode(part, Phase.BROADCAST, self._whole)[0]
        message = self.transport.broadcast(message, max_message_bytes(limit, self.size, self.values), "broadcast")
        result = self._decode(message, Phase.BROADCAST, 0, self._whole, limit)
        self._digest([message])
        return result

    def _digest(self, messages: Sequence[Tensor]) -> None:
        """Take messages that all ranks have received into the digest.

        All of their bytes: another message with the same checksum is easy to make. If one of two ranks lies, there
        are no two honest ones that could differ: then checksums suffice, for defects.
        """
        with self.stopwatch.stage("decode"):
            for message in messages:
                self.digest.add(message if self.world > 2 else message[:FRAME_BYTES])

    @property
    def _whole(self) -> Region:
        return 0, self.size

    def _others(self) -> Iterator[int]:
        return (peer for peer in range(self.world) if peer != self.rank)

    def _tag(self, phase: Phase, sender: int, region: Region) -> Tag:
        start, stop = region
        who = self.transport.global_rank(sender)
        return Tag(self.step, self.bucket, int(phase), who, self.size, start, stop - start)

    def _encode(self, part: SparseVector, phase: Phase, region: Region) -> tuple[Tensor, SparseVector]:
        tag = self._tag(phase, self.rank, region)
        self.blocked_sent = self.stopwatch.seconds("exchange") or self._blocked_before
        if self._plugin is not None:  # it is given finite values only
            self.check_finite(all_finite(part.values))
        with self.stopwatch.stage("encode"):
            message, decoded = encode(part, tag, self.values, self.nonfinite, self.raw_indices, self.blocked_sent)
        return message, part.with_values(decoded)

    def _decode(
        self, message: Tensor, phase: Phase, peer: int, region: Region, limit: int, exact: bool = False
    ) -> SparseVector:
        """The one way in for sparse vectors of other ranks: in order, in the region, of the announced length."""
        with self.stopwatch.stage("decode"):
            try:
                decoded = decode(message, self._tag(phase, peer, region), None, self._plugin)
                count = len(decoded.vector)
                if count > limit or (exact and count < limit):
                    who, bound = self.transport.global_rank(peer), "" if exact else "at most "
                    raise WireError(f"message from rank {who}: {count} entries, expected {bound}{limit}")
            except WireError as error:
                raise WireError(f"{_OPERATIONS[phase]}: {error}{self._route(phase, peer)}") from error
        self.blocked_received[peer] = decoded.blocked
        self.check_finite(not decoded.nonfinite)
        if phase is not Phase.SPLIT:  # there the sums are checked
            self.check_finite(all_finite(decoded.vector.values))
        return decoded.vector

    def _route(self, phase: Phase, peer: int) -> str:
        """The ranks that have passed a message on, which may have changed it."""
        ranks: list[int] = []
        if phase is Phase.GATHER:
            ranks = gather_relays(peer, self.rank, self.world)
        elif phase is Phase.BROADCAST:
            ranks = broadcast_relays(self.rank)
        return f", passed on by {format_ranks([*map(self.transport.global_rank, ranks)])}" if ranks else ""
