"""Training questions for the model "answer": with an answer, and hard ones without.

    python recipes/answer_data.py DATA OUT

DATA holds the folder qa/ (docs/data.md). OUT receives train.jsonl.xz and squad.jsonl.xz to train
on, valid.jsonl.xz with an answer and held-back.jsonl.xz without, and counts.json. No context of
these shares a sentence with SQuAD's development set. Questions without an answer are made from
questions that have one:

- ``removed``: the sentences with the answer are taken out of the context.
- ``other``: the context is the most similar one that does not hold the answer.
- ``entity``: a name, year or number of the question becomes another one of the same kind.
- ``words``: a word of the question becomes its opposite, or the question is negated.
- ``asked``: the question asks for something else, such as "how many arms" for "how many hearts".

``renamed`` questions keep their answer: a name becomes another one in the question and in the
context, so that an unusual name alone does not mean that there is no answer.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from regard.text.words import sentences

TRAIN = (
    "squadshifts_new_wiki/train",
    "squadshifts_amazon/train",
    "squadshifts_reddit/train",
    "qamr/dev",
    "qamr/test",
    "tweetqa/train",
    "tweetqa/dev",
    "qed_dev/all",
    "qed-train/train",
    "covidqa_windows/all",
)
SQUAD = "squad1-train-part/train"
VALID = ("squadshifts_new_wiki/valid", "squadshifts_amazon/valid", "squadshifts_reddit/valid")
HELD_BACK_ARTICLES = ("Spectre_(2015_film)", "Antibiotics")  # of SQUAD; they are in the valid part
TEST = "squad/dev-v1.1.rebuilt.json.xz"
MIN_SHARED = 20  # letters and digits of a sentence that counts as shared
# For each kind, the number of questions to make, as a share of the questions with an answer.
SHARES = {"removed": 0.12, "other": 0.17, "entity": 0.12, "words": 0.05, "asked": 0.09}
RENAMED = 0.06
HELD_BACK_SHARE = 0.2  # of each kind, of the validation questions


class Question(NamedTuple):
    """A question about a context; without answers, the context does not answer it."""

    name: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]  # text and start
    source: str
    title: str

    def row(self) -> dict[str, Any]:
        answers = [{"text": text, "start": start} for text, start in self.answers]
        return {
            "id": self.name,
            "question": self.question,
            "context": self.context,
            "answers": answers,
        }


# ------------------------------------------------------------------------------------ reading


def read_questions(root: Path, name: str) -> Iterator[Question]:
    """The questions of a file that have an answer."""
    with lzma.open(root / f"qa/{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            answers = tuple((answer["text"], answer["start"]) for answer in row["answers"])
            if answers:
                yield Question(
                    f"{name}:{row['id']}",
                    row["question"],
                    row["context"],
                    answers,
                    name.split("/", maxsplit=1)[0],
                    row.get("title", ""),
                )


def bare(text: str) -> str:
    """The letters and digits of a text in lower case, by which texts are compared."""
    return "".join(filter(str.isalnum, text.casefold()))


def _sentence_keys(context: str) -> set[str]:
    keys = (bare(context[low:high]) for low, high in sentences(context))
    return {key for key in keys if len(key) >= MIN_SHARED}


def test_sentences(root: Path) -> set[str]:
    """The sentences of SQuAD's development set, through ``bare``."""
    with lzma.open(root / "qa" / TEST, "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    contexts = (part["context"] for article in articles for part in article["paragraphs"])
    return {key for context in contexts for key in _sentence_keys(context)}


def without_shared(
    questions: Iterable[Question], held_out: set[str], counts: Counter[str]
) -> Iterator[Question]:
    """The questions whose context shares no sentence with the test part."""
    known: dict[str, bool] = {}
    for question in questions:
        context = question.context
        if context not in known:
            known[context] = not held_out.isdisjoint(_sentence_keys(context))
        counts["shared" if known[context] else "kept"] += 1
        if not known[context]:
            yield question


# ------------------------------------------------------------------------- other contexts

_WORD = re.compile(r"\w+")
_STOP_WORDS = (
    "a an and are as at be been by can could did do does for from had has have he her his how if "
    "in into is it its many much of on or she that the their them they this to was were what when "
    "where which who whom whose why will with would you your not"
)
_STOP = frozenset(_STOP_WORDS.split())


def content_words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP]


