"""What the demo is asked to do, as plain values that travel to the rank processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hostring.integrations.llm.checkpoint.repository import find_model
from hostring.integrations.llm.context.plan import ContextPlan, context_plan, is_context_plan, why_not_shared
from hostring.integrations.llm.handover.roles import Roles, asks_for_roles, roles
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.pipeline.stages import StagePlan, is_stage_plan, stage_plan
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.integrations.llm.planning.plan_file import PlanFile, as_lists
from hostring.integrations.llm.planning.wish import BYTES, EVEN, PLACE, plan_by_bytes, plan_of_file, plan_of_places
from hostring.integrations.llm.rows.plan import RowPlan, asks_for_rows, row_plan, why_not_divided
from hostring.integrations.llm.speculation.wish import DEFAULT_MOST, OFF, Speculation

BUNDLED = Path(__file__).parents[1] / "tiny"
DTYPE_NAMES = ("float16", "bfloat16", "float32")
COMPUTES = ("auto", "packed", "exact")
_MAX_UNCHECKED_RANKS = 8  # may be started to find out that the model has too few KV heads for them
Asked = StagePlan | ContextPlan | Roles | RowPlan | PlanFile | None
_COMPILE = {"off": "", "on": "inductor"}
_SHORT = {"f16": "float16", "fp16": "float16", "bf16": "bfloat16", "f32": "float32", "fp32": "float32"}


@dataclass(frozen=True)
class Job:
    """What to generate and to measure.

    Attributes:
        model: a GGUF file or a directory in Hugging Face form.
        dtypes: what each rank computes in.
        devices: what each rank computes on; none where every rank says so for itself.
        compile: for each rank, the backend of `torch.compile`, "" for none; nothing where no rank compiles.
        compute: "auto", "packed" or "exact", see `load_model`.
        plan: who holds what: "even", "bytes", "auto", "experts=place", a file, stages such as "pp=2,tp=2", a grid
            such as "context=3,heads=2", or rows such as "rows=78/22".
        shares: KV groups, columns, vocabulary and query heads by rank, where they are known before the ranks start.
        stages: layers and ranks of each stage of a pipeline; none where all ranks share every layer.
        roles: the rank that computes prompts and the one that decodes; none where all ranks do both.
        grid: of ranks that share their KV caches by position, see `ContextPlan`; none where no ranks do.
        rows: each rank's share of a prompt's rows; none where rows are not divided.
        planned: what else the plan says, as JSON.
        same_bits: promise the bits of any other number of ranks, see `load_model`.
        xray: file for a recording of the first answer, stage by stage; none where it is empty.
        speculate, draft, draft_max: see `Speculation`.
        prompts: answered one after the other; none for one that suits the model.
        chat: more of them come from the head rank's standard input, a line each, and all are one conversation.
            Otherwise
            every prompt is answered for itself.
        max_tokens, temperature, top_k, top_p, seed: see `Sampling`.
        controls: also run on one rank alone, and on all ranks with one dtype.
        patience: seconds that the ranks wait for one that died to come back; 0 ends the run instead.
        topology, order, timeout: see `hostring.init`; of the ranks that the demo starts.
    """

    model: str
    dtypes: tuple[str, ...]
    prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    controls: bool
    chat: bool = False
    patience: float = 300.0
    devices: tuple[str, ...] = ()
    compile: tuple[str, ...] = ()
    compute: str = "auto"
    plan: str = "even"
    shares: tuple[tuple[int, ...], ...] = ()
    stages: tuple[tuple[int, ...], ...] = ()
    roles: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    rows: tuple[float, ...] = ()
    planned: str = ""
    same_bits: bool = False
    xray: str = ""
    speculate: str = OFF
    draft: str = ""
    draft_max: int = DEFAULT_MOST
    topology: str = "auto"
    order: str = "rank"
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.speculation.on and (self.xray or asks_for_roles(self.plan)):
            what = "--xray records" if self.xray else f"--plan {self.plan} hands over after"
            raise ValueError(f"{what} steps of one row; leave --speculate and --draft out")

    @property
    def speculation(self) -> Speculation:
        return Speculation(self.speculate, self.draft, self.draft_max)

    def compile_of(self, rank: int) -> bool | str:
        """What `load_model` is told."""
        return self.compile[rank] or False if self.compile else False

    def computes_in(self, rank: int) -> str:
        """What is known of a rank's arithmetic before it has loaded: its dtype, "packed", or "" for one of the two."""
        may_pack = self.compute != "exact" and self.model.lower().endswith(".gguf")
        return self.dtypes[rank] if not may_pack else "packed" if self.compute == "packed" else ""

    @property
    def split(self) -> ShardPlan | StagePlan | ContextPlan | Roles | RowPlan | None:
        """What was planned: shares, stages, a grid, roles or rows; None for even shares, and where the ranks plan."""
        if self.grid:
            return ContextPlan(*self.grid)
        if self.stages:
            return StagePlan(*self.stages)
        if self.roles:
            return Roles(*self.roles)
        if self.rows:
            return RowPlan(self.rows)
        return ShardPlan(*self.shares) if self.shares else None

    @property
    def compiles(self) -> bool:
        """Whether any rank compiles."""
        return any(self.compile)

    @property
    def ranks(self) -> int:
        return len(self.dtypes)

    @property
    def several(self) -> bool:
        """More than one prompt may come."""
        return self.chat or len(self.prompts) > 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        names = ("dtypes", "prompts", "devices", "compile", "roles", "grid", "rows")
        lists = {name: tuple(fields[name]) for name in names}
        nested = {name: tuple(map(tuple, fields[name])) for name in ("shares", "stages")}
        return Job(**{**fields, **lists, **nested})


