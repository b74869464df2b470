"""The precisions a model can be loaded at, and which of them take less memory than another."""

PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "nf4")  # what --precision takes
QUANTISED = ("int8", "nf4")  # by bitsandbytes
BY_MEMORY = ("bf16", "int8", "nf4")  # what a load may fall back to, the largest first


def smaller_precisions(precision: str) -> tuple[str, ...]:
    """The precisions that take less memory than `precision`, the largest first."""
    if precision in BY_MEMORY:
        return BY_MEMORY[BY_MEMORY.index(precision) + 1 :]
    return BY_MEMORY if precision == "fp32" else BY_MEMORY[1:]
