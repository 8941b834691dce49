"""The requests of regard's own API: a class for each path, with the function that runs it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from regard.decoding.settings import Settings
from regard.decoding.strategies import MAX_LENGTH_PENALTY
from regard.errors import InputError
from regard.interpret.explaining.inputs import explain, explain_options
from regard.interpret.explaining.layer import explain_model
from regard.interpret.looking import look
from regard.mechanism.masks import Causal
from regard.server import limits
from regard.server.pool import Models
from regard.tasks.completion import stream_completion
from regard.tasks.question_answering import answer
from regard.tasks.records import Record
from regard.tasks.summarization import summarize
from regard.tasks.translation import translate
from regard.tasks.writing import Check


def _with_words(text: str) -> str:
    if not text.strip():
        raise InputError("is empty. Give some words.")
    return text


HasWords = AfterValidator(_with_words)
Document = Annotated[str, Field(max_length=limits.MAX_DOCUMENT), HasWords]
Looked = Annotated[str, Field(max_length=limits.MAX_LOOK), HasWords]
Sentence = Annotated[str, Field(max_length=limits.MAX_EXPLAIN)]
Name = Annotated[str, Field(max_length=limits.MAX_NAME)]
Layer = Annotated[Name | int | None, Field(description="The name of a layer.")]
Head = Annotated[int | None, Field(description="The number of the head in its layer, from 0.")]
Target = "The text that an encoder-decoder writes; without it, the model writes one."
MaxNewTokens = Annotated[
    int | None,
    Field(ge=1, le=limits.MAX_NEW_TOKENS, description="The maximum number of tokens to generate."),
]
NoRepeat = Annotated[
    int, Field(ge=0, description="Generate no n-gram of this size twice; 0 is no limit.")
]
ReturnsAttended = Annotated[
    bool, Field(description="Return the attention weights. This takes another forward pass.")
]
Svg = Annotated[bool, Field(description="Add a picture of the attention weights, as SVG.")]
Response = dict[str, Any]


class Request(BaseModel):
    """A request as data. Unknown fields are errors, so that misspelt fields are noticed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    path: ClassVar[str]
    summary: ClassVar[str]
    varying: ClassVar[frozenset[str]] = frozenset()  # fields that may differ within a batch

    @property
    def batch_key(self) -> Hashable | None:
        """Requests with equal keys may run together. A request whose key is None runs alone."""
        if not self.varying:
            return None
        return self.path, *(value for name, value in self if name not in self.varying)

    @classmethod
    def run_many(cls, requests: Sequence[Self], models: Models, check: Check) -> list[Response]:
        """The response to each request. All requests have the same batch key.

        ``check`` is called in every loop, and raises if all clients have disconnected.
        """
        return [request.run(models, check) for request in requests]

    def run(self, models: Models, check: Check) -> Response:
        """The response to a request that runs alone."""
        raise NotImplementedError


class BeamSearch(Request):
    """The decoding settings of translations and summaries; None is the model's default."""

    num_beams: Annotated[
        int | None, Field(ge=1, le=limits.MAX_BEAMS, description="1 is greedy decoding.")
    ] = None
    length_penalty: Annotated[
        float | None,
        Field(
            ge=-MAX_LENGTH_PENALTY,
            le=MAX_LENGTH_PENALTY,
            description="Above 0 favours longer texts.",
        ),
    ] = None
    early_stopping: Annotated[
        bool | None, Field(description="Stop as soon as num_beams texts are finished.")
    ] = None
    no_repeat_ngram_size: NoRepeat | None = None
    min_new_tokens: Annotated[
        int | None,
        Field(ge=0, le=limits.MAX_NEW_TOKENS, description="The minimum number of tokens."),
    ] = None
    max_new_tokens: MaxNewTokens = None
    attended: ReturnsAttended = True
    svg: Svg = False

    @property
    def settings(self) -> Settings:
        """The decoding settings of the request."""
        return Settings(
            num_beams=self.num_beams, length_penalty=self.length_penalty,
            early_stopping=self.early_stopping, no_repeat_ngram_size=self.no_repeat_ngram_size,
            min_new_tokens=self.min_new_tokens,
        )  # fmt: skip


