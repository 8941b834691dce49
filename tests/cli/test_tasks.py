"""The commands that use models: what goes in, what comes out, and how what is wrong is told."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from helpers import model_folders as folders
from helpers.command import PATIENCE, START, one_line, regard, started
from regard import Greedy, answer, complete, summarize, translate
from regard.checkpoints import cards
from regard.cli import main


def test_translate_lines_in_their_order(made: Path, tmp_path: Path) -> None:
    lines = ["The cat sat.", "", "Nobody had seen the dog of the house.", "Who?"]
    model = made / "translate"
    expected = [
        record.text
        for record in translate(lines, "fr", model=model, max_new_tokens=6, attended=False)
    ]
    options = ["--to", "fr", "--model", model, "--max-new-tokens", 6]
    shown = regard("translate", *options, given="\r\n".join(lines).encode())
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == "\n".join(expected) + "\n"
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    assert regard("translate", *options, "--file", tmp_path / "lines").stdout == shown.stdout
    assert regard("translate", *options, lines[0], lines[2]).stdout.splitlines() == [
        expected[0],
        expected[2],
    ]


def test_translate_draws_the_alignment_when_asked(made: Path) -> None:
    options = ["--to", "fr", "--model", made / "translate", "--max-new-tokens", 6, "--num-beams", 1]
    sentence = "The cat sat on the mat."
    found = translate(sentence, "fr", model=made / "translate", max_new_tokens=6, how=Greedy())
    shown = regard("translate", sentence, *options, "--attended")
    assert shown.stdout.startswith(f"{found.text}\nAlignment\ntarget down, source across\n")
    assert found.attended.where.split(",")[0] in shown.stdout
    assert "\x1b" not in shown.stdout
    assert regard("translate", sentence, *options).stdout == f"{found.text}\n"
    record = json.loads(regard("translate", sentence, *options, "--json", "--attended").stdout)
    assert record["text"] == found.text
    assert record["attended"]["queries"] == list(found.attended.queries)
    assert set(record) == {
        "text", "score", "tokens", "seconds", "model", "attended", "source", "to",
    }  # fmt: skip
    assert "attended" not in json.loads(regard("translate", sentence, *options, "--json").stdout)


def test_summarize_takes_documents_whole(made: Path, tmp_path: Path) -> None:
    options = ["--model", made / "summarize", "--max-new-tokens", 5]
    (tmp_path / "story").write_text(folders.STORY)
    found = summarize(folders.STORY, model=made / "summarize", max_new_tokens=5, attended=False)
    shown = regard("summarize", *options, "--file", tmp_path / "story")
    assert (shown.returncode, shown.stdout) == (0, f"{found.text}\n")
    assert regard("summarize", *options, given=folders.STORY.encode()).stdout == shown.stdout
    record = json.loads(regard("summarize", *options, folders.STORY, "--json", "--join").stdout)
    assert record["method"] == "joined"
    assert record["parts"][0]["start"] == 0
    drawn = regard("summarize", *options, folders.LINES[2], "--attended").stdout
    assert "summary down, document across" in drawn


def test_answer_says_where(made: Path, tmp_path: Path) -> None:
    (tmp_path / "story").write_text(folders.STORY)
    options = ["--model", made / "answer", "--file", tmp_path / "story"]
    found = answer("Who sat?", folders.STORY, model=made / "answer", threshold=-1e9)
    shown = regard("answer", "Who sat?", "Where?", *options, "--threshold", "-inf", "--json")
    first, second = map(json.loads, shown.stdout.splitlines())
    assert (first["text"], first["start"]) == (found.text, found.start)
    assert folders.STORY[first["start"] : first["end"]] == first["text"]
    assert second["question"] == "Where?"
    assert regard("answer", "Who?", *options, "--threshold", "inf").stdout == "No answer.\n"
    asked = ["answer", "Who sat?", "--model", made / "answer", "--threshold", "-inf"]
    assert regard(*asked, "--context", folders.STORY).stdout == f"{found.text}\n"
    assert "question down, context across" in regard(
        *asked, "--context", folders.LINES[0], "--attended"
    ).stdout  # fmt: skip


def test_complete_writes_the_text_on(made: Path) -> None:
    model = made / "gpt2"
    found = complete("The cat", model=model, how=Greedy(), max_new_tokens=7)
    options = ["--model", model, "--temperature", 0, "--max-new-tokens", 7]
    assert regard("complete", "The cat", *options).stdout == f"The cat{found.text}\n"
    record = json.loads(regard("complete", *options, "--json", given=b"The cat\n").stdout)
    assert record["text"] == found.text
    assert record["prompt"] == "The cat"
    drawn = regard("complete", "The cat", *options, "--attended").stdout
    assert "new words down, earlier words across" in drawn
    samples = {
        regard(
            "complete", "The cat", "--model", model, "--max-new-tokens", 9, "--seed", seed
        ).stdout
        for seed in (1, 1, 2)
    }
    assert len(samples) == 2


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (["translate", "", "--to", "fr"], b"", "The text is empty"),
        (["translate", "--to", "fr"], b"", "standard input is empty"),
        (["translate", "--to", "fr"], b" \n\n", "standard input is empty"),
        (
            ["translate", "--to", "fr"],
            b"\x89PNG\r\n\x1a\n",
            "standard input is not a text in UTF-8: ",
        ),
        pytest.param(["translate", "--to", "fr"], b"a\0b", "it has zero bytes", id="zero bytes"),
        (["translate", "Hello", "--to", "xx"], b"", "does not translate into 'xx'. It offers deu"),
        (["translate", "Hello", "--to", "fr", "--file", "x"], b"", "--file x, not both"),
        (["translate", "a " * 300, "--to", "fr"], b"", "too long"),
        (["translate", "a " * 300, "--to", "fr"], b"", "It begins with 'a a a"),
        (
            ["translate", "Hello", "--to", "fr", "--num-beams", "-1"],
            b"",
            "greater than or equal to 1",
        ),
        (["translate", "Hello", "--to", "fr", "--device", "gpu9"], b"", "no device 'gpu9'"),
        (["summarize"], b"", "empty"),
        (["summarize"], b"\xff\xfe", "byte 0 is 0xff"),
        (["answer", "", "--context", "a"], b"", "empty"),
        (["answer", "Who?"], b"", "There is no text: standard input is empty"),
        (["answer", "Who?", "Ann."], b"", "Give the context, with --context or --file."),
        (["answer", "Who?", "--context", " "], b"", "context is empty"),
        (["answer", "Who?", "--context", "\u200b"], b"", "has no token that"),
        (["answer", "\u200b", "--context", "The cat"], b"", "has no token that"),
        (["translate", "Hello"], b"", "translates into deu, fra. Choose one: --to deu, or"),
        (["answer", "who " * 90, "--context", "a"], b"", "question is too long"),
        (["answer", "Who?", "--context", "a", "--threshold", "nan"], b"", "not nan"),
        (["complete", " "], b"", "empty"),
        (["complete", "the " * 70], b"", "too long"),
        (["complete", "the", "--temperature", "-1"], b"", "temperature"),
    ],
)
def test_bad_input_is_one_line_and_status_2(made, words, stdin, message) -> None:
    name = {"complete": "gpt2"}.get(words[0], words[0])
    one_line(regard(*words, "--model", made / name, given=stdin), message)


def test_several_files_are_read_one_after_another(made: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_bytes(b"The cat sat.\r\n\r\nWho?\r\n")
    two.write_bytes(b"Nobody had seen the dog.")
    files = ["--file", one, "--file", two]
    options = ["--to", "fr", "--model", made / "translate", "--max-new-tokens", 6]
    found = regard("translate", *options, *files).stdout
    assert found == regard("translate", *options, given=one.read_bytes() + two.read_bytes()).stdout
    assert found.count("\n") == 4
    options = ["--model", made / "summarize", "--max-new-tokens", 3, "--json"]
    assert regard("summarize", *options, *files).stdout.count("\n") == 2
    options = ["--model", made / "gpt2", "--max-new-tokens", 3, "--json"]
    prompts = [json.loads(line)["prompt"] for line in
               regard("complete", *options, *files).stdout.splitlines()]  # fmt: skip
    assert prompts == ["The cat sat.", "Who?", "Nobody had seen the dog."]
    for command in (["answer", "Who?", "--model", made / "answer"], ["look", made / "answer"]):
        one_line(regard(*command, *files), "Give one file, not several: ")
        assert regard(*command, "--file", one).returncode == 0


def test_a_line_ends_where_it_does_on_standard_input(made: Path, tmp_path: Path) -> None:
    file = tmp_path / "odd.txt"
    file.write_bytes("The\fcat\x0bsat\x85on\u2028the mat.\n\n\nWho?".encode())
    options = ["--to", "fr", "--model", made / "translate", "--max-new-tokens", 4, "--json"]
    sources = [json.loads(line)["source"] for line in
               regard("translate", *options, "--file", file).stdout.split("\n")[:-1]]  # fmt: skip
    assert sources == ["The\fcat\x0bsat\x85on\u2028the mat.", "", "", "Who?"]


def test_empty_lines_are_passed_over_where_there_is_nothing_to_complete(made: Path) -> None:
    options = ["--model", made / "gpt2", "--max-new-tokens", 3, "--json"]
    shown = regard("complete", *options, given=b"\nThe cat\n  \r\n\nWho\n")
    assert shown.returncode == 0
    assert [json.loads(line)["prompt"] for line in shown.stdout.splitlines()] == ["The cat", "Who"]


def test_the_name_of_a_file_is_no_text(made: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    file.write_text("The cat sat on the mat.")
    for command in (
        ["translate", file, "--to", "fr", "--model", made / "translate"],
        ["summarize", "The cat.", file, "--model", made / "summarize"],
        ["answer", "Who?", "--context", file, "--model", made / "answer"],
        ["complete", file, "--model", made / "gpt2"],
        ["look", made / "answer", file],
    ):
        shown = regard(*command)
        assert (shown.returncode, shown.stderr) == (
            2,
            f"regard: {file} is a file. To read it, pass --file {file}.\n",
        )
    long = f"{'日' * 200}.txt"  # as a name, more bytes than a name may have
    options = ["--model", made / "gpt2", "--max-new-tokens", 3]
    assert "is a file" not in regard("complete", long, *options).stderr


@pytest.mark.parametrize("command", ["summarize", "complete", "translate", "answer", "look"])
def test_an_empty_file_is_named(made: Path, tmp_path: Path, command: str) -> None:
    file = tmp_path / "empty.txt"
    file.write_text(" \n")
    words = [command, *(["Who?"] * (command == "answer"))]
    words += [made / "answer"] if command == "look" else ["--model", made / "translate"]
    shown = regard(*words, "--file", file)
    assert (shown.returncode, shown.stderr) == (2, f"regard: {file} is empty. Give some words.\n")


@pytest.mark.parametrize("command", ["translate", "summarize", "complete"])
def test_files_that_cannot_be_read(made, tmp_path, monkeypatch, command) -> None:
    options = ["--model", made / {"complete": "gpt2"}.get(command, command)]
    shown = regard(command, *options, *(["--to", "fr"] * (command == "translate")), "--file", "no")
    assert (shown.returncode, shown.stderr) == (
        2,
        "regard: no cannot be read: No such file or directory.\n",
    )
    shown = regard(command, *options, "--file", tmp_path)
    assert shown.returncode == 2
    assert "Is a directory" in shown.stderr
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    shown = regard(command, *options, *(["--to", "fr"] * (command == "translate")),
                   "--file", tmp_path / "binary")  # fmt: skip
    one_line(shown, "binary is not a text")

    def denied(self: Path) -> bytes:  # root may read everything: the system is asked to say no
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    shown = regard(command, *options, "--file", "secret.txt")
    assert (shown.returncode, shown.stderr) == (
        2,
        "regard: secret.txt cannot be read: Permission denied.\n",
    )


def test_an_unknown_model_is_answered_with_the_nearest(tmp_path, monkeypatch) -> None:
    folder = folders.writer(tmp_path / "shelf" / "books-tiny")
    (folder / "README.md").write_text(folders.CARD)
    monkeypatch.setattr(cards, "SHIPPED", tmp_path / "shelf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shown = regard("complete", "The cat", "--model", "bookstiny")
    assert one_line(shown).endswith("Did you mean books-tiny?\n")
    assert (
        regard("complete", "The cat", "--model", "books-tiny", "--max-new-tokens", 3).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("command", "does", "recipe"),
    [
        (["translate", "The cat", "--to", "fr"], "translation", "translate"),
        (["summarize", "The cat"], "summarization", "summarize"),
        (["answer", "Who?", "--context", "The cat"], "question answering", "answer"),
        (["complete", "The cat", "--max-new-tokens", 3], "completion", "books-gpt2"),
    ],
)
def test_a_default_that_is_not_shipped_is_said_in_one_line(
    made: Path, tmp_path, monkeypatch, command, does, recipe
) -> None:
    monkeypatch.setattr(cards, "SHIPPED", tmp_path / "shelf")
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)  # nor is the hub asked
    shown = one_line(regard(*command), "--model ")
    assert shown.startswith(
        f"regard: No {does} model is shipped with this build of regard. Name one"
    )
    assert shown.endswith(f"or train one with recipes/{recipe}.toml.\n")
    # One that is shipped some day is simply used.
    folder = made / {"books-gpt2": "gpt2"}.get(recipe, recipe)
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / recipe).symlink_to(folder)
    assert regard(*command).returncode == 0


def test_a_broken_model_is_one_line_and_status_1(tmp_path) -> None:
    folder = folders.writer(tmp_path / "gpt2")
    (folder / "model.safetensors").write_bytes(b"not weights")
    one_line(regard("complete", "The cat", "--model", folder), status=1)


@pytest.mark.processes
def test_lines_are_translated_as_they_come_until_an_interrupt(made: Path) -> None:
    """A line typed is answered before the next one is; Ctrl-C ends it without a word."""
    # A shell that runs the tests in the background has them ignore interrupts.
    handle = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    words = ("translate", "--to", "fr", "--model", made / "translate", "--max-new-tokens", 3)
    with started(*words, start=handle + START) as process:
        for line in ("The cat.\n", "The dog.\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline().endswith("\n")
        process.send_signal(signal.SIGINT)  # while it waits for a line
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == ""


@pytest.mark.processes
def test_a_closed_pipe_is_quiet(made: Path) -> None:
    with started("complete", "--model", made / "gpt2", "--max-new-tokens", 9) as process:
        process.stdout.close()  # before anything is written to it
        process.stdin.write("The cat\n" * 3)
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_without_standard_input_it_says_so(made, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["regard", "summarize", "--model", str(made / "summarize")])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no standard input" in capsys.readouterr().err
