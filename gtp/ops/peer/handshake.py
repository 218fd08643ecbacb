"""`Handshake`: "it is there" and "you may have it back" between the ranks of a group, by stream memory operations.

[Note: signals that replay] A CUDA graph bakes in every value it writes, so a counter cannot tell this replay's signal
from the last one's. A flag can, if it is reset, and then a fast sender's second signal must not come before the reset
of the first, or it is lost. So each direction of each pair of ranks has two flags, `full` with the receiver and `empty`
with the sender, and the four moves below come strictly in turn:

    sender                                    receiver
    reclaim: wait until empty is 1, clear it
    (write the data) post: set full ------->  await_posts: wait until full is 1, clear it
                                   <-------   release: set empty (after the last read)

`full` is set again only after a `release`, which follows the clearing of `full`; `empty` likewise. Eager code and
graphs use the same moves, and may take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gtp.ops.peer.driver import Driver, SignalOp, Wait, Write

WORD = 4  # bytes

Mark = Callable[[str, Mapping[int, int]], int]
"""Given "full" or "empty", and per peer the address of the flag that a wait is for: the address of a word that the
stream is to set to 1 while it waits, for whoever watches."""


class Handshake:
    """Flags between this rank and every other rank of a group. Each move is a prepared batch of signal operations.

    Args:
        driver: Prepares the batches.
        rank: This rank.
        words: Per rank, the address of this handshake's `words_needed(size)` words in that rank's memory, zeroed.
        mark: Called for every batch that waits; None where nobody watches.
    """

    def __init__(self, driver: Driver, rank: int, words: Sequence[int], mark: Mark | None = None) -> None:
        self._driver = driver
        self._rank = rank
        self._words = words
        self._size = len(words)
        self._mark = mark
        # Staggered: at any moment every rank talks to another one.
        self.peers = tuple((rank + step) % self._size for step in range(1, self._size))
        self.post = driver.batch(self.post_ops(self.peers))
        self.await_posts = driver.batch(self.await_ops(self.peers))
        self.release = driver.batch(self.release_ops(self.peers))
        self.reclaim = driver.batch(self.reclaim_ops(self.peers))

    @staticmethod
    def words_needed(size: int) -> int:
        """Words in each rank's memory: `full` by sender, then `empty` by receiver."""
        return 2 * size

    def full_address(self, owner: int, sender: int) -> int:
        """Where `owner` looks for `sender`'s data."""
        return self._words[owner] + WORD * sender

    def empty_address(self, owner: int, receiver: int) -> int:
        """Where `owner` looks for `receiver`'s consent to send again."""
        return self._words[owner] + WORD * (self._size + receiver)

    def post_ops(self, peers: Sequence[int]) -> list[SignalOp]:
        return [Write(self.full_address(peer, self._rank), 1) for peer in peers]

    def await_ops(self, peers: Sequence[int]) -> list[SignalOp]:
        return self._held("full", {peer: self.full_address(self._rank, peer) for peer in peers})

    def release_ops(self, peers: Sequence[int]) -> list[SignalOp]:
        return [Write(self.empty_address(peer, self._rank), 1) for peer in peers]

    def reclaim_ops(self, peers: Sequence[int]) -> list[SignalOp]:
        return self._held("empty", {peer: self.empty_address(self._rank, peer) for peer in peers})

    def _held(self, what: str, flags: Mapping[int, int]) -> list[SignalOp]:
        """Waits for all flags to be 1 and clears them."""
        ops: list[SignalOp] = [Wait(address, 1) for address in flags.values()]
        if self._mark is not None:
            marker = self._mark(what, flags)
            ops = [Write(marker, 1), *ops, Write(marker, 0)]
        return ops + [Write(address, 0) for address in flags.values()]
