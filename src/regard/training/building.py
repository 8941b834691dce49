"""From a recipe to what it names: records, tokenizer, tables, model and objective."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from regard.errors import InputError
from regard.layers import lock_dropout
from regard.models import (
    GPT2,
    T5,
    BertAnswering,
    BertConfig,
    BertMaskedLM,
    GPT2Config,
    Model,
    T5Config,
    Transformer,
    TransformerConfig,
    TransformerXL,
    TransformerXLConfig,
    load,
)
from regard.text import SizeError, Text
from regard.text.preparing import prepare
from regard.training import reading
from regard.training.answering import Answers, Exam, elsewhere, windows
from regard.training.data import Ragged, Table, cached, content, place
from regard.training.huggingface import open_dataset, read_dataset
from regard.training.objectives import (
    Examine,
    MaskedTokens,
    NextToken,
    NextTokenWithMemory,
    Objective,
    Pairs,
    Spans,
    Special,
)
from regard.training.publishing import publish
from regard.training.reading import Bad, Pair, Question, Record, Report
from regard.training.recipe import RECORDS, Recipe, Source, nearest

SENTINELS = tuple(f"<extra_id_{n}>" for n in range(100))
END = "<|endoftext|>"

# ------------------------------------------------------------------------------------- records


def records(recipe: Recipe, sources: Sequence[Source], report: Report) -> Iterator[Record]:
    """The records of some sources, prepared; those of other parts are left out."""
    for source in sources:
        for record in _read(recipe, source, report):
            by = {Pair: 0, Question: 2}.get(type(record))
            text = record if isinstance(record, str) else cast(str, record[by or 0])
            low, high = source.part
            if (low, high) != (0, 1000) and not low <= reading.thousandth(text) < high:
                continue
            record = _prepared(record, recipe.data.prepare)
            if isinstance(record, Pair):
                yield from _sided(record, source, RECORDS[recipe.task])
            else:
                yield record


def _sided(pair: Pair, source: Source, kind: type) -> Iterator[Record]:
    """A pair as the task takes it: turned round, with what comes before it, or its source alone."""
    if kind is str:
        yield pair.source
    elif source.reverse:
        for target in pair.targets:
            yield Pair(source.prefix + target, (pair.source,))
    else:
        yield Pair(source.prefix + pair.source, pair.targets)


def _read(recipe: Recipe, source: Source, report: Report) -> Iterator[Record]:
    files = _paths(recipe, source.files)
    columns, names = source.columns, source.fields
    if source.format == "parallel":
        return reading.read_parallel(files, _paths(recipe, source.targets), report)
    if source.format == "tsv":
        return reading.read_tsv(files, (columns[0], columns[1]), report)
    if source.format == "jsonl":
        one, other = names or ("source", "target")
        return reading.read_jsonl(files, (one, other), report)
    if source.format == "dataset":
        name = source.dataset or ", ".join(source.files)
        return read_dataset(
            _dataset(recipe, source), name, RECORDS[recipe.task], source.fields, report
        )
    if source.format == "questions":
        return reading.read_questions(files, report)
    if source.format == "squad":
        return reading.read_squad(files, report)
    return reading.read_text(files, report)


def _dataset(recipe: Recipe, source: Source) -> Any:
    root, files = Path(recipe.data.root).expanduser(), _paths(recipe, source.files)
    return open_dataset(source.dataset, files, root, source.subset, source.split)


def _paths(recipe: Recipe, names: Iterable[str]) -> list[Path]:
    root = Path(recipe.data.root).expanduser()
    return [root / Path(name).expanduser() for name in names]


def _prepared(record: Record, steps: Sequence[str]) -> Record:
    if not steps or isinstance(record, Question):
        return record  # the places of answers would no longer be right
    if isinstance(record, str):
        return prepare(record, steps)
    targets = tuple(prepare(target, steps) for target in record.targets)
    return Pair(prepare(record.source, steps), targets)


# ----------------------------------------------------------------------------------- tokenizer


def tokenizer(recipe: Recipe, folder: Path) -> Text:
    """The recipe's tokenizer; one that is trained is kept in ``folder``.

    It must be: training WordPiece or Unigram again gives other ids in another process.
    """
    start = recipe.tokenizer.start or recipe.model.start
    if start is not None and not recipe.tokenizer.keep:
        found = Text.load(start)
        known = found.tokenizer.get_vocab()
        if missing := [token for token in recipe.tokenizer.special if token not in known]:
            raise InputError(
                f"The tokenizer of {start} has no token {missing[0]!r} (tokenizer.special): tokens "
                "of their own are for a tokenizer that is trained."
            )
        return found
    if not folder.exists():
        for left in folder.parent.glob(f".saving-{folder.name}.*"):  # by a run that was killed
            shutil.rmtree(left)
        lines = _texts(records(recipe, recipe.data.train, Report()))
        if start is None:
            try:
                text = _trained(recipe, lines)
            except SizeError as error:
                raise InputError(f"tokenizer.{error}") from None
        else:
            whole = Text.load(start)
            text = whole.pruned(
                Counter(chain.from_iterable(token_ids(whole, lines))), recipe.tokenizer.keep
            )
        publish(folder, {"tokenizer.json": text.tokenizer.to_str().encode()}, {})
    return Text.load(folder)


def _texts(found: Iterable[Record]) -> Iterator[str]:
    for record in found:
        if isinstance(record, str):
            yield record
        elif isinstance(record, Pair):
            yield record.source
            yield from record.targets
        else:
            yield record.question
            yield record.context


# The tokenizers to train that have the tokens a model needs.
_FITTING: dict[str, tuple[str, ...]] = {
    "transformer": ("bpe", "unigram"),
    "t5": ("bpe", "unigram"),
    "bert": ("wordpiece",),
    "gpt2": ("bpe", "words"),
    "transformer-xl": ("bpe", "words"),
}


def _trained(recipe: Recipe, lines: Iterator[str]) -> Text:
    kind, size, own = recipe.tokenizer.kind, recipe.tokenizer.size, recipe.tokenizer.special
    fitting = _FITTING[recipe.model.kind]
    if kind not in fitting:
        raise InputError(
            f"tokenizer.kind = {kind!r} is not for {recipe.model.kind}; choose "
            f"{' or '.join(fitting)}."
        )
    if kind == "wordpiece":
        return Text.train_wordpiece(lines, size=size)
    if kind == "words":
        return _words(lines, size, own)
    sentinels = SENTINELS if recipe.model.kind == "t5" else ()
    if kind == "unigram":
        special = ("<pad>", "</s>", "<unk>", *own, *sentinels)
        return Text.train_unigram(lines, size=size, special=special, end=None)
    special = {"transformer": ("</s>", "<pad>"), "t5": ("<pad>", "</s>", *sentinels)}.get(
        recipe.model.kind, (END,)
    )
    return Text.train_bpe(lines, size=size, special=(*special, *own))


def _words(lines: Iterator[str], size: int, own: Sequence[str]) -> Text:
    """What stands between spaces, and the ends of lines: words as the Penn Treebank has them."""
    special = (END, "\n", *own)
    counts = Counter(word for line in lines for word in line.split(" ") if word)
    for token in (*special, "<unk>"):
        counts.pop(token, None)
    words = [word for word, _ in counts.most_common(size - len(special) - 1)]
    ids = {token: index for index, token in enumerate((*special, "<unk>", *words))}
    found = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    found.add_special_tokens(list(special))
    return Text(found)


# --------------------------------------------------------------------------------------- tables


def token_ids(text: Text, lines: Iterable[str]) -> Iterator[list[int]]:
    """The ids of many lines, some thousand at once, nothing added."""
    waiting = iter(lines)
    while some := list(islice(waiting, 8192)):
        for encoding in text.tokenizer.encode_batch_fast(some, add_special_tokens=False):
            yield encoding.ids


def table(recipe: Recipe, part: str, text: Text) -> tuple[Table, str]:
    """The token ids of a part of the data, from the cache or made anew, and their SHA-256."""
    sources: tuple[Source, ...] = getattr(recipe.data, part)
    key = {
        "form": 2,
        "task": recipe.task,
        "prepare": recipe.data.prepare,
        "length": recipe.data.length,
        "dropout": [recipe.tokenizer.dropout, _variants(recipe, part)],
        "unanswered": _unanswered(recipe, part),
        "sources": [
            asdict(source)
            | {"files": content(_paths(recipe, source.files))}
            | {"targets": content(_paths(recipe, source.targets))}
            | {"dataset": _dataset(recipe, source)._fingerprint if source.dataset else ""}
            for source in sources
        ],
        "tokenizer": _digest(text),
        **({} if text.target is text else {"target tokenizer": _digest(text.target)}),
    }
    folder = Path(recipe.data.cache).expanduser()
    found = cached(folder, key, lambda: _table(recipe, part, text))
    # A table from the cache may have been made where more was accepted.
    Report(found.facts["read"], [Bad(*bad) for bad in found.facts["bad"]]).check(
        recipe.data.bad, part
    )
    # By content: what was dropped at random would be dropped otherwise if it were made again.
    digest = hashlib.sha256()
    for column in found.columns.values():
        digest.update(column.flat.numpy().tobytes())
        digest.update(column.starts.numpy().tobytes())
    return found, digest.hexdigest()


def _digest(text: Text) -> str:
    return hashlib.sha256(text.tokenizer.to_str().encode()).hexdigest()


def _variants(recipe: Recipe, part: str) -> int:
    """How many times over a part has all its pairs, each time cut into tokens otherwise."""
    return recipe.tokenizer.variants if part == "train" and recipe.tokenizer.dropout else 1


def _unanswered(recipe: Recipe, part: str) -> float:
    return recipe.data.unanswered if part == "train" else 0.0


def _table(recipe: Recipe, part: str, text: Text) -> Table:
    """Read and tokenised; what could not be used is among the facts."""
    report = Report()
    found = records(recipe, getattr(recipe.data, part), report)
    kind, facts = RECORDS[recipe.task], {}
    if kind is Pair:
        facts["variants"] = _variants(recipe, part)
        pairs = cast(Iterator[Pair], found)
        columns = _pair_columns(pairs, recipe, text, report, facts["variants"])
    elif kind is Question:
        questions = elsewhere(cast(Iterator[Question], found), _unanswered(recipe, part))
        columns = windows(questions, text, recipe.data.length)
    else:
        columns, facts["bytes"] = _text_columns(cast(Iterator[str], found), text)
    report.check(recipe.data.bad, part)
    said: dict[str, Any] = {
        "report": str(report),
        "read": report.read,
        "bad": [list(bad) for bad in report.bad],
    }
    return Table(columns, said | facts)


def _pair_columns(
    found: Iterator[Pair], recipe: Recipe, text: Text, report: Report, variants: int
) -> dict[str, Ragged]:
    """Both sides of all pairs; then of all pairs again, cut otherwise at random, and so on."""
    most = recipe.data.length - 1
    kept: list[tuple[str, str]] = []
    plain: list[tuple[list[int], list[int]]] = []
    # A pair with several targets is as many examples.
    rows = ((pair.source, target, report.place) for pair in found for target in pair.targets)
    while some := list(islice(rows, 8192)):
        cut = _cut(text, [(source, target) for source, target, _ in some])
        for (source, target, where), ids in zip(some, cut, strict=True):
            if max(map(len, ids)) > most:
                too_long = f"longer than {recipe.data.length} tokens (data.length)"
                report.bad.append(Bad(*where, too_long))
            else:
                kept.append((source, target))
                plain.append(ids)
    report.read = len(kept)
    whole = list(plain)
    for _ in range(1, variants):
        with _dropping(text, recipe.tokenizer.dropout):
            # What is too long when it is cut finer stays as it was.
            whole += [
                finer if max(map(len, finer)) <= most else ids
                for finer, ids in zip(_cut(text, kept), plain, strict=True)
            ]
    ends = {"source": text.id("</s>"), "target": text.target.id("</s>")}
    return {
        name: Ragged.of([*ids[side], end] for ids in whole)
        for side, (name, end) in enumerate(ends.items())
    }


def _cut(text: Text, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[list[int], list[int]]]:
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    return zip(token_ids(text, sources), token_ids(text.target, targets), strict=True)


@contextmanager
def _dropping(text: Text, share: float) -> Iterator[None]:
    """Within, BPE leaves out merges at random (https://arxiv.org/abs/1910.13267)."""
    algorithms = [one.tokenizer.model for one in (text, text.target)]
    for algorithm in algorithms:
        if not isinstance(algorithm, BPE):
            raise InputError(
                f"tokenizer.dropout is for BPE; this tokenizer is a {type(algorithm).__name__}."
            )
    try:
        for algorithm in algorithms:
            algorithm.dropout = share
        yield
    finally:
        for algorithm in algorithms:
            algorithm.dropout = None


def _text_columns(found: Iterator[str], text: Text) -> tuple[dict[str, Ragged], int]:
    """One long sequence, each line with its newline, and how many bytes it was."""
    size = 0

    def lines() -> Iterator[str]:
        nonlocal size
        for line in found:
            size += len(line.encode()) + 1
            yield line + "\n"

    whole = Ragged.of(token_ids(text, lines()))
    one = Ragged(whole.flat, torch.tensor([0, len(whole.flat)]))
    return {"text": one}, size


# ---------------------------------------------------------------------------------------- model

_CONFIGS: dict[str, type[Any]] = {
    "transformer": TransformerConfig,
    "t5": T5Config,
    "gpt2": GPT2Config,
    "transformer-xl": TransformerXLConfig,
    "bert": BertConfig,
}


def _model_kind(recipe: Recipe) -> type[Model]:
    if recipe.model.kind == "bert":
        return BertAnswering if recipe.task == "question answering" else BertMaskedLM
    kinds: dict[str, type[Model]] = {
        "transformer": Transformer,
        "t5": T5,
        "gpt2": GPT2,
        "transformer-xl": TransformerXL,
    }
    return kinds[recipe.model.kind]


def model(recipe: Recipe, text: Text) -> Model:
    """The model to train, anew or from where it starts."""
    found = _model(recipe, text)
    if len(text) > found.config.vocabulary:
        raise InputError(
            f"The tokenizer has {len(text)} tokens, and the model knows {found.config.vocabulary}: "
            "they do not belong together (model.start and tokenizer.start, or "
            "model.config.vocabulary)."
        )
    longest = getattr(found.config, "length", None)
    if longest is not None and recipe.data.length > longest:
        raise InputError(
            f"The model reads at most {longest} tokens, but data.length is {recipe.data.length}: "
            "lower it."
        )
    if recipe.model.locked:
        lock_dropout(found)
    return found


def _model(recipe: Recipe, text: Text) -> Model:
    kind, given = _model_kind(recipe), recipe.model.config
    if recipe.model.start is not None:
        if given:
            raise InputError("model.config comes with model.start: leave one of them out.")
        found = load(recipe.model.start, dtype=torch.float32)
        if recipe.tokenizer.keep:
            found = _pruned(found, text, Text.load(recipe.tokenizer.start or recipe.model.start))
        if isinstance(found, kind):
            return found
        theirs = getattr(found, "encoder", None)
        if type(found.config) is not _CONFIGS[recipe.model.kind] or theirs is None:
            raise InputError(
                f"{recipe.model.start} is a {type(found).__name__}, which {recipe.task} with "
                f"{recipe.model.kind} cannot start from."
            )
        made = kind(found.config)
        made.get_submodule("encoder").load_state_dict(theirs.state_dict())
        return made
    config = _CONFIGS[recipe.model.kind]
    nearest("key model.config.", given, [entry.name for entry in fields(config)])
    sizes = {**_from_text(recipe, text), **given}
    if isinstance(sizes.get("cutoffs"), list):
        sizes["cutoffs"] = tuple(sizes["cutoffs"])
    return kind(config(**sizes))


def _pruned(found: Model, text: Text, whole: Text) -> Model:
    """A BERT that knows the tokens of ``text`` only, which are some of those of ``whole``."""
    config = found.config
    if not isinstance(config, BertConfig):
        raise InputError(f"tokenizer.keep is for BERT, not for {type(found).__name__}.")
    tokens = sorted(text.tokenizer.get_vocab().items(), key=itemgetter(1))
    rows = torch.tensor([whole.id(token) for token, _ in tokens])
    small = type(found)(replace(config, vocabulary=len(text), pad=text.id("[PAD]")))
    state = found.state_dict()
    for name in ("encoder.tokens.weight", "bias"):  # the second of a masked language model
        if name in state:
            state[name] = state[name][rows]
    small.load_state_dict(state)
    return small


def _from_text(recipe: Recipe, text: Text) -> dict[str, Any]:
    """What a config takes from the tokenizer and the data, unless the recipe says otherwise."""
    if text.target.tokenizer.get_vocab() != text.tokenizer.get_vocab():
        raise InputError(
            "This tokenizer has a vocabulary for each language, and a new model has one for both. "
            "Set model.start to the checkpoint it came with, or train a tokenizer."
        )
    sizes: dict[str, Any] = {"vocabulary": len(text)}
    kind, length = recipe.model.kind, recipe.data.length
    if kind in ("transformer", "t5"):
        pad = text.id("<pad>")
        sizes |= {"pad": pad, "start": pad, "end": text.id("</s>")}
    elif kind == "bert":
        sizes |= {"length": length, "pad": text.id("[PAD]")}
    else:
        end = text.tokenizer.token_to_id(END)
        sizes["end"] = end
        sizes |= {"length": length, "begin": end} if kind == "gpt2" else {"cutoffs": ()}
    return sizes


# ------------------------------------------------------------------------------------ objective


def objective(
    recipe: Recipe,
    text: Text,
    made: Model,
    device: torch.device,
    parts: dict[str, Table],
    held_out: str = "valid",
) -> Objective:
    """What the recipe's task learns from ``parts["train"]`` and is measured on, ``held_out``."""
    tokens, length = recipe.batch.tokens, recipe.data.length
    train = place(parts["train"], device)
    held = place(parts[held_out], device) if held_out in parts else None
    if RECORDS[recipe.task] is Pair:
        special = _special(made)
        examine = None if held is None else _examine(recipe, held_out, text, held)
        return Pairs(
            train,
            special,
            tokens,
            smoothing=recipe.optimizer.smoothing,
            agreement=recipe.optimizer.agreement,
            examine=examine,
        )
    if RECORDS[recipe.task] is Question:
        exam = None if held is None else _exam(recipe, held_out, text, held)
        return Answers(train, tokens, text.id("[PAD]"), exam)
    stream = train["text"]
    if recipe.task == "language modelling":
        return _next_token(recipe, stream, held)
    if recipe.task == "masked language modelling":
        first, last, mask = (text.id(token) for token in ("[CLS]", "[SEP]", "[MASK]"))
        return MaskedTokens(
            stream, held, length, tokens, first=first, last=last, mask=mask, vocabulary=len(text)
        )
    found = [text.tokenizer.token_to_id(token) for token in SENTINELS]
    sentinels = [token for token in found if token is not None]
    return Spans(stream, held, length, tokens, special=_special(made), sentinels=sentinels)


def _next_token(recipe: Recipe, stream: Ragged, held: Table | None) -> Objective:
    data, pieces = recipe.data, (stream, held, recipe.data.length, recipe.batch.tokens)
    asked = {"activation": recipe.optimizer.activation, "slowness": recipe.optimizer.slowness}
    calm = {name: strength for name, strength in asked.items() if strength}
    warm = recipe.evaluation.temperature
    if recipe.model.kind == "transformer-xl" and not data.context:
        return NextTokenWithMemory(*pieces, forget=data.forget, temperature=warm, calm=calm)
    return NextToken(*pieces, context=data.context, temperature=warm, calm=calm)


def _special(made: Model) -> Special:
    config = made.config
    assert isinstance(config, TransformerConfig | T5Config)
    pad, start, end = config.pad, config.start, config.end
    if pad is None or start is None or end is None:
        raise InputError("A model that writes text needs pad, start and end in model.config.")
    return Special(pad, start, end)


def _examine(recipe: Recipe, part: str, text: Text, held: Table) -> Examine:
    """What Pairs are evaluated on: pairs of equal source are one, with several references."""
    report = Report()
    pairs = cast("list[Pair]", list(records(recipe, getattr(recipe.data, part), report)))
    joined = reading.together(pairs)
    end = text.id("</s>")
    prompts = [[*ids, end] for ids in token_ids(text, [pair.source for pair in joined])]
    settings, most = recipe.evaluation, recipe.data.length
    return Examine(joined, prompts, held, text.decode, settings, most, recipe.batch.tokens)


def _exam(recipe: Recipe, part: str, text: Text, held: Table) -> Exam:
    """What Answers are evaluated on."""
    found = records(recipe, getattr(recipe.data, part), Report())
    questions = cast("list[Question]", list(found))
    return Exam(questions, held, text, recipe.batch.tokens, recipe.evaluation.always)