def holds(context: str, answers: Sequence[tuple[str, int]]) -> bool:
    """Whether a context has one of the answers as words, in any case."""
    lower = context.lower()
    return any(
        re.search(rf"(?<!\w){re.escape(text.lower())}(?!\w)", lower) is not None
        for text, _ in answers
    )


class Contexts:
    """Finds contexts by the words that they share with a question and its context."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self.texts = list(dict.fromkeys((q.source, q.title, q.context) for q in questions))
        self.words = [frozenset(content_words(text)) for _, _, text in self.texts]
        self.where: dict[str, list[int]] = defaultdict(list)
        for number, words in enumerate(self.words):
            for word in words:
                self.where[word].append(number)

    def weight(self, word: str) -> float:
        return math.log(len(self.texts) / len(self.where[word])) if word in self.where else 0.0

    def most_similar(self, question: Question, random: Random) -> str | None:
        """A context of the same source that has words of the question but not its answer.

        It is drawn from the best three.
        """
        scores: Counter[int] = Counter()
        for word in dict.fromkeys(content_words(question.question)):
            if len(self.where.get(word, ())) > 0.3 * len(self.texts):
                continue
            for number in self.where.get(word, ()):
                scores[number] += self.weight(word)  # type: ignore[assignment]
        good = []
        for number, _ in scores.most_common(25):
            source, title, text = self.texts[number]
            if source != question.source or text == question.context:
                continue
            if holds(text, question.answers) or text in question.context:
                continue
            same = 1.25 if title and title == question.title else 1.0
            good.append((scores[number] * same, text))
        best = sorted(good, reverse=True)[:3]
        return random.choice(best)[1] if best else None


# ---------------------------------------------------------------------------- the answer removed


def with_answer_removed(question: Question) -> str | None:
    """The context without the sentences that have an answer; None if too little is left."""
    context = question.context
    spans = sentences(context)
    kept = [
        span
        for span in spans
        if not holds(context[slice(*span)], question.answers)
        and not any(
            start < span.end and span.start < start + len(text) for text, start in question.answers
        )
    ]
    text = " ".join(context[low:high] for low, high in kept)
    return text if kept and len(kept) < len(spans) and len(text.split()) >= 12 else None


# -------------------------------------------------------------------------------------- entities

_NAME = re.compile(r"(?:[A-Z][\w'\u2019-]+)(?:\s(?:of|the|de|and)?\s?[A-Z][\w'\u2019-]+){0,3}")
_YEAR = re.compile(r"(?<![\d.,$€£])(?:1[1-9]|20)\d\d(?![\d.,]\d|\d|%)")
_NUMBER = re.compile(r"(?<![\w.,$€£-])\d[\d,]*(?:\.\d+)?(?![\w-])")
_ORDINARY_WORDS = (
    "who what when where why how which the a an in on at of is are was were did do does has have "
    "had if it this that these those he she they we i you my your his her their our but and or "
    "for to from with by after before during while because so no not there here all some many "
    "most on once one two three january february march april may june july august september "
    "october november december monday tuesday wednesday thursday friday saturday sunday question "
    "name can could would should according let im ive its dont also however although though since "
    "as then thus both each every its yes well just"
)
_ORDINARY = frozenset(_ORDINARY_WORDS.split())


def names_in(text: str, known: Counter[str]) -> list[tuple[int, int]]:
    """The spans of names: words with a capital letter that rarely begin with a small one."""
    found = []
    for match in _NAME.finditer(text):
        low, high = match.span()
        words = match[0].split()
        while words and (
            words[0].lower() in _ORDINARY or known[words[0].lower()] > known[words[0]]
        ):
            low += len(words[0])
            low += len(text[low:high]) - len(text[low:high].lstrip())
            words = words[1:]
        if words and len(text[low:high].strip()) > 2:
            found.append((low, high))
    return found


def form_of(name: str) -> int:
    """A coarse kind of a name: the number of its words, up to three."""
    return min(len(name.split()), 3)


class Entities:
    """Names, years and numbers, and others of the same kind."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.known: Counter[str] = Counter()
        contexts = list(dict.fromkeys(question.context for question in questions))
        for context in contexts:
            self.known.update(
                re.findall(r"(?<![.!?:\"'\u201c] )(?<!^)\b[^\W\d_][\w'\u2019-]*", context)
            )
        self.names: dict[int, list[str]] = defaultdict(list)
        for context in contexts:
            for low, high in names_in(context, self.known):
                self.names[form_of(context[low:high])].append(context[low:high])

    def places(self, text: str) -> Iterator[tuple[str, int, int]]:
        """The kind and the span of each name, year and number."""
        taken: list[tuple[int, int]] = []
        for kind, spans in (
            ("year", [match.span() for match in _YEAR.finditer(text)]),
            ("number", [match.span() for match in _NUMBER.finditer(text)]),
            ("name", names_in(text, self.known)),
        ):
            for low, high in spans:
                if not any(low < end and start < high for start, end in taken):
                    taken.append((low, high))
                    yield kind, low, high

    def another(self, kind: str, old: str, question: Question, random: Random) -> str | None:
        """Another entity of the kind, if possible from the context; never from an answer."""
        context = question.context
        words = set(old.lower().split())

        def fits(new: str) -> bool:
            return words.isdisjoint(new.lower().split()) and not any(
                new.lower() in text.lower() or text.lower() in new.lower()
                for text, _ in question.answers
            )

        inside = [
            context[low:high]
            for other, low, high in self.places(context)
            if other == kind and fits(context[low:high])
        ]
        if kind == "name":
            inside = [name for name in inside if form_of(name) == form_of(old)] or inside
        if inside and random.random() < 0.7:
            return random.choice(inside)
        if kind == "year":
            new = str(int(old) + random.choice((-1, 1)) * random.choice((1, 2, 3, 5, 10, 20, 50)))
        elif kind == "number":
            digits = re.sub(r"\D", "", old.split(".", maxsplit=1)[0]) or "1"
            value = max(2, round(int(digits) * random.choice((0.2, 0.5, 0.8, 1.5, 2, 3, 10))))
            new = f"{value:,}" if "," in old else str(value)
        elif names := self.names[form_of(old)]:
            new = random.choice(names)
        else:
            return None
        return new if fits(new) and new.lower() not in context.lower() else None

    def changed(self, question: Question, random: Random) -> str | None:
        """The question with one of its entities, which its context has, replaced."""
        text, lower = question.question, question.context.lower()
        found = [place for place in self.places(text) if text[place[1] : place[2]].lower() in lower]
        if not found:
            return None
        kind, low, high = random.choice(found)
        new = self.another(kind, text[low:high], question, random)
        return None if new is None else text[:low] + new + text[high:]

    def renamed(self, question: Question, random: Random) -> Question | None:
        """The question with a name replaced in it and in the context; its answer stays."""
        text, context = question.question, question.context
        start = question.answers[0][1]
        answer = question.answers[0][0]
        for kind, low, high in self.places(text):
            old = text[low:high]
            if (
                kind != "name"
                or old not in context
                or old in answer
                or not self.names[form_of(old)]
            ):
                continue
            new = random.choice(self.names[form_of(old)])
            if new.lower() in context.lower() or answer in new or new in answer:
                return None
            pattern = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
            before, after = (
                pattern.sub(lambda _, new=new: new, part)
                for part in (context[:start], context[start + len(answer) :])
            )
            return question._replace(
                name=question.name + ":renamed",
                question=pattern.sub(lambda _, new=new: new, text),
                context=before + answer + after,
                answers=((answer, len(before)),),
            )
        return None


