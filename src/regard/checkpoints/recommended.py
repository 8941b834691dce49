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
    does: str  # what it adds to the shipped models
    parameters: int
    size: int  # bytes of the files that are downloaded, to two digits
    licence: str

    @property
    def short(self) -> str:
        return self.name.rpartition("/")[2]


_MARIAN, _T5 = "MarianMTModel", "T5ForConditionalGeneration"
_BERT, _GPT2 = "BertForQuestionAnswering", "GPT2LMHeadModel"

RECOMMENDED = (
    Recommended(
        "Helsinki-NLP/opus-mt-en-fr", _MARIAN, "English to French", 75_100_000, 300_000_000,
        "apache-2.0",
    ),
    Recommended(
        "Helsinki-NLP/opus-mt-en-de", _MARIAN, "English to German", 74_400_000, 300_000_000,
        "cc-by-4.0",
    ),
    Recommended(
        "Helsinki-NLP/opus-mt-fr-en", _MARIAN, "French to English", 75_100_000, 300_000_000,
        "apache-2.0",
    ),
    Recommended(
        "Helsinki-NLP/opus-mt-de-en", _MARIAN, "German to English", 74_400_000, 300_000_000,
        "apache-2.0",
    ),
    Recommended(
        "google-t5/t5-small", _T5, "summaries of news; English to French and German", 60_500_000,
        240_000_000, "apache-2.0",
    ),
    Recommended(
        "google-t5/t5-base", _T5, "summaries of news; English to French and German", 222_900_000,
        890_000_000, "apache-2.0",
    ),
    Recommended(
        "google/flan-t5-small", _T5, "summaries; English to French and German", 77_000_000,
        310_000_000, "apache-2.0",
    ),
    Recommended(
        "google/flan-t5-base", _T5, "summaries; English to French and German", 247_600_000,
        990_000_000, "apache-2.0",
    ),
    Recommended(
        "deepset/bert-base-cased-squad2", _BERT, "answers, and says when there is none",
        107_700_000, 430_000_000, "cc-by-4.0",
    ),
    Recommended(
        "google-bert/bert-large-uncased-whole-word-masking-finetuned-squad", _BERT,
        "answers, but cannot say that there is none", 334_100_000, 1_300_000_000, "apache-2.0",
    ),
    Recommended(
        "distilbert/distilgpt2", _GPT2, "completion of English text", 81_900_000, 350_000_000,
        "apache-2.0",
    ),
    Recommended(
        "openai-community/gpt2", _GPT2, "completion of English text", 124_400_000, 550_000_000,
        "mit",
    ),
)  # fmt: skip


def full_name(name: str) -> str:
    """Return the name on the hub of a recommended model; any other name as it is.

    >>> full_name("opus-mt-en-fr"), full_name("somebody/opus-mt-en-fr")
    ('Helsinki-NLP/opus-mt-en-fr', 'somebody/opus-mt-en-fr')
    """
    return next((model.name for model in RECOMMENDED if name == model.short), name)
