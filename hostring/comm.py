"""The group of ranks, as users see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, TypeAlias, cast

from hostring.arrays.dtypes import Array
from hostring.engine.arguments import check_call, check_reduction
from hostring.engine.coalesced import Coalesced, joint_dtype
from hostring.engine.movements import Movements
from hostring.engine.payload import expected_payload
from hostring.engine.postings import Postings
from hostring.engine.reductions import Reductions
from hostring.engine.session import Session
from hostring.engine.splitting import color_and_key, reform, split
from hostring.tuning.agreement import open_session

Counts: TypeAlias = "Sequence[int] | None"
Seconds: TypeAlias = "float | None"
Choose: TypeAlias = "Callable[[Array], Array]"


class Comm:
    """A group of ranks that reduce and exchange arrays, with the same bits on every rank. Made by `hostring.init`.

    Every rank calls the same collectives in the same order. Calls on several threads are carried out in a defined
    order. Calls with `async_op=True` return a `Work` at once and are carried out first in, first out.

    Attributes:
        rank, world_size: this process's index, and how many there are.
        order: the declared fold order. wire: what float32 contributions are rounded to. topology: what was asked for.
        counters: see `Counters`. recorder: the last calls. session: the state behind this, for hostring's own tools.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rank, self.world_size = session.rank, session.world_size
        self.order, self.wire, self.topology = session.order, session.wire, session.topology
        self.counters, self.recorder = session.counters, session.recorder
        self._reductions, self._movements = Reductions(session), Movements(session)

    @property
    def timeout(self) -> float:
        """Seconds for each operation that doesn't say otherwise. May be set."""
        return self.session.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.session.timeout = seconds

    @property
    def memory_held(self) -> int:
        """Bytes of host memory that the group keeps from call to call: scratch, staging and joined buffers."""
        return self.session.memory_held

    def _call(self, what: str, async_op: bool, job: Callable[..., Any], *args: Any) -> Any:
        """Carry out `job(*args)` when it is its turn: at once and in this thread where nothing is queued."""
        turns = self.session.turns
        if async_op:
            check_call(what, self.rank, self.world_size, args)
            return turns.submit(partial(job, *args), what)
        if turns.queued or not turns.turn.acquire(False):
            return turns.run(job, what, *args)
        turns.holder = get_ident()
        try:
            return job(*args)
        finally:
            turns.holder = 0
            turns.turn.release()

    def all_reduce(
        self, x: Any, op: str = "sum", *, feedback: Any = None, async_op: bool = False, timeout: Seconds = None
    ) -> Any:
        """Fold `x` of all ranks element by element, in the declared order. All ranks get the same bits.

        Args:
            x: the same number of elements on every rank. Floats of 32 bits or less may differ in dtype between ranks;
                the same float32 is then rounded to each. Changed in place and returned; an immutable one gives a new.
            op: sum, avg, min, max, prod, or band, bor, bxor for integers and bool. avg divides after the fold.
            feedback: a `Feedback`: adds what the wire has cut off this tensor before, for sums and averages of float32.
            async_op: return a `Work` at once; leave `x` alone until it is done.
            timeout: seconds for the whole operation, instead of the group's.

        Raises:
            TypeError, ValueError: the dtype, the operator or their pair can't be reduced; nothing was sent.
            HostringError: see docs/errors.md. The contents of `x` are unspecified then, and the group is poisoned.

        Cost: (N-1)·S sent per rank for small messages, 2(N-1)/N·S for large ones on a mesh; see docs/topologies.md.
        """
        turns = self.session.turns
        if feedback is not None:
            return self._call("feedback", async_op, self._reductions.compensated, x, op, timeout, feedback)
        if async_op:
            check_reduction(x, op)
            return turns.submit(partial(self._reductions.all_reduce, x, op, timeout), "all_reduce")
        if turns.queued or not turns.turn.acquire(False):
            return turns.run(self._reductions.all_reduce, "all_reduce", x, op, timeout)
        try:
            return self._reductions.all_reduce(x, op, timeout)
        finally:
            turns.turn.release()

    def all_reduce_coalesced(
        self, xs: Iterable[Any], op: str = "sum", *, async_op: bool = False, timeout: Seconds = None
    ) -> Any:
        """Like `all_reduce` of each of several arrays, whose results come in a list, with the same bits.

        Args:
            xs: arrays of any shape, library and device that don't overlap; as many, and each with as many elements, on
                every rank. Either all are floats of 32 bits or less, which may differ in dtype, or all have one dtype.
            timeout: seconds for each of the operations that this takes.

        Raises:
            TypeError, ValueError: as `all_reduce`, or these dtypes can't be folded together; nothing was sent.
            CollectiveMismatch: the arrays have other numbers of elements on another rank.

        Cost: two copies of arrays of up to 4096 elements, which travel together, and an all_reduce of each larger one.
        With order="ring", and with floats on another wire than float32, each array travels alone.
        """
        arrays, coalesced = list(xs), Coalesced(self.session, self._reductions)
        return self._call("all_reduce", async_op, coalesced.all_reduce, arrays, joint_dtype(arrays, op), op, timeout)

    def reduce(self, x: Any, root: int = 0, op: str = "sum", *, async_op: bool = False, timeout: Seconds = None) -> Any:
        """Like `all_reduce`, but only `root` gets the result; `x` of the others is left as it is and returned."""
        return self._call("reduce", async_op, self._reductions.reduce, x, root, op, timeout)

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, counts: Counts = None, out: Any = None, async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:  # fmt: skip
        """Fold `x` of all ranks and give rank r part r of the result along the first dimension.

        Args:
            x: shape (rows, …) on every rank. Left as it is.
            counts: rows of each rank's part; without, they must divide evenly.
            out: an array of shape (rows of this rank, …) and the dtype of `x` to write into and to return.
        """
        return self._call("reduce_scatter", async_op, self._reductions.reduce_scatter, x, op, counts, out, timeout)

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False, timeout: Seconds = None) -> Any:
        """Give `x` of `root` to all. Floats are rounded to each rank's own dtype; other dtypes must agree. In place."""
        return self._call("broadcast", async_op, self._movements.broadcast, x, root, timeout)

    def all_gather(
        self, x: Any, *, counts: Counts = None, out: Any = None, async_op: bool = False, timeout: Seconds = None
    ) -> Any:
        """Give `x` of every rank to all.

        Args:
            x: the same shape on every rank. With `counts`, `counts[r]` rows on rank r, and otherwise the same shape.
            out: an array to write into.

        Returns:
            shape (world_size, *x.shape); with `counts`, the parts one after the other, shape (sum(counts), …).
        """
        return self._call("all_gather", async_op, self._movements.all_gather, x, counts, out, timeout)

    def gather(
        self, x: Any, root: int = 0, *, counts: Counts = None, out: Any = None, async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:  # fmt: skip
        """Like `all_gather`, but only `root` gets the result; the others get None."""
        return self._call("gather", async_op, self._movements.gather, x, root, counts, out, timeout)

    def scatter(
        self, x: Any, root: int = 0, *, counts: Counts = None, out: Any = None, async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:  # fmt: skip
        """Give part r of `x` of `root` along the first dimension to rank r.

        Args:
            x: on `root`, shape (world_size, …), or (sum(counts), …) with `counts`. Elsewhere ignored; None will do.
            out: where the part goes. Needed on every rank but `root`, which alone knows the shape.
        """
        return self._call("scatter", async_op, self._movements.scatter, x, root, counts, out, timeout)

    def all_to_all(
        self, x: Any, *, send_counts: Counts = None, recv_counts: Counts = None, out: Any = None,
        async_op: bool = False, timeout: Seconds = None,
    ) -> Any:  # fmt: skip
        """Give part q of `x` along the first dimension to rank q, and get one part from each, in the order of ranks.

        Args:
            send_counts: rows for each rank; without, they must divide evenly. When given on one rank, give it on all:
                the counts of all ranks are then gathered first, which is one more small collective.
            recv_counts: rows expected from each rank, checked against what the others send.
        """
        return self._call("all_to_all", async_op, self._movements.all_to_all, x, send_counts, recv_counts, out, timeout)

    def barrier(self, *, async_op: bool = False, timeout: Seconds = None) -> Any:
        """Return when every rank has called it."""
        return self._call("barrier", async_op, self._movements.barrier, timeout)

    def broadcast_bytes(self, data: bytes = b"", root: int = 0, *, timeout: Seconds = None) -> bytes:
        """Return `data` of `root`, of any length, on every rank. `data` of the others is ignored. Two broadcasts."""
        return bytes(self._call("broadcast", False, self._movements.broadcast_bytes, data, root, timeout))

    def gather_bytes(self, data: bytes, *, timeout: Seconds = None) -> list[bytes]:
        """Return `data` of all ranks, of any lengths, on every rank, in the order of ranks. Two all_gathers."""
        return list(self._call("all_gather", False, self._movements.gather_bytes, data, timeout))

    def decide(self, x: Any, choose: Choose, root: int = 0, n: int | None = None, *, timeout: Seconds = None) -> Array:
        """One collective in which `root` decides for all. Returns on every rank what `choose` returned, bit for bit.

        Args:
            x: a numpy array, the same shape and dtype on every rank.
            choose: called on `root` alone with all contributions, shape (world_size, *x.shape); returns an array of the
                dtype of `x` and of shape (n,), or of the shape of `x` without `n`. What it raises, every rank raises.
        """
        return cast("Array", self._call("decide", False, self._movements.decide, x, choose, root, n, timeout))

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False, timeout: Seconds = None) -> Any:
        """Send `x` to rank `dst`. Returns when `x` may be changed again; large messages wait for the receiver.

        Two ranks may both send first. Returns None, or a `Work` with `async_op`, which progresses without `wait`.
        """
        return Postings(self.session).send(x, dst, tag, async_op, timeout)

    def recv(
        self, x: Any, src: int | None = None, tag: int = 0, *, async_op: bool = False, timeout: Seconds = None
    ) -> Any:
        """Receive into `x` the next message with `tag` from rank `src`, or from any rank when it is None.

        Floats are rounded to the dtype of `x`. Returns `x` (or a new array where `x` is immutable), or a `Work` with
        `async_op`, whose `src` says who sent it.

        Raises:
            CollectiveMismatch: the message has another number of elements, or a dtype that `x` can't take.
        """
        return Postings(self.session).recv(x, src, tag, async_op, timeout)

    def split(
        self, color: int | None, key: int | None = None, *, topology: str | None = None, order: str | None = None
    ) -> Comm | None:
        """Make a group of all ranks that name the same `color`, with links of its own. Every rank must call this.

        Ranks are ordered by `key`, then by their rank here. Returns None for a rank whose `color` is None.

        Raises:
            ValueError: `color` is negative, or `topology` and `order` don't go together; nothing was sent.
        """
        topology, order = topology or self.topology, order or self.order
        colors = self.all_gather(color_and_key(self.session, color, key, topology, order))
        group = split(self.session, colors, topology, order, self.gather_bytes)
        return None if group is None else Comm(open_session(group, topology, order, self.wire, self.timeout))

    def turn(self, job: Callable[[], Any], *, what: str = "turn", async_op: bool = False) -> Any:
        """Carry out `job`, which calls blocking collectives of this group, with no other thread's call in between.

        Returns what `job` returns, or a `Work` with `async_op`. Inside, don't wait for this group's asynchronous calls.
        """
        turns = self.session.turns
        return turns.submit(job, what) if async_op else turns.run(job, what)

    def rebuild(self, min_ranks: int = 1, *, timeout: Seconds = None) -> Comm:
        """After a failure: return a new group of the survivors and of processes that came back. This one is closed.

        Every survivor calls this; a process that comes back calls `hostring.init(rejoin=True)`. All known survivors are
        waited for, and more ranks until there are `min_ranks`. They are ordered by the rank that they held or ask for,
        then by arrival, and numbered without gaps. The new group has its own links and epoch, and takes no old frame.

        Raises:
            RendezvousError: too few ranks came within `timeout` (the group's own when None). It may be called again.
            ValueError: the group has no store: it was split from another, or started by `RING_CONFIG`.
        """
        group = reform(self.session, min_ranks, timeout)
        return Comm(open_session(group, self.topology, self.order, self.wire, self.timeout))

    def close(self) -> None:
        """Finish the accepted calls, and close all links. Idempotent. Ranks that still wait for this one fail."""
        self.session.close()

    def abort(self, reason: str = "aborted by the user") -> None:
        """End the group now, on every rank: calls under way and later ones raise `reason`. Any thread may call this."""
        self.session.abort(reason)

    def __repr__(self) -> str:
        return f"<hostring.Comm {self.session.describe()}>"

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is None:
            self.close()
        else:
            self.abort(f"{type(exc).__name__}: {exc}")

    def expected_payload(self, collective: str, n_elements: Any, dtype: Any = "float32", root: int = 0) -> int:
        """Payload bytes that this rank sends in one call, when all ranks bring one dtype and op isn't avg.

        Args:
            n_elements: of the buffer of all_reduce, reduce, reduce_scatter, broadcast and all_to_all, divided evenly;
                of one rank's share of gather, scatter, all_gather (or of each rank's) and decide (or share and answer).
        """
        return expected_payload(self.session, collective, n_elements, dtype, root)