# ----------------------------------------------------------------------------------------- words

_OPPOSITES = """
first last|largest smallest|biggest smallest|highest lowest|longest shortest|oldest youngest|
most least|more fewer|greater smaller|higher lower|before after|earliest latest|best worst|
north south|east west|northern southern|eastern western|increase decrease|increased decreased|
rise fall|rose fell|won lost|win lose|winner loser|start end|started ended|begin end|began ended|
beginning end|open close|opened closed|buy sell|bought sold|arrive leave|arrived left|
joined left|accepted rejected|accept reject|approved rejected|allowed forbidden|allow forbid|
supported opposed|support oppose|success failure|successful unsuccessful|good bad|better worse|
positive negative|strong weak|stronger weaker|hot cold|large small|big small|long short|
high low|early late|old new|male female|men women|man woman|father mother|brother sister|
son daughter|husband wife|king queen|born buried|major minor|majority minority|
maximum minimum|advantage disadvantage|advantages disadvantages|upper lower|always never|
like dislike|likes dislikes|liked disliked|love hate|loved hated|created destroyed|
built demolished|gained lost|gain lose|included excluded|include exclude|includes excludes|
public private|urban rural|rich poor|easy difficult|easier harder|fast slow|cheap expensive|
light heavy|hard soft|top bottom|left right|inside outside|common rare|present absent|
internal external|domestic foreign|modern ancient|agreed disagreed|agree disagree|
succeeded preceded|followed preceded|entered left|attack defend|attacked defended|
appointed dismissed|hired fired|raised lowered|added removed|add remove|adds removes
"""
OPPOSITES: dict[str, str] = {}
for _pair in _OPPOSITES.replace("\n", "").split("|"):
    _one, _two = _pair.split()
    OPPOSITES.setdefault(_one, _two)
    OPPOSITES.setdefault(_two, _one)
