"""`medusa-chat export`: writes a checkpoint's heads for vLLM, and prints the serving command."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from medusa_chat.cli.options import (
    PLACE,
    AsJson,
    Backbone,
    DataDir,
    Offline,
    named,
    prepare_process,
    value,
)
from medusa_chat.cli.terminal import json_line, show_load
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadPhase, LoadRequest
from medusa_chat.units import gb

if TYPE_CHECKING:
    from medusa_chat.checkpoints.vllm_export import VllmExport

FORMATS = ("vllm",)


@dataclass(frozen=True)
class Export:
    """Write Medusa heads in vLLM's format, and print the command that serves them."""

    output: Annotated[Path, Argument(metavar="DIR", help="New folder for the export.")]
    checkpoint: Annotated[
        str | None, value(PLACE, "Hub id, folder or GGUF file. Default: the demo.")
    ] = None
    backbone: Backbone = None
    format: Annotated[str, value("|".join(FORMATS), "Program to export for.")] = FORMATS[0]
    offline: Offline = False
    data_dir: DataDir = None
    as_json: AsJson = False

    def run(self) -> None:
        """Check the options, write the heads, print the command."""
        if self.format not in FORMATS:
            raise UsageError(f"format is {self.format!r}: choose one of {', '.join(FORMATS)}")
        prepare_process(data_dir=self.data_dir, offline=self.offline)
        checkpoint, backbone = named(self.checkpoint, self.backbone)
        request = LoadRequest(checkpoint, backbone, offline=self.offline)
        written: list[VllmExport] = []
        show_load(phases(request, self.output, written))
        print(json_line(to_json(written[0]), indent=2) if self.as_json else lines(written[0]))


def phases(request: LoadRequest, output: Path, written: list["VllmExport"]) -> Iterator[LoadPhase]:
    """The phases of an export; the result is appended to `written` at the end."""
    from medusa_chat.checkpoints.vllm_export import export_vllm  # torch takes seconds to import

    for phase, export in export_vllm(request, output):
        yield phase
        written += [] if export is None else [export]


def to_json(export: "VllmExport") -> dict[str, object]:
    return asdict(export) | {"folder": str(export.folder), "command": export.command}


def lines(export: "VllmExport") -> str:
    """The result, the command, and how to use several GPUs."""
    drafts = f"drafts from {export.tokens:,} of {export.vocabulary:,} tokens"
    return "\n".join(
        [
            f"{export.folder}: {export.heads} heads, {drafts}, {gb(export.bytes)}",
            *export.notes,
            "to serve them (vLLM 0.32 drafts a chain of each head's most probable token):",
            f"  {shlex.join(export.command)}",
            "on N GPUs, add --tensor-parallel-size N if the model is too large for one, or",
            "--data-parallel-size N if one is too slow for all requests",
        ]
    )