def make_job(
    *,
    model: str | None,
    ranks: int | None,
    dtypes: str | None,
    prompts: Sequence[str],
    devices: str | None = None,
    compile: str | None = None,
    **rest: Any,
) -> Job:
    """Complete and check what the user said, before any process starts.

    Args:
        model: a path or a Hugging Face repository; the bundled model when None.
        ranks: 2, or as many as `dtypes` or `devices` names, when None.
        dtypes: names separated by commas: one for all ranks, or one per rank. float16 and bfloat16 in turn when None.
        devices: names alike, see `find_device`; whether they are here is not asked. Left open when None.
        compile: "on", "off", or a backend of `torch.compile`, alike.
        prompts, rest: the other attributes of `Job`.

    Raises:
        ValueError: names that are unknown, numbers that don't go together, or more ranks than the model has query
            heads.
        FileNotFoundError: no such model.
    """
    path = find_model(BUNDLED if model is None else model)
    if ranks is not None and ranks < 1:
        raise ValueError(f"{ranks} ranks: at least one is needed")
    _check_prompts(prompts)
    if (compute := rest.get("compute", "auto")) not in COMPUTES:
        raise ValueError(f"compute {compute!r} is not one of {', '.join(COMPUTES)}")
    places = () if devices is None else tuple(name.strip() for name in devices.split(","))
    one_dtype = dtypes is None or "," not in dtypes
    if ranks is None and len(places) > 1 and one_dtype:
        ranks = len(places)
    asked = _asked_for(rest.get("plan", EVEN), path, ranks, compute)
    if ranks is None and one_dtype and asked is not None:
        ranks = (asked.plan if isinstance(asked, PlanFile) else asked).world_size
    kinds = _dtypes(ranks, dtypes)
    job = Job(
        str(path.absolute()),
        kinds,
        tuple(prompts),
        devices=places and _per_rank(places, len(kinds), "devices"),
        compile=_compile(compile, len(kinds)),
        **rest,
    )
    return _placed(job, asked)


def _placed(job: Job, asked: Asked) -> Job:
    """`job` with what was asked for, as far as that is known before its ranks start."""
    if isinstance(asked, StagePlan):
        return _staged(job, asked)
    if isinstance(asked, Roles | RowPlan):
        return _with_copies(job, asked)
    if isinstance(asked, ContextPlan):
        return _on_grid(job, asked)
    if job.ranks > _MAX_UNCHECKED_RANKS:
        ShardPlan.balanced(read_model_file(job.model).config, job.ranks)
    return _planned(job, asked)