_AUXILIARY = re.compile(
    r"(?<!\w)(is|are|was|were|did|does|do|can|could|has|have|had|will|would|should)(?!\w)",
    re.IGNORECASE,
)


def with_opposite(question: Question, random: Random) -> str | None:
    """The question with a word replaced by its opposite, or negated."""
    text, context = question.question, set(_WORD.findall(question.context.lower()))
    found = [
        match
        for match in _WORD.finditer(text)
        if match[0] in OPPOSITES and match[0] in context and OPPOSITES[match[0]] not in context
    ]
    if found and random.random() < 0.8:
        match = random.choice(found)
        return text[: match.start()] + OPPOSITES[match[0]] + text[match.end() :]
    if re.search(r"\bnot\b|n't\b|\bnever\b|\bno\b", text, re.IGNORECASE):
        return None
    if (match := _AUXILIARY.search(text)) is None:
        return None
    word, rest = match[0], text[match.end() :]
    if re.match(r"\s+(?:there|it|this|that|these|those|he|she|they|you|the \w+|[A-Z]\w+)\s", rest):
        # "did the king build" -> "did the king not build", and "didn't the king build".
        negated = "can't" if word.lower() == "can" else word + "n't"
        if word.lower() == "will":
            negated = "won't"
        return text[: match.start()] + negated + rest
    return text[: match.end()] + random.choice((" not", " never")) + rest


# --------------------------------------------------------------------------------- asked for

_VERB = r"(?=(?:is|are|was|were|did|does|do|can|has|have)\b)"
# What a question asks for: the group is replaced by that of another question with the same form.
_ASKED = {
    form: re.compile(pattern, re.IGNORECASE)
    for form, pattern in {
        "how many": rf"^how many (\w+(?: \w+)?) {_VERB}",
        "how much": rf"^how much (\w+) {_VERB}",
        "how": rf"^how (?!many|much|did|does|do|is|are|was|were|can)(\w+) {_VERB}",
        "what": rf"^(?:what|which) (\w+(?: \w+)?) {_VERB}",
        "what is the": r"^what (?:is|are|was|were) the (\w+(?: \w+)?) (?=(?:of|for|in)\b)",
        "who is the": r"^who (?:is|was|were|are) the (\w+(?: \w+)?) (?=(?:of|for|in|at)\b)",
        "who did": (
            r"^who (\w+ed|wrote|won|made|built|led|gave|took|sold|bought|became|ran|held|sang|found"
            r"|began) (?!by\b)"
        ),
        "when was it": (
            r"^(?:when|where|in what year) (?:was|were) .{3,60}? (\w+ed|born|built|written|made"
            r"|sold|held|found|begun|known)(?=\?|$| in\b| by\b)"
        ),
        "when did it": (
            r"^(?:when|where|why|how) (?:did|does|do) (?:the )?\w+(?: \w+)? (\w+)(?=\?|$| )"
        ),
    }.items()
}


