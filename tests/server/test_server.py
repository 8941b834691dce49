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
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
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
from regard.checkpoints import hub
from regard.interpret.looking import look
from regard.server.app import build
from regard.server.middleware import MOST_BYTES
from regard.server.pool import Models
from regard.server.worker import MOST_WAITING, Busy, Going, Worker

CAT = "The cat sat on the mat."
STORY = "The cat sat on the mat while the dog slept in the garden."
PAPER = "This library reads and writes PDF files. It can merge pages and extract text."


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(build(Models(), Worker()), base_url="http://127.0.0.1") as found:
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


def completed(text: str, **asked: Any) -> regard.Completion:
    """The record of a text written piece by piece, as the server has it written."""
    pieces = regard.stream_completion(text, **asked)
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
        (
            "/answer",
            {"question": "Where did the dog sleep?", "context": STORY},
            lambda: regard.answer("Where did the dog sleep?", STORY),
        ),
        (
            "/complete",
            {"text": "Once upon a time", "length": 8, "seed": 3},
            lambda: completed(
                "Once upon a time", length=8, how=regard.Sample(0.8, top_p=0.95, seed=3), look=True
            ),
        ),
    ],
    ids=["translate", "summarize", "answer", "complete"],
)
def test_a_task_gives_the_record_that_python_gives(client, path, body, task) -> None:
    expected = task()
    record = posted(client, path, **body)
    assert timeless(record) == timeless(expected.to_dict())
    assert "attended" not in posted(client, path, **body, look=False)
    drawn = posted(client, path, **body, svg=True)
    assert timeless(drawn) == timeless(record) | {"svg": drawn["svg"]}
    assert drawn["svg"].startswith("<svg ")
    assert expected.attended.where in drawn["svg"].replace("\n", " ")


def test_options_are_those_of_the_tasks(client: TestClient) -> None:
    found = posted(client, "/translate", text=CAT, to="de", beam=1, length=3, look=False)
    how = {"num_beams": 1}
    expected = regard.translate(CAT, "de", how=how, length=3, look=False)
    assert timeless(found) == timeless(expected.to_dict())
    never = posted(client, "/answer", question="Who?", context=CAT, threshold=1e9)
    assert (never["answered"], never["text"], never["start"]) == (False, "", None)
    likeliest = posted(client, "/complete", text="Once upon", temperature=0, length=5)
    assert likeliest["text"] == regard.complete("Once upon", how=regard.Greedy(), length=5).text
    joined = posted(client, "/summarize", text=PAPER * 60, join=True, look=False)
    assert (joined["how"], len(joined["parts"]) > 1) == ("joined", True)


def test_a_completion_comes_as_it_is_written(client: TestClient) -> None:
    body = {"text": "Once upon a time", "length": 8, "seed": 3}
    with client.stream("POST", "/complete", json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.iter_lines()]
    *pieces, last = lines
    assert all(list(piece) == ["piece"] for piece in pieces)
    assert len(pieces) > 4
    assert timeless(last["record"]) == timeless(posted(client, "/complete", **body))
    assert "".join(piece["piece"] for piece in pieces) == last["record"]["text"]


def test_what_is_wrong_with_a_stream_is_a_status(client: TestClient) -> None:
    answer = client.post("/complete", json={"text": " ", "stream": True})
    assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "InputError")


@pytest.mark.parametrize("asked", [{}, {"layer": "3", "head": 1}, {"word": "mat"}])
def test_looking_gives_what_python_gives(client: TestClient, asked: dict[str, Any]) -> None:
    expected = look("books-gpt2", CAT, **asked)
    found = posted(client, "/look", model="books-gpt2", text=CAT, **asked)
    assert found == expected.to_dict()
    drawn = posted(client, "/look", model="books-gpt2", text=CAT, **asked, svg=True)
    assert drawn == found | {"svg": expected.picture().svg()}


def test_a_picture_without_the_first_token(client: TestClient) -> None:
    asked = {"layer": 3, "head": 1}
    found = posted(
        client, "/look", model="books-gpt2", text=CAT, **asked, svg=True, without_first=True
    )
    expected = look("books-gpt2", CAT, **asked).picture(without_first=True)
    assert found["svg"] == expected.svg()


def test_an_explanation_is_the_trace_that_python_gives(client: TestClient) -> None:
    assert posted(client, "/explain") == regard.explain().to_dict()
    made = posted(client, "/explain", sentence=CAT, heads=2, causal=True, word="sat")
    assert made == regard.explain(CAT, heads=2, mask=regard.Causal(), word="sat").to_dict()
    real = posted(client, "/explain", sentence=CAT, model="books-gpt2", layer=1, head=2)
    assert real == regard.explain(CAT, model="books-gpt2", layer=1, head=2).to_dict()


