"""The map of `hostring plan map`: prices over contexts, ranks and links, as a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hostring.integrations.llm.planning.ask import Described
from hostring.integrations.llm.planning.predicted import Predicted
from hostring.integrations.llm.planning.prices import Asked, Price, Way, ways
from hostring.integrations.llm.planning.shares import Phase


@dataclass(frozen=True)
class Cell:
    """One point of the map: the fastest way there, over the first `n_ranks` ranks or some of them."""

    context: int
    n_ranks: int
    gbit: float
    tokens: int
    best: Way

    @property
    def rate(self) -> float:
        """Tokens per second, of the prompt where that is what is priced."""
        return 0.0 if self.best.why_not else self.tokens / self.best.seconds

    def as_json(self) -> dict[str, Any]:
        rate = None if self.best.why_not else Predicted(self.rate, "tokens/s").as_json()
        point = {"context": self.context, "ranks": self.n_ranks, "gbit_per_s": self.gbit}
        return {**point, "plan": self.best.name, "used": self.best.ranks, "why_not": self.best.why_not, "rate": rate}


def swept(known: Described, phase: Phase, contexts: Sequence[int], links: Mapping[float, Price]) -> list[Cell]:
    """The map.

    Args:
        links: the price of reductions, by the rate of the links.
    """
    found = []
    for gbit, price in links.items():
        for n_ranks in range(1, len(known.ranks) + 1):
            for context in contexts:
                best, *_ = ways(Asked(known.model, known.ranks[:n_ranks], phase, context, price))
                found.append(Cell(context, n_ranks, gbit, 1 if phase == "decode" else context, best))
    return found


def table(cells: Sequence[Cell]) -> Table:
    """A line for each rate of the links and each number of ranks, a column for each context."""
    contexts = sorted({cell.context for cell in cells})
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("Gbit/s", "ranks", *(f"{context:,} positions" for context in contexts)):
        found.add_column(heading, justify="right")
    for gbit, n_ranks in dict.fromkeys((cell.gbit, cell.n_ranks) for cell in cells):
        row = {cell.context: cell for cell in cells if (cell.gbit, cell.n_ranks) == (gbit, n_ranks)}
        found.add_row(f"{gbit:g}", str(n_ranks), *(_in_words(row[context]) for context in contexts))
    return found


def _in_words(cell: Cell) -> str:
    return "doesn't fit" if cell.best.why_not else f"{cell.best.name}: {Predicted(cell.rate, 'tokens/s')}"


def draw(cells: Sequence[Cell], path: str) -> None:
    """Rates over contexts, a line for each number of ranks and rate of the links."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "hostring", "font.size": 10}):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        rates = list(dict.fromkeys(cell.gbit for cell in cells))
        for gbit, n_ranks in dict.fromkeys((cell.gbit, cell.n_ranks) for cell in cells):
            mine = [c for c in cells if (c.gbit, c.n_ranks) == (gbit, n_ranks) and not c.best.why_not]
            style = {"color": f"C{n_ranks - 1}", "linestyle": ("-", "--", ":", "-.")[rates.index(gbit) % 4]}
            label = f"{n_ranks} rank{'s' * (n_ranks > 1)}, {gbit:g} Gbit/s"
            axes.loglog(
                [c.context for c in mine], [c.rate for c in mine], marker="o", markersize=4, label=label, **style
            )
        axes.set(xlabel="positions", ylabel="tokens/s, predicted", title="Fastest way to divide the model, predicted")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
