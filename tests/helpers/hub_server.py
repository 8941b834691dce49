"""A server on this machine that speaks the API of the Hugging Face hub, as downloads need it.

Large files are redirected to another host, as the hub does with those in its large file storage.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".spm")  # in large file storage


@dataclass
class Repository:
    """A model: its commits, each with its files, and its branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    licence: str | None = "apache-2.0"
    token: str | None = None  # the token that a gated model asks for
    offers: list[dict[str, Any]] = field(default_factory=list)  # open pull requests

    def commit(self, files: dict[str, bytes], reference: str = "main") -> str:
        """Add a commit, at the head of a branch; return its hash."""
        number = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[number] = dict(files)
        self.references[reference] = number
        return number

    def commit_folder(self, folder: Path) -> str:
        return self.commit({file.name: file.read_bytes() for file in folder.iterdir()})

    def offer(self, files: dict[str, bytes], author: str) -> str:
        """Open a pull request that adds safetensors."""
        number = len(self.offers) + 1
        self.offers.append({
            "num": number, "author": {"name": author}, "status": "open", "isPullRequest": True,
            "title": "Adding `safetensors` variant of this model",
            "createdAt": "2024-01-01T00:00:00.000Z", "repo": {"name": "", "type": "model"},
        })  # fmt: skip
        return self.commit(files, f"refs/pr/{number}")


@dataclass
class Hub:
    """The state of the server, which tests change while it runs."""

    address: str = ""
    models: dict[str, Repository] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)  # bytes to send of each answer's file
    wrong: dict[str, bytes] = field(default_factory=dict)  # other contents than those listed
    busy: list[int] = field(default_factory=list)  # statuses of the next answers with a file
    hold: dict[str, int] = field(default_factory=dict)  # bytes to send, then nothing
    holding: Event = field(default_factory=Event)
    released: Event = field(default_factory=Event)
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range

    def model(self, name: str) -> Repository:
        return self.models.setdefault(name, Repository())

    def files_asked(self) -> list[tuple[str, str]]:
        """The files that were sent, each with the range of the request."""
        found = []
        for method, path, wanted in self.asked:
            match = re.search(r"/resolve/[0-9a-f]+/([^/]+)$", path)
            if match and method == "GET":
                found.append((match[1], wanted))
        return found


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path, query = parts.path, parse_qs(parts.query)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        if match := re.fullmatch(r"/storage/(\w+)/([0-9a-f]{40})/([^/]+)", path):
            if self.headers.get("Authorization"):
                self._fail(400, "")
                return
            name = bytes.fromhex(match[1]).decode()
            self._send_file(match[3], self.hub.models[name].commits[match[2]][match[3]])
        elif match := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)?)/discussions", path):
            repository = self.hub.models[match[1]]
            offers = [o for o in repository.offers if o["author"]["name"] == query["author"][0]]
            self._json({"count": len(offers), "start": 0, "discussions": offers})
        elif match := re.fullmatch(r"/api/models/(.+)/(revision|tree)/([^/]+)", path):
            self._listing(match[1], unquote(match[3]), match[2], path)
        elif match := re.fullmatch(r"/(.+)/resolve/([^/]+)/([^/]+)", path):
            self._resolve(match[1], unquote(match[2]), match[3])
        else:
            self._fail(404, "")

    def _found(self, name: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.hub.models.get(name)
        if repository is None:
            self._fail(401, "RepoNotFound")  # the hub does not tell that nothing is there
            return None
        commit = repository.references.get(revision, revision)
        if commit not in repository.commits:
            self._fail(404, "RevisionNotFound")
            return None
        return repository, commit

    def _listing(self, name: str, revision: str, kind: str, path: str) -> None:
        if name in self.hub.renamed:
            self._send(307, b"", {"Location": path.replace(name, self.hub.renamed[name])})
            return
        if (found := self._found(name, revision)) is None:
            return
        repository, commit = found
        files = repository.commits[commit]
        if kind == "tree":
            self._json([
                {"type": "file", "path": file, "size": len(data), "oid": git_hash(data)}
                | ({"lfs": self._large(data, "oid")} if file.endswith(LARGE) else {})
                for file, data in files.items()
            ])  # fmt: skip
            return
        config = json.loads(files.get("config.json", b"{}"))
        self._json({
            "id": name, "modelId": name, "sha": commit, "private": False,
            "gated": "manual" if repository.token else False,
            "config": {key: config.get(key) for key in ("architectures", "model_type")},
            "cardData": {"license": repository.licence} if repository.licence else None,
            "siblings": [
                {"rfilename": file, "size": len(data), "blobId": git_hash(data)}
                | ({"lfs": self._large(data, "sha256")} if file.endswith(LARGE) else {})
                for file, data in files.items()
            ],
        })  # fmt: skip

    def _large(self, data: bytes, hash_name: str) -> dict[str, Any]:
        return {"size": len(data), hash_name: sha256(data), "pointerSize": 134}

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if (found := self._found(name, revision)) is None:
            return
        repository, commit = found
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            self._fail(401, "GatedRepo")
            return
        if file not in repository.commits[commit]:
            self._fail(404, "EntryNotFound")
            return
        data = repository.commits[commit][file]
        linked = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(data))}
        if not file.endswith(LARGE):
            self._send_file(file, data, {**linked, "ETag": f'"{git_hash(data)}"'})
            return
        port = urlsplit(self.hub.address).port  # another host, which must not see the token
        place = f"http://localhost:{port}/storage/{name.encode().hex()}/{commit}/{file}"
        self._send(302, b"", {**linked, "X-Linked-ETag": f'"{sha256(data)}"', "Location": place})

    def _send_file(self, name: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        if self.hub.busy:
            self._fail(self.hub.busy.pop(0), "")
            return
        data = self.hub.wrong.get(name, data)
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        headers = {**(headers or {}), "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        counts = self.hub.cut.get(name)
        most = counts.pop(0) if counts else self.hub.hold.get(name)
        self._send(206 if start else 200, data[start:], headers, most)
        if name in self.hub.hold:
            self.wfile.flush()
            self.hub.holding.set()
            self.hub.released.wait()

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], most: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:most])
        if most is not None:
            self.close_connection = True


@contextmanager
def running() -> Iterator[Hub]:
    """A server at a free port."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            server.shutdown()
            thread.join()
