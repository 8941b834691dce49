"""The commands that use models: what goes in, what comes out, and how what is wrong is told."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from helpers import model_folders as folders
from helpers.command import PATIENCE, START, one_line, printed, records, regard, started
from regard import Greedy, answer, complete, summarize, translate
from regard.checkpoints import cards
from regard.cli import main, texts
from regard.decoding.settings import Settings


def test_translate_lines_in_their_order(made: Path, tmp_path: Path) -> None:
    lines = ["The cat sat.", "", "Nobody had seen the dog of the house.", "Who?"]
    model = made / "translate"
    found = translate(lines, "fr", model=model, max_new_tokens=6, attended=False)
    expected = [record.text for record in found]
    options = ["--to", "fr", "--model", model, "--max-new-tokens", 6]
    shown = regard("translate", *options, given="\r\n".join(lines).encode())
    assert shown.returncode == 0
    doubts = [record.doubt for record in found if record.doubtful]
    assert doubts  # the weights are random
    remarks = shown.stderr.splitlines()
    assert all(map(str.startswith, remarks, doubts)), remarks
    assert len(remarks) == len(doubts)
    assert shown.stdout == "\n".join(expected) + "\n"
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    assert printed("translate", *options, "--file", tmp_path / "lines") == shown.stdout
    assert printed("translate", *options, lines[0], lines[2]).splitlines() == expected[::2]


def test_translate_draws_the_alignment_when_asked(made: Path) -> None:
    sentence = "The cat sat on the mat."
    options = ["--to", "fr", "--model", made / "translate", "--max-new-tokens", 6, "--num-beams", 1]
    words = ["translate", sentence, *options]
    found = translate(sentence, "fr", model=made / "translate", max_new_tokens=6, how=Greedy())
    shown = printed(*words, "--attended")
    assert shown.startswith(f"{found.text}\nAlignment\ntarget down, source across\n")
    assert found.attended.where.split(",")[0] in shown
    assert "\x1b" not in shown
    assert printed(*words) == f"{found.text}\n"
    [record] = records(*words, "--attended")
    assert record["text"] == found.text
    assert record["attended"]["queries"] == list(found.attended.queries)
    assert set(record) == {
        "text", "score", "tokens", "seconds", "model", "confidence", "reasons", "doubtful",
        "attended", "source", "to",
    }  # fmt: skip
    assert "attended" not in records(*words)[0]


@pytest.mark.slow
def test_summarize_takes_documents_whole(made: Path, tmp_path: Path) -> None:
    words = ["summarize", "--model", made / "summarize", "--max-new-tokens", 5]
    (tmp_path / "story").write_text(folders.STORY)
    found = summarize(folders.STORY, model=made / "summarize", max_new_tokens=5, attended=False)
    assert printed(*words, "--file", tmp_path / "story") == f"{found.text}\n"
    assert printed(*words, given=folders.STORY) == f"{found.text}\n"
    [record] = records(*words, folders.STORY, "--join")
    assert record["method"] == "joined"
    assert record["parts"][0]["start"] == 0
    assert "summary down, document across" in printed(*words, folders.LINES[2], "--attended")


@pytest.mark.slow
def test_summarize_chooses_sentences_unless_a_model_is_to_write(tmp_path: Path) -> None:
    document = (
        "The bridge in the town closes on Tuesday. Two of its pillars have cracks. "
        "Cars must use another road."
    )
    for name in ("one", "two"):
        (tmp_path / name).write_text(document)
    found = summarize(document, attended=False)
    files = ["--file", tmp_path / "one", "--file", tmp_path / "two"]
    assert printed("summarize", *files) == f"{found.text}\n" * 2
    assert printed("summarize", document, "--sentences", 3) == f"{document}\n"
    assert "document down, summary across" in printed("summarize", document, "--attended")
    assert printed("summarize", document, "--words", 8) == printed("summarize", document)
    assert records("summarize", document, "--one-line")[0]["method"] == "whole"
    one_line(
        regard("summarize", document, "--num-beams", 2),
        "--num-beams is for a summary that a model writes. Ask for --one-line, or name a --model",
    )
    one_line(regard("summarize", document, "--sentences", 2, "--words", 9), "Give --sentences or")


def test_answer_says_where(made: Path, tmp_path: Path) -> None:
    (tmp_path / "story").write_text(folders.STORY)
    options = ["--model", made / "answer", "--file", tmp_path / "story"]
    found = answer("Who sat?", folders.STORY, model=made / "answer", threshold=-1e9)
    first, second = records("answer", "Who sat?", "Where?", *options, "--threshold", "-inf")
    assert (first["text"], first["start"]) == (found.text, found.start)
    assert folders.STORY[first["start"] : first["end"]] == first["text"]
    assert second["question"] == "Where?"
    assert printed("answer", "Who?", *options, "--threshold", "inf") == "No answer.\n"
    asked = ["answer", "Who sat?", "--model", made / "answer", "--threshold", "-inf"]
    assert printed(*asked, "--context", folders.STORY) == f"{found.text}\n"
    drawn = printed(*asked, "--context", folders.LINES[0], "--attended")
    assert "question down, context across" in drawn


def test_complete_writes_the_text_on(made: Path) -> None:
    model = made / "gpt2"
    found = complete("The cat", model=model, how=Settings(temperature=0), max_new_tokens=7)
    options = ["--model", model, "--temperature", 0, "--max-new-tokens", 7]
    assert printed("complete", "The cat", *options) == f"The cat{found.text}\n"
    [record] = records("complete", *options, given="The cat\n")
    assert (record["prompt"], record["text"]) == ("The cat", found.text)
    drawn = printed("complete", "The cat", *options, "--attended")
    assert "new words down, earlier words across" in drawn
    sampled = ["complete", "The cat", "--model", model, "--max-new-tokens", 9, "--seed"]
    assert len({printed(*sampled, seed) for seed in (1, 1, 2)}) == 2


# ------------------------------------------------------------------------------------ bad input


TO_FRENCH = ["translate", "--to", "fr"]


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (TO_FRENCH, b"", "standard input is empty"),
        (TO_FRENCH, b" \n\n", "standard input is empty"),
        (TO_FRENCH, b"\x89PNG\r\n\x1a\n", "standard input is not a text in UTF-8: "),
        pytest.param(TO_FRENCH, b"a\0b", "it has zero bytes", id="zero bytes"),
        ([*TO_FRENCH, ""], b"", "The text is empty"),
        ([*TO_FRENCH, "Hello", "--file", "x"], b"", "--file x, not both"),
        ([*TO_FRENCH, "Hello", "--num-beams", "-1"], b"", "greater than or equal to 1"),
        ([*TO_FRENCH, "Hello", "--device", "gpu9"], b"", "no device 'gpu9'"),
        (["translate", "Hello", "--to", "xx"], b"", "does not translate into 'xx'. It offers deu"),
        (["translate", "Hello"], b"", "translates into deu, fra. Choose one: --to deu, or"),
        (["summarize"], b"", "empty"),
        (["summarize"], b"\xff\xfe", "byte 0 is 0xff"),
        (["answer", "", "--context", "a"], b"", "empty"),
        (["answer", "Who?"], b"", "There is no text: standard input is empty"),
        (["answer", "Who?", "Ann."], b"", "Give the context, with --context or --file."),
        (["answer", "Who?", "--context", " "], b"", "context is empty"),
        (["answer", "Who?", "--context", "\u200b"], b"", "has no token that"),
        (["answer", "\u200b", "--context", "The cat"], b"", "has no token that"),
        (["answer", "who " * 90, "--context", "a"], b"", "question is too long"),
        (["answer", "Who?", "--context", "a", "--threshold", "nan"], b"", "not nan"),
        (["complete", " "], b"", "empty"),
        (["complete", "the " * 70], b"", "too long"),
        (["complete", "the", "--temperature", "-1"], b"", "temperature"),
        (["translate", "Hello", "--to", "fr", "--device", "meta"], b"", "no device 'meta'"),
        (["translate", "Hello", "--length-penalty", "1e30"], b"", "'--length-penalty': "),
        (["summarize", "Hello", "--length-penalty", "-11"], b"", "'--length-penalty': "),
    ],
)
def test_bad_input_is_one_line_and_status_2(made, words, stdin, message) -> None:
    name = {"complete": "gpt2"}.get(words[0], words[0])
    one_line(regard(*words, "--model", made / name, given=stdin), message)


def test_an_untrained_direction_is_one_line_that_says_what_to_do() -> None:
    shown = one_line(regard("translate", "Le chat est sur la table.", "--to", "de"))
    assert "was not trained from French to German. It translates English to French" in shown
    assert "--from eng" in shown


@pytest.mark.slow
def test_several_files_are_read_one_after_another(made: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_bytes(b"The cat sat.\r\n\r\nWho?\r\n")
    two.write_bytes(b"Nobody had seen the dog.")
    files = ["--file", one, "--file", two]
    options = ["--to", "fr", "--model", made / "translate", "--max-new-tokens", 6]
    found = printed("translate", *options, *files)
    assert found == printed("translate", *options, given=one.read_bytes() + two.read_bytes())
    assert found.count("\n") == 4
    options = ["--model", made / "summarize", "--max-new-tokens", 3]
    assert len(records("summarize", *options, *files)) == 2
    options = ["--model", made / "gpt2", "--max-new-tokens", 3]
    prompts = [record["prompt"] for record in records("complete", *options, *files)]
    assert prompts == ["The cat sat.", "Who?", "Nobody had seen the dog."]
    for command in (["answer", "Who?", "--model", made / "answer"], ["look", made / "answer"]):
        one_line(regard(*command, *files), "Give one file, not several: ")
        assert printed(*command, "--file", one)


def test_a_file_is_written_batch_by_batch_and_an_interrupt_keeps_what_is_done(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.tasks import translation

    file, whole, batches = tmp_path / "lines", translation.translate, list[list[str]]()
    lines = [f"The cat sat on the mat {number}." for number in range(7)]
    file.write_text("\n".join(lines))

    def interrupted(texts: list[str], *arguments: object, **settings: object) -> object:
        batches.append(texts)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return whole(texts, *arguments, **settings)

    options = ["--to", "fr", "--model", made / "translate", "--max-new-tokens", 4, "--batch", 1]
    expected = printed("translate", *options, "--file", file).splitlines()
    assert len(expected) == 7
    monkeypatch.setattr(translation, "translate", interrupted)
    shown = regard("translate", *options, "--file", file)
    assert shown.returncode == 130
    assert batches == [lines[:2], lines[2:4], lines[4:6]]
    assert shown.stdout.splitlines() == expected[:4]
    assert shown.stderr.splitlines()[-1] == "Stopped: 4 lines are translated and written."


def test_progress_is_counted_in_lines_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1\n2\n3\n")
    (tmp_path / "two").write_text("4\n5")
    shown = list[tuple[int, int]]()
    files = [tmp_path / "one", tmp_path / "two"]
    found = texts.lines(None, files, most=2, show=lambda *counts: shown.append(counts))
    assert list(found) == [["1", "2"], ["3"], ["4", "5"]]
    assert shown == [(2, 5), (3, 5), (5, 5)]


def test_a_line_ends_where_it_does_on_standard_input(made: Path, tmp_path: Path) -> None:
    file = tmp_path / "odd.txt"
    file.write_bytes("The\fcat\x0bsat\x85on\u2028the mat.\n\n\nWho?".encode())
    options = ["--to", "fr", "--model", made / "translate", "--max-new-tokens", 4]
    sources = [record["source"] for record in records("translate", *options, "--file", file)]
    assert sources == ["The\fcat\x0bsat\x85on\u2028the mat.", "", "", "Who?"]


def test_empty_lines_are_passed_over_where_there_is_nothing_to_complete(made: Path) -> None:
    options = ["--model", made / "gpt2", "--max-new-tokens", 3]
    found = records("complete", *options, given=b"\nThe cat\n  \r\n\nWho\n")
    assert [record["prompt"] for record in found] == ["The cat", "Who"]


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
        one_line(regard(*command), f": {file} is a file. To read it, pass --file {file}.\n")
    long = f"{'日' * 200}.txt"  # as a name, more bytes than a name may have
    options = ["--model", made / "gpt2", "--max-new-tokens", 3]
    assert "is a file" not in regard("complete", long, *options).stderr


@pytest.mark.parametrize("command", ["summarize", "complete", "translate", "answer", "look"])
def test_an_empty_file_is_named(made: Path, tmp_path: Path, command: str) -> None:
    file = tmp_path / "empty.txt"
    file.write_text(" \n")
    words = [command, *(["Who?"] * (command == "answer"))]
    words += [made / "answer"] if command == "look" else ["--model", made / "translate"]
    one_line(regard(*words, "--file", file), f": {file} is empty. Give some words.\n")


@pytest.mark.parametrize("command", ["translate", "summarize", "complete"])
def test_files_that_cannot_be_read(made, tmp_path, monkeypatch, command) -> None:
    words = [command, "--model", made / {"complete": "gpt2"}.get(command, command)]
    words += ["--to", "fr"] * (command == "translate")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for file, message in (
        ("no", ": no cannot be read: No such file or directory.\n"),
        (tmp_path, "Is a directory"),
        (tmp_path / "binary", "binary is not a text"),
    ):
        one_line(regard(*words, "--file", file), message)

    def denied(self: Path) -> bytes:  # root may read everything: the system is asked to say no
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    shown = regard(*words, "--file", "secret.txt")
    one_line(shown, ": secret.txt cannot be read: Permission denied.\n")


def test_an_unknown_model_is_answered_with_the_nearest(tmp_path, monkeypatch) -> None:
    folder = folders.writer(tmp_path / "shelf" / "books-tiny")
    (folder / "README.md").write_text(folders.CARD)
    monkeypatch.setattr(cards, "SHIPPED", tmp_path / "shelf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shown = regard("complete", "The cat", "--model", "bookstiny")
    assert one_line(shown).endswith("Did you mean books-tiny?\n")
    assert printed("complete", "The cat", "--model", "books-tiny", "--max-new-tokens", 3)


@pytest.mark.parametrize(
    ("command", "does", "model", "recipe"),
    [
        (["translate", "The cat", "--to", "fr"], "translation", "translate", "translate-student"),
        (["summarize", "The cat"], "summarization", "summarize", "summarize"),
        (["answer", "Who?", "--context", "The cat"], "question answering", "answer", "answer"),
        (["complete", "Cat", "--max-new-tokens", 3], "completion", "books-gpt2", "books-gpt2"),
    ],
)
def test_a_default_that_is_not_shipped_is_said_in_one_line(
    made: Path, tmp_path, monkeypatch, command, does, model, recipe
) -> None:
    monkeypatch.setattr(cards, "SHIPPED", tmp_path / "shelf")
    missing = f": No {does} model is shipped with this build of regard. Download one"
    shown = one_line(regard(*command), missing)
    assert "--model " in shown
    assert shown.endswith(f"or train one with recipes/{recipe}.toml.\n")
    # One that is shipped some day is simply used.
    folder = made / {"books-gpt2": "gpt2"}.get(model, model)
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / model).symlink_to(folder)
    assert printed(*command)


def test_a_broken_model_is_one_line_and_status_1(tmp_path) -> None:
    folder = folders.writer(tmp_path / "gpt2")
    (folder / "model.safetensors").write_bytes(b"not weights")
    one_line(regard("complete", "The cat", "--model", folder), status=1)


@pytest.mark.processes
def test_lines_are_translated_as_they_come_until_an_interrupt(made: Path) -> None:
    """A line typed is answered before the next one is; Ctrl-C ends it without an error."""
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
        remarks = process.stderr.read().splitlines()
        assert all(remark.startswith("low confidence ") for remark in remarks), remarks


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
