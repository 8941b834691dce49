"""Commands that use models: translate, summarize, answer, complete."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from regard.cli import terminal
from regard.decoding.settings import Settings
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.pictures.terminal import Colouring
    from regard.tasks.records import Completion, Record, WordAttention

AT_ONCE = 256  # lines that are translated together, where they come as fast

Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--file", metavar="FILE", help="Read from this file; repeatable.", show_default=False
    ),
]
File = Annotated[  # a list too: of a single one the last would count, and the others silently not
    list[Path] | None,
    typer.Option("--file", metavar="FILE", help="Read from this file.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")]
Batch = Annotated[int, typer.Option(help="How many go through the model together.", min=1)]
Beams = Annotated[
    int | None,
    typer.Option("--beam", help="Beams to keep; 1 is greedy. As the model says if not given."),
]
Length = Annotated[
    int | None, typer.Option(help="Tokens to write at most. As the model says if not given.", min=1)
]
Precision = Annotated[
    Literal["float32", "bfloat16", "int8"],
    typer.Option(help="Of the weights while they are used; int8 is the fastest on most CPUs."),
]
MODEL = "A shipped model, a folder, or a model of the hub."


def translate(
    text: Annotated[
        list[str] | None,
        typer.Argument(help="What to translate; else standard input, line by line."),
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="Into which language, as fr.", show_default=False)
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Out of which, for a T5 that has several.", show_default=False),
    ] = None,
    model: Annotated[str, typer.Option(help=MODEL)] = "translate",
    file: Files = None,
    align: Annotated[
        bool | None,
        typer.Option(
            help="Draw which words were attended to; one sentence's are, on a terminal.",
            show_default=False,
        ),
    ] = None,
    beam: Beams = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 0 it favours longer translations; the model's own if not given.",
            show_default=False,
        ),
    ] = None,
    length: Length = None,
    batch: Batch = 32,
    as_json: Json = False,
    device: terminal.Device = "cpu",
    precision: Precision = "float32",
) -> None:
    """Translate texts, or the lines of a file or of standard input as they come.

    Every line of input is a line of output, in the same order.
    """
    from regard.tasks.translation import translate as run

    how = Settings(num_beams=beam, length_penalty=length_penalty)
    place = terminal.device(device)
    draw = (
        (sys.stdout.isatty() and len(text or ()) == 1 and not as_json) if align is None else align
    )
    for lines in _lines(text, file):
        found = run(
            lines, to, source=source, model=model, how=how, length=length, batch=batch, look=draw,
            device=place, precision=precision,
        )  # fmt: skip
        for record in found:
            _show(record, as_json)
            if draw and not as_json and record.attended is not None:
                _draw(record.attended, "Alignment")
        sys.stdout.flush()


def summarize(
    text: Annotated[
        list[str] | None, typer.Argument(help="A document; else standard input.")
    ] = None,
    model: Annotated[str, typer.Option(help=MODEL)] = "summarize",
    file: Files = None,
    join: Annotated[
        bool,
        typer.Option("--join", help="Of a long document, keep the summaries of all its parts."),
    ] = False,
    attended: Annotated[
        bool, typer.Option("--attended", help="Draw which sentences were attended to.")
    ] = False,
    beam: Beams = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 0 it favours longer summaries; the model's own if not given.",
            show_default=False,
        ),
    ] = None,
    length: Length = None,
    batch: Batch = 8,
    as_json: Json = False,
    device: terminal.Device = "cpu",
    precision: Precision = "float32",
) -> None:
    """Summarize documents of any length.

    One that is longer than the model reads at once is summarized in parts, and their summaries
    once more.
    """
    from regard.tasks.summarization import summarize as run

    how = Settings(num_beams=beam, length_penalty=length_penalty)
    place = terminal.device(device)
    for document in _documents(text, file):
        record = run(
            document, model=model, join=join, how=how, length=length, batch=batch, look=attended,
            device=place, precision=precision,
        )  # fmt: skip
        _show(record, as_json)
        if record.how != "whole" and sys.stderr.isatty():
            said = "joined" if record.how == "joined" else "summarized once more"
            _remark(f"{len(record.parts)} parts, {said}")
        if attended and not as_json and record.attended is not None:
            _draw(record.attended, "Where it comes from")


def answer(
    question: Annotated[list[str], typer.Argument(help="One question, or several.")],
    context: Annotated[
        str | None,
        typer.Option(help="Where to look; else --file or standard input.", show_default=False),
    ] = None,
    model: Annotated[str, typer.Option(help=MODEL)] = "answer",
    file: File = None,
    threshold: Annotated[
        float,
        typer.Option(help="By how much an answer must be better than none; -inf always answers."),
    ] = 0.0,
    window: Annotated[
        int | None, typer.Option(help="Tokens read at once.", show_default=False)
    ] = None,
    attended: Annotated[
        bool, typer.Option("--attended", help="Draw which words the question attended to.")
    ] = False,
    batch: Batch = 16,
    as_json: Json = False,
    device: terminal.Device = "cpu",
    precision: Precision = "float32",
) -> None:
    """Answer questions by words of a text of any length, or say that it has no answer."""
    from regard.tasks.question_answering import answer as run

    if math.isnan(threshold):
        raise InputError("--threshold is a number, not nan.")
    if context is not None and file is not None:
        raise InputError("Give --context or --file, not both.")
    document = _document(context, file, "a text to look in, with --context or --file")
    records = run(
        question, document, model=model, threshold=threshold, window=window, batch=batch,
        look=attended, device=terminal.device(device), precision=precision,
    )  # fmt: skip
    for record in records:
        _show(record, as_json)
        if record.span is not None and not as_json and sys.stdout.isatty():
            around = " ".join(
                document[max(record.span.start - 40, 0) : record.span.end + 40].split()
            )
            _remark(
                f"characters {record.start} to {record.end}, probability "
                f"{record.probability:.2f}: … {around} …"
            )
        if attended and not as_json and record.attended is not None:
            _draw(record.attended, "What the question attended to")


def complete(
    text: Annotated[
        list[str] | None, typer.Argument(help="How it begins; else standard input, by lines.")
    ] = None,
    model: Annotated[str, typer.Option(help=MODEL)] = "books-gpt2",
    file: Files = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens to write at most; 100, or as many as the model has room for.",
            min=1,
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Below 1 likelier, above 1 wilder; 0 always takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw among so many; 0 is all.", min=0)] = 0,
    top_p: Annotated[float, typer.Option(help="Draw within this share of probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    no_repeat: Annotated[
        int, typer.Option(help="Let no run of so many tokens come twice; 0 allows it.", min=0)
    ] = 0,
    attended: Annotated[
        bool, typer.Option("--attended", help="Draw which words were attended to.")
    ] = False,
    as_json: Json = False,
    device: terminal.Device = "cpu",
    precision: Precision = "float32",
) -> None:
    """Go on from a text, shown as it is written. Empty lines are passed over."""
    from regard.tasks.completion import stream_completion

    how = Settings(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        no_repeat_ngram_size=no_repeat,
    )  # fmt: skip
    place = terminal.device(device)
    for prompt in (line for lines in _lines(text, file) for line in lines if line.strip()):
        pieces = stream_completion(
            prompt,
            model=model,
            how=how,
            length=length,
            look=attended,
            device=place,
            precision=precision,
        )
        record = _written(prompt, pieces, quiet=as_json)
        if as_json:
            _show(record, as_json)
        elif attended and record.attended is not None:
            _draw(record.attended, "What was attended to")


def _written(prompt: str, pieces: Generator[str, None, Completion], quiet: bool) -> Completion:
    """The record of a text, printed meanwhile as it is written."""
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


# ------------------------------------------------------------------------------------------- input


def _document(text: str | None, files: Sequence[Path] | None, wanted: str = "some words") -> str:
    """One whole text: the one given, or a file, or all of standard input."""
    if files and len(files) > 1:
        names = ", ".join(map(str, files))
        raise InputError(f"Give one file: one text is read at a time, but got {names}.")
    return _documents(None if text is None else [text], files, wanted)[0]


def _documents(
    texts: Sequence[str] | None, files: Sequence[Path] | None, wanted: str = "some words"
) -> list[str]:
    """Whole texts: those given, or those of files, or all of standard input."""
    if texts:
        _check_given(texts, files)
        return list(texts)
    if files:
        return [_filled(_decoded(_bytes(file), str(file)), str(file)) for file in files]
    whole = _decoded(b"".join(_blocks()), "standard input")
    return [_filled(whole, "There is no text: standard input", wanted)]


def _lines(texts: Sequence[str] | None, files: Sequence[Path] | None) -> Iterator[list[str]]:
    """Texts in lots: those given, or the lines of files, or of standard input as they come."""
    if texts:
        _check_given(texts, files)
        if not any(text.strip() for text in texts):
            raise InputError("The text is empty. Give some words.")
        yield list(texts)
        return
    if not files:
        yield from _arriving()
    for file in files or ():
        # As those of standard input are: not splitlines(), which takes more signs for ends.
        whole = _filled(_decoded(_bytes(file), str(file)), str(file))
        lines = [line.removesuffix("\r") for line in whole.removesuffix("\n").split("\n")]
        for start in range(0, len(lines), AT_ONCE):
            yield lines[start : start + AT_ONCE]


def _filled(text: str, name: str, wanted: str = "some words") -> str:
    if not text.strip():
        raise InputError(f"{name} is empty. Give {wanted}.")
    return text


def _arriving() -> Iterator[list[str]]:
    """The lines of standard input, as many together as are there already.

    A thread waits for them: so a line typed is translated at once, and a file in large lots.
    """
    queue: Queue[bytes | OSError | None] = Queue(maxsize=4 * AT_ONCE)
    Thread(target=_hand_over, args=(_blocks(), queue), daemon=True).start()
    lot: list[str] = []
    found = False  # any word at all
    while True:
        try:
            line = queue.get(block=not (found and lot))
        except Empty:  # what is there is enough to go on with
            yield lot
            lot = []
            continue
        if line is None:
            break
        if isinstance(line, OSError):
            raise InputError(f"Standard input cannot be read: {line.strerror or line}.")
        lot.append(_decoded(line, "standard input").removesuffix("\r"))
        found = found or bool(lot[-1].strip())
        if found and len(lot) >= AT_ONCE:
            yield lot
            lot = []
    if not found:
        raise InputError("There is no text: standard input is empty. Give some words.")
    if lot:
        yield lot


def _hand_over(blocks: Iterator[bytes], queue: Queue[bytes | OSError | None]) -> None:
    """Put lines into a queue, and None after the last."""
    rest = b""
    try:
        for block in blocks:
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                queue.put(line)
    except OSError as error:
        queue.put(error)
    if rest:
        queue.put(rest)
    queue.put(None)


def _blocks() -> Iterator[bytes]:
    """All of standard input, as it comes.

    Not through Python's own buffer: a thread that waits in there keeps Python from leaving.
    """
    if sys.stdin is None:
        raise InputError("There is no text, and no standard input to read it from.")
    if sys.stdin.isatty():
        _remark("Reading what you type; Ctrl-D ends it.")
    number = sys.stdin.fileno()
    return iter(lambda: os.read(number, 2**16), b"")


def _check_given(texts: Sequence[str], files: Sequence[Path] | None) -> None:
    """Texts come in one way, and are not the names of files that somebody wants to be read."""
    if files:
        raise InputError(f"Give a text or --file {files[0]}, not both.")
    for text in texts:
        # Not Path.is_file(), which raises where a text is too long to be a name.
        if Path(text).suffix and os.path.isfile(text):  # noqa: PTH113
            raise InputError(f"{text} is a file. To read it, pass --file {text}.")


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}.") from None


def _decoded(raw: bytes, name: str) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = f"byte {error.start} is 0x{raw[error.start]:02x}"
        raise InputError(f"{name} is no text in UTF-8: {at}. Save it as UTF-8 first.") from None
    if "\0" in text:
        raise InputError(f"{name} is no text: it holds zero bytes.")
    return text


# ------------------------------------------------------------------------------------------ output


def _show(record: Record, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record.to_dict(), ensure_ascii=False), flush=True)
    else:
        print(record, flush=True)


def _remark(text: str) -> None:
    """A word on the side, where somebody is looking."""
    Console(stderr=True).print(text, style="dim", markup=False, highlight=False)


def _draw(attended: WordAttention, title: str) -> None:
    console = Console()
    systems: dict[str | None, Colouring] = {"truecolor": "truecolor", "256": "256"}
    color = "none" if console.no_color else systems.get(console.color_system, "none")
    width = console.width if console.is_terminal else 120
    print(attended.picture(title).text(width=max(width, 40), color=color), flush=True)