class Translate(BeamSearch):
    """Translate a text. In the response, ``attended`` aligns its words with the source."""

    path = "/translate"
    summary = "Translate a text."
    varying = frozenset({"text"})

    text: Annotated[str, Field(max_length=limits.MAX_TRANSLATE), HasWords]
    to: Annotated[Name | None, Field(description="The target language, such as fr.")] = None
    source: Annotated[
        Name | None, Field(description="The source language; by default it is told from the text.")
    ] = None
    model: Name = "translate"

    @classmethod
    def run_many(cls, requests: Sequence[Self], models: Models, check: Check) -> list[Response]:
        first = requests[0]
        records = translate(
            [request.text for request in requests], first.to, source=first.source,
            model=models.name(first.model), how=first.settings,
            max_new_tokens=first.max_new_tokens, attended=first.attended or first.svg,
            device=models.device, check=check,
        )  # fmt: skip
        return [_response(record, first.svg) for record in records]


class Summarize(BeamSearch):
    """Summarize a document with some of its sentences, or let a model write.

    With sentences of the document, ``attended`` has the weights that its sentences give to them.
    If a model writes, it has the weights of the sentences of the summary on the document's.
    """

    path = "/summarize"
    summary = "Summarize a document."
    varying = frozenset({"text"})

    text: Document
    sentences: Annotated[
        int | None,
        Field(ge=1, description="The number of sentences; by default a third, at most 3."),
    ] = None
    words: Annotated[
        int | None, Field(ge=1, description="Choose sentences of at most so many words.")
    ] = None
    one_line: Annotated[
        bool, Field(description="Write one line, for a description of software.")
    ] = False
    model: Annotated[Name | None, Field(description="The model that writes the summary.")] = None
    join: Annotated[
        bool, Field(description="Join the summaries of all parts; do not summarize them again.")
    ] = False

    @classmethod
    def run_many(cls, requests: Sequence[Self], models: Models, check: Check) -> list[Response]:
        first = requests[0]
        records = summarize(
            [request.text for request in requests], sentences=first.sentences, words=first.words,
            one_line=first.one_line, model=first.model and models.name(first.model),
            join=first.join, how=first.settings, max_new_tokens=first.max_new_tokens,
            attended=first.attended or first.svg, device=models.device, check=check,
        )  # fmt: skip
        return [_response(record, first.svg) for record in records]


class Answer(Request):
    """Answer a question with a part of a context, or report that the context has no answer."""

    path = "/answer"
    summary = "Answer a question with a part of a context."
    varying = frozenset({"question", "context"})

    question: Annotated[str, Field(max_length=limits.MAX_QUESTION), HasWords]
    context: Document
    threshold: Annotated[
        float | None,
        Field(
            description="The score that an answer must exceed; no answer scores 0. By default, the "
            "model's own, or 0."
        ),
    ] = None
    model: Name = "answer"
    attended: ReturnsAttended = True
    svg: Svg = False

    @classmethod
    def run_many(cls, requests: Sequence[Self], models: Models, check: Check) -> list[Response]:
        first = requests[0]
        records = answer(
            [request.question for request in requests], [request.context for request in requests],
            model=models.name(first.model), threshold=first.threshold,
            attended=first.attended or first.svg, device=models.device, check=check,
        )  # fmt: skip
        return [_response(record, first.svg) for record in records]


