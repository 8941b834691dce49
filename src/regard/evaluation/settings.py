"""The evaluation section of a recipe, and the settings of an evaluation outside training."""

# ruff: noqa: RUF009 - key() declares a field
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.data.records import PAIR_TASKS, QUESTION_TASKS, Pair, Question
from regard.data.schema import check_scope, key
from regard.data.sources import Data, check_data
from regard.decoding.settings import Settings
from regard.decoding.strategies import MAX_LENGTH_PENALTY

WRITTEN = ("bleu", "chrf", "rouge-1", "rouge-2", "rouge-l")  # scores of text that a model writes
# The decoding settings among the keys of an evaluation.
DECODING = ("num_beams", "length_penalty", "no_repeat_ngram_size", "min_new_tokens")
METRICS = ("loss", *WRITTEN, "exact", "f1")
# The scores that can select the best checkpoint of a run.
SCORED: dict[type, tuple[str, ...]] = {
    Pair: ("loss", *WRITTEN),
    Question: ("loss", "exact", "f1"),
    str: ("loss",),
}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how a run is evaluated."""

    every: int = key("evaluate every this many steps; 0 for only at the end", 1000, least=0)
    before: bool = key("also evaluate before the first step", False)
    metric: str = key("the score that decides which checkpoint is best", "loss", among=METRICS)
    examples: int = key("the number of examples to decode during training; 0 for all", 0, least=0)
    num_beams: int = key("the number of beams; 1 is greedy", 1, least=1, only=PAIR_TASKS)
    length_penalty: float = key(
        "a beam's score is divided by its length to this power",
        1.0,
        least=-MAX_LENGTH_PENALTY,
        most=MAX_LENGTH_PENALTY,
        only=PAIR_TASKS,
    )
    no_repeat_ngram_size: int = key(
        "no sequence of this many tokens is generated twice; 0 for no limit",
        0,
        least=0,
        only=PAIR_TASKS,
    )
    min_new_tokens: int = key(
        "the minimum number of tokens before an end token", 0, least=0, only=PAIR_TASKS
    )
    temperature: float = key(
        "the temperature of a language model's softmax; above 1 for a model that is "
        "overconfident, for example after overfitting",
        1.0,
        least=0.01,
        only=("language modelling",),
    )
    always_answer: bool = key(
        "answer every question, even if the model prefers to give no answer",
        False,
        only=QUESTION_TASKS,
    )
    threshold: float = key(
        "the score that an answer must exceed; no answer scores 0", 0.0, only=QUESTION_TASKS
    )
    tokenize: str = key(
        "the tokenization of BLEU (none: for tokenized text)",
        "13a",
        among=("13a", "intl", "char", "zh", "none"),
        only=PAIR_TASKS,
    )
    patience: int = key(
        "stop after this many evaluations without a better score; 0 for never", 0, least=0
    )

    @property
    def decoding(self) -> Settings:
        """The decoding settings of the evaluation."""
        return Settings(**{name: getattr(self, name) for name in DECODING})


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """The model that is scored."""

    kind: str = key("the architecture")
    config: dict[str, Any] = key("memory, for a Transformer-XL: the length of its memory", dict)


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The size of a batch."""

    tokens: int = key("the maximum number of tokens of a batch, padding included", 2048, least=1)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The recipe keys that the scores of a model depend on."""

    task: str = key("the task to score")
    model: ScoredModel = key("the model")
    data: Data = key("the data; test is scored")
    batch: ScoredBatch = key("the batches", ScoredBatch)
    evaluation: Evaluation = key("the evaluation", Evaluation)

    def __post_init__(self) -> None:
        check_scope(self, (self.task, self.model.kind))
        check_data(self.data, self.task)
