"""Sliding windows in a HF `config.json`: which layers have one. Models say it in different fields."""

from __future__ import annotations

from hostring.integrations.llm.checkpoint.fields import Fields

_IN_ALL_LAYERS = ("mistral", "mixtral")
_IN_LATER_LAYERS = ("qwen2", "qwen3")  # where use_sliding_window is true
_WITH_SWITCH = (*_IN_LATER_LAYERS, "smollm3", "qwen3_moe", "qwen2_moe")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def windows_from_hf(fields: Fields, kind: str) -> tuple[int, ...]:
    """The window of each layer, 0 for none; empty where no window is shorter than what the model was made for.

    Raises:
        ValueError: a window in a model whose layers are not known to have any.
    """
    layers, longest = fields.whole("num_hidden_layers"), fields.whole("max_position_embeddings", 2048)
    slides = fields.flag("use_sliding_window") if kind in _WITH_SWITCH else fields.get("sliding_window") is not None
    if kind not in _WITH_SWITCH:
        fields.only("use_sliding_window", False)
    types = _types(fields, layers, kind in _IN_LATER_LAYERS and slides)
    if not slides:
        fields.ignore(("sliding_window",))  # without use_sliding_window it has no effect
        return ()
    if kind not in _IN_ALL_LAYERS + _IN_LATER_LAYERS and kind in _WITH_SWITCH:
        raise fields.wrong("use_sliding_window", f"false: sliding windows of {kind} models are not supported")
    window = fields.whole("sliding_window", 4096)
    if window >= longest:
        return ()
    if kind in _IN_ALL_LAYERS:
        return (window,) * layers
    if kind not in _IN_LATER_LAYERS:
        raise fields.wrong("sliding_window", f"none: sliding windows of {kind} models are not supported")
    first = fields.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.wrong("max_window_layers", "a whole number")
    found = types or [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    windows = tuple(window if one == _SLIDING else 0 for one in found)
    return windows if any(windows) else ()


def _types(fields: Fields, layers: int, may_slide: bool) -> list[str]:
    """The types of layers that the file names, all of them known; empty where it names none."""
    types = fields.get("layer_types") or []
    accepted = (_FULL, _SLIDING) if may_slide else (_FULL,)
    odd = sorted({str(t) for t in types if t not in accepted}) if isinstance(types, list | tuple) else [str(types)]
    if odd:
        raise ValueError(
            f"{fields.source}: layer_types: layers of type {', '.join(odd)} are not supported; only "
            f"{' and '.join(accepted)} are"
        )
    if types and len(types) != layers:
        raise fields.wrong("layer_types", f"one type for each of {layers} layers")
    return list(types)