def test_letters_of_all_kinds_go_in_and_out(client: TestClient) -> None:
    context = "🐈 The cat 'Émile' slept in the garden. <b>&"
    found = posted(client, "/answer", question="Where did the cat sleep?", context=context)
    assert context[found["start"] : found["end"]] == found["text"] != ""
    posted(client, "/translate", text="a\0b 漢字 \u202e", to="fr")


def test_a_folder_given_at_the_start_is_served_and_no_other(tmp_path: Path) -> None:
    folders.writer(tmp_path / "mine")
    folders.writer(tmp_path / "other")
    name = str(tmp_path / "mine")
    client = TestClient(build(Models([name]), Worker()), base_url="http://localhost")
    first = client.get("/models").json()["models"][0]
    assert (first["name"], first["origin"]) == (name, "folder")
    assert first["can"] == ["complete", "look", "explain"]
    record = posted(client, "/complete", text="The cat", model=name, length=3)
    assert record["model"] == name
    answer = client.post("/complete", json={"text": "a", "model": str(tmp_path / "other")})
    assert answer.status_code == 404


# ------------------------------------------------------------------------------------------ errors

WRONG = [
    ("/translate", {"to": "fr"}, 400, "POST /translate needs text, which is missing."),
    ("/translate", {"text": "a", "too": "fr"}, 400, "takes no 'too'. See GET /openapi.json"),
    ("/translate", {"text": 5, "to": "fr"}, 400, "text of POST /translate is wrong: .* got 5."),
    ("/translate", {"text": " ", "to": "fr"}, 400, "The text is empty. Give some words."),
    ("/translate", {"text": "a"}, 400, "translates into deu, eng, fra. Say which"),
    ("/translate", {"text": "a", "to": "klingon"}, 400, "does not translate into 'klingon'"),
    ("/translate", {"text": "a" * 5001, "to": "fr"}, 400, "5,001 characters.* 5,000 at most"),
    ("/translate", {"text": "a", "beam": 0}, 400, "beam .*greater than or equal to 1, but got 0"),
    ("/translate", {"text": "a", "to": "fr", "model": "answer"}, 400, "BertAnswering, which"),
    ("/translate", {"text": "a", "model": "tranlate"}, 404, "Did you mean 'translate'"),
    ("/translate", {"text": "a", "model": "/etc"}, 404, "This server has no model '/etc'"),
    ("/summarize", {"text": ""}, 400, "The text is empty"),
    ("/answer", {"question": "Who?", "context": ""}, 400, "The context is empty"),
    ("/answer", {"question": "a" * 1001, "context": "a"}, 400, "1,001 characters"),
    ("/complete", {"text": "a", "temperature": -1}, 400, "temperature"),
    ("/complete", {"text": "a", "length": 1001}, 400, "less than or equal to 1000"),
    ("/complete", {"text": "word " * 3000}, 400, "The text is too long"),
    ("/look", {"text": "a"}, 400, "POST /look needs model"),
    ("/look", {"text": CAT, "model": "books-gpt2", "layer": 9, "head": 0}, 400, "layer"),
    ("/look", {"text": CAT, "model": "books-gpt2", "head": 0}, 400, "give the layer, too"),
    ("/look", {"text": CAT, "model": "summarize"}, 400, "begin this one so, too"),
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
        "/translate": {"text": "The cat.", "to": "fr", "look": False},
        "/summarize": {"text": "The cat sat.", "look": False},
        "/answer": {"question": "Who sat?", "context": "The cat sat.", "look": False},
        "/complete": {"text": "Once", "length": 2, "look": False},
        "/look": {"model": "books-gpt2", "text": "The cat.", "layer": 0, "head": 0},
        "/explain": {"sentence": "The cat."},
    }
    extremes = [0, -1, 10**30, 2**63, -1e308, 1e308, 1e-320, math.nan, math.inf, "\0", "\ufeff", []]
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    headers = {"Content-Type": "application/json"}
    for path, body in bodies.items():
        fields = schemas[path.strip("/").title()]["properties"]
        assert set(body) <= set(fields)
        for name in fields:
            for value in extremes:
                content = json.dumps(body | {name: value}).encode()
                answer = client.post(path, content=content, headers=headers)
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

    assert post(b"{oh").startswith("The body is no JSON: ")
    assert "body" in post(b"\xff\xfe\xfa")
    assert "a body in JSON" in post(b"")
    assert "got []" in post(b"[]")
    assert "Content-Type: application/json" in post(b'{"text": "a"}', "text/plain")
    assert "unicode" in post(b'{"text": "a\\ud800b", "to": "fr"}')
    assert "got nan" in post(b'{"text": "a", "to": "fr", "length_penalty": NaN}')
    post(b"[" * 100_000)