def _asked_for(wish: str, path: Path, ranks: int | None, compute: str) -> Asked:
    """What `wish` says before the ranks start; None where they share the model out themselves."""
    if is_stage_plan(wish):
        return stage_plan(wish, read_model_file(path).config, ranks)
    if is_context_plan(wish):
        return context_plan(wish, ranks)
    if asks_for_rows(wish):
        return row_plan(wish, ranks)
    return roles(wish, ranks) if asks_for_roles(wish) else plan_of_file(wish, path, compute)


def _with_copies(job: Job, plan: Roles | RowPlan) -> Job:
    """`job` with a plan by which every rank holds the whole model."""
    if job.xray or (isinstance(plan, RowPlan) and job.speculation.on):
        what = "no sums to record; leave --xray" if job.xray else "logits of last rows only; leave --speculate, --draft"
        raise ValueError(f"--plan {job.plan} has {what} or --plan {job.plan} out")
    if isinstance(plan, Roles):
        plan.check(job.ranks)
        return replace(job, roles=(plan.prefill, plan.decode))
    plan = row_plan(job.plan, job.ranks)  # even shares are those of so many ranks as there are dtypes
    if why := why_not_divided(plan, job.ranks, job.compute, compile=job.compiles, same_bits=job.same_bits):
        raise ValueError(why)
    return replace(job, rows=plan.shares, compute="exact")


def _staged(job: Job, stages: StagePlan) -> Job:
    """`job` with stages, where there are several."""
    stages.check(read_model_file(job.model).config, job.ranks)
    if job.xray and len(stages.layers) > 1:
        raise ValueError(f"--plan {job.plan}: stages hold other layers, and aren't recorded; leave --xray or pp= out")
    return job if len(stages.layers) == 1 else replace(job, stages=(stages.layers, stages.ranks))


def _on_grid(job: Job, grid: ContextPlan) -> Job:
    if why := why_not_shared(grid, job.ranks, job.compute, compile=job.compiles, same_bits=job.same_bits):
        raise ValueError(why)
    grid.shares(read_model_file(job.model).config)
    return replace(job, grid=(grid.context, grid.heads))


def _planned(job: Job, plan: PlanFile | None) -> Job:
    """`job` with the shares that are known before its ranks start."""
    if job.plan == BYTES:
        plan = plan_by_bytes(Path(job.model), job.ranks, job.compute)
    if job.plan == PLACE:
        plan = plan_of_places(Path(job.model), job.ranks)
    if plan is None:
        return job
    shares = plan.plan
    if shares.world_size != job.ranks:
        raise ValueError(
            f"the plan {plan.source} is for {shares.world_size} ranks, and there are {job.ranks}; start "
            f"{shares.world_size}, or plan again with: hostring plan model {job.model} --ranks {job.ranks}"
        )
    about = json.dumps({"left_out": plan.left_out, "predicted": plan.fields.get("predicted")})
    return replace(job, shares=as_lists(shares), planned=about)


def _check_prompts(prompts: Sequence[str]) -> None:
    if "" in prompts:
        raise ValueError(
            "a prompt is empty: say what to continue or to answer, or leave it out for one that suits the model"
        )
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"the prompt {ascii(prompt)[:60]} is not text in UTF-8: {exc.reason}") from None


def _compile(text: str | None, ranks: int) -> tuple[str, ...]:
    names = [] if text is None else [_COMPILE.get(name.strip(), name.strip()) for name in text.split(",")]
    return _per_rank(tuple(names), ranks, "choices of --compile") if any(names) else ()


def _dtypes(ranks: int | None, text: str | None) -> tuple[str, ...]:
    if text is None:
        return tuple(DTYPE_NAMES[rank % 2] for rank in range(ranks or 2))
    names = [_SHORT.get(name.strip(), name.strip()) for name in text.split(",")]
    unknown = [name for name in names if name not in DTYPE_NAMES]
    if unknown:
        raise ValueError(f"dtype {unknown[0]!r} is not one of {', '.join(DTYPE_NAMES)}")
    return _per_rank(tuple(names), ranks or max(2, len(names)), "dtypes")


def _per_rank(names: tuple[str, ...], ranks: int, what: str) -> tuple[str, ...]:
    if len(names) not in (1, ranks):
        raise ValueError(f"{len(names)} {what} for {ranks} ranks; name one for all, or one per rank")
    return names if len(names) == ranks else names * ranks