class Complete(Request):
    """Complete a text; books-gpt2 and books-xl continue it like a book from before 1930.

    With ``stream``, the response has one JSON object per line.

    All lines but the last are ``{"piece": " and"}``. The last line is ``{"record": {...}}`` or
    ``{"error": {...}}``.
    """

    path = "/complete"
    summary = "Complete a text."

    text: Annotated[str, Field(max_length=limits.MAX_COMPLETE), HasWords]
    max_new_tokens: MaxNewTokens = None
    temperature: Annotated[
        float, Field(description="Above 1 is more random, below 1 less; 0 is greedy decoding.")
    ] = 0.7
    top_k: Annotated[
        int, Field(ge=0, description="Sample from the k likeliest tokens; 0 is all tokens.")
    ] = 0
    top_p: Annotated[
        float, Field(description="Sample from the likeliest tokens up to this total probability.")
    ] = 0.9
    seed: Annotated[int, Field(description="The seed of the sample.")] = 0
    no_repeat_ngram_size: NoRepeat = 3
    model: Name = "books-gpt2"
    attended: ReturnsAttended = True
    svg: Svg = False
    stream: Annotated[bool, Field(description="Return each piece when it is generated.")] = False

    def run(self, models: Models, check: Check) -> Response:
        *_, last = self.pieces(models, check)
        record: Response = last["record"]
        return record

    def pieces(self, models: Models, check: Check) -> Iterator[dict[str, Any]]:
        """Each piece of the text as it is generated, then the record."""
        settings = Settings(
            do_sample=True, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            seed=self.seed, no_repeat_ngram_size=self.no_repeat_ngram_size,
        )  # fmt: skip
        pieces = stream_completion(
            self.text, model=models.name(self.model), how=settings,
            max_new_tokens=self.max_new_tokens, attended=self.attended or self.svg,
            device=models.device, check=check,
        )  # fmt: skip
        while True:
            try:
                yield {"piece": next(pieces)}
            except StopIteration as stopped:
                yield {"record": _response(stopped.value, self.svg)}
                return


class Look(Request):
    """Measure every head of a model on a text, or show one head or the weights of one word.

    Layers are named 0, 1, ..., or encoder.0, decoder.0, cross.0, ... in an encoder-decoder.
    """

    path = "/look"
    summary = "Show what the heads of a model attend to in a text."

    model: Name
    text: Looked
    target: Annotated[Looked | None, Field(description=Target)] = None
    layer: Layer = None
    head: Head = None
    word: Annotated[Name | None, Field(description="Show what this word attends to.")] = None
    without_first: Annotated[
        bool, Field(description="Leave the first token out of the picture.")
    ] = False
    svg: Svg = False

    def run(self, models: Models, check: Check) -> Response:
        def progress(_done: int, _total: int) -> None:
            check()

        result = look(
            models.loaded(self.model), self.text, target=self.target, layer=self.layer,
            head=self.head, word=self.word, progress=progress,
        )  # fmt: skip
        response = result.to_dict()
        if self.svg:
            response["svg"] = result.picture(without_first=self.without_first).svg()
        return response


class Explain(Request):
    """Show one attention call step by step, with random weights or with the weights of a model."""

    path = "/explain"
    summary = "Show one attention call step by step, with its numbers."

    sentence: Annotated[
        Sentence | None, Field(description="Without it, the response is a worked example.")
    ] = None
    word: Annotated[Sentence | None, Field(description="The word to follow.")] = None
    heads: Annotated[
        int | None,
        Field(le=limits.MAX_HEADS, description="The number of heads, without a model."),
    ] = None
    dim: Annotated[
        int | None,
        Field(le=limits.MAX_DIM, description="The width of an embedding, without a model."),
    ] = None
    seed: Annotated[int | None, Field(description="The seed of the random weights.")] = None
    causal: Annotated[bool, Field(description="Use a causal mask, without a model.")] = False
    model: Name | None = None
    layer: Layer = None
    head: Head = None
    target: Annotated[Sentence | None, Field(description=Target)] = None

    def run(self, models: Models, check: Check) -> Response:
        check()
        options = explain_options(
            model=self.model is not None, heads=self.heads, dim=self.dim, seed=self.seed,
            mask=Causal() if self.causal else None, layer=self.layer, head=self.head,
            target=self.target, word=self.word,
        )  # fmt: skip
        if self.model is None:
            return explain(self.sentence, **options).to_dict()
        bundle = models.loaded(self.model)
        return explain_model(bundle, self.sentence or "", **options).to_dict()


REQUESTS: tuple[type[Request], ...] = (Translate, Summarize, Answer, Complete, Look, Explain)


def _response(record: Record, svg: bool) -> Response:
    """A record as plain values, with its picture if requested."""
    response = record.to_dict()
    if svg:
        response["svg"] = None if record.attended is None else record.picture().svg()
    return response
