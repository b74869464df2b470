"""Native: a Llama-like decoder of fp32 or bf16 on a CPU as one call into C (kernels/decoder.c).

A step of a small model is a hundred operators, each of which takes torch longer to begin than to
do. One call does them all, and sums every number in one order, so a tree's rows are bit-equal to
plain decoding's. The rules of a step are not here (step.py). Its reference is the decoder of
merged layers (fused_layers.py), which also runs whatever this one does not support.
"""

from medusa_chat.decoding.backends.native.attach import (
    can_run,
    convert,
    layout,
    native_step,
    round_linears,
)
from medusa_chat.decoding.backends.native.decoder import NativeStep
from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.texts import NativeTexts

__all__ = [
    "NativeStep",
    "NativeTexts",
    "NativeThreads",
    "can_run",
    "convert",
    "layout",
    "native_step",
    "round_linears",
]
