"""The evaluation section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from regard.data.records import Pair, Question
from regard.data.schema import key
from regard.decoding.settings import Settings

WRITTEN = ("bleu", "chrf", "rouge-1", "rouge-2", "rouge-l")  # scores of text that a model writes
TOKENS = 2**15  # of sources that are decoded at once, padding counted
METRICS = ("loss", *WRITTEN, "exact", "f1")
SCORED: dict[type, tuple[str, ...]] = {
    Pair: ("loss", *WRITTEN),
    Question: ("loss", "exact", "f1"),
    str: ("loss",),
}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how a run is evaluated."""

    every: int = key("evaluate every this many steps; 0 for only at the end", 1000, least=0)
    metric: str = key("the score that decides which checkpoint is best", "loss", among=METRICS)
    examples: int = key("the number of examples to decode during training; 0 for all", 0, least=0)
    beam: int = key("the number of beams; 1 is greedy", 1, least=1)
    length_penalty: float = key("a beam's score is divided by its length to this power", 1.0)
    no_repeat: int = key(
        "no sequence of this many tokens is generated twice; 0 for no limit", 0, least=0
    )
    least: int = key("the minimum number of tokens before an end token", 0, least=0)
    temperature: float = key(
        "the temperature of a language model's softmax; above 1 for a model that is "
        "overconfident, for example after overfitting",
        1.0,
        least=0.01,
    )
    always: bool = key("answer every question, even if no answer is more likely", False)
    tokenize: str = key(
        "the tokenization of BLEU (none: for tokenized text)",
        "13a",
        among=("13a", "intl", "char", "zh", "none"),
    )
    patience: int = key(
        "stop after this many evaluations without a better score; 0 for never", 0, least=0
    )

    @property
    def decoding(self) -> Settings:
        """How text is decoded to be scored."""
        return Settings(
            num_beams=self.beam,
            length_penalty=self.length_penalty,
            no_repeat_ngram_size=self.no_repeat,
            min_new_tokens=self.least,
        )
