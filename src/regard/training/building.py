"""Build the model, the objective and the scorer of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from operator import itemgetter
from typing import Any, cast

import torch

from regard.data.readers import group_targets
from regard.data.records import RECORDS, Pair, Question, Report
from regard.data.schema import nearest
from regard.data.sources import records
from regard.data.tables import Table
from regard.errors import InputError
from regard.evaluation.losses import special_tokens, summed_loss
from regard.evaluation.scoring import AnswerScorer, PairScorer, TextScorer, loss_scores
from regard.layers.modules import lock_dropout
from regard.models.adapting import adapt, check_base
from regard.models.bert import BertConfig
from regard.models.loading import load
from regard.models.model import Model
from regard.models.registry import trained
from regard.text.tokenizer import Tokenizer
from regard.training.objectives import (
    Answers,
    MaskedTokens,
    NextToken,
    NextTokenWithMemory,
    Objective,
    Pairs,
    Spans,
)
from regard.training.recipe import Recipe
from regard.training.tokenizing import SENTINELS

# ---------------------------------------------------------------------------------------- model


def model(recipe: Recipe, tokenizer: Tokenizer) -> Model:
    """The model to train, with random weights or from ``model.start``."""
    built = _model(recipe, tokenizer)
    if len(tokenizer) > built.config.vocabulary:
        raise InputError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model has only "
            f"{built.config.vocabulary}. Set tokenizer.start to the tokenizer of model.start, or "
            "raise model.config.vocabulary."
        )
    longest = getattr(built.config, "length", None)
    if longest is not None and recipe.data.length > longest:
        raise InputError(
            f"The model reads at most {longest} tokens, but data.length is {recipe.data.length}: "
            "lower it."
        )
    if recipe.lora.rank:
        adapt(built, **asdict(recipe.lora))
    if recipe.model.variational_dropout:
        lock_dropout(built)
    return built


def _model(recipe: Recipe, tokenizer: Tokenizer) -> Model:
    row, given = trained(recipe.model.kind, recipe.task), recipe.model.config
    kind, config = row.model_class(), row.config_class()
    if recipe.model.start is not None:
        if given:
            raise InputError(
                "model.config and model.start exclude each other: leave one of them out."
            )
        if recipe.lora.rank:
            check_base(recipe.model.start)
        loaded = load(recipe.model.start, dtype=torch.float32)
        if recipe.tokenizer.keep:
            loaded = _pruned(
                loaded, tokenizer, Tokenizer.load(recipe.tokenizer.start or recipe.model.start)
            )
        if isinstance(loaded, kind):
            return loaded
        if recipe.lora.rank:
            raise InputError(
                f"{recipe.model.start} is a {type(loaded).__name__}, which has no trained output "
                f"layer for {recipe.task}. Train one with lora.rank = 0 first."
            )
        encoder = getattr(loaded, "encoder", None)
        if type(loaded.config) is not config or encoder is None:
            raise InputError(
                f"{recipe.model.start} is a {type(loaded).__name__}, which {recipe.task} with "
                f"{recipe.model.kind} cannot start from."
            )
        built = kind(loaded.config)
        built.get_submodule("encoder").load_state_dict(encoder.state_dict())
        return built
    nearest("key model.config.", given, [entry.name for entry in fields(config)])
    sizes = {**_tokenizer_sizes(recipe, tokenizer), **given}
    if isinstance(sizes.get("cutoffs"), list):
        sizes["cutoffs"] = tuple(sizes["cutoffs"])
    return kind(config(**sizes))


def _pruned(model: Model, tokenizer: Tokenizer, whole: Tokenizer) -> Model:
    """A BERT with embeddings only for ``tokenizer``, whose tokens are a subset of ``whole``'s."""
    config = model.config
    if not isinstance(config, BertConfig):
        raise InputError(f"tokenizer.keep is for BERT, not for {type(model).__name__}.")
    tokens = sorted(tokenizer.tokenizer.get_vocab().items(), key=itemgetter(1))
    rows = torch.tensor([whole.id(token) for token, _ in tokens])
    small = type(model)(replace(config, vocabulary=len(tokenizer), pad_token=tokenizer.id("[PAD]")))
    state = model.state_dict()
    for name in ("encoder.tokens.weight", "bias"):  # only a masked language model has "bias"
        if name in state:
            state[name] = state[name][rows]
    small.load_state_dict(state)
    return small


