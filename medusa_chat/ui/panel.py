"""The panel beside the talk as data: figures, bars, and the picture of one step. No gradio."""

from typing import Any

from medusa_chat.ui.answer import Answer
from medusa_chat.ui.tree_view import step_view, to_line

MAX_BARS = 240


def figures(answer: Answer, plain: float | None) -> dict[str, Any]:
    """The numbers beside the picture. plain: tokens per second of plain decoding, measured
    on this model."""
    first, steps = answer.prefilled, len(answer.steps)
    used = first.prompt_tokens + len(first.token_ids) + answer.tokens if first else None
    return {
        "rate": _round(answer.rate),
        "per_step": _round(answer.tokens / steps if steps else None),
        "ms": _round(answer.seconds / steps * 1000 if steps else None),
        "steps": steps,
        "used": used,
        "context": first.context or None if first else None,
        "plain": _round(plain),
        "ratio": _round(answer.rate / plain if answer.rate and plain else None),
        "is_plain": answer.is_plain,
        "prefill_ms": _round(first.seconds * 1000 if first else None),
    }


def panel_line(answer: Answer, plain: float | None, index: int | None = None) -> str:
    """JSON for the picture: figures, bars, and step `index` (None: the latest)."""
    first = max(0, len(answer.steps) - MAX_BARS)
    settings = answer.prefilled.settings if answer.prefilled else {}
    is_pinned = index is not None and index < len(answer.steps)
    place = -1 if index is None or not is_pinned else index
    step = answer.steps[place] if answer.steps else None
    return to_line(
        {
            "answer": answer.number,
            "pinned": is_pinned,
            "drafter": settings.get("drafter"),
            "acceptance": settings.get("acceptance"),
            "temperature": settings.get("temperature"),
            "epsilon": settings.get("posterior_threshold"),
            "delta": settings.get("posterior_alpha"),
            "figures": figures(answer, plain),
            "first": first,
            "bars": [len(step.token_ids) for step in answer.steps[first:]],
            "step": step_view(step) if step else None,
        }
    )


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
