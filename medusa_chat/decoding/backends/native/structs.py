"""The structures of the C library, field by field as in its headers."""

from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p


class Weights(Structure):
    """Weights in panels: kernels/weights.h."""

    _fields_ = (
        ("panels", c_void_p),
        *((n, c_int32) for n in ("kind", "block", "has_floor", "is_wide")),
    )


class Product(Structure):
    """One product with weights in panels: kernels/product.h."""

    _fields_ = (
        ("x", c_void_p),
        ("weights", Weights),
        *((n, c_void_p) for n in ("bias", "y")),
        *((n, c_int) for n in ("rows", "ins", "outs", "adds", "stride")),
    )


class Layer(Structure):
    """The weights and caches of one layer: kernels/pass.h."""

    _fields_ = (
        *((n, c_void_p) for n in ("before", "qkv_bias", "out_bias", "after")),
        *((n, c_void_p) for n in ("gate_up_bias", "down_bias")),
        *((n, Weights) for n in ("qkv", "out", "gate_up", "down")),
        *((n, c_void_p) for n in ("keys", "values")),
    )


class Decoder(Structure):
    """What all layers share: kernels/pass.h."""

    _fields_ = (
        *((n, c_int64) for n in ("count", "hidden", "heads", "kv_heads", "head_dim")),
        *((n, c_int64) for n in ("inner", "capacity", "vocabulary", "is_half")),
        *((n, c_float) for n in ("epsilon", "scaling")),
        *((n, c_void_p) for n in ("embedding", "norm", "cosines", "sines")),
        ("layers", POINTER(Layer)),
    )


class Pass(Structure):
    """One pass of the decoder: kernels/pass.h."""

    _fields_ = (
        ("decoder", POINTER(Decoder)),
        *((n, c_void_p) for n in ("tokens", "positions", "texts", "mask")),
        *((n, c_int64) for n in ("stride", "free", "rows", "start", "keys", "threads")),
        *((n, c_void_p) for n in ("hidden", "work")),
    )


class Draw(Structure):
    """The largest of rows of scores, with noise: kernels/rows.h."""

    _fields_ = (
        *(
            (n, c_void_p)
            for n in ("scores", "depths", "places", "seeds", "noise", "gaps", "tokens")
        ),
        ("seed", c_uint64),
        *((n, c_int64) for n in ("rows", "size", "place", "deepest")),
    )


class Sums(Structure):
    """Sums over rows of scores: kernels/rows.h."""

    _fields_ = (
        *((n, c_void_p) for n in ("scores", "sums", "entropies")),
        *((n, c_int64) for n in ("rows", "size")),
    )


class Guesses(Structure):
    """The largest of rows of scores: kernels/rows.h."""

    _fields_ = (
        *((n, c_void_p) for n in ("scores", "values", "sums", "places")),
        *((n, c_int64) for n in ("rows", "size", "count")),
    )


class HeadStates(Structure):
    """The states of heads at one position: kernels/heads.h."""

    _fields_ = (
        *((n, Weights) for n in ("weights", "roots")),
        *((n, c_void_p) for n in ("bias", "hidden", "states")),
        *((n, c_int64) for n in ("layers", "heads", "used", "size")),
        ("root", c_void_p),
    )


class HeadGuesses(Structure):
    """The best guesses of heads at one position: kernels/heads.h."""

    _fields_ = (
        *(("states", HeadStates), ("logits", Product), ("guesses", Guesses)),
        ("names", c_void_p),
    )
