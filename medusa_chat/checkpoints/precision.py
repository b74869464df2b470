"""The precisions a model can be loaded at, and which of them take less memory than another."""

PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "nf4")  # what --precision takes
QUANTISED = ("int8", "nf4")  # on a CPU by our C where there is a compiler, else by bitsandbytes


def smaller_precisions(precision: str, in_c: bool = False) -> tuple[str, ...]:
    """The precisions that a load may fall back to because they take less memory, the largest first.
    in_c: whether our C would multiply what is quantised. On a GPU int8 is none of them: nf4 takes
    half of its memory and a shorter step, and only --precision int8 chooses it."""
    falling = ("fp32", "bf16", "int8", "nf4") if in_c else ("fp32", "bf16", "nf4")
    alike = "bf16" if precision in ("fp16", *(() if in_c else ("int8",))) else precision
    return falling[falling.index(alike) + 1 :]
