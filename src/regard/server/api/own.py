"""What may be asked of the server: one class for each path, which says what is taken and runs it.

Lengths are limited, so that no request keeps others waiting for long: most take less than a second,
the longest some minutes. Python and the command line have no such limits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from regard.decoding.settings import Settings
from regard.interpret.explaining.inputs import explain, explain_options
from regard.interpret.explaining.layer import explain_model
from regard.interpret.looking import look
from regard.mechanism.masks import Causal
from regard.server.pool import Models
from regard.server.worker import Going
from regard.tasks.completion import stream_completion
from regard.tasks.question_answering import answer
from regard.tasks.records import Completion, Record
from regard.tasks.summarization import summarize
from regard.tasks.translation import translate

Document = Annotated[str, Field(max_length=50_000)]
Looked = Annotated[str, Field(max_length=10_000)]  # it takes the square of the tokens
Name = Annotated[str, Field(max_length=500)]
Few = Annotated[str, Field(max_length=300)]
Beams = Annotated[int | None, Field(ge=1, le=8, description="Beams to keep; 1 is greedy.")]
Penalty = Annotated[
    float | None, Field(ge=-10, le=10, description="Above 0 it favours longer texts.")
]
Length = Annotated[int | None, Field(ge=1, le=1000, description="Tokens to write at most.")]
Looks = Annotated[bool, Field(description="See what was attended to, in one more pass.")]
Svg = Annotated[bool, Field(description="Add a picture of it to the record, as SVG.")]


class Asked(BaseModel):
    """What comes with a request. Nothing else may: a word misspelt would be passed over."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def run(self, models: Models, going: Going) -> dict[str, Any]:
        """The record that answers it, as plain values."""
        raise NotImplementedError


class _Searched(Asked):
    """What has its text searched for by beams."""

    beam: Beams = None
    length_penalty: Penalty = None
    length: Length = None
    look: Looks = True
    svg: Svg = False

    @property
    def how(self) -> Settings:
        """The decoding settings that replace those of the model's files."""
        return Settings(num_beams=self.beam, length_penalty=self.length_penalty)


class Translate(_Searched):
    """Translate a text; ``attended`` of the record is the alignment of its words."""

    text: Annotated[str, Field(max_length=5_000)]
    to: Annotated[Name | None, Field(description="Into which language, as fr.")] = None
    source: Annotated[Name | None, Field(description="Out of which, for a T5.")] = None
    model: Name = "translate"

    def run(self, models: Models, going: Going) -> dict[str, Any]:
        going.check()
        found = translate(
            self.text, self.to, source=self.source, model=models.name(self.model), how=self.how,
            length=self.length, look=self.look or self.svg, device=models.device,
        )  # fmt: skip
        return _told(found, self.svg, "Alignment")


class Summarize(_Searched):
    """Summarize a document; ``attended`` says which of its sentences were attended to."""

    text: Document
    join: Annotated[bool, Field(description="Keep the summaries of all parts.")] = False
    model: Name = "summarize"

    def run(self, models: Models, going: Going) -> dict[str, Any]:
        going.check()
        found = summarize(
            self.text, model=models.name(self.model), join=self.join, how=self.how,
            length=self.length, look=self.look or self.svg, device=models.device,
        )  # fmt: skip
        return _told(found, self.svg, "Where it comes from")


class Answer(Asked):
    """Answer a question by words of a context, or say that it has no answer."""

    question: Annotated[str, Field(max_length=1_000)]
    context: Document
    threshold: Annotated[
        float, Field(description="By how much an answer must be better than none.")
    ] = 0.0
    model: Name = "answer"
    look: Looks = True
    svg: Svg = False

    def run(self, models: Models, going: Going) -> dict[str, Any]:
        going.check()
        found = answer(
            self.question, self.context, model=models.name(self.model), threshold=self.threshold,
            look=self.look or self.svg, device=models.device,
        )  # fmt: skip
        return _told(found, self.svg, "What the question attended to")


