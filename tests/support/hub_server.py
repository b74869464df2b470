"""A small Hub on loopback: enough of its HTTP API for the real huggingface_hub, and its faults.

Repos are dicts of files. Large ones (LFS) are answered by a redirect to another host name with the
headers of the Hub, as the CDN does; a token that arrives there is a leak and is remembered.
Run as a program it serves one folder: `python hub_server.py OWNER/NAME FOLDER` prints its address.
"""

import functools
import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LFS_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".model", ".h5")
PIECE = 1 << 14


@dataclass
class HubRepo:
    """A repo: its files by name. revisions: other revisions' files, by revision."""

    files: dict[str, bytes]
    gated: str | bool = False
    private: bool = False
    downloads: int = 0
    config: dict[str, object] | None = None
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch, a tag or a commit."""
        for name, files in {"main": self.files, **self.revisions}.items():
            if revision in (name, commit(files)):
                return commit(files), files
        return None


@dataclass
class Fault:
    """What goes wrong for requests whose path matches `path`, the first `times` times.

    kind: "status" (with `status`, `headers`), "cut", "stall" and "slow" (after `after` bytes; slow
    sends `rate` bytes a second), "hang" (no answer), "wrong" (one byte of the content is another),
    "longer" (more than was said), "html" (a sign-in page), "whole" (ranges are not known).
    """

    path: str
    kind: str
    times: int = 10**9
    after: int = 0
    rate: int = 10**9
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)


def commit(files: dict[str, bytes]) -> str:
    lines = [f"{name} {git_sha1(content)}" for name, content in sorted(files.items())]
    return hashlib.sha1("\n".join(lines).encode()).hexdigest()


@functools.lru_cache(1000)
def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@functools.lru_cache(1000)
def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_lfs(name: str) -> bool:
    return name.endswith(LFS_ENDINGS)


def etag(name: str, content: bytes) -> str:
    return sha256(content) if is_lfs(name) else git_sha1(content)


def content_facts(name: str, content: bytes, hash_name: str) -> dict[str, object]:
    """What a listing says of a file's content. hash_name: of the hash that files in LFS have."""
    size = {"size": len(content)}
    lfs = {hash_name: sha256(content), **size, "pointerSize": 134}
    return {**size, "lfs": lfs} if is_lfs(name) else size


class Hub:
    """The server: repos, faults and tokens may be changed while it runs."""

    def __init__(self, repos: dict[str, HubRepo] | None = None) -> None:
        self.repos = repos or {}
        self.faults: list[Fault] = []
        self.tokens: dict[str, set[str]] = {}  # token -> gated and private repos it may read
        self.requests: list[tuple[str, str, str]] = []  # method, path with query, Range
        self.leaks: list[str] = []
        self.sent = 0  # bytes of files
        self.ended = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def fault(self, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.path, path):
                fault.times -= 1
                return fault
        return None

    def asked(self, pattern: str) -> list[str]:
        """Paths asked for that match."""
        return [path for _, path, _ in self.requests if re.search(pattern, path)]


