"""From a recipe to what it names: records, tokenizer, tables, model and objective."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import itemgetter
from typing import Any, cast

import torch

from regard.data import readers
from regard.data.encoding import token_ids
from regard.data.records import Pair, Question, Report
from regard.data.schema import nearest
from regard.data.sources import RECORDS, records
from regard.data.tables import Ragged, Table, place
from regard.errors import InputError
from regard.layers.modules import lock_dropout
from regard.models.bert import BertConfig
from regard.models.loading import load
from regard.models.model import Model
from regard.models.registry import trained
from regard.text.tokenizer import Tokenizer
from regard.training.answers import Answers, Exam
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
from regard.training.recipe import Recipe
from regard.training.tokenizing import SENTINELS

# ------------------------------------------------------------------------------------- records


# ----------------------------------------------------------------------------------- tokenizer


# --------------------------------------------------------------------------------------- tables


# ---------------------------------------------------------------------------------------- model


def model(recipe: Recipe, text: Tokenizer) -> Model:
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


def _model(recipe: Recipe, text: Tokenizer) -> Model:
    row, given = trained(recipe.model.kind, recipe.task), recipe.model.config
    kind, config = row.model_class(), row.config_class()
    if recipe.model.start is not None:
        if given:
            raise InputError("model.config comes with model.start: leave one of them out.")
        found = load(recipe.model.start, dtype=torch.float32)
        if recipe.tokenizer.keep:
            found = _pruned(
                found, text, Tokenizer.load(recipe.tokenizer.start or recipe.model.start)
            )
        if isinstance(found, kind):
            return found
        theirs = getattr(found, "encoder", None)
        if type(found.config) is not config or theirs is None:
            raise InputError(
                f"{recipe.model.start} is a {type(found).__name__}, which {recipe.task} with "
                f"{recipe.model.kind} cannot start from."
            )
        made = kind(found.config)
        made.get_submodule("encoder").load_state_dict(theirs.state_dict())
        return made
    nearest("key model.config.", given, [entry.name for entry in fields(config)])
    sizes = {**_from_text(recipe, text), **given}
    if isinstance(sizes.get("cutoffs"), list):
        sizes["cutoffs"] = tuple(sizes["cutoffs"])
    return kind(config(**sizes))


def _pruned(found: Model, text: Tokenizer, whole: Tokenizer) -> Model:
    """A BERT that knows the tokens of ``text`` only, which are some of those of ``whole``."""
    config = found.config
    if not isinstance(config, BertConfig):
        raise InputError(f"tokenizer.keep is for BERT, not for {type(found).__name__}.")
    tokens = sorted(text.tokenizer.get_vocab().items(), key=itemgetter(1))
    rows = torch.tensor([whole.id(token) for token, _ in tokens])
    small = type(found)(replace(config, vocabulary=len(text), pad_token=text.id("[PAD]")))
    state = found.state_dict()
    for name in ("encoder.tokens.weight", "bias"):  # the second of a masked language model
        if name in state:
            state[name] = state[name][rows]
    small.load_state_dict(state)
    return small


def _from_text(recipe: Recipe, text: Tokenizer) -> dict[str, Any]:
    """What a config takes from the tokenizer and the data, unless the recipe says otherwise."""
    if text.target.tokenizer.get_vocab() != text.tokenizer.get_vocab():
        raise InputError(
            "This tokenizer has a vocabulary for each language, and a new model has one for both. "
            "Set model.start to the checkpoint it came with, or train a tokenizer."
        )
    architecture = trained(recipe.model.kind, recipe.task).model_class()
    return {"vocabulary": len(text), **architecture.sizes_for(text, recipe.data.length)}


# ------------------------------------------------------------------------------------ objective


def objective(
    recipe: Recipe,
    text: Tokenizer,
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
    pad, start, end = config.pad_token, config.start_token, config.end_token
    if pad is None or start is None or end is None:
        raise InputError("A model that writes text needs pad, start and end in model.config.")
    return Special(pad, start, end)


def _examine(recipe: Recipe, part: str, text: Tokenizer, held: Table) -> Examine:
    """What Pairs are evaluated on: pairs of equal source are one, with several references."""
    report = Report()
    pairs = cast("list[Pair]", list(records(recipe, getattr(recipe.data, part), report)))
    joined = readers.together(pairs)
    end = text.id("</s>")
    prompts = [[*ids, end] for ids in token_ids(text, [pair.source for pair in joined])]
    settings, most = recipe.evaluation, recipe.data.length
    return Examine(joined, prompts, held, text.decode, settings, most, recipe.batch.tokens)


def _exam(recipe: Recipe, part: str, text: Tokenizer, held: Table) -> Exam:
    """What Answers are evaluated on."""
    found = records(recipe, getattr(recipe.data, part), Report())
    questions = cast("list[Question]", list(found))
    return Exam(questions, held, text, recipe.batch.tokens, recipe.evaluation.always)
