"""The ggml inside the wheel of `xllamacpp`, bound by ctypes.

Nothing of this is a promised interface of that package. So its symbols and the layout of its tensors are checked when
it is loaded, and `Unavailable` says what is missing. The caller then computes with dequantised weights, and says so.
"""

from __future__ import annotations

import ctypes as C
import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "xllamacpp"
MIN_VERSION, NEXT_VERSION = (2026, 10), (2026, 11)
"""The first release that was tried, and the next one that was not. Earlier ones give a chunk of a prompt other bits
than its rows one by one."""

OBJECT_NBYTES: Final = 32  # of the header that a context puts before each tensor

Pointer = Any  # a C pointer, as an int


class Unavailable(RuntimeError):
    """There is no ggml that can be used here. The message says why, and what to try."""


class InitParams(C.Structure):
    """`struct ggml_init_params`."""

    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


class Tensor(C.Structure):
    """`struct ggml_tensor`. Written in two places: the length of the cached keys and values of a step, and how far
    apart the matrices of experts lie in a file."""

    _fields_ = [
        ("type", C.c_int),
        ("buffer", C.c_void_p),
        ("ne", C.c_int64 * 4),
        ("nb", C.c_size_t * 4),
        ("op", C.c_int),
        ("op_params", C.c_int * 16),
        ("flags", C.c_int),
        ("src", C.c_void_p * 10),
        ("view_src", C.c_void_p),
        ("view_offs", C.c_size_t),
        ("data", C.c_void_p),
        ("name", C.c_char * 64),
        ("extra", C.c_void_p),
        ("padding", C.c_char * 8),
    ]


class TypeTraits(C.Structure):
    """The beginning of `struct ggml_type_traits`."""

    _fields_ = [
        ("name", C.c_char_p),
        ("block", C.c_int64),
        ("interleaved", C.c_int64),
        ("block_nbytes", C.c_size_t),
        ("is_quantised", C.c_bool),
        ("to_float", C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int64)),
    ]


_P, _I, _L, _Z, _F, _B = C.c_void_p, C.c_int, C.c_int64, C.c_size_t, C.c_float, C.c_bool
_LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)

# name without "ggml_": result, arguments
SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "init": (_P, (InitParams,)),
    "free": (None, (_P,)),
    "type_size": (_Z, (_I,)),
    "blck_size": (_L, (_I,)),
    "get_type_traits": (C.POINTER(TypeTraits), (_I,)),
    "tensor_overhead": (_Z, ()),
    "new_tensor_1d": (_P, (_P, _I, _L)),
    "new_tensor_2d": (_P, (_P, _I, _L, _L)),
    "new_tensor_3d": (_P, (_P, _I, _L, _L, _L)),
    "view_1d": (_P, (_P, _P, _L, _Z)),
    "view_2d": (_P, (_P, _P, _L, _L, _Z, _Z)),
    "view_3d": (_P, (_P, _P, _L, _L, _L, _Z, _Z, _Z)),
    "reshape_2d": (_P, (_P, _P, _L, _L)),
    "reshape_3d": (_P, (_P, _P, _L, _L, _L)),
    "permute": (_P, (_P, _P, _I, _I, _I, _I)),
    "cont": (_P, (_P, _P)),
    "get_rows": (_P, (_P, _P, _P)),
    "set_rows": (_P, (_P, _P, _P, _P)),
    "rms_norm": (_P, (_P, _P, _F)),
    "mul": (_P, (_P, _P, _P)),
    "add": (_P, (_P, _P, _P)),
    "add_inplace": (_P, (_P, _P, _P)),
    "mul_mat": (_P, (_P, _P, _P)),
    "mul_mat_id": (_P, (_P, _P, _P, _P)),
    "out_prod": (_P, (_P, _P, _P)),
    "swiglu_split": (_P, (_P, _P, _P)),
    "rope_ext": (_P, (_P, _P, _P, _P, _I, _I, _I, _F, _F, _F, _F, _F, _F)),
    "flash_attn_ext": (_P, (_P, _P, _P, _P, _P, _F, _F, _F)),
    "new_graph_custom": (_P, (_P, _Z, _B)),
    "graph_overhead_custom": (_Z, (_Z, _B)),
    "build_forward_expand": (None, (_P, _P)),
    "backend_cpu_init": (_P, ()),
    "backend_free": (None, (_P,)),
    "backend_cpu_set_n_threads": (None, (_P, _I)),
    "backend_cpu_set_use_ref": (None, (_P, _B)),
    "backend_cpu_buffer_from_ptr": (_P, (_P, _Z)),
    "backend_buffer_free": (None, (_P,)),
    "backend_cpu_buffer_type": (_P, ()),
    "backend_tensor_alloc": (_I, (_P, _P, _P)),
    "backend_graph_plan_create": (_P, (_P, _P)),
    "backend_graph_plan_free": (None, (_P, _P)),
    "backend_graph_plan_compute": (_I, (_P, _P)),
    "backend_cpu_reg": (_P, ()),
    "backend_reg_dev_get": (_P, (_P, _Z)),
    "backend_reg_get_proc_address": (_P, (_P, C.c_char_p)),
    "backend_dev_supports_op": (_B, (_P, _P)),
    "backend_buft_name": (C.c_char_p, (_P,)),
    "backend_buft_alloc_buffer": (_P, (_P, _Z)),
    "backend_buft_get_alloc_size": (_Z, (_P, _P)),
    "backend_buffer_get_base": (_P, (_P,)),
    "backend_tensor_set": (None, (_P, _P, _Z, _Z)),
    "log_set": (None, (_LOG, _P)),
    "gallocr_new": (_P, (_P,)),
    "gallocr_free": (None, (_P,)),
    "gallocr_reserve": (_B, (_P, _P)),
    "gallocr_alloc_graph": (_B, (_P, _P)),
    "gallocr_get_buffer_size": (_Z, (_P, _I)),
}


