"""Keeping: how the weights of a checkpoint will lie in memory where our C multiplies them."""

from medusa_chat.checkpoints.cpu import this_cpu
from medusa_chat.checkpoints.device_plan import DevicePlan
from medusa_chat.checkpoints.gguf_blocks import stored_blocks
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory_estimate import is_rounded
from medusa_chat.decoding.backends.native.blocks import AS_IT_IS, Keep, Rounded, Widened

BITS = {"int8": 8, "nf4": 4}


def rounding(precision: str, device: str) -> Keep:
    """Rounded for a quantised precision where our C multiplies it on this device; else as it is."""
    is_ours = device == "cpu" and is_rounded(precision, this_cpu())
    return Rounded(BITS[precision]) if is_ours else AS_IT_IS


def keep_of(found: Checkpoint, plan: DevicePlan) -> Keep:
    """Rounded for a quantised precision, a GGUF file's own numbers in bf16, in fp32 bf16 where the
    files have it; as it is in all else, and where our C does not multiply. Raises ModelError."""
    rounded = rounding(plan.precision, plan.needs.device)
    if isinstance(rounded, Rounded):
        return rounded
    if plan.needs.widens(plan.precision):
        return Widened()
    return stored_blocks(found) if plan.is_native and plan.precision == "bf16" else AS_IT_IS
