"""The structures of the C library, field by field as in its headers."""

from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_uint64, c_void_p


class Product(Structure):
    """One product with packed weights: kernels/product.h."""

    _fields_ = (
        *((n, c_void_p) for n in ("x", "w", "bias", "y")),
        *((n, c_int) for n in ("rows", "ins", "outs", "adds", "is_half")),
    )


class Layer(Structure):
    """The weights and caches of one layer: kernels/pass.h."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("before", "qkv_bias", "out_bias", "after", "gate_up_bias", "down_bias"),
            *("qkv", "out", "gate_up", "down", "keys", "values"),
        )
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
        *((n, c_int64) for n in ("stride", "free", "rows", "start", "threads")),
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
        *((n, c_void_p) for n in ("panels", "bias", "hidden", "states")),
        *((n, c_int64) for n in ("layers", "heads", "used", "size", "is_half")),
        *((n, c_void_p) for n in ("root_panels", "root")),
    )
