"""Models of the Hugging Face hub that are recommended for the tasks.

regard implements their architectures, so that its own commands run them. ``regard get`` reads the
size and the licence anew from the hub; those here are for listings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recommended:
    """A recommended model."""

    name: str  # on the hub
    architecture: str  # in config.json
    tasks: str
    licence: str
    parameters: int
    size: int  # bytes that are downloaded

    @property
    def short(self) -> str:
        return self.name.rpartition("/")[2]


def _table() -> tuple[Recommended, ...]:
    marian, t5 = "MarianMTModel", "T5ForConditionalGeneration"
    bert, gpt2 = "BertForQuestionAnswering", "GPT2LMHeadModel"
    apache, by = "apache-2.0", "cc-by-4.0"
    rows = (  # with millions of parameters, and megabytes
        ("Helsinki-NLP/opus-mt-en-fr", marian, "translate en to fr", apache, 75, 300),
        ("Helsinki-NLP/opus-mt-en-de", marian, "translate en to de", by, 74, 300),
        ("Helsinki-NLP/opus-mt-fr-en", marian, "translate fr to en", apache, 75, 300),
        ("Helsinki-NLP/opus-mt-de-en", marian, "translate de to en", apache, 74, 300),
        ("google-t5/t5-small", t5, "summarize, translate", apache, 61, 240),
        ("google-t5/t5-base", t5, "summarize, translate", apache, 223, 890),
        ("google/flan-t5-small", t5, "summarize, translate", apache, 77, 310),
        ("google/flan-t5-base", t5, "summarize, translate", apache, 248, 990),
        ("deepset/bert-base-cased-squad2", bert, "answer", by, 108, 430),
        ("distilbert/distilgpt2", gpt2, "complete", apache, 82, 350),
        ("openai-community/gpt2", gpt2, "complete", "mit", 124, 550),
    )
    return tuple(
        Recommended(name, kind, tasks, licence, millions * 10**6, megabytes * 10**6)
        for name, kind, tasks, licence, millions, megabytes in rows
    )


RECOMMENDED = _table()


def full_name(name: str) -> str:
    """Return the name on the hub of a recommended model; any other name as it is.

    >>> full_name("opus-mt-en-fr"), full_name("somebody/opus-mt-en-fr")
    ('Helsinki-NLP/opus-mt-en-fr', 'somebody/opus-mt-en-fr')
    """
    return next((model.name for model in RECOMMENDED if name == model.short), name)
