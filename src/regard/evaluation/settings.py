"""The evaluation section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from regard.data.records import Pair, Question
from regard.data.schema import key
from regard.decoding.strategies import Beam, Greedy

WRITTEN = ("bleu", "chrf", "rouge-1", "rouge-2", "rouge-l")  # scores of text that a model writes
TOKENS = 2**15  # of sources that are decoded at once, padding counted
METRICS = ("loss", *WRITTEN, "exact", "f1")
SCORED: dict[type, tuple[str, ...]] = {
    Pair: ("loss", *WRITTEN),
    Question: ("loss", "exact", "f1"),
    str: ("loss",),
}


def how_to_decode(settings: Evaluation) -> Beam | Greedy:
    """How text is decoded to be scored."""
    if settings.beam == 1:
        return Greedy(settings.no_repeat, settings.least)
    return Beam(
        settings.beam,
        settings.length_penalty,
        no_repeat=settings.no_repeat,
        least=settings.least,
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well, measured while it learns."""

    every: int = key("after how many steps; 0 for at the end only", 1000, least=0)
    metric: str = key("which score decides what is best", "loss", among=METRICS)
    examples: int = key("how many examples to decode while it learns; 0 for all", 0, least=0)
    beam: int = key("the beams of decoding; 1 is greedy", 1, least=1)
    length_penalty: float = key("by what power of the length a beam's score is divided", 1.0)
    no_repeat: int = key("no sequence of so many tokens is written twice; 0: all may", 0, least=0)
    least: int = key("how many tokens are written before one that ends a text", 0, least=0)
    temperature: float = key(
        "by what a language model's scores of tokens are divided before their softmax; above 1 for "
        "one that is too sure, as after learning by heart",
        1.0,
        least=0.01,
    )
    always: bool = key("answer every question, even where no answer seems more likely", False)
    tokenize: str = key(
        "how BLEU parts words: 13a, or none for text that is parted",
        "13a",
        among=("13a", "intl", "char", "zh", "none"),
    )
    patience: int = key(
        "stop after this many evaluations without a better one; 0 never", 0, least=0
    )
