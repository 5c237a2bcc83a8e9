"""The control links of a rank: who failed first, and who keeps the others waiting.

Small frames that interrupt any sleep.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final

from hostring.engine.causes import fresh_copy, from_words, to_words
from hostring.engine.control_link import Body, ControlLink, is_silence
from hostring.engine.cut_off import far_hosts, lost_address, unacknowledged
from hostring.engine.waits import State, Waiting, mismatch, odd_one_out
from hostring.errors import CollectiveMismatch, HostringError, OperationTimeout, PeerLostError, ProtocolError
from hostring.transports.link import Link

PROBE_SECONDS: Final = 0.4  # how long a sleeping rank may take to say whom it waits for, and a live host to acknowledge
GRACE_SECONDS: Final = 0.3  # how long an operation may stand still after some rank has died
SETTLE_SECONDS: Final = 0.5  # how long a first cause may take to arrive after a link has broken
VOTE_SECONDS: Final = 1.0  # how long ranks may take to say what they call
LATE_SECONDS: Final = 0.3  # how long ranks that say that they are elsewhere are asked again
MAX_SLEEP_SECONDS: Final = 1.0


class Control:
    """All control links of this rank. A thread in a collective and one that receives messages may both be in here.

    Attributes:
        cause: the first failure that this rank knows of; everything after it raises the same.
        waiting: what this rank sleeps in, or has failed in, for whoever asks; None while it is awake.
        receiving: the same for messages.
    """

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        self._rank, self._links = rank, links
        self._peers = {peer: ControlLink(link) for peer, link in links.items()}
        self._by_fd = {link.fileno(): peer for peer, link in links.items()}
        self._far = far_hosts(links)
        self._states: dict[int, State] = {}  # of those that told
        self._asked: set[int] = set()
        self._n_frames = 0
        self.cause: HostringError | None = None
        self.waiting: Waiting | None = None
        self.receiving: Waiting | None = None

    # ------------------------------------------------------------------ sleeping

    def arm(self, poller: select.poll) -> None:
        """Let `poller` wake up for what comes here."""
        for fd, peer in self._by_fd.items():
            if self._peers[peer].gone is None:
                poller.register(fd, self._links[peer].arm(True, False))

    def sleep(self, poller: select.poll, mine: Waiting, seconds: float) -> None:
        """Sleep in `poller`, at most `seconds`, and take what comes here. Raises what `hear` raises."""
        self.waiting, before = mine, self._n_frames
        for peer in self._peers:  # frames that came before the doorbells were set would not ring them
            self._read(peer)
        heard = self._n_frames > before or self.cause is not None
        events = [(-1, 0)] if heard else poller.poll(min(seconds, self.patience()) * 1000)
        self.hear(events)
        if not events:
            self.ask(mine.peer)
        self.waiting = None  # but not after an error: other ranks may still ask what this one was in

    def patience(self) -> float:
        """Seconds to sleep at most before `hear` should judge: few when a rank has died."""
        return GRACE_SECONDS if any(p.died for p in self._peers.values()) else MAX_SLEEP_SECONDS

    def hear(self, events: list[tuple[int, int]]) -> None:
        """Read what came on the control links among `events`, the result of a `poll`.

        A rank that is gone may have done its part before: it is an error only for an operation that then stands still.

        Raises:
            HostringError: the first cause, when a peer passed one on; `PeerLostError` when nothing came and a rank has
                died; `CollectiveMismatch` when a rank that told its call sleeps in another one of the same number.
        """
        # After a sleep without events, all: a link may have got something before its doorbell was set.
        for peer in [self._by_fd[fd] for fd, _ in events if fd in self._by_fd] if events else self._peers:
            self._read(peer)
        if self.cause is not None:
            raise fresh_copy(self.cause)
        if self._states and self.waiting is not None:
            for peer, state in self._states.items():
                if (difference := mismatch(self.waiting, state, peer)) is not None:
                    raise difference
        if not events:
            for peer, link in self._peers.items():
                if link.gone is not None and not link.left:
                    raise PeerLostError(peer, link.gone)

    def ask(self, peer: int) -> None:
        """Ask `peer` what it sleeps in: two ranks that each wait for the other's first message would wait for ever."""
        if peer in self._peers and peer not in self._asked and self._peers[peer].gone is None:
            self._asked.add(peer)
            self._peers[peer].tell({"what": "probe"})

    def alive(self) -> int:
        """How many other ranks have not gone, as far as this one can see now."""
        self._listen(0)
        return sum(p.gone is None and not p.left for p in self._peers.values())

    def known_failure(self) -> HostringError | None:
        """The first cause, or a rank that has died, as far as this one can see now. Never waits."""
        self._listen(0)
        if self.cause is not None:
            return fresh_copy(self.cause)
        return next((PeerLostError(r, p.gone) for r, p in self._peers.items() if p.gone and not p.left), None)

    # ------------------------------------------------------------------ frames

    def _read(self, peer: int) -> None:
        link = self._peers[peer]
        if link.gone is None and not link.read(lambda body: self._take(peer, body)):
            self.cause = self.cause or ProtocolError(
                f"rank {peer} sent bytes on its control link that are no control frame", peer
            )

    def _take(self, peer: int, body: Body) -> None:
        self._n_frames += 1
        what = body.get("what")
        if what == "abort":
            self.cause = self.cause or from_words(body, peer)
        elif what == "probe":
            mine = self.waiting or self.receiving or Waiting(-1, "")
            self._peers[peer].tell(mine.to_body())
        elif what == "state":
            self._states[peer] = State.of(body)
            self._asked.discard(peer)
        elif what == "farewell":
            self._peers[peer].left = True

    def flood(self, cause: HostringError) -> None:
        """Tell everyone the first cause. Never waits."""
        self.cause = cause
        self._tell_all(to_words(cause))

    def farewell(self) -> None:
        """Tell everyone that this rank leaves in an orderly way."""
        self._tell_all({"what": "farewell"})

    def _tell_all(self, body: Body) -> None:
        for link in self._peers.values():
            link.tell(body)

    def _listen(self, seconds: float) -> bool:
        """Take what comes within `seconds`. Returns whether the time was not yet over."""
        if seconds < 0:
            return False
        poller, before = select.poll(), self._n_frames
        self.arm(poller)
        for peer in self._peers:  # frames that came before the doorbells were set would not ring them
            self._read(peer)
        if self._n_frames == before:
            for fd, _ in poller.poll(seconds * 1000):
                if fd in self._by_fd:
                    self._read(self._by_fd[fd])
        return True

    def _listen_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Take what comes, until `done`, a first cause, or `seconds` have passed."""
        give_up = perf_counter() + seconds
        while not done() and self.cause is None and self._listen(give_up - perf_counter()):
            pass

    # ------------------------------------------------------------------ blame

    def settle(self, failure: HostringError, mine: Waiting | None = None) -> HostringError:
        """The first cause behind `failure`: what a peer passes on within a moment, else `failure` itself, well blamed.

        A peer that gives up closes its links after it has said why, so a broken link alone is no proof of death.

        Args:
            mine: the call that failed, if it is known.
        """
        self.waiting = mine or self.waiting
        if self.cause is None and isinstance(failure, PeerLostError) and failure.rank in self._peers:
            peer = self._peers[failure.rank]
            self._listen_until(lambda: peer.gone is not None, SETTLE_SECONDS)
        self._listen(0)
        if self.cause is not None:
            return self.cause
        if isinstance(failure, CollectiveMismatch) and mine is not None and mine.call is not None:
            return self._vote(failure, mine)
        if not isinstance(failure, PeerLostError) or failure.rank not in self._far:
            return failure
        return self.unless_cut_off(failure) if is_silence(failure) or self._peers[failure.rank].silent else failure

    def unless_cut_off(self, failure: PeerLostError) -> PeerLostError:
        """`failure` of a rank from which nothing came; or of this one, where this host is the one that is cut off."""
        if failure.rank in self._far and (why := self._why_cut_off()):
            return PeerLostError(self._rank, f"{why}; rank {failure.rank} was the first that it missed")
        return failure

    def _vote(self, failure: HostringError, mine: Waiting) -> HostringError:
        """`failure` of two ranks whose calls differ: ask the others which of the two is the odd one out.

        A rank that says that it is in another call, or in none, is asked again for a moment: it may be about to begin
        this one. It is not waited for longer, since deadlines of other ranks may be near.
        """
        header, world_size = mine.header(), len(self._peers) + 1
        if world_size == 2:
            return failure
        self._states = {peer: s for peer, s in self._states.items() if s.seq == mine.seq and s.header}
        self._tell_all(mine.to_body())
        self._tell_all({"what": "probe"})

        def calls() -> dict[int, bytes]:
            told = {peer: s.header for peer, s in self._states.items() if s.seq == mine.seq and s.header}
            return {**told, self._rank: header}

        def all_told() -> bool:
            return all(peer in self._states or link.gone is not None for peer, link in self._peers.items())

        def decided() -> bool:
            return odd_one_out(calls(), world_size) is not None or all_told()

        begun = perf_counter()
        self._listen_until(decided, VOTE_SECONDS)
        while self.cause is None and odd_one_out(calls(), world_size) is None and perf_counter() < begun + LATE_SECONDS:
            self._listen_until(lambda: False, LATE_SECONDS / 10)
            for peer in self._states.keys() - calls().keys():
                del self._states[peer]
                self._peers[peer].tell({"what": "probe"})
            self._listen_until(decided, LATE_SECONDS)
        known = calls()
        return self.cause or odd_one_out(known, world_size) or odd_one_out(known, len(known)) or failure

    def culprit(self, waits_for: int) -> int:
        """Follow who waits for whom, from `waits_for` on, to the rank that keeps everybody waiting.

        A rank that is asleep in a call answers whom it waits for; a stopped one, or one that computes elsewhere,
        doesn't.
        """
        seen = {self._rank}
        while waits_for in self._peers and waits_for not in seen and self._peers[waits_for].gone is None:
            seen.add(waits_for)
            state = self._probe(waits_for)
            if state is None or state.waits_for in {-1, *seen}:
                break
            waits_for = state.waits_for
        return waits_for

    def _probe(self, peer: int) -> State | None:
        """What `peer` says that it waits for; None when it doesn't answer."""
        self._states.pop(peer, None)
        self._peers[peer].tell({"what": "probe"})
        self._listen_until(lambda: peer in self._states, PROBE_SECONDS)
        return self._states.get(peer)

    def silent(self) -> list[int]:
        """The ranks that don't answer: stopped ones, and those that compute outside of any call."""
        asked = [peer for peer, link in self._peers.items() if link.gone is None]
        for peer in asked:
            self._states.pop(peer, None)
            self._peers[peer].tell({"what": "probe"})
        self._listen_until(lambda: all(peer in self._states for peer in asked), PROBE_SECONDS)
        return [peer for peer in asked if peer not in self._states]

    def timed_out(self, mine: Waiting, progress: str, seconds: float) -> HostringError:
        """The error for a deadline that passed in `mine`; or the first cause, when one comes in."""
        self.waiting = mine  # two ranks whose deadlines pass together ask each other
        culprit = self.culprit(mine.peer)
        if self.cause is not None:
            return fresh_copy(self.cause)
        what = f"{mine.name}: rank {mine.peer} {progress} in {seconds:.1f} s"
        if culprit in self._far and culprit not in self._states and (why := self._why_cut_off()):
            return OperationTimeout(f"{what}; {why}", self._rank)
        if culprit != mine.peer:
            what += f" (rank {mine.peer} itself waits for rank {culprit})"
        return OperationTimeout(f"{what}; raise the timeout if rank {culprit} is only slow", culprit)

    def _why_cut_off(self) -> str | None:
        """Why it must be this rank that has lost its network, and not another; None when another may have."""
        if lost := lost_address(self._links, self._far):
            return f"rank {self._rank} itself is cut off: its address {lost} is on no interface that is up"
        doubtful = [peer for peer in self._far if self._peers[peer].gone is None or self._peers[peer].silent]
        if len({self._far[peer] for peer in doubtful}) < 2:
            return None

        def somebody_answers() -> bool:
            alive = (peer for peer in doubtful if self._peers[peer].gone is None)
            return not all(unacknowledged(self._links[peer]) for peer in alive)

        for peer in doubtful:
            self._peers[peer].tell({"what": "probe"})
        self._listen_until(somebody_answers, PROBE_SECONDS)
        return None if somebody_answers() else f"rank {self._rank} itself is cut off: no other host answers"
