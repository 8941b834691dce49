"""The server: its records are those of the tasks, and every way to ask wrongly is told as one."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient

import regard
from helpers import model_folders as folders
from helpers.command import PATIENCE, ROOT, one_line, serving, until
from helpers.command import regard as command
from helpers.library_models import library_folder
from helpers.random_models import of_five
from regard.checkpoints import hub
from regard.decoding.settings import Settings
from regard.interpret.looking import look
from regard.server.api import own
from regard.server.app import build
from regard.server.limits import MAX_BATCH, MAX_BODY_BYTES, MAX_WAITING
from regard.server.pool import Models
from regard.server.worker import Busy, Worker
from regard.tasks.writing import Check

CAT = "The cat sat on the mat."
STORY = "The cat sat on the mat while the dog slept in the garden."
WHERE = "Where did the dog sleep?"
ONCE = "Once upon a time"
PAPER = "This library reads and writes PDF files. It can merge pages and extract text."


JSON = {"Content-Type": "application/json"}


def client_of(models: Models, **options: Any) -> TestClient:
    return TestClient(build(models, Worker(models)), "http://127.0.0.1", **options)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(Models()) as found:
        yield found


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


def posted(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ----------------------------------------------------------------------------------------- records


def test_it_tells_that_it_runs(client: TestClient) -> None:
    expected = {"status": "ok", "version": regard.__version__, "waiting": 0}
    assert client.get("/health").json() == expected


def test_models_say_what_they_can_do_and_not_where_they_lie(client: TestClient) -> None:
    found = {model["name"]: model for model in client.get("/models").json()["models"]}
    assert found["translate"]["can"] == ["translate", "look", "explain"]
    assert found["translate"]["languages"] == ["en", "fr", "de"]
    assert found["translate"]["licence"] == regard.checkpoints.cards.card("translate").licence
    assert found["books-xl"]["can"] == ["complete", "look", "explain"]
    assert all("folder" not in model for model in found.values())


def completed() -> regard.Completion:
    """The record of a text written piece by piece, as the server has it written."""
    how = Settings(seed=3)
    pieces = regard.stream_completion(ONCE, max_new_tokens=8, how=how, attended=True)
    while True:
        try:
            next(pieces)
        except StopIteration as stopped:
            record: regard.Completion = stopped.value
            return record


@pytest.mark.parametrize(
    ("path", "body", "task"),
    [
        ("/translate", {"text": CAT, "to": "fr"}, lambda: regard.translate(CAT, "fr")),
        ("/summarize", {"text": PAPER}, lambda: regard.summarize(PAPER)),
        ("/answer", {"question": WHERE, "context": STORY}, lambda: regard.answer(WHERE, STORY)),
        ("/complete", {"text": ONCE, "max_new_tokens": 8, "seed": 3}, completed),
    ],
    ids=["translate", "summarize", "answer", "complete"],
)
def test_a_task_gives_the_record_that_python_gives(client, path, body, task) -> None:
    expected = task()
    record = posted(client, path, **body)
    assert timeless(record) == timeless(expected.to_dict())
    assert "attended" not in posted(client, path, **body, attended=False)
    drawn = posted(client, path, **body, svg=True)
    assert timeless(drawn) == timeless(record) | {"svg": drawn["svg"]}
    assert drawn["svg"].startswith("<svg ")
    assert expected.attended.where in drawn["svg"].replace("\n", " ")


def test_options_are_those_of_the_tasks(client: TestClient) -> None:
    short = {"to": "de", "max_new_tokens": 3, "attended": False}
    found = posted(client, "/translate", text=CAT, num_beams=1, **short)
    expected = regard.translate(CAT, how={"num_beams": 1}, **short)
    assert timeless(found) == timeless(expected.to_dict())
    never = posted(client, "/answer", question="Who?", context=CAT, threshold=1e9)
    assert (never["answered"], never["text"], never["start"]) == (False, "", None)
    likeliest = posted(client, "/complete", text="Once upon", temperature=0, max_new_tokens=5)
    greedy = regard.complete("Once upon", how=Settings(temperature=0), max_new_tokens=5)
    assert likeliest["text"] == greedy.text
    long = {"text": PAPER * 60, "attended": False}
    joined = posted(client, "/summarize", **long, one_line=True, join=True)
    assert (joined["method"], len(joined["parts"]) > 1) == ("joined", True)
    chosen = posted(client, "/summarize", text=f"{STORY} {PAPER}", sentences=2)
    assert sum(sentence["chosen"] for sentence in chosen["sentences"]) == 2


def test_a_completion_comes_as_it_is_written(client: TestClient) -> None:
    body = {"text": ONCE, "max_new_tokens": 8, "seed": 3}
    with client.stream("POST", "/complete", json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        *pieces, last = [json.loads(line) for line in answer.iter_lines()]
    assert all(list(piece) == ["piece"] for piece in pieces)
    assert len(pieces) > 4
    assert timeless(last["record"]) == timeless(posted(client, "/complete", **body))
    assert "".join(piece["piece"] for piece in pieces) == last["record"]["text"]


@pytest.mark.parametrize("asked", [{}, {"layer": "3", "head": 1}, {"word": "mat"}])
def test_looking_gives_what_python_gives(client: TestClient, asked: dict[str, Any]) -> None:
    expected = look("books-gpt2", CAT, **asked)
    found = posted(client, "/look", model="books-gpt2", text=CAT, **asked)
    assert found == expected.to_dict()
    drawn = posted(client, "/look", model="books-gpt2", text=CAT, **asked, svg=True)
    assert drawn == found | {"svg": expected.picture().svg()}


def test_a_picture_without_the_first_token(client: TestClient) -> None:
    asked = {"model": "books-gpt2", "text": CAT, "layer": 3, "head": 1}
    found = posted(client, "/look", **asked, svg=True, without_first=True)
    assert found["svg"] == look(**asked).picture(without_first=True).svg()


def test_an_explanation_is_the_trace_that_python_gives(client: TestClient) -> None:
    assert posted(client, "/explain") == regard.explain().to_dict()
    made = posted(client, "/explain", sentence=CAT, heads=2, causal=True, word="sat")
    assert made == regard.explain(CAT, heads=2, mask=regard.Causal(), word="sat").to_dict()
    real = posted(client, "/explain", sentence=CAT, model="books-gpt2", layer=1, head=2)
    assert real == regard.explain_model("books-gpt2", CAT, layer=1, head=2).to_dict()


def test_letters_of_all_kinds_go_in_and_out(client: TestClient) -> None:
    context = "🐈 The cat 'Émile' slept in the garden. <b>&"
    found = posted(client, "/answer", question="Where did the cat sleep?", context=context)
    assert context[found["start"] : found["end"]] == found["text"] != ""
    posted(client, "/translate", text="a\0b 漢字 \u202e", to="fr")


def test_a_folder_given_at_the_start_is_served_and_no_other(tmp_path: Path) -> None:
    folders.writer(tmp_path / "mine")
    folders.writer(tmp_path / "other")
    name = str(tmp_path / "mine")
    client = client_of(Models([name]))
    first = client.get("/models").json()["models"][0]
    assert (first["name"], first["origin"]) == (name, "folder")
    assert first["can"] == ["complete", "look", "explain"]
    record = posted(client, "/complete", text="The cat", model=name, max_new_tokens=3)
    assert record["model"] == name
    answer = client.post("/complete", json={"text": "a", "model": str(tmp_path / "other")})
    assert answer.status_code == 404


@of_five("is too old to load other architectures")
def test_a_folder_of_another_architecture_is_served(tmp_path: Path) -> None:
    name = str(library_folder(tmp_path / "llama", "llama"))
    client = client_of(Models([name]))
    first = client.get("/models").json()["models"][0]
    assert (first["architecture"], first["task"]) == ("LlamaForCausalLM", "")
    assert first["can"] == ["look", "explain"]
    found = posted(client, "/look", text=CAT, model=name, svg=True)
    assert found["layers"] == ["0", "1"]
    assert found["svg"].startswith("<svg")
    answer = client.post("/complete", json={"text": "a", "model": name})
    assert answer.status_code == 422
    assert "regard does not implement" in answer.json()["error"]["message"]


# ------------------------------------------------------------------------------------------ errors

WRONG = [
    ("/translate", {"to": "fr"}, 400, "POST /translate needs text, which is missing."),
    ("/translate", {"text": "a", "too": "fr"}, 400, "has no field 'too'. GET /openapi.json"),
    ("/translate", {"text": 5, "to": "fr"}, 400, "text of POST /translate is wrong: .* got 5."),
    ("/translate", {"text": " ", "to": "fr"}, 400, "text is empty. Give some words."),
    ("/translate", {"text": "a"}, 400, "translates into deu, eng, fra. Choose one"),
    ("/translate", {"text": "a", "to": "klingon"}, 400, "does not translate into 'klingon'"),
    ("/translate", {"text": "Il est là et je le vois.", "to": "de"}, 400, "French to German"),
    ("/translate", {"text": "a" * 5001, "to": "fr"}, 400, "5,001 characters.* at most 5,000"),
    ("/translate", {"text": "a", "length_penalty": 1e30}, 400, "equal to 10, but got 1e\\+30"),
    ("/translate", {"text": "a", "num_beams": 0}, 400, "num_beams .*equal to 1, but got 0"),
    ("/translate", {"text": "a", "to": "fr", "model": "answer"}, 400, "BertAnswering, which"),
    ("/translate", {"text": "a", "model": "tranlate"}, 404, "Did you mean 'translate'"),
    ("/translate", {"text": "a", "model": "/etc"}, 404, "This server has no model '/etc'"),
    ("/summarize", {"text": ""}, 400, "text is empty"),
    ("/summarize", {"text": CAT, "sentences": 0}, 400, "sentences .* equal to 1, but got 0"),
    ("/summarize", {"text": CAT, "num_beams": 2}, 400, "num_beams is for a summary that a model"),
    ("/summarize", {"text": CAT, "model": "answer"}, 400, "cannot summarize"),
    ("/answer", {"question": "Who?", "context": ""}, 400, "context is empty"),
    ("/answer", {"question": "a" * 1001, "context": "a"}, 400, "1,001 characters"),
    ("/complete", {"text": " ", "stream": True}, 400, "text is empty"),
    ("/complete", {"text": "a", "temperature": -1}, 400, "temperature"),
    ("/complete", {"text": "a", "max_new_tokens": 1001}, 400, "less than or equal to 1000"),
    ("/complete", {"text": "word " * 3000}, 400, "The text is too long"),
    ("/look", {"text": "a"}, 400, "POST /look needs model"),
    ("/look", {"text": CAT, "model": "books-gpt2", "layer": 9, "head": 0}, 400, "layer"),
    ("/look", {"text": CAT, "model": "books-gpt2", "head": 0}, 400, "give the layer, too"),
    ("/look", {"text": CAT, "model": "summarize"}, 400, "Put it before this text"),
    ("/explain", {"sentence": "..."}, 400, "There is no word in"),
    ("/explain", {"sentence": CAT, "heads": 3}, 400, "Numbers of heads that fit: 1, 2, 4, 8"),
    ("/explain", {"sentence": CAT, "dim": 4096}, 400, "less than or equal to 64"),
    ("/explain", {"heads": 2}, 400, "The worked example"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
def test_what_is_wrong_is_said(client: TestClient, path, body, status, message) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == status
    said = answer.json()["error"]
    assert list(answer.json()) == ["error"]
    assert said["kind"] == ("UnknownModelError" if status == 404 else "InputError")
    assert re.search(message, said["message"]), said["message"]


@pytest.mark.slow
def test_no_number_and_no_sign_is_a_bug(client: TestClient) -> None:
    """Extremes of every field: each is answered, or told what is wrong with it."""
    bodies = {
        "/translate": {"text": "The cat.", "to": "fr", "attended": False},
        "/summarize": {"text": "The cat sat.", "attended": False},
        "/answer": {"question": "Who sat?", "context": "The cat sat.", "attended": False},
        "/complete": {"text": "Once", "max_new_tokens": 2, "attended": False},
        "/look": {"model": "books-gpt2", "text": "The cat.", "layer": 0, "head": 0},
        "/explain": {"sentence": "The cat."},
    }
    extremes = [0, -1, 10**30, 2**63, -1e308, 1e308, 1e-320, math.nan, math.inf, "\0", "\ufeff", []]
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for path, body in bodies.items():
        fields = schemas[path.strip("/").title()]["properties"]
        assert set(body) <= set(fields)
        for name in fields:
            for value in extremes:
                content = json.dumps(body | {name: value}).encode()
                answer = client.post(path, content=content, headers=JSON)
                assert answer.status_code in (200, 400, 404), (path, name, value, answer.text)


def told(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    message: str = answer.json()["error"]["message"]
    return message


def test_bodies_that_are_no_json(client: TestClient) -> None:
    def post(content: bytes, kind: str = "application/json") -> str:
        headers = {"Content-Type": kind}
        return told(client.post("/translate", content=content, headers=headers), 400)

    assert post(b"{oh").startswith("The body is not valid JSON: ")
    assert "body" in post(b"\xff\xfe\xfa")
    assert "a body in JSON" in post(b"")
    assert "got []" in post(b"[]")
    assert "Content-Type: application/json" in post(b'{"text": "a"}', "text/plain")
    assert "unicode" in post(b'{"text": "a\\ud800b", "to": "fr"}')
    assert "got NaN" in post(b'{"text": "a", "to": "fr", "length_penalty": NaN}')
    post(b"[" * 100_000)


def test_paths_that_are_not_there(client: TestClient) -> None:
    assert told(client.get("/nowhere"), 404).startswith("There is no GET /nowhere.")
    assert told(client.get("/translate"), 405).startswith("There is no GET /translate.")
    told(client.get("/docs"), 404)
    told(client.get("/../page.js/../app.py"), 404)


def test_bodies_that_are_too_large(client: TestClient) -> None:
    large = b" " * (MAX_BODY_BYTES + 1)
    # In pieces nobody says beforehand how many will come.
    pieces = (large[at : at + 2**16] for at in range(0, len(large), 2**16))
    for content in (large, pieces):
        answer = client.post("/translate", content=content, headers=JSON)
        assert "1,048,576" in told(answer, 413)


HOSTS = [
    "evil.example", "evil.example:8000", "", "127.0.0.1.nip.io", "[", "evil@127.0.0.1",
    "127.0.0.1#x", "127.0.0.1/x",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_names_that_are_not_ours(client: TestClient, host: str) -> None:
    assert "does not answer to the name" in told(client.get("/health", headers={"Host": host}), 403)


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "192.168.0.7:80"])
def test_names_that_are_ours(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1234", "http://[", ""]
)
def test_pages_of_others_may_not_ask(client: TestClient, origin: str) -> None:
    assert "may not use" in told(client.get("/models", headers={"Origin": origin}), 403)


def test_our_page_may_ask(client: TestClient) -> None:
    mine = client.get("/models", headers={"Origin": "http://127.0.0.1"})
    assert mine.status_code == 200
    assert not [name for name in mine.headers if name.startswith("access-control")]


def test_a_bug_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Models):
        def name(self, asked: str) -> str:
            raise ZeroDivisionError("a secret")

    client = client_of(Broken(), raise_server_exceptions=False)
    with caplog.at_level(logging.ERROR, "regard.server"):
        answer = client.post("/translate", json={"text": "a", "to": "fr"})
    assert told(answer, 500) == "This is a bug in the server. Its log has the details."
    assert "secret" not in answer.text
    assert "a secret" in caplog.text


# ----------------------------------------------------------------------------------- what is served


def test_nothing_served_comes_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "{{" not in page.text
    served = re.findall(r'(?:src|href)="(/[^"]*)"', page.text)
    assert {"/page.js", "/page.css", "/colours.css"} <= set(served)
    for path in ["/", *served]:
        answer = client.get(path)
        assert answer.status_code == 200
        outside = set(re.findall(r"https?://[^\s'\"`)]+", answer.text))
        assert outside <= {"http://www.w3.org/2000/svg"}, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert client.head(path).status_code == 200


def test_odd_things_in_the_cache_are_passed_over(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"broken": ["GPT2LMHeadModel"], "nested": [["x"]], "number": 5, "object": {"a": 1}}
    for name, architectures in (odd | {"part": ["GPT2LMHeadModel"]}).items():
        folder = tmp_path / f"models--acme--{name}"
        snapshot = folder / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"architectures": architectures}))
        if name == "part":  # a name without a main must not be looked for at the hub
            continue
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
        (snapshot / "model.safetensors").symlink_to("nowhere")
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path)
    names = [model["name"] for model in client.get("/models").json()["models"]]
    assert "translate" in names
    assert not any(name.startswith("acme/") for name in names)
    answer = client.post("/complete", json={"text": "a", "model": "acme/part"})
    assert answer.status_code == 404


def test_the_api_describes_itself(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    tasks = ("translate", "summarize", "answer", "complete", "look", "explain")
    assert set(paths) == {"/health", "/models", *(f"/{task}" for task in tasks)}
    for task in tasks:
        assert paths[f"/{task}"]["post"]["summary"]


# -------------------------------------------------------------------------------------- the worker


class Fake:
    """A request that calls a function when it runs, and may have a batch key."""

    def __init__(self, run: Callable[[Check], Any], batch_key: str | None = None) -> None:
        self.run, self.batch_key = run, batch_key

    @classmethod
    def run_many(cls, requests: Sequence[Fake], models: Models, check: Check) -> list[Any]:
        return [(request.run(check), len(requests)) for request in requests]

    def pieces(self, models: Models, check: Check) -> Iterator[Any]:
        return self.run(check)


class Gate:
    """A function that waits until it is opened."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, _: Check) -> str:
        self.begun.set()
        assert self.open.wait(PATIENCE)
        return "gate"


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs in an event loop."""
    return wraps(test)(lambda: asyncio.run(test()))


async def enter(worker: Worker, *requests: Fake) -> list[asyncio.Task[Any]]:
    """The tasks of requests that the worker has taken."""
    tasks = [asyncio.create_task(worker.run(request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def occupied() -> tuple[Worker, Gate, asyncio.Task[Any]]:
    """A worker, and the request that it runs until the gate is opened."""
    worker, gate = Worker(Models()), Gate()
    [running] = await enter(worker, Fake(gate))
    assert await asyncio.to_thread(gate.begun.wait, PATIENCE)
    return worker, gate, running


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@in_a_loop
async def test_requests_run_one_after_another_while_the_loop_is_free() -> None:
    seen = list[str]()
    worker, gate, first = await occupied()
    [second] = await enter(worker, Fake(lambda _: seen.append("second")))
    assert (worker.waiting, worker.busy, seen) == (2, True, [])
    gate.open.set()
    assert await asyncio.gather(first, second) == [("gate", 1), (None, 1)]
    assert (worker.waiting, worker.busy, seen) == (0, False, ["second"])


@in_a_loop
async def test_waiting_requests_with_an_equal_key_run_together_up_to_the_limit() -> None:
    worker, gate, _ = await occupied()
    keys = ["a", "b", None, "a", None, *["a"] * MAX_BATCH]
    requests = [Fake(lambda _, number=n: number, key) for n, key in enumerate(keys)]
    waiting = await enter(worker, *requests)
    gate.open.set()
    results = await asyncio.gather(*waiting)
    assert [number for number, _ in results] == list(range(len(keys)))  # each its own result
    sizes = [size for _, size in results]
    assert sizes[:5] == [MAX_BATCH, 1, 1, MAX_BATCH, 1]
    assert sizes[5:] == [*[MAX_BATCH] * (MAX_BATCH - 2), 2, 2]


@in_a_loop
async def test_one_wrong_request_does_not_fail_the_others_of_its_batch() -> None:
    def wrong(_: Check) -> None:
        raise regard.InputError("wrong")

    worker, gate, _ = await occupied()
    runs = [lambda _: "right", wrong, lambda _: "right"]
    waiting = await enter(worker, *(Fake(run, "key") for run in runs))
    gate.open.set()
    one, error, other = await asyncio.gather(*waiting, return_exceptions=True)
    assert one == other == ("right", 1)
    assert isinstance(error, regard.InputError)


@in_a_loop
async def test_a_request_whose_client_has_left_counts_until_it_ends() -> None:
    worker, gate, running = await occupied()
    await cancel(running)
    assert worker.waiting == 1
    gate.open.set()
    await asyncio.to_thread(until, lambda: worker.waiting == 0)


@in_a_loop
async def test_a_request_is_dropped_when_its_client_leaves() -> None:
    """Before it runs, and while it runs; and a batch when all of its clients have left."""
    runs, ended, ran = threading.Event(), threading.Event(), []

    def endless(check: Check) -> None:
        runs.set()
        try:
            while True:
                check()
        finally:
            ended.set()

    worker, gate, _ = await occupied()
    one, other, waiting = await enter(
        worker, Fake(endless, "key"), Fake(endless, "key"), Fake(lambda _: ran.append("never"))
    )
    gate.open.set()
    assert await asyncio.to_thread(runs.wait, PATIENCE)
    await cancel(waiting, one)
    assert not ended.is_set()  # a client of the batch still waits
    await cancel(other)
    assert await asyncio.to_thread(ended.wait, PATIENCE)
    assert await worker.run(Fake(lambda _: "next")) == ("next", 1)
    assert ran == []


@in_a_loop
async def test_a_stream_ends_when_its_reader_leaves() -> None:
    worker, ended = Worker(Models()), threading.Event()

    def endless(check: Check) -> Iterator[int]:
        try:
            while True:
                check()
                yield 1
        finally:
            ended.set()

    pieces = worker.stream(Fake(endless))
    assert await anext(pieces) == 1
    await pieces.aclose()
    assert await asyncio.to_thread(ended.wait, PATIENCE)

    def failing(_: Check) -> Iterator[int]:
        yield 1
        yield 2
        raise ZeroDivisionError

    pieces = worker.stream(Fake(failing))
    assert [await anext(pieces), await anext(pieces)] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        await anext(pieces)


@in_a_loop
async def test_a_full_or_closed_worker_refuses_requests() -> None:
    worker, gate = Worker(Models()), Gate()
    line = await enter(worker, *[Fake(gate)] * MAX_WAITING)
    with pytest.raises(Busy, match="32 requests are waiting"):
        await worker.run(Fake(gate))
    worker.close()
    gate.open.set()
    ends = await asyncio.gather(*line, return_exceptions=True)
    assert all(isinstance(end, Busy) for end in ends)
    with pytest.raises(Busy, match="closing"):
        await worker.run(Fake(gate))


BATCHES = [
    [own.Translate(text=text, to="fr") for text in (CAT, STORY, "Where is the station?", CAT)],
    [own.Summarize(text=text, svg=True) for text in (PAPER, "A web server in C. It is small.")],
    [
        own.Answer(question=question, context=context, attended=False)
        for question in ("Who sat?", WHERE)
        for context in (CAT, STORY)
    ],
]


@pytest.mark.parametrize(
    "requests",
    [pytest.param(BATCHES[0], marks=pytest.mark.slow), *BATCHES[1:]],
    ids=["translate", "summarize", "answer"],
)
def test_requests_of_a_batch_get_what_each_gets_alone(requests: list[own.Request]) -> None:
    assert len({request.batch_key for request in requests}) == 1
    models = Models()
    together = type(requests[0]).run_many(requests, models, lambda: None)
    for request, record in zip(requests, together, strict=True):
        [alone] = request.run_many([request], models, lambda: None)
        for name in ("text", "parts", "start", "end", "tokens", "method"):
            assert record.get(name) == alone.get(name)
        assert ("svg" in record, "attended" in record) == ("svg" in alone, "attended" in alone)


def test_only_requests_with_the_same_settings_have_an_equal_key() -> None:
    keys = {
        request.batch_key
        for request in (
            own.Translate(text="a", to="fr"), own.Translate(text="a", to="de"),
            own.Translate(text="a", to="fr", num_beams=2),
            own.Translate(text="a", to="fr", svg=True),
            own.Translate(text="a", to="fr", model="other"), own.Summarize(text="a"),
        )
    }  # fmt: skip
    assert len(keys) == 6
    assert own.Translate(text="b", to="fr").batch_key in keys
    alone = (own.Complete(text="a"), own.Look(model="a", text="a"), own.Explain())
    assert {request.batch_key for request in alone} == {None}


def test_busy_is_a_status() -> None:
    worker = Worker(Models())
    worker.close()
    answer = TestClient(build(Models(), worker), "http://127.0.0.1").post("/explain", json={})
    assert told(answer, 503) == "The server is closing."
    assert answer.json()["error"]["kind"] == "Busy"


# ------------------------------------------------------------------------------------- the command


def fetched(address: str, body: str | None = None) -> str:
    data = None if body is None else body.encode()
    request = urllib.request.Request(address, data, JSON if body else {})
    try:
        answer = urllib.request.urlopen(request, timeout=PATIENCE)
    except urllib.error.HTTPError as refused:
        answer = refused
    with answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.processes
def test_many_ask_at_once_and_each_gets_its_own(served: str) -> None:
    def ask(text: str) -> str:
        body = json.dumps({"text": text, "to": "fr"})
        return json.loads(fetched(f"{served}/translate", body))["text"]

    texts = [f"I have {count} cats." for count in range(2, 10)]
    with ThreadPoolExecutor(len(texts)) as threads:
        found = threads.map(ask, texts)
        assert json.loads(fetched(f"{served}/health"))["status"] == "ok"
    records = regard.translate(texts, "fr", attended=False)
    assert list(found) == [record.text for record in records]


def test_a_completion_ends_when_its_reader_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after the first ones are held back until then."""
    whole, steps, gone = regard.TransformerXL.step, [], threading.Event()

    def counted(*given: Any) -> torch.Tensor:
        steps.append(given)
        if len(steps) > 20:
            assert gone.wait(PATIENCE)
            time.sleep(0.1)  # so that it takes the server many steps to notice, and not all
        return whole(*given)

    monkeypatch.setattr(regard.TransformerXL, "step", counted)
    worker = Worker(Models())
    app = build(Models(), worker)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    running = threading.Thread(target=server.run)
    running.start()
    until(lambda: server.started)
    host, port = server.servers[0].sockets[0].getsockname()
    body = json.dumps({"text": "Once", "model": "books-xl", "max_new_tokens": 1000, "stream": True})
    with socket.create_connection((host, port), timeout=PATIENCE) as asking:
        asking.sendall(
            f"POST /complete HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        said = b""
        while b'{"piece"' not in said:
            said += asking.recv(4096)
        assert worker.waiting == 1
    gone.set()
    until(lambda: not worker.waiting)
    assert len(steps) < 1000
    server.should_exit = True
    running.join(PATIENCE)


def ends_without_a_word(process: subprocess.Popen[str]) -> None:
    """Press Ctrl-C."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.processes
def test_ctrl_c_ends_it_without_a_word() -> None:
    with serving() as (address, process):
        fetched(f"{address}/health")
        ends_without_a_word(process)


@pytest.mark.processes
def test_ctrl_c_ends_it_though_a_model_runs() -> None:
    body = json.dumps({"text": "The cats of the house slept. " * 150, "to": "fr"})
    with ThreadPoolExecutor() as threads, serving() as (address, process):
        said = threads.submit(fetched, f"{address}/translate", body)
        until(lambda: json.loads(fetched(f"{address}/health"))["waiting"])
        ends_without_a_word(process)
    assert json.loads(said.result())["error"] == {
        "kind": "Busy",
        "message": "The server is closing.",
    }


def test_what_keeps_it_from_starting_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = one_line(command("serve", "--port", str(port)))
        assert f"Port {port} of 127.0.0.1 is in use. Use another one: --port {port + 1}." in said
    assert "is not an address of this machine" in one_line(command("serve", "--host", "192.0.2.1"))
    assert "This machine has no host 'no host'" in one_line(command("serve", "--host", "no host"))
    nowhere = command("serve", "--port", "0", "--model", "./nowhere")
    one_line(nowhere, "There is no folder ./nowhere")


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_the_extra_it_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    advice = f"The server needs {missing}, which is not installed: pip install 'regard[server]'"
    one_line(command("serve"), advice)


# ---------------------------------------------------------------------------------------- its page

EXAMPLES = re.findall(
    r"^```sh\n(curl .*?)\n```\n+```(?:json|text)\n(.*?)^```$",
    (ROOT / "docs/service.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)


def steady(text: str) -> str:
    """Without what differs from run to run, and from machine to machine in its last digit."""
    text = re.sub(r'"seconds": [\d.]+', '"seconds": …', text)
    return re.sub(r"(\d\.\d{2})\d+", r"\1", text)


@pytest.mark.processes
@pytest.mark.parametrize(("asked", "expected"), EXAMPLES)
def test_the_examples_of_its_page_give_what_is_shown(asked: str, expected: str, served) -> None:
    name, *words = shlex.split(asked.replace("\\\n", " "))
    assert name == "curl"
    assert words[0] in ("-s", "-sN")
    body = words[words.index("--json") + 1] if "--json" in words else None
    found = fetched(words[-1].replace("http://localhost:8000", served), body)
    shown = expected.strip()
    if shown.endswith("…"):  # the rest of it is long
        assert steady(found).startswith(steady(shown.removesuffix("…").rstrip()))
    else:
        assert steady(found).strip() == steady(shown)


def test_the_page_of_the_api_has_an_example_of_every_path(client: TestClient) -> None:
    shown = {re.search(r"localhost:8000(/\w+)", asked)[1] for asked, _ in EXAMPLES}
    assert shown == set(client.get("/openapi.json").json()["paths"])