_WARNING: Final = 3  # of ggml's levels; what it says of its own doings is below

_log = logging.getLogger(__name__)

INSTRUCTIONS: Final = (
    *("sse3", "ssse3", "avx", "avx_vnni", "avx2", "f16c", "fma", "bmi2", "avx512", "avx512_vbmi", "avx512_vnni"),
    *("avx512_bf16", "amx_int8", "neon", "arm_fma", "fp16_va", "dotprod", "matmul_int8", "sve", "sme", "llamafile"),
)
"""What ggml can say of itself, as ggml_cpu_has_…."""


class Ggml:
    """The library. Its functions are attributes, named as in SIGNATURES."""

    def __init__(self, file: Path) -> None:
        """Raises: Unavailable, when a symbol is missing or a tensor is laid out in another way."""
        self.file = file
        try:
            library = C.CDLL(str(file))
        except OSError as exc:
            raise Unavailable(f"{file.name} of {PACKAGE} can't be loaded: {exc}") from exc
        for name, (result, arguments) in SIGNATURES.items():
            try:
                function = getattr(library, f"ggml_{name}")
            except AttributeError:
                raise Unavailable(f"{file.name} of {PACKAGE} has no ggml_{name}; {_install()}") from None
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.log_set(_SAY, None)
        self._check_layout()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml_{name} is not bound; add it to SIGNATURES")

    def instructions(self) -> list[str]:
        """The instruction sets for which the kernels were built, of those that change their bits."""
        library = C.CDLL(str(self.file))
        names = [name for name in INSTRUCTIONS if hasattr(library, f"ggml_cpu_has_{name}")]
        return [name for name in names if getattr(library, f"ggml_cpu_has_{name}")()]

    def context(self, n_tensors: int, n_graphs: int = 0, graph_nodes: int = 0) -> Pointer:
        """A context with room for the descriptions of so many tensors and graphs; their data lies elsewhere."""
        nbytes = n_tensors * self.tensor_overhead() + n_graphs * self.graph_overhead_custom(graph_nodes, False) + 1024
        context = self.init(InitParams(nbytes, None, True))
        if not context:
            raise MemoryError(f"ggml has no memory for {n_tensors} tensors")
        return context

    def to_float(self, kind: int) -> Callable[[int, int, int], None]:
        """What converts blocks of an element type: from an address, to an address of float32, so many elements.

        Raises:
            Unavailable: the library describes its types in another way than expected.
        """
        traits = self.get_type_traits(kind).contents
        sizes, wanted = (traits.block, traits.block_nbytes), (self.blck_size(kind), self.type_size(kind))
        if sizes != wanted or not traits.to_float:
            raise Unavailable(f"a type of {PACKAGE} has another layout than expected ({sizes}, {wanted}); {_install()}")
        return traits.to_float  # type: ignore[no-any-return]

    def _check_layout(self) -> None:
        """Make two tensors and see that they read as `Tensor` says."""
        if self.tensor_overhead() != C.sizeof(Tensor) + OBJECT_NBYTES:
            sizes = f"{self.tensor_overhead()} bytes, {C.sizeof(Tensor) + OBJECT_NBYTES} were expected"
            raise Unavailable(f"a tensor of {PACKAGE} takes {sizes}; {_install()}")
        context = self.context(4)
        try:
            whole = self.new_tensor_3d(context, 0, 3, 5, 7)
            part = self.view_2d(context, whole, 2, 5, 12, 24)
            w, p = at(whole), at(part)
            read = (w.type, list(w.ne), list(w.nb), list(p.ne), p.view_src, p.view_offs)
            if read != (0, [3, 5, 7, 1], [4, 12, 60, 420], [2, 5, 1, 1], whole, 24):
                raise Unavailable(f"a tensor of {PACKAGE} has another layout than expected ({read}); {_install()}")
        finally:
            self.free(context)


def at(tensor: Pointer) -> Tensor:
    """The struct that a pointer leads to."""
    return C.cast(tensor, C.POINTER(Tensor)).contents


def _say(level: int, text: bytes, _: object) -> None:
    """Passes ggml's warnings on, and nothing else: it would write a line for every matrix that it lays out."""
    if level >= _WARNING:
        _log.warning("ggml: %s", text.decode(errors="replace").rstrip())


_SAY = _LOG(_say)  # as long as the library is loaded


def _install() -> str:
    wanted = f">={'.'.join(map(str, MIN_VERSION))},<{'.'.join(map(str, NEXT_VERSION))}"
    return f"install a release that was tried: pip install '{PACKAGE}{wanted}'"


def _find() -> Path:
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        raise Unavailable(f"{PACKAGE} is not installed; pip install 'hostring[packed]'") from None
    numbers = tuple(int(n) if n.isdigit() else 0 for n in found.split(".")[:2])
    if not MIN_VERSION <= numbers < NEXT_VERSION:
        raise Unavailable(f"{PACKAGE} {found} was not tried with hostring; {_install()}")
    spec = importlib.util.find_spec(PACKAGE)
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob(f"{PACKAGE}*.so"))
    if not files:
        raise Unavailable(f"{PACKAGE} {found} has no compiled library for {sys.platform}; {_install()}")
    return files[0]


@cache
def load() -> Ggml:
    """The library, loaded once.

    Raises:
        Unavailable: there is none that can be used; says why.
    """
    return Ggml(_find())