@contextmanager
def serving(repos: dict[str, HubRepo] | None = None) -> Iterator[Hub]:
    hub = Hub(repos)
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        hub.server.shutdown()
        hub.server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            hub.requests.append((self.command, self.path, self.headers.get("Range", "")))
            try:
                fault = hub.fault(self.path)
                if fault and fault.kind == "hang":
                    hub.ended.wait(240)
                    self.close_connection = True
                elif fault and fault.kind == "status":
                    self.refuse(fault.status, headers=fault.headers)
                elif fault and fault.kind == "html":
                    self.send(b"<html>Sign in to this network</html>", "text/html")
                else:
                    self.route(fault)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def route(self, fault: Fault | None) -> None:
            url = urlsplit(self.path)
            path, query = unquote(url.path), parse_qs(url.query)
            if path.startswith("/cdn/"):
                return self.cdn(path.removeprefix("/cdn/"), fault)
            if path == "/api/models":
                return self.listing(query)
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/auth-check", path):
                return self.auth_check(match[1])
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
                return self.tree(match[1], match[2])
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                return self.model_info(match[1], match[2] or "main")
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+)", path):
                return self.resolve(match[1], match[2], fault)
            return self.refuse(404, "EntryNotFound")

        # What the user may see.

        def may(self, repo: str) -> bool:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            return repo in hub.tokens.get(token, ())

        def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
            """Commit and files; answers itself where there is nothing to see."""
            found = hub.repos.get(repo)
            if found is None or (found.private and not self.may(repo)):
                self.refuse(401 if not self.headers.get("Authorization") else 404, "RepoNotFound")
                return None
            at = found.at(revision)
            if at is None:
                self.refuse(404, "RevisionNotFound")
            return at

        # The API.

        def listing(self, query: dict[str, list[str]]) -> None:
            word = query.get("search", [""])[0].lower()
            author = query.get("author", [""])[0]
            limit = int(query.get("limit", ["1000"])[0])
            rows = [
                {
                    "id": name,
                    "downloads": repo.downloads,
                    "likes": 1,
                    "gated": repo.gated,
                    "lastModified": "2024-05-06T07:08:09.000Z",
                    "siblings": [{"rfilename": file} for file in repo.files],
                    "config": repo.config or {},
                }
                for name, repo in hub.repos.items()
                if word in name.lower() and name.startswith(author) and not repo.private
            ]
            rows.sort(key=lambda row: -int(str(row["downloads"])))
            self.json(rows[:limit])

        def model_info(self, repo: str, revision: str) -> None:
            at = self.find(repo, revision)
            if at is None:
                return
            siblings = [
                {
                    "rfilename": name,
                    "blobId": git_sha1(content),
                    **content_facts(name, content, "sha256"),
                }
                for name, content in at[1].items()
            ]
            gated = hub.repos[repo].gated
            self.json({"id": repo, "sha": at[0], "gated": gated, "siblings": siblings})

        def tree(self, repo: str, revision: str) -> None:
            at = self.find(repo, revision)
            if at is None:
                return
            rows = [
                {
                    "type": "file",
                    "path": name,
                    "oid": git_sha1(content),
                    **content_facts(name, content, "oid"),
                }
                for name, content in at[1].items()
            ]
            self.json(rows)

        def auth_check(self, repo: str) -> None:
            if self.find(repo, "main") is None:
                return
            if hub.repos[repo].gated and not self.may(repo):
                return self.gated()
            self.json({})

        def gated(self) -> None:
            self.refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")

        def resolve(self, repo: str, rest: str, fault: Fault | None) -> None:
            parts = rest.split("/")
            for length in (3, 1):  # refs/pr/1, else a branch or a commit
                revision, name = "/".join(parts[:length]), "/".join(parts[length:])
                if length == 3 and not revision.startswith("refs/pr/"):
                    continue
                at = self.find(repo, revision)
                break
            if at is None:
                return
            if hub.repos[repo].gated and not self.may(repo):
                return self.gated()
            sha, files = at
            if name not in files:
                return self.refuse(404, "EntryNotFound")
            content = files[name]
            headers = {"X-Repo-Commit": sha, "ETag": f'"{etag(name, content)}"'}
            if not is_lfs(name):
                return self.content(content, fault, headers)
            place = f"http://localhost:{hub.port}/cdn/{repo}/{sha}/{name}"
            headers |= {
                "X-Linked-Size": str(len(content)),
                "X-Linked-ETag": headers.pop("ETag"),
                "Location": place,
            }
            self.send(b"", status=302, headers=headers)

        def cdn(self, rest: str, fault: Fault | None) -> None:
            if self.headers.get("Authorization"):
                hub.leaks.append(rest)
            owner, name, sha, file = rest.split("/", 3)
            at = hub.repos[f"{owner}/{name}"].at(sha)
            assert at is not None
            self.content(at[1][file], fault, {"Accept-Ranges": "bytes"})

        # Bytes.

        def content(self, content: bytes, fault: Fault | None, headers: dict[str, str]) -> None:
            kind = fault.kind if fault else ""
            if kind == "wrong":
                content = bytes([content[0] ^ 1]) + content[1:]
            if kind == "longer":
                content += b"more"
            start, status = 0, 200
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked and kind != "whole":
                start = int(asked[1])
                stop = min(int(asked[2] or len(content) - 1) + 1, len(content))
                if start >= len(content):
                    return self.refuse(416)
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
                content, status = content[start:stop], 206
            self.head(status, len(content), headers)
            if self.command == "HEAD":
                return
            self.pour(content, fault)

        def pour(self, content: bytes, fault: Fault | None) -> None:
            """Send it, cut off or slowed down as the fault says."""
            for at in range(0, len(content), PIECE):
                piece = content[at : at + PIECE]
                if fault and fault.kind in ("cut", "slow", "stall") and at >= fault.after:
                    if fault.kind == "cut":
                        self.close_connection = True
                        self.wfile.flush()
                        self.connection.shutdown(socket.SHUT_RDWR)
                        return
                    if fault.kind == "stall":
                        hub.ended.wait(240)
                        self.close_connection = True
                        return
                    if hub.ended.wait(len(piece) / fault.rate):
                        return
                hub.sent += len(piece)
                self.wfile.write(piece)

        def json(self, value: object) -> None:
            self.send(json.dumps(value).encode(), "application/json")

        def refuse(
            self, status: int, code: str = "", headers: dict[str, str] | None = None
        ) -> None:
            own = {"X-Error-Code": code} if code else {}
            text = json.dumps({"error": code or "no"}).encode()
            self.send(text, "application/json", status, own | (headers or {}))

        def send(
            self,
            body: bytes,
            kind: str = "text/plain",
            status: int = 200,
            headers: dict[str, str] | None = None,
        ) -> None:
            self.head(status, len(body), {"Content-Type": kind} | (headers or {}))
            if self.command != "HEAD":
                self.wfile.write(body)

        def head(self, status: int, length: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()

    return Handler


def read_folder(folder: Path) -> dict[str, bytes]:
    """A folder's files as a repo's."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


if __name__ == "__main__":
    name, place = sys.argv[1:3]
    with serving({name: HubRepo(read_folder(Path(place)))}) as running:
        print(running.url, flush=True)
        while True:
            time.sleep(3600)
