"""HubSource: a repo's files read in small pieces by range requests; weights stay where they are.

huggingface_hub 2.4's HfFileSystem takes a whole file for the piece where a server knows no ranges,
and its parse_safetensors_file_metadata reads no pickles and checks no offsets.
"""

from collections.abc import Mapping

from medusa_chat.gguf_files import parts_of, split_name
from medusa_chat.hub.cache import folder_of
from medusa_chat.hub.client import file_path, get
from medusa_chat.hub.errors import HubError
from medusa_chat.hub.repo import RepoFile, repo_info

AHEAD = 128 * 1024  # what one request brings at least: most headers fit
ABOUT = "README.md"  # is kept beside a file that was named: it tells the licence
MAX_READ = 64 * 1024 * 1024


class HubSource:
    """The files of a Hub repo at one commit (layouts.source.Source), or one GGUF file of it alone.

    What lies in the cache is read from there. Every method raises HubError.
    """

    def __init__(self, repo: str, revision: str | None = None) -> None:
        repo, named = split_name(repo)
        found = repo_info(repo, revision)
        self.name = repo
        self.sha = found.sha
        self.gated = found.gated
        kept = found.names if named is None else (*parts_of(named), ABOUT)
        self._files: dict[str, RepoFile] = {f.name: f for f in found.files if f.name in kept}
        if named is not None and named not in self._files:
            raise HubError(f"{repo} has no file {named}", "missing")
        self._cached = folder_of(repo, found.sha)
        self._pieces: dict[str, list[tuple[int, bytes]]] = {}

    def files(self) -> Mapping[str, int]:
        """File name -> bytes; names in folders below have "/" between the parts."""
        return {name: file.size for name, file in self._files.items()}

    def read(self, file: str, start: int, length: int) -> bytes:
        """`length` bytes from byte `start`; fewer where the file ends."""
        if file not in self._files:
            raise HubError(f"{self.name} has no file {file!r}", "missing")
        length = max(0, min(length, self._files[file].size - start))
        if length > MAX_READ:
            raise HubError(
                f"{length} bytes of {file}: only headers can be read without a download", "refused"
            )
        if not length:
            return b""
        for at, piece in self._pieces.setdefault(file, []):
            if at <= start and start + length <= at + len(piece):
                return piece[start - at : start - at + length]
        piece = self._local(file, start, length) or self._fetch(file, start, max(length, AHEAD))
        self._pieces[file] = [*self._pieces[file][-3:], (start, piece)]
        return piece[:length]

    def _local(self, file: str, start: int, length: int) -> bytes:
        place = self._cached / file
        try:
            if place.stat().st_size != self._files[file].size:
                return b""
            with open(place, "rb") as stream:
                stream.seek(start)
                return stream.read(length)
        except OSError:
            return b""

    def _fetch(self, file: str, start: int, length: int) -> bytes:
        stop = min(start + length, self._files[file].size)
        path = file_path(self.name, self.sha, file)
        answer = get(path, self.name, byte_range=f"bytes={start}-{stop - 1}")
        data = bytes(answer.content)
        if answer.status_code == 200:  # a server that knows no ranges
            data = data[start:stop]
        if len(data) != stop - start:
            raise HubError(
                f"the Hub sent {len(data)} of {stop - start} bytes of {file}: try again",
                "network",
            )
        return data
