"""A GGUF file as the backbone of a folder: which one, its config, and whether it fits together."""

from medusa_chat.checkpoints.layouts.backbone_shapes import refuse_misfits
from medusa_chat.checkpoints.layouts.folders import BackboneFiles, Folder
from medusa_chat.checkpoints.layouts.gguf_config import family_of, gguf_config
from medusa_chat.checkpoints.layouts.gguf_header import read_gguf
from medusa_chat.checkpoints.layouts.gguf_names import entries, renamed
from medusa_chat.checkpoints.layouts.settings_files import refuse_odd_config
from medusa_chat.errors import ModelError
from medusa_chat.gguf_files import choose_file, part_of_split


def gguf_in(folder: Folder) -> BackboneFiles | None:
    """The model in the GGUF file of a folder, None where there is none. Its config comes from the
    file; what lies beside it is not read. Raises ModelError."""
    file, why = choose_file(folder.sizes)
    if file is None:
        return None
    path = folder.path(file)
    where = f"{folder.source.name}/{path}"
    if part := part_of_split(file):
        raise ModelError(
            f"{where} is {part}: join the parts with llama-gguf-split --merge, or take another file"
        )
    header = read_gguf(folder.source, path)
    config = gguf_config(header, folder.source, path)
    refuse_odd_config(config, where)
    names = renamed(header, family_of(header, where), where)
    refuse_misfits(entries(header, names), config, where)
    return BackboneFiles(
        folder=folder.folder,
        config=config,
        files=(file,),
        missing=(),
        bytes=folder.sizes[file],
        has_tokenizer=True,
        stored=header.quantisation,
        notes=(why,) if why else (),
    )