def test_paths_that_are_not_there(client: TestClient) -> None:
    assert told(client.get("/nowhere"), 404).startswith("There is no GET /nowhere here.")
    assert told(client.get("/translate"), 405).startswith("There is no GET /translate here.")
    told(client.get("/docs"), 404)
    told(client.get("/../page.js/../app.py"), 404)


def test_bodies_that_are_too_large(client: TestClient) -> None:
    large = b" " * (MOST_BYTES + 1)
    headers = {"Content-Type": "application/json"}
    assert "1,048,576" in told(client.post("/translate", content=large, headers=headers), 413)
    # In pieces nobody says beforehand how many will come.
    pieces = (large[at : at + 2**16] for at in range(0, len(large), 2**16))
    assert "1,048,576" in told(client.post("/translate", content=pieces, headers=headers), 413)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "", "127.0.0.1.nip.io", "["])
def test_names_that_are_not_ours(client: TestClient, host: str) -> None:
    assert "is not called" in told(client.get("/health", headers={"Host": host}), 403)


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "192.168.0.7:80"])
def test_names_that_are_ours(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"Host": host}).status_code == 200


def test_pages_of_others_may_not_ask(client: TestClient) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1234"):
        assert "may not ask" in told(client.get("/models", headers={"Origin": origin}), 403)
    mine = client.get("/models", headers={"Origin": "http://127.0.0.1"})
    assert mine.status_code == 200
    assert not [name for name in mine.headers if name.startswith("access-control")]


def test_a_bug_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Models):
        def name(self, asked: str) -> str:
            raise ZeroDivisionError("a secret")

    app = build(Broken(), Worker())
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    with caplog.at_level(logging.ERROR, "regard.server"):
        answer = client.post("/translate", json={"text": "a", "to": "fr"})
    assert told(answer, 500) == "This is a bug of the server. Its log says more."
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


@pytest.mark.parametrize("origin", ["http://[", "http://evil.example", "null", ""])
def test_other_origins_are_refused_however_they_are_written(
    client: TestClient, origin: str
) -> None:
    assert client.get("/health", headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize("host", ["evil@127.0.0.1", "127.0.0.1#x", "127.0.0.1/x", "["])
def test_hosts_that_are_no_hosts_are_refused(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"Host": host}).status_code == 403


