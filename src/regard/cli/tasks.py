"""The commands translate, summarize, answer and complete, which run the tasks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli import options, terminal, texts
from regard.decoding.settings import Settings
from regard.errors import InputError
from regard.pictures.record import printable, shorten

if TYPE_CHECKING:
    from regard.tasks.records import Completion, Record

GROUP = 2  # batches that are translated before their lines are written; equal lengths go together


def translate(
    text: options.Texts = None,
    to: Annotated[
        str | None, typer.Option(help="The target language, such as fr.", show_default=False)
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="The source language; by default it is told from the text.",
            show_default=False,
        ),
    ] = None,
    model: options.Model = "translate",
    file: options.Files = None,
    attended: Annotated[
        bool | None,
        typer.Option(
            help="Draw the alignment of the words; by default for a single text on a terminal.",
            show_default=False,
        ),
    ] = None,
    num_beams: options.NumBeams = None,
    length_penalty: options.LengthPenalty = None,
    early_stopping: options.EarlyStopping = None,
    no_repeat_ngram_size: options.NoRepeat = None,
    min_new_tokens: options.MinNewTokens = None,
    max_new_tokens: options.MaxNewTokens = None,
    batch: options.Batch = 32,
    as_json: options.Json = False,
    device: options.Device = "cpu",
    precision: options.Precision = "float32",
) -> None:
    """Translate texts, or each line of a file or of standard input.

    The output has one line for each line of input, in the same order. It is written batch by batch,
    so Ctrl-C keeps what is done.
    """
    from regard.tasks.translation import translate as run

    settings = Settings(
        num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping,
        no_repeat_ngram_size=no_repeat_ngram_size, min_new_tokens=min_new_tokens,
    )  # fmt: skip
    place = terminal.device(device)
    if attended is None:
        attended = sys.stdout.isatty() and len(text or ()) == 1 and not as_json
    done = 0
    try:
        with terminal.progress("Translating", hidden=not file or sys.stdout.isatty()) as show:
            for lines in texts.lines(text, file, most=GROUP * batch, show=show):
                records = run(
                    lines, to, source=source, model=model, how=settings, batch=batch,
                    max_new_tokens=max_new_tokens, attended=attended, device=place,
                    precision=precision,
                )  # fmt: skip
                for record in records:
                    _show(record, as_json)
                    done += 1
    except KeyboardInterrupt:
        if file:
            terminal.remark(f"Stopped: {done:,} lines are translated and written.")
        raise


def summarize(
    text: options.Texts = None,
    file: options.Files = None,
    sentences: Annotated[
        int | None,
        typer.Option(
            help="The number of sentences; by default a third of them, at most 3.",
            min=1,
            show_default=False,
        ),
    ] = None,
    words: Annotated[
        int | None,
        typer.Option(help="Choose sentences of at most so many words.", min=1, show_default=False),
    ] = None,
    one_line: Annotated[
        bool,
        typer.Option("--one-line", help="Write one line, for a description of software."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"The model that writes the summary. {options.MODEL}", show_default=False
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option("--join", help="Join the summaries of the parts of a long document."),
    ] = False,
    attended: options.Attended = False,
    num_beams: options.NumBeams = None,
    length_penalty: options.LengthPenalty = None,
    early_stopping: options.EarlyStopping = None,
    no_repeat_ngram_size: options.NoRepeat = None,
    min_new_tokens: options.MinNewTokens = None,
    max_new_tokens: options.MaxNewTokens = None,
    batch: options.Batch = 8,
    as_json: options.Json = False,
    device: options.Device = "cpu",
    precision: options.Precision = "float32",
) -> None:
    """Summarize documents of any length with their most telling sentences.

    These are the sentences that the others attend to most. With --one-line the model summarize
    writes one line, as for descriptions of software, and with --model another model writes. A
    document longer than its input is summarized in parts, and then the summaries are summarized
    again.
    """
    from regard.tasks.summarization import check_options
    from regard.tasks.summarization import summarize as run

    settings = Settings(
        num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping,
        no_repeat_ngram_size=no_repeat_ngram_size, min_new_tokens=min_new_tokens,
    )  # fmt: skip
    given: dict[str, object] = {
        "sentences": sentences, "words": words, "one_line": one_line, "model": model,
        "join": join, "max_new_tokens": max_new_tokens, **settings.to_json(),
    }  # fmt: skip
    check_options(given, _as_option)
    place = terminal.device(device)
    documents = texts.documents(text, file)
    done, hidden = 0, not file or sys.stdout.isatty()
    try:
        with terminal.progress("Summarizing", hidden=hidden) as show:
            for document in documents:
                record = run(
                    document, sentences=sentences, words=words, one_line=one_line, model=model,
                    join=join, how=settings, max_new_tokens=max_new_tokens, batch=batch,
                    attended=attended, device=place, precision=precision,
                )  # fmt: skip
                _show(record, as_json, record.remark or None)
                done += 1
                show(done, len(documents))
    except KeyboardInterrupt:
        if file:
            terminal.remark(f"Stopped: {done:,} of {len(documents):,} documents are summarized.")
        raise


def _as_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def answer(
    question: Annotated[list[str], typer.Argument(help="One question, or several.")],
    context: Annotated[
        str | None,
        typer.Option(
            help="The text with the answer. Without it or --file, standard input is read.",
            show_default=False,
        ),
    ] = None,
    model: options.Model = "answer",
    file: options.File = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="The score that an answer must exceed; by default the model's own, or 0. -inf "
            "always gives an answer.",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="The number of tokens in each window of the text.")
    ] = None,
    attended: options.Attended = False,
    batch: options.Batch = 16,
    as_json: options.Json = False,
    device: options.Device = "cpu",
    precision: options.Precision = "float32",
) -> None:
    """Answer questions with parts of a text of any length, or report that it has no answer."""
    from regard.tasks.question_answering import answer as run

    if threshold is not None and math.isnan(threshold):
        raise InputError("--threshold is a number, not nan.")
    if context is not None and file is not None:
        raise InputError("Give --context or --file, not both.")
    document = texts.document(context, file, "the context, with --context or --file")
    records = run(
        question, document, model=model, threshold=threshold, window=window, batch=batch,
        attended=attended, device=terminal.device(device), precision=precision,
    )  # fmt: skip
    for record in records:
        remark = f"confidence {record.confidence:.2f}"
        if record.span is not None:
            start, end = record.span
            around = " ".join(document[max(start - 40, 0) : end + 40].split())
            place = f"characters {start} to {end}"
            remark = f"{remark}, {place}: … {around} …"
        _show(record, as_json, remark)


def complete(
    text: options.Texts = None,
    model: options.Model = "books-gpt2",
    file: options.Files = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="The maximum number of tokens to generate; by default 100 or what fits, and the "
            "text ends with a whole sentence, if one ends late enough.",
            min=1,
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Above 1 is more random, below 1 less; 0 is greedy decoding.")
    ] = 0.7,
    top_k: Annotated[
        int, typer.Option(help="Sample from the k likeliest tokens; 0 is all tokens.", min=0)
    ] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens up to this total probability.")
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="The seed of the sample.")] = 0,
    no_repeat_ngram_size: options.NoRepeat = 3,
    attended: options.Attended = False,
    as_json: options.Json = False,
    device: options.Device = "cpu",
    precision: options.Precision = "float32",
) -> None:
    """Complete a text, and print each piece when it is generated. Empty lines are skipped.

    books-gpt2 and books-xl continue a text like a book from before 1930. They are no assistants.
    """
    from regard.tasks.completion import stream_completion

    settings = Settings(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        no_repeat_ngram_size=no_repeat_ngram_size,
    )  # fmt: skip
    place = terminal.device(device)
    for prompt in (line for lines in texts.lines(text, file) for line in lines if line.strip()):
        pieces = stream_completion(
            prompt, model=model, how=settings, max_new_tokens=max_new_tokens, attended=attended,
            device=place, precision=precision,
        )  # fmt: skip
        record = _consume(prompt, pieces, quiet=as_json)
        _show(record, as_json, printed=True)


def _consume(prompt: str, pieces: Generator[str, None, Completion], quiet: bool) -> Completion:
    """Print each piece of a completion when it is generated, and return the record."""
    piece = prompt
    while True:
        if not quiet:
            print(piece, end="", flush=True)
        try:
            piece = next(pieces)
        except StopIteration as stopped:
            if not quiet:
                print(flush=True)
            record: Completion = stopped.value
            return record


def _show(
    record: Record, as_json: bool, remark: str | None = None, *, printed: bool = False
) -> None:
    """Print a record: as JSON, or as its text, remarks and a picture of its weights.

    What speaks against a doubtful result goes to standard error.
    """
    if as_json:
        print(json.dumps(record.to_dict(), ensure_ascii=False), flush=True)
        return
    if not printed:
        print(record, flush=True)
    if record.doubtful:
        terminal.remark(f"{record.doubt} ({shorten(printable(record.text), 32)})")
    if remark is not None and sys.stdout.isatty():
        terminal.remark(remark)
    if record.attended is not None:
        terminal.draw(record.picture())
        print(flush=True)
