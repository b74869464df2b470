"""The model card of a trained checkpoint: README.md, and what it tells of the calibration."""

import re
from collections.abc import Sequence
from pathlib import Path

from medusa_chat import __version__, paths
from medusa_chat.checkpoints.locate import CALIBRATION_FILE
from medusa_chat.training.checkpoint_writer import Base, Calibrated
from medusa_chat.training.recipe import Recipe

FIGURES = re.compile(  # of a card, as `_figures` writes them
    r"^Measured on .*\n\r?\n\| head \| top-1 \| top-5 \|\r?\n(\|.*\n)+\r?\n"
    r"Tokens a step expected .*[^\r\n]",
    re.MULTILINE,
)


def model_card(base: Base, recipe: Recipe, data: Sequence[str], calibrated: Calibrated) -> str:
    """README.md of the checkpoint. data: the names of the files."""
    front = ["---", "library_name: medusa-chat", "tags: [medusa, speculative-decoding]"]
    if base.folder is None:
        front.append(f"base_model: {base.name}")
    whole = recipe.method == "medusa-2" and recipe.output == "merged"
    kind = "A whole model with its heads" if whole else "Heads; the backbone is not in here"
    answers = " (its prompts, answered by the backbone itself)" if recipe.distill else ""
    lm = "an LM head each" if recipe.own_lm_head else "the backbone's LM head"
    return "\n".join(
        [
            *front,
            "---",
            "",
            f"# Medusa heads for {base.name}",
            "",
            f"{kind}. {recipe.heads} heads of {recipe.head_layers} residual layers, with {lm}; "
            f"{recipe.method}, recipe {recipe.name}, made by medusa-chat {__version__}.",
            "",
            f"- Backbone: {base.name}",
            f"- Data: {', '.join(data)}{answers}",
            f"- Settings: {_settings(recipe)}",
            "",
            _figures(calibrated),
            "",
            "    medusa-chat --checkpoint THIS_FOLDER",
            "",
        ]
    )


def renew_figures(card: Path, calibrated: Calibrated) -> bool:
    """Put a new calibration's figures in place of those that `model_card` wrote -> whether they
    are there; all else of the card stays. Raises OSError."""
    try:
        text = card.read_bytes().decode() if card.is_file() else ""
    except UnicodeError:  # not one of ours
        return False
    end = "\r\n" if "\r\n" in text else "\n"
    figures = _figures(calibrated).replace("\n", end)
    found, count = FIGURES.subn(lambda _: figures, text, count=1)
    if count:
        mode = card.stat().st_mode
        paths.write_text(card, found)
        card.chmod(mode)
    return count > 0


def _figures(calibrated: Calibrated) -> str:
    promised = ", ".join(f"{tokens:.2f} with {n}" for n, tokens in calibrated.expected.items())
    return "\n".join(
        [
            f"Measured on {calibrated.measured_on} ({calibrated.positions:,} positions):",
            "",
            "| head | top-1 | top-5 |",
            "|---|---|---|",
            *(
                f"| {head} | {row[0]:.3f} | {sum(row[:5]):.3f} |"
                for head, row in enumerate(calibrated.accuracies, start=1)
            ),
            "",
            f"Tokens a step expected of the tree in `{CALIBRATION_FILE}`, by nodes: {promised}.",
        ]
    )


def _settings(recipe: Recipe) -> str:
    shown = [
        f"learning rate {recipe.learning_rate:g} (heads {recipe.head_learning_rate:g})",
        f"{recipe.max_steps} steps" if recipe.max_steps else f"{recipe.epochs} epochs",
        f"{recipe.batch_tokens} tokens a batch",
        f"decay {recipe.decay:g}, seed {recipe.seed}",
    ]
    if recipe.method == "medusa-2":
        shown.append(f"LoRA {recipe.lora_rank}, lambda0 {recipe.lambda0:g}")
    return ", ".join(shown)