def _tokenizer_sizes(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """The defaults of config fields that depend on the tokenizer and the data."""
    if tokenizer.target.tokenizer.get_vocab() != tokenizer.tokenizer.get_vocab():
        raise InputError(
            "This tokenizer has a vocabulary for each language, but a new model needs only one. "
            "Set model.start to the checkpoint of the tokenizer, or train another tokenizer."
        )
    architecture = trained(recipe.model.kind, recipe.task).model_class()
    return {"vocabulary": len(tokenizer), **architecture.sizes_for(tokenizer, recipe.data.length)}


# ----------------------------------------------------------------------- objective and scorer


def objective(
    recipe: Recipe, tokenizer: Tokenizer, model: Model, table: Table, *, shuffled: bool = True
) -> Objective:
    """The objective of the recipe's task on a table; an evaluation takes ``shuffled=False``."""
    length, tokens = recipe.data.length, recipe.batch.tokens
    if RECORDS[recipe.task] is Pair:
        settings = recipe.optimizer
        return Pairs(
            table,
            special_tokens(model),
            tokens,
            smoothing=settings.label_smoothing,
            r_drop=settings.r_drop,
        )
    if RECORDS[recipe.task] is Question:
        return Answers(table, tokens, tokenizer.id("[PAD]"))
    text = table["text"]
    if recipe.task == "language modelling":
        return _next_token(recipe, table)
    if recipe.task == "masked language modelling":
        first, last, mask = (tokenizer.id(token) for token in ("[CLS]", "[SEP]", "[MASK]"))
        return MaskedTokens(
            text,
            length,
            tokens,
            shuffled=shuffled,
            first=first,
            last=last,
            mask=mask,
            vocabulary=len(tokenizer),
        )
    known = [tokenizer.tokenizer.token_to_id(token) for token in SENTINELS]
    sentinels = [token for token in known if token is not None]
    special = special_tokens(model)
    return Spans(text, length, tokens, shuffled=shuffled, special=special, sentinels=sentinels)


def _next_token(recipe: Recipe, table: Table) -> NextToken:
    data, settings = recipe.data, recipe.optimizer
    penalties = {
        "activation": settings.activation_regularization,
        "slowness": settings.temporal_activation_regularization,
    }
    penalties = {name: weight for name, weight in penalties.items() if weight}
    pieces = (table["text"], data.length, recipe.batch.tokens)
    if recipe.model.kind == "transformer-xl" and not data.context:
        every = data.memory_reset_every
        return NextTokenWithMemory(*pieces, reset_every=every, penalties=penalties)
    return NextToken(*pieces, context=data.context, penalties=penalties)


def scorer(
    recipe: Recipe, part: str, tokenizer: Tokenizer, model: Model, table: Table, examples: int = 0
) -> Callable[[Any], dict[str, float]]:
    """The scorer for the part "valid" or "test" of the data, with the table of that part.

    It decodes at most ``examples`` texts; with 0, all texts.
    """
    settings, data, tokens = recipe.evaluation, recipe.data, recipe.batch.tokens
    kind = RECORDS[recipe.task]
    if kind is not str:
        held_out = list(records(data, getattr(data, part), kind, Report()))
        if kind is Question:
            questions = cast("list[Question]", held_out)
            return AnswerScorer(
                questions, table, tokenizer, tokens, settings.always_answer, settings.threshold
            )
        names = next((names for names in _DECODED_TOGETHER if settings.metric in names), ())
        pairs = group_targets(cast("list[Pair]", held_out))[: examples or None]
        return PairScorer(pairs, tokenizer, settings, names, data.length, table, tokens)
    if recipe.task == "language modelling":
        flat, size = table["text"].flat, table.facts["bytes"]
        return TextScorer(flat, size, data.length, data.context, tokens, settings.temperature)
    try:
        held = objective(recipe, tokenizer, model, table, shuffled=False)
    except InputError as error:
        raise InputError(f"data.{part} is too short: {error}") from None

    def loss(model: Any) -> dict[str, float]:
        return loss_scores(*summed_loss(model, held.plan, held.device, held.prepare, held.loss))

    return loss


# Scores with equal decoding: if a run measures one of a group, it logs the whole group.
_DECODED_TOGETHER = (("bleu", "chrf"), ("rouge-1", "rouge-2", "rouge-l"))