class Complete(Asked):
    """Go on from a text. With ``stream`` it comes as it is written, a JSON object a line.

    Lines ``{"piece": " and"}`` come first, and in the end ``{"record": {...}}``, or
    ``{"error": {...}}``.
    """

    text: Annotated[str, Field(max_length=20_000)]
    length: Length = None
    temperature: Annotated[
        float, Field(description="Below 1 likelier, above 1 wilder; 0 takes the likeliest.")
    ] = 0.8
    top_k: Annotated[int, Field(ge=0, description="Draw among so many; 0 is all.")] = 0
    top_p: Annotated[float, Field(description="Draw within this share of probability.")] = 0.95
    seed: Annotated[int, Field(description="Of what is drawn.")] = 0
    no_repeat: Annotated[int, Field(ge=0, description="Let no such run come twice.")] = 0
    model: Name = "books-gpt2"
    look: Looks = True
    svg: Svg = False
    stream: bool = False

    def run(self, models: Models, going: Going) -> dict[str, Any]:
        *_, last = self.pieces(models, going)
        record: dict[str, Any] = last["record"]
        return record

    def pieces(self, models: Models, going: Going) -> Iterator[dict[str, Any]]:
        """Each piece as it is written, and in the end the record."""
        how = Settings(
            do_sample=True,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            no_repeat_ngram_size=self.no_repeat,
        )
        writing: Generator[str, None, Completion] = stream_completion(
            self.text, model=models.name(self.model), how=how, length=self.length,
            look=self.look or self.svg, device=models.device,
        )  # fmt: skip
        while True:
            going.check()
            try:
                yield {"piece": next(writing)}
            except StopIteration as stopped:
                yield {"record": _told(stopped.value, self.svg, "What was attended to")}
                return


class Look(Asked):
    """See what the heads of a model do to a text: all of them, or one, or what a word attends to.

    Layers are called 0, 1 ... or, of an encoder-decoder, encoder.0, decoder.0, cross.0.
    """

    model: Name
    text: Looked
    target: Annotated[
        Looked | None, Field(description="What an encoder-decoder is to have written.")
    ] = None
    layer: Annotated[Name | int | None, Field(description="Of the head to see.")] = None
    head: Annotated[int | None, Field(description="Of the layer, from 0 on.")] = None
    word: Annotated[Name | None, Field(description="See what this word attends to.")] = None
    without_first: Annotated[
        bool, Field(description="Leave the first token out of the picture.")
    ] = False
    svg: Svg = False

    def run(self, models: Models, going: Going) -> dict[str, Any]:
        found = look(
            models.loaded(self.model), self.text, target=self.target, layer=self.layer,
            head=self.head, word=self.word, progress=lambda *_: going.check(),
        )  # fmt: skip
        drawn = found.picture(without_first=self.without_first).svg() if self.svg else None
        return found.to_dict() | ({} if drawn is None else {"svg": drawn})


class Explain(Asked):
    """Follow one attention step by step, with its numbers: made up, or with a model its own."""

    sentence: Annotated[
        Few | None, Field(description="Without one it is a worked example, to be checked by hand.")
    ] = None
    word: Annotated[Few | None, Field(description="The word to follow closely.")] = None
    heads: Annotated[int | None, Field(le=16, description="Of a sentence without a model.")] = None
    dim: Annotated[int | None, Field(le=64, description="Numbers per word, without a model.")] = (
        None
    )
    seed: Annotated[int | None, Field(description="Of the random numbers.")] = None
    causal: Annotated[bool, Field(description="Let no word look at later ones.")] = False
    model: Name | None = None
    layer: Annotated[Name | int | None, Field(description="Of the model.")] = None
    head: Annotated[int | None, Field(description="Of the layer.")] = None
    target: Annotated[
        Few | None, Field(description="What an encoder-decoder is to have written.")
    ] = None

    def run(self, models: Models, going: Going) -> dict[str, Any]:
        going.check()
        options = explain_options(
            model=self.model is not None, heads=self.heads, dim=self.dim, seed=self.seed,
            mask=Causal() if self.causal else None, layer=self.layer, head=self.head,
            target=self.target, word=self.word,
        )  # fmt: skip
        if self.model is None:
            return explain(self.sentence, **options).to_dict()
        bundle = models.loaded(self.model)
        return explain_model(bundle, self.sentence or "", **options).to_dict()


def _told(record: Record, svg: bool, title: str) -> dict[str, Any]:
    """A record as it stands, with its picture where that was asked for."""
    found = record.to_dict()
    if svg:
        found["svg"] = None if record.attended is None else record.attended.picture(title).svg()
    return found
