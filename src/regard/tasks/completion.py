"""Complete a text, and return it whole or as a stream of pieces."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import ceil
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from regard.decoding.generation import generate, stream_tokens
from regard.decoding.settings import Asked, Settings
from regard.decoding.strategies import Strategy
from regard.errors import InputError
from regard.interpret.pooling import pool
from regard.interpret.watching import watch
from regard.mechanism.seeing import See
from regard.models.bundle import Bundle, Name, Precision
from regard.models.model import LanguageModel
from regard.tasks.attended import mean_rows
from regard.tasks.confidence import chance, doubts_about_repeats, trust
from regard.tasks.defaults import open_model
from regard.tasks.records import Completion, WordAttention
from regard.tasks.writing import Check, CheckedDecoder, log_probability, one_or_many
from regard.text.words import Span, sentences, spans_of, words

TASK = "language modelling"  # the task's name in a recipe
# What reads best of seven settings, by the cards of books-gpt2 and books-xl.
DEFAULT = Settings(do_sample=True, temperature=0.7, top_p=0.9, no_repeat_ngram_size=3)
DEFAULT_NEW_TOKENS = 100
WHOLE_FROM = 0.6  # by default, a sentence's end after this share of the tokens may end the text
MAX_ATTENDED_WEIGHTS = 2**26  # 256 MiB of memory


@one_or_many
def complete(
    texts: list[str],
    *,
    model: Name = "books-gpt2",
    how: Asked | None = None,
    max_new_tokens: int | None = None,
    batch: int = 32,
    attended: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    check: Check | None = None,
) -> list[Completion]:
    """Complete a text, or each text of a list.

    ``model`` is a GPT-2 or a Transformer-XL. By default ``how`` is sampling, which gives the same
    text for the same seed. Without ``max_new_tokens`` up to 100 tokens are generated, or fewer if
    the model's positions end earlier, and the text ends with the last sentence that is whole, if
    one ends after 60% of them. The score is that of all generated tokens. ``attended`` returns the
    attention weights of each new word on earlier words, or None for very long texts.
    :mod:`regard.tasks` describes the other options.

    >>> from regard import Greedy
    >>> record = complete("Once upon a time", how=Greedy(), max_new_tokens=6)
    >>> record.tokens, str(record).startswith("Once upon a time")
    (6, True)
    """
    strategy, given = DEFAULT.resolve(how, max_new_tokens)
    bundle, prompts, max_new_tokens = _open(texts, model, given, device, precision)
    began = perf_counter()
    decoder, ids = CheckedDecoder(bundle.model, check), [prompt.ids for prompt in prompts]
    outputs = generate(
        decoder, ids, strategy, max_new_tokens=max_new_tokens, stop=bundle.ends, batch=batch
    )
    seconds = (perf_counter() - began) / max(len(texts), 1)
    records = []
    for prompt, (best, *_) in zip(prompts, outputs, strict=True):
        score = log_probability(best, strategy) / max(len(best.ids) + best.stopped, 1)
        kept = best.ids
        if given is None and not best.stopped:
            kept = kept[: _whole_length(bundle, prompt, kept, max_new_tokens)]
        records.append(_record(bundle, prompt, kept, score, best.stopped, seconds, attended))
    return records


def stream_completion(
    text: str,
    *,
    model: Name = "books-gpt2",
    how: Asked | None = None,
    max_new_tokens: int | None = None,
    attended: bool = False,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    check: Check | None = None,
) -> Generator[str, None, Completion]:
    """Complete one text like :func:`complete`, but yield each piece as soon as it is generated.

    The generator returns the record.

    >>> from regard import Greedy
    >>> pieces = stream_completion("Once upon a time", how=Greedy(), max_new_tokens=6)
    >>> "".join(pieces) == complete("Once upon a time", how=Greedy(), max_new_tokens=6).text
    True
    """
    if not isinstance(text, str):
        raise InputError(f"Give one text to complete, not {type(text).__name__}.")
    strategy, given = DEFAULT.resolve(how, max_new_tokens)
    bundle, [prompt], max_new_tokens = _open([text], model, given, device, precision)
    decoder = _ScoringDecoder(bundle.model, check)
    return _pieces(bundle, decoder, prompt, strategy, max_new_tokens, given is None, attended)


class _Prompt(NamedTuple):
    text: str
    ids: list[int]


class _ScoringDecoder(CheckedDecoder):
    """A model for decoding that keeps its last logits."""

    logits: Tensor

    def step(self, ids: Tensor, state: object) -> Tensor:
        self.logits = super().step(ids, state)
        return self.logits

    def log_probability(self, token: int) -> float:
        return float(self.logits[0].float().log_softmax(-1)[token])


def _open(
    texts: Sequence[str],
    model: Name,
    max_new_tokens: int | None,
    device: torch.device | str | None,
    precision: Precision,
) -> tuple[Bundle, list[_Prompt], int]:
    """The model, the prompts as ids, and the maximum number of new tokens."""
    bundle = open_model(model, "complete", device, precision)
    if not all(text.strip() for text in texts):
        raise InputError("A text to complete is empty. Give some words.")
    prompts = []
    for text in (bundle.prepared(text, TASK) for text in texts):
        prompts.append(_Prompt(text, bundle.tokenizer.encode(text, special=False).ids))
        if not prompts[-1].ids:
            raise InputError(f"The text {text[:40]!r} has no token that {bundle.name} knows.")
    wanted = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    if bundle.model.longest is None:
        return bundle, prompts, wanted
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    room = bundle.window - longest
    if room < (1 if max_new_tokens is None else max_new_tokens):
        raise InputError(
            f"The text is too long: its {longest} and {max_new_tokens or 1} new tokens do not fit "
            f"into the {bundle.window} that {bundle.name} reads. Give only the last part of the "
            f"text{', or a smaller max_new_tokens' if max_new_tokens else ''}."
        )
    return bundle, prompts, min(wanted, room)


def _pieces(
    bundle: Bundle,
    decoder: _ScoringDecoder,
    prompt: _Prompt,
    strategy: Strategy,
    max_new_tokens: int,
    whole: bool,
    attended: bool,
) -> Generator[str, None, Completion]:
    began = perf_counter()
    ids, total, sent = list[int](), 0.0, ""
    for token in stream_tokens(
        decoder, prompt.ids, strategy, max_new_tokens=max_new_tokens, stop=bundle.ends
    ):
        ids.append(token)
        total += decoder.log_probability(token)
        # The start of a sentence is sent when the sentence ends, because it may be cut off.
        kept = ids[: _whole_length(bundle, prompt, ids, max_new_tokens)] if whole else ids
        if len(ids) > len(kept) or not whole or len(ids) < WHOLE_FROM * max_new_tokens:
            text = _new_text(bundle, prompt, kept)
            if text != sent and not text.endswith("\ufffd"):  # some characters take several tokens
                yield text[len(sent) :]
                sent = text
    stopped = len(ids) < max_new_tokens
    score = total + max(decoder.log_probability(t) for t in bundle.ends) if stopped else total
    score /= max(len(ids) + stopped, 1)
    if whole and not stopped:
        ids = ids[: _whole_length(bundle, prompt, ids, max_new_tokens)]
    text = _new_text(bundle, prompt, ids)
    if text != sent:
        yield text[len(sent) :]
    return _record(bundle, prompt, ids, score, stopped, perf_counter() - began, attended)


def _whole_length(bundle: Bundle, prompt: _Prompt, ids: Sequence[int], max_new_tokens: int) -> int:
    """The number of new tokens up to the end of the last whole sentence; all if none ends late."""
    text = _new_text(bundle, prompt, ids)
    for count in range(len(ids), ceil(WHOLE_FROM * max_new_tokens) - 1, -1):
        before = _new_text(bundle, prompt, ids[:count])
        # A quotation mark may follow the sign that ends a sentence.
        goes_on = text[len(before) : len(before) + 1].strip() != ""
        if not goes_on and before == before.rstrip() and _ends_sentence(before):
            return count
    return len(ids)


def _ends_sentence(text: str) -> bool:
    """Whether a text ends with the end of a sentence, not with an abbreviation."""
    *_, last = sentences(f"{text} The")
    return (text + " The")[last.start :] == "The"


def _new_text(bundle: Bundle, prompt: _Prompt, ids: Sequence[int]) -> str:
    """The text of new tokens. Whether it begins with a space depends on the token before."""
    before = prompt.ids[-1:]
    return bundle.decode([*before, *ids])[len(bundle.decode(before)) :]


def _record(
    bundle: Bundle,
    prompt: _Prompt,
    ids: list[int],
    score: float,
    stopped: bool,
    seconds: float,
    attended: bool,
) -> Completion:
    text = _new_text(bundle, prompt, ids)
    # How probable a usual text is depends on the model, so nothing is said without a calibration.
    trusted = trust(chance(bundle, TASK, score, 1.0), doubts_about_repeats(text, prompt.text))
    return Completion(
        text=text,
        score=score,
        tokens=len(ids) + stopped,
        seconds=seconds,
        model=bundle.name,
        confidence=trusted.confidence,
        reasons=trusted.reasons,
        attended=_attended(bundle, prompt, ids) if attended else None,
        prompt=prompt.text,
        stopped=stopped,
    )


def _attended(bundle: Bundle, prompt: _Prompt, ids: list[int]) -> WordAttention | None:
    """The weights of each new word on earlier words, averaged over all heads.

    The first token is left out, because heads put their unused weight on it.
    """
    model = bundle.model
    assert isinstance(model, LanguageModel)
    depth, heads = model.config.depth, model.config.heads
    total, before = len(prompt.ids) + len(ids), len(prompt.text)
    whole = prompt.text + _new_text(bundle, prompt, ids)
    units = words(whole)
    queries = [unit for unit in units if unit.end > before]
    if not queries or len(ids) * total * heads * depth > MAX_ATTENDED_WEIGHTS:
        return None
    read = torch.tensor([[*prompt.ids, *ids[:-1]]], device=model.device)
    rows = range(len(prompt.ids) - 1, total - 1)  # the rows that predict the new tokens
    with torch.inference_mode(), watch(model, See(rows=rows)) as seen:
        model.read(read)
    table = mean_rows(seen)
    table[:, 0] = 0
    spans = spans_of(ids, lambda some: _new_text(bundle, prompt, some))
    written = [Span(before + low, before + high) for low, high in spans]
    keys = [*bundle.tokenizer.encode(prompt.text, special=False).offsets, *written[:-1]]
    pooled = pool(table, written, queries, keys, units)
    where = f"The mean over {depth} layers of {heads} heads, without the first token"
    sides = ("new words", "earlier words")
    return WordAttention.of((whole, queries), (whole, units), pooled, where, sides)
