"""The structures of the C library, field by field as in its headers."""

from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int64, c_uint64, c_void_p


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
        *((n, c_void_p) for n in ("tokens", "positions", "mask")),
        *((n, c_int64) for n in ("stride", "free", "rows", "start", "threads")),
        *((n, c_void_p) for n in ("hidden", "work")),
    )


class Growth(Structure):
    """A dynamic tree: kernels/growth.h."""

    _fields_ = (
        *((n, c_void_p) for n in ("parents", "depths", "mask", "seconds")),
        *((n, c_double) for n in ("rate", "gate")),
        *((n, c_int64) for n in ("nodes", "most")),
        *((n, c_void_p) for n in ("chosen", "own_parents", "own_depths", "own_mask")),
        *((n, c_int64) for n in ("stride", "count", "deepest", "asked")),
    )


class Proposal(Structure):
    """One draft of the heads: kernels/heads.h."""

    _fields_ = (
        *((n, c_void_p) for n in ("panels", "lm_panels", "bias", "lm_bias", "names", "hidden")),
        *((n, c_void_p) for n in ("states", "logits", "values", "sums", "places", "index")),
        *((n, c_void_p) for n in ("tokens", "shares")),
        ("growth", POINTER(Growth)),
        *((n, c_int64) for n in ("layers", "heads", "used", "hidden_size", "size", "width")),
        *((n, c_int64) for n in ("nodes", "root", "threads", "is_half")),
    )


class Verdict(Structure):
    """The acceptance of one draft by its logits: kernels/judge.h."""

    _fields_ = (
        *((n, c_void_p) for n in ("logits", "parents", "depths", "tokens", "own", "path")),
        *((n, c_void_p) for n in ("at_parent", "entropies", "noise", "sums", "thresholds")),
        ("seed", c_uint64),
        *((n, c_int64) for n in ("rows", "size", "place", "deepest", "threads", "is_typical")),
        *((n, c_int64) for n in ("length", "is_finite")),
        *((n, c_float) for n in ("temperature", "epsilon", "alpha", "least", "certainty")),
    )


class Step(Structure):
    """A whole step: kernels/step.c."""

    _fields_ = (
        ("draft", POINTER(Proposal)),
        ("work", POINTER(Pass)),
        ("verdict", POINTER(Verdict)),
        *((n, c_void_p) for n in ("lm_panels", "lm_bias", "tokens", "positions", "logits")),
        ("last", c_void_p),
        ("is_text", c_int64),
        *((n, c_double) for n in ("drafting", "passing", "whole")),
    )


class Account(Structure):
    """What an answer may spend on drafts: kernels/account.h."""

    _fields_ = (
        ("prices", c_void_p),
        *((n, c_double) for n in ("plain", "enough", "rate", "share", "least", "sure", "strict")),
        *((n, c_double) for n in ("most", "weight")),
        *((n, c_int64) for n in ("count", "usual", "proof", "asks")),
        *((n, c_double) for n in ("balance", "credit", "pace")),
        *((n, c_int64) for n in ("certain", "length")),
    )


class Run(Structure):
    """Steps one after another: kernels/run.c."""

    _fields_ = (
        ("step", POINTER(Step)),
        ("account", POINTER(Account)),
        *((n, c_void_p) for n in ("ends", "ids", "times")),
        *((n, c_int64) for n in ("end_count", "rows", "stride", "longest")),
        *((n, c_int64) for n in ("most_steps", "most_tokens", "last_start", "count")),
        *((n, c_double) for n in ("seconds", "certainty", "least", "whole")),
    )
