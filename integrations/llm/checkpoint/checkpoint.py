"""What every kind of checkpoint offers: slices of tensors under HF names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from hostring.integrations.llm.checkpoint.layout import TensorSlice, slices_of_rank
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan

_MAX_NAMED = 5  # tensors in one error


class Checkpoint(Protocol):
    """Tensors under HF names, whatever the file format.

    Attributes:
        config: shapes and options of the whole model.
        bytes_read: bytes of tensor data touched so far.
    """

    config: ModelConfig
    bytes_read: int

    def prepare(self, parts: Iterable[TensorSlice]) -> None:
        """All of these are going to be read: where they are sent here, they come at once."""

    def read(self, part: TensorSlice) -> Tensor:
        """The values of `part`, in the dtype of the file (f32 where the file is block-quantised).

        Raises:
            ValueError: the tensor is missing or has another shape.
        """


def missing(source: object, name: str, shape: tuple[int, ...]) -> ValueError:
    """The error for a tensor that the config implies and the checkpoint lacks."""
    why = "; biases of matrices that are used together come together" if name.endswith(".bias") else ""
    return ValueError(f"{source} has no tensor {name} of shape {shape}; the config says that the model has one{why}")


def check_shape(source: object, name: str, implied: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless the tensor has the shape that the config implies."""
    if shape != implied:
        raise ValueError(f"{source}: {name} has shape {shape}, the config implies {implied}")


def wanted_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that the decoder reads, over all ranks."""
    whole = ShardPlan((config.num_key_value_heads,), (config.intermediate_size,), (config.vocab_size,))
    return {part.name: part.shape for parts in slices_of_rank(config, whole, 0).values() for part in parts}


def check_tensors(
    source: object,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    harmless: Callable[[str], bool],
    named: Callable[[str], str] = str,
) -> None:
    """Raise a ValueError unless the decoder reads every tensor of the file, and the file has all that it reads.

    Args:
        shapes: of the tensors in the file, by name.
        harmless: whether a tensor that is not read changes nothing.
        named: from the HF name to that of the file.
    """
    wanted = {named(name): shape for name, shape in wanted_tensors(config).items()}
    unread = sorted(name for name in shapes if name not in wanted and not harmless(name))
    for name, shape in wanted.items():
        if name not in shapes:
            error = missing(source, name, shape)
            raise ValueError(f"{error}. It has {_listed(unread)} instead") if unread else error
        check_shape(source, name, shape, shapes[name])
    if unread:
        raise ValueError(
            f"{source} has {_listed(unread)}, which a {config.model_type} decoder as its config describes it does not "
            "read; the result would be wrong without. Layouts of this kind (quantised in parts, mixtures of experts, "
            "biases or norms in other places) are not supported"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more tensors" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