def test_odd_things_in_the_cache_are_passed_over(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {
        "broken": '["GPT2LMHeadModel"]',
        "nested": '[["x"]]',
        "number": "5",
        "object": '{"a": 1}',
    }
    for name, architectures in odd.items():
        folder = tmp_path / f"models--acme--{name}"
        snapshot = folder / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
        (snapshot / "config.json").write_text(f'{{"architectures": {architectures}}}')
        (snapshot / "model.safetensors").symlink_to("nowhere")
    # Nothing that a request names may be looked for at the hub: without a main it would be.
    (tmp_path / "models--acme--part" / "snapshots" / "abc").mkdir(parents=True)
    config = tmp_path / "models--acme--part" / "snapshots" / "abc" / "config.json"
    config.write_text('{"architectures": ["GPT2LMHeadModel"]}')
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


# ---------------------------------------------------------------------------------------- the line


def test_jobs_run_one_after_another_while_the_loop_goes_on() -> None:
    async def go() -> list[str]:
        worker, seen, may_end = Worker(), list[str](), threading.Event()
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def first(_: Going) -> None:
            seen.append("first begins")
            loop.call_soon_threadsafe(begun.set)
            assert may_end.wait(30)
            seen.append("first ends")

        def second(_: Going) -> None:
            seen.append("second")

        both = asyncio.gather(worker.run(first), worker.run(second))
        await begun.wait()  # the loop goes on while the first is in work
        assert (worker.waiting, worker.busy) == (2, True)
        may_end.set()
        await both
        assert (worker.waiting, worker.busy) == (0, False)
        return seen

    assert asyncio.run(go()) == ["first begins", "first ends", "second"]


def test_what_nobody_waits_for_counts_until_it_ends() -> None:
    async def go() -> None:
        worker, begun, may_end = Worker(), threading.Event(), threading.Event()

        def job(_: Going) -> None:
            begun.set()
            assert may_end.wait(30)

        asking = asyncio.create_task(worker.run(job))
        await asyncio.to_thread(begun.wait, 30)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert worker.waiting == 1
        may_end.set()
        await asyncio.to_thread(until, lambda: worker.waiting == 0)

    asyncio.run(go())


def test_who_leaves_is_left_out() -> None:
    async def go() -> None:
        worker, begun, ended = Worker(), threading.Event(), threading.Event()
        ran = []

        def endless(going: Going) -> None:
            begun.set()
            try:
                while True:
                    going.check()
            finally:
                ended.set()

        working = asyncio.create_task(worker.run(endless))
        waiting = asyncio.create_task(worker.run(lambda _: ran.append("never")))
        await asyncio.to_thread(begun.wait, 30)
        waiting.cancel()
        working.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
        assert await asyncio.to_thread(ended.wait, 30)
        assert await worker.run(lambda _: "next") == "next"
        assert ran == []

    asyncio.run(go())


def test_a_stream_ends_with_who_reads_it() -> None:
    async def go() -> None:
        worker, ended = Worker(), threading.Event()

        def endless(_: Going) -> Iterator[int]:
            try:
                while True:
                    yield 1
            finally:
                ended.set()

        pieces = worker.each(endless)
        assert await anext(pieces) == 1
        await pieces.aclose()  # type: ignore[attr-defined]
        assert await asyncio.to_thread(ended.wait, 30)

        def failing(_: Going) -> Iterator[int]:
            yield 1
            yield 2
            raise ZeroDivisionError

        pieces = worker.each(failing)
        assert [await anext(pieces), await anext(pieces)] == [1, 2]
        with pytest.raises(ZeroDivisionError):
            await anext(pieces)

    asyncio.run(go())


def test_a_line_that_is_too_long_or_closed_takes_nobody() -> None:
    async def go() -> None:
        worker, may_end = Worker(), threading.Event()
        line = [
            asyncio.create_task(worker.run(lambda _: may_end.wait(30))) for _ in range(MOST_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="32 requests are waiting"):
            await worker.run(lambda _: None)
        worker.close()
        may_end.set()
        ends = await asyncio.gather(*line, return_exceptions=True)
        assert any(isinstance(end, Busy) for end in ends)
        with pytest.raises(Busy, match="closing"):
            await worker.run(lambda _: None)

    asyncio.run(go())


def test_busy_is_a_status() -> None:
    worker = Worker()
    worker.close()
    client = TestClient(build(Models(), worker), base_url="http://localhost")
    answer = client.post("/explain", json={})
    assert told(answer, 503) == "The server is closing."
    assert answer.json()["error"]["kind"] == "Busy"


# ------------------------------------------------------------------------------------- the command


def fetched(address: str, body: str | None = None) -> str:
    headers = {"Content-Type": "application/json"} if body else {}
    data = None if body is None else body.encode()
    request = urllib.request.Request(address, data, headers)
    try:
        answer = urllib.request.urlopen(request, timeout=PATIENCE)
    except urllib.error.HTTPError as refused:
        answer = refused
    with answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.processes
def test_many_ask_at_once_and_each_gets_its_own(served: str) -> None:
    texts = [f"I have {count} cats." for count in range(2, 10)]
    found: dict[str, str] = {}

    def ask(text: str) -> None:
        body = json.dumps({"text": text, "to": "fr"})
        found[text] = json.loads(fetched(f"{served}/translate", body))["text"]

    asking = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for one in asking:
        one.start()
    assert json.loads(fetched(f"{served}/health"))["status"] == "ok"
    for one in asking:
        one.join(PATIENCE)
    records = regard.translate(texts, "fr", look=False)
    assert found == {text: record.text for text, record in zip(texts, records, strict=True)}


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
    worker = Worker()
    server = uvicorn.Server(
        uvicorn.Config(build(Models(), worker), port=0, log_level="critical", lifespan="off")
    )
    running = threading.Thread(target=server.run)
    running.start()
    until(lambda: server.started)
    host, port = server.servers[0].sockets[0].getsockname()
    body = json.dumps({"text": "Once", "model": "books-xl", "length": 1000, "stream": True})
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


@pytest.mark.processes
def test_ctrl_c_ends_it_without_a_word() -> None:
    with serving() as (address, process):
        fetched(f"{address}/health")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.processes
def test_ctrl_c_ends_it_though_a_model_runs() -> None:
    body = json.dumps({"text": "The cats of the house slept. " * 150, "to": "fr"})
    said = []
    with serving() as (address, process):
        ask = threading.Thread(target=lambda: said.append(fetched(f"{address}/translate", body)))
        ask.start()
        until(lambda: json.loads(fetched(f"{address}/health"))["waiting"])
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        ask.join(PATIENCE)
    assert (process.returncode, out, err) == (0, "", "")
    assert json.loads(said[0])["error"] == {"kind": "Busy", "message": "The server is closing."}


def test_what_keeps_it_from_starting_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = one_line(command("serve", "--port", str(port)))
        assert f"Port {port} of 127.0.0.1 is in use. Take another one: --port {port + 1}." in said
    assert "is no address of this machine" in one_line(command("serve", "--host", "192.0.2.1"))
    assert "There is no host 'no host'" in one_line(command("serve", "--host", "no host"))
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


def test_the_page_of_the_api_has_an_example_of_every_path() -> None:
    shown = {re.search(r"localhost:8000(/\w+)", asked)[1] for asked, _ in EXAMPLES}
    app = build(Models(), Worker())
    assert shown == set(app.openapi()["paths"])
