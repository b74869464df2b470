"""The precisions a model can be loaded at, and which of them take less memory than another."""

PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "nf4")  # what --precision takes
QUANTISED = ("int8", "nf4")  # by bitsandbytes


def smaller_precisions(precision: str) -> tuple[str, ...]:
    """The precisions that a load may fall back to because they take less memory, the largest first.
    int8 is none: bitsandbytes looks for outliers on the host in each of its products (220 times a
    step of a 7B model), so that it is slower than 16 bits. Only --precision int8 chooses it."""
    if precision == "fp32":
        return "bf16", "nf4"
    return () if precision == "nf4" else ("nf4",)
