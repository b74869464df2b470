"""NativeLibrary: the C library's functions and structures, and the threads of a call."""

from ctypes import (
    CDLL,
    POINTER,
    Structure,
    c_char_p,
    c_float,
    c_int,
    c_int64,
    c_uint64,
    c_void_p,
)
from typing import Any


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one kind, in order."""
    return [(name, kind) for name in names.split()]


class Weights(Structure):
    """Packed weights: kernels/weights.h."""

    _fields_ = [("panels", c_void_p), ("kind", c_int64)]


class Product(Structure):
    """One product with packed weights: kernels/product.h."""

    _fields_ = [
        ("x", c_void_p),
        ("weights", Weights),
        *_all(c_void_p, "bias y"),
        *_all(c_int, "rows ins outs adds stride"),
    ]


class Linear(Structure):
    """A linear of a layer: kernels/pass.h."""

    _fields_ = [("weights", Weights), ("bias", c_void_p)]


class Experts(Structure):
    """A layer's experts: kernels/pass.h."""

    _fields_ = [("router", Linear), *_all(c_int64, "count chosen is_normed")]


class Layer(Structure):
    """One layer, by what it computes, and its caches: kernels/pass.h."""

    _fields_ = [
        *_all(c_void_p, "before beside mixed after fed query_norm key_norm value_norm own_norm"),
        *_all(c_void_p, "cosines sines growth"),
        *_all(Linear, "query key value out gate up down own_gate own_out"),
        ("experts", Experts),
        *_all(c_void_p, "sinks keys values"),
        *_all(c_int64, "heads kv_heads head_dim rotary inner window gates"),
        *_all(c_float, "scaling cap residual alpha limit scale"),
    ]


class OwnInputs(Structure):
    """What each layer reads of a token beside the residual: kernels/pass.h."""

    _fields_ = [
        ("embedding", c_void_p),
        ("table", Weights),
        ("projection", Linear),
        ("norm", c_void_p),
        ("width", c_int64),
        ("factor", c_float),
    ]


class Decoder(Structure):
    """What all layers share: kernels/pass.h."""

    _fields_ = [
        *_all(c_int64, "count hidden capacity vocabulary is_half"),
        *_all(c_float, "epsilon embedding_scale"),
        ("embedding", c_void_p),
        ("table", Weights),
        ("norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("own", OwnInputs),
    ]


class Pass(Structure):
    """One pass of the decoder: kernels/pass.h."""

    _fields_ = [
        ("decoder", POINTER(Decoder)),
        *_all(c_void_p, "tokens positions texts taps mask states"),
        *_all(c_int64, "stride rows start keys tap_count threads"),
        *_all(c_void_p, "hidden tapped work"),
    ]


class Draw(Structure):
    """A sample of each row of scores: kernels/draw.h."""

    _fields_ = [
        *_all(c_void_p, "scores depths places seeds work tokens unsure"),
        ("seed", c_uint64),
        *_all(c_int64, "rows size place top_k"),
        *_all(c_float, "scale top_p min_p"),
    ]


class Sums(Structure):
    """Sums over rows of scores: kernels/rows.h."""

    _fields_ = [
        *_all(c_void_p, "scores sums entropies"),
        *_all(c_int64, "rows size"),
        ("scale", c_float),
    ]


class Guesses(Structure):
    """The largest few of each row of scores: kernels/rows.h."""

    _fields_ = [*_all(c_void_p, "scores values sums places"), *_all(c_int64, "rows size count")]


class HeadStates(Structure):
    """The states of heads at one position: kernels/heads.h."""

    _fields_ = [
        *_all(Weights, "weights roots"),
        *_all(c_void_p, "bias hidden states"),
        *_all(c_int64, "layers heads used size"),
        ("root", c_void_p),
    ]


class HeadGuesses(Structure):
    """The best guesses of heads at one position: kernels/heads.h."""

    _fields_ = [
        ("states", HeadStates),
        ("logits", Product),
        ("guesses", Guesses),
        ("names", c_void_p),
    ]


SIGNATURES: dict[str, tuple[Any, ...]] = {  # of a function its result's type, then its arguments'
    "without": (c_char_p,),
    "run": (c_int64, POINTER(Pass)),
    "packed_size": (c_int64, c_int64, c_int64, c_int64),
    "pack": (None, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64),
    "unpack": (None, POINTER(Weights), c_int64, c_void_p, c_int64, c_void_p),
    "linear": (None, POINTER(Product), c_int64),
    "head_states": (None, POINTER(HeadStates), c_int64),
    "head_guesses": (None, POINTER(HeadGuesses), c_int64),
    "draw": (None, POINTER(Draw), c_int64),
    "draw_work": (c_int64, c_int64),
    "guesses": (None, POINTER(Guesses), c_int64),
    "row_sums": (None, POINTER(Sums), c_int64),
    "work_size": (c_int64, POINTER(Decoder), c_int64, c_int64, c_int64),
}


class NativeLibrary:
    """The C library's functions. c: the functions; threads: how many share the work of a call;
    panel_width: the outputs of one panel of packed weights on this CPU; without: the instructions
    of this CPU that gave wrong products, so that portable C does their work; empty for none."""

    def __init__(self, c: CDLL, threads: int) -> None:
        self.c, self.threads = c, threads
        self.panel_width = int(c.panel())
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(c, name)
            function.argtypes, function.restype = arguments, result
        self.without = c.without().decode()