class Asked:
    """What questions ask for, by the form of the question."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self.seen: dict[str, list[str]] = defaultdict(list)
        for text in dict.fromkeys(question.question for question in questions):
            for form, match in self.forms(text):
                self.seen[form].append(match[1].lower())

    def forms(self, text: str) -> Iterator[tuple[str, re.Match[str]]]:
        for form, pattern in _ASKED.items():
            if (match := pattern.search(text)) is not None:
                yield form, match

    def changed(self, question: Question, random: Random) -> str | None:
        """The question asking for something that neither the question nor the answer names."""
        text = question.question
        for form, match in self.forms(text):
            inside = set(content_words(question.context))
            old = set(content_words(match[1]))
            for _ in range(12):
                new = random.choice(self.seen[form])
                words = set(content_words(new))
                # Half of the time, something that the context mentions.
                if not words or words & old or (random.random() < 0.5) != bool(words & inside):
                    continue
                if len(words & inside) == len(words) and form not in ("how many", "how much"):
                    near = [
                        question.context[low:high].lower()
                        for low, high in sentences(question.context)
                        if holds(question.context[low:high], question.answers)
                    ]
                    if any(word in sentence for sentence in near for word in words):
                        continue
                low, high = match.span(1)
                return text[:low] + new + text[high:]
        return None


# ----------------------------------------------------------------------------------------- all


def made(
    questions: Sequence[Question],
    shares: dict[str, float],
    everything: Sequence[Question],
    random: Random,
) -> dict[str, list[Question]]:
    """Questions without an answer of each kind; a question is used at most once a kind."""
    contexts, entities, asked = Contexts(everything), Entities(everything), Asked(everything)
    makers: dict[str, Callable[[Question], Question | None]] = {
        "removed": lambda q: _about(q, with_answer_removed(q)),
        "other": lambda q: _about(q, contexts.most_similar(q, random)),
        "entity": lambda q: _asking(q, entities.changed(q, random)),
        "words": lambda q: _asking(q, with_opposite(q, random)),
        "asked": lambda q: _asking(q, asked.changed(q, random)),
        "renamed": lambda q: entities.renamed(q, random),
    }
    found: dict[str, list[Question]] = {}
    for kind, share in shares.items():
        wanted, rows = round(share * len(questions)), list[Question]()
        for question in random.sample(questions, len(questions)):
            if len(rows) == wanted:
                break
            # QAMR has some 17 questions for each sentence.
            if question.source == "qamr" and random.random() < 0.5:
                continue
            if (new := makers[kind](question)) is not None:
                rows.append(new._replace(name=f"{question.name}:{kind}"))
        found[kind] = rows
    return found


def _about(question: Question, context: str | None) -> Question | None:
    return None if context is None else question._replace(context=context, answers=())


def _asking(question: Question, text: str | None) -> Question | None:
    if text is None or bare(text) == bare(question.question):
        return None
    return question._replace(question=text, answers=())


def write(file: Path, questions: Iterable[Question]) -> int:
    """Write questions, one JSON object a line, and return their number."""
    lines = [json.dumps(question.row(), ensure_ascii=False) + "\n" for question in questions]
    with lzma.open(file, "wt", encoding="utf-8") as out:
        out.writelines(lines)
    return len(lines)


def prepare(root: Path, out: Path, seed: int = 0) -> dict[str, dict[str, int]]:
    """Write all files, and return the counts of each."""
    out.mkdir(parents=True, exist_ok=True)
    held_out = test_sentences(root)
    counts: dict[str, dict[str, int]] = {}

    def read(name: str) -> list[Question]:
        counts[name] = Counter()
        return list(without_shared(read_questions(root, name), held_out, counts[name]))

    squad = read(SQUAD)
    valid = [question for name in VALID for question in read(name)]
    valid += [question for question in squad if question.title in HELD_BACK_ARTICLES]
    held_back = {key for question in valid for key in _sentence_keys(question.context)}
    squad = [question for question in squad if question.title not in HELD_BACK_ARTICLES]
    answered = [
        question
        for name in TRAIN
        for question in read(name)
        if held_back.isdisjoint(_sentence_keys(question.context))
    ]
    everything = answered + squad
    train = made(everything, SHARES | {"renamed": RENAMED}, everything, Random(seed))
    hard = made(valid, dict.fromkeys(SHARES, HELD_BACK_SHARE), valid, Random(seed + 1))
    files = {
        "train": [*answered, *(question for rows in train.values() for question in rows)],
        "squad": squad,
        "valid": valid,
        "held-back": [question for rows in hard.values() for question in rows],
    }
    counts["files"] = {
        name: write(out / f"{name}.jsonl.xz", sorted(rows, key=lambda row: (row.context, row.name)))
        for name, rows in files.items()
    }
    counts["kinds"] = {kind: len(train[kind]) for kind in SHARES}
    counts["kinds held back"] = {kind: len(rows) for kind, rows in hard.items()}
    (out / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the questions of recipes/answer.toml.")
    parser.add_argument("data", type=Path, help="the folder that holds qa/")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random choices")
    arguments = parser.parse_args()
    counts = prepare(arguments.data, arguments.out, arguments.seed)
    sys.stdout.write(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
