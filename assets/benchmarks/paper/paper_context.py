"""PaperContext: what the paper's studies read beside what `medusa-chat bench` does."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from report_data import Report

from medusa_chat.bench.context import BenchContext, read_model
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError


@dataclass(frozen=True)
class PaperContext(BenchContext):
    """data: conversations for the studies that train. reference: a checkout of the paper's own
    code. medusa_2: a checkpoint of `train --method medusa-2` for the ladder. settings: acceptance
    and temperature of the report's answers; report: where these are kept."""

    data: Path | None = None
    reference: Path | None = None
    medusa_2: Path | None = None
    settings: GenerationSettings = field(default_factory=GenerationSettings)
    report: Report = field(default_factory=Report)


def with_checkpoint(context: PaperContext, checkpoint: Path) -> PaperContext:
    """The same options for another checkpoint. Raises UsageError for one without heads."""
    wanted = replace(context.request, checkpoint=str(checkpoint), backbone=None)
    loaded = read_model(wanted, context.progress)
    if not loaded.info.heads:
        raise UsageError(f"{checkpoint} has no Medusa heads: give a checkpoint that has")
    return replace(context, request=wanted, loaded=loaded)
