"""Readers report what they cannot use; a feed that stops goes on with the same rows."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.checkpoints.folders import DamageWarning
from regard.data.batches import ByLength, Feed, Lanes, Windows
from regard.data.readers import (
    read_jsonl,
    read_parallel,
    read_questions,
    read_squad,
    read_text,
    read_tsv,
)
from regard.data.records import Answer, Pair, Question, Report
from regard.data.tables import Ragged, Table, cached, content
from regard.errors import InputError

CPU = torch.device("cpu")


def write(file: Path, data: bytes) -> Path:
    """Compressed as its name says."""
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
    file.write_bytes(packers.get(file.suffix, bytes)(data))
    return file


# ------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("suffix", [".tsv", ".gz", ".xz"])
def test_tsv_is_read_however_it_is_packed_and_bad_lines_are_reported(
    tmp_path: Path, suffix: str
) -> None:
    rows = [
        b"\xef\xbb\xbfone\tun\tx",
        b"two",
        b"three\t",
        b"\xff\tvier",
        "fü\u2028nf\tcinq\r".encode(),
    ]
    file = write(tmp_path / f"pairs{suffix}", b"\n".join(rows))
    report = Report()
    pairs = list(read_tsv([file], (1, 2), report))
    assert pairs == [Pair("one", ("un",)), Pair("fü\u2028nf", ("cinq",))]
    assert report.read == 2
    assert [(bad.line, bad.why) for bad in report.bad] == [
        (2, "fewer than 2 columns"),
        (3, "an empty source or target"),
        (4, "not UTF-8"),
    ]
    assert f"{file}:2" in str(report)
    assert next(read_tsv([file], (2, 1), Report())) == Pair("un", ("one",))


def test_too_many_bad_lines_are_an_error_that_shows_them(tmp_path: Path) -> None:
    report = Report()
    list(read_tsv([write(tmp_path / "a.tsv", b"a\tb\nc\nd\te\nf\tg\n")], (1, 2), report))
    report.check(most=0.25)
    with pytest.raises(InputError, match=r"25\.00% of the lines are bad; .*a\.tsv:2"):
        report.check(most=0.2)
    with pytest.raises(InputError, match=r"There is no text in data\.train"):
        Report().check(most=1)


def test_half_a_character_is_a_bad_line(tmp_path: Path) -> None:
    rows = [r'{"a": "cut \ud83d", "b": "x"}', r'{"a": "whole \ud83d\ude00", "b": "x"}']
    report = Report()
    file = write(tmp_path / "a.jsonl", "\n".join(rows).encode())
    assert list(read_jsonl([file], ("a", "b"), report)) == [Pair("whole \U0001f600", ("x",))]
    assert [(bad.line, bad.why) for bad in report.bad] == [
        (1, "a lone surrogate (U+D800 to U+DFFF)")
    ]


def test_parallel_files_must_end_together(tmp_path: Path) -> None:
    english = write(tmp_path / "a.en.gz", b"one\ntwo\n\nfour\n")
    german = write(tmp_path / "a.de", b"eins\nzwei\ndrei\nvier\n")
    report = Report()
    pairs = list(read_parallel([english], [german], report))
    assert pairs == [Pair("one", ("eins",)), Pair("two", ("zwei",)), Pair("four", ("vier",))]
    assert [(bad.line, bad.why) for bad in report.bad] == [(3, "an empty source or target")]
    one_less = write(tmp_path / "less", b"1\n2\n3\n")
    for longer in (english, german):
        for sides in (([longer], [one_less]), ([one_less], [longer])):
            with pytest.raises(InputError, match=f"{longer.name} has a line 4"):
                list(read_parallel(*sides, Report()))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_packed_file_that_was_cut_off_is_an_error(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"a{suffix}", bytes(range(32, 127)) * 999)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=f"a{suffix} is damaged"):
        list(read_text([file], Report()))
    with pytest.raises(InputError, match="There is no file"):
        list(read_text([tmp_path / "none"], Report()))


def test_jsonl_joins_sentences_and_keeps_references(tmp_path: Path) -> None:
    rows = [
        {"source": ["A.", "B."], "target": ["x", "y"]},
        {"source": "C.", "target": "z"},
        {"source": 3, "target": "z"},
        {"target": "z"},
        [],
    ]
    text = "\n".join(map(json.dumps, rows)) + "\n{"
    report = Report()
    pairs = list(
        read_jsonl([write(tmp_path / "a.xz", text.encode())], ("source", "target"), report)
    )
    assert pairs == [Pair("A. B.", ("x", "y")), Pair("C.", ("z",))]
    assert [bad.line for bad in report.bad] == [3, 4, 5, 6]


def test_questions_are_read_from_both_forms_and_answers_checked(tmp_path: Path) -> None:
    context = "Ada wrote it in 1843."
    good = {"id": "1", "question": "When?", "answers": [{"text": "1843", "answer_start": 16}]}
    shifted = {"id": "2", "question": "When?", "answers": [{"text": "1843", "answer_start": 15}]}
    nobody = {"id": "3", "question": "Why?", "answers": []}
    broken = {"id": "4", "question": "Why?"}
    squad = {
        "data": [{"paragraphs": [{"context": context, "qas": [good, shifted, nobody, broken]}]}]
    }
    report = Report()
    found = list(read_squad([write(tmp_path / "s.json.gz", json.dumps(squad).encode())], report))
    expected = Question("1", "When?", context, (Answer("1843", 16),))
    assert found == [expected, Question("3", "Why?", context, ())]
    assert [(bad.line, bad.why) for bad in report.bad] == [
        (2, "an answer that is not at its answer_start in the context"),
        (4, "no id, question or answers with text and answer_start"),
    ]
    row = {"context": context, **good, "answers": [{"text": "1843", "start": 16}]}
    lines = write(tmp_path / "q.jsonl", json.dumps(row).encode())
    assert list(read_questions([lines], Report())) == [expected]
    with pytest.raises(InputError, match="is not in the format of SQuAD"):
        list(read_squad([lines], Report()))


# --------------------------------------------------------------------------------------- cache


def test_a_table_is_built_once_kept_and_built_again_only_when_damaged(tmp_path: Path) -> None:
    built = []

    def build() -> Table:
        built.append(1)
        return Table(
            {"source": Ragged.of([[1, 2], [], [3]]), "empty": Ragged.of([[], [], []])}, {"bytes": 7}
        )

    for _ in range(2):
        table = cached(tmp_path / "cache", {"text": "abc"}, build)
        assert len(built) == 1
        assert len(table) == 3
        assert table.facts == {"bytes": 7}
        assert table["source"].flat.tolist() == [1, 2, 3]
        assert table.lengths.tolist() == [[2, 0], [0, 0], [1, 0]]
    cached(tmp_path / "cache", {"text": "other"}, build)
    assert len(built) == 2
    for file in (tmp_path / "cache").rglob("source.flat"):
        file.write_bytes(bytes(12))
    with pytest.warns(DamageWarning, match="A table of tokens is built again"):
        table = cached(tmp_path / "cache", {"text": "abc"}, build)
    assert len(built) == 3
    assert table["source"].flat.tolist() == [1, 2, 3]


def test_of_two_that_build_the_same_table_the_first_wins(tmp_path: Path) -> None:
    def slow() -> Table:
        cached(tmp_path, {}, lambda: Table({"source": Ragged.of([[1]])}, {}))  # the other one
        return Table({"source": Ragged.of([[1]])}, {})

    assert cached(tmp_path, {}, slow)["source"].flat.tolist() == [1]
    assert len(list(tmp_path.iterdir())) == 1


def test_content_is_what_is_in_a_file(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one", b"a"), write(tmp_path / "other", b"a")
    assert content([one]) == content([other])
    other.write_bytes(b"b")
    assert content([one]) != content([other])
    with pytest.raises(InputError, match="cannot be read"):
        content([tmp_path / "none"])


# ------------------------------------------------------------------------------------- batches

shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=60)


@given(shapes, st.integers(18, 60), st.integers(0, 5))
def test_every_row_comes_once_an_epoch_within_the_tokens(
    lengths: list[tuple[int, int]], tokens: int, seed: int
) -> None:
    plan = ByLength(torch.tensor(lengths), tokens)
    for number in range(2):
        rows, batches = plan.epoch(seed, number)
        seen: Counter[int] = Counter()
        for start, stop, longest, even, _ in batches:
            members = rows[start:stop].tolist()
            seen.update(members)
            assert even == (len({lengths[row][0] for row in members}) == 1)
            for column in range(2):
                assert longest[column] == max(lengths[row][column] for row in members)
            assert len(members) * sum(longest) <= tokens
        assert seen == Counter(range(len(lengths)))


def test_epochs_differ_and_the_same_epoch_is_the_same() -> None:
    plan = ByLength(torch.ones(100, 1, dtype=torch.long), 10)
    first, again, second = plan.epoch(0, 0), plan.epoch(0, 0), plan.epoch(0, 1)
    assert torch.equal(first.rows, again.rows)
    assert first.batches == again.batches
    assert not torch.equal(first.rows, second.rows)
    assert not torch.equal(first.rows, plan.epoch(1, 0).rows)
    with pytest.raises(InputError, match="longest example has 11 tokens"):
        ByLength(torch.tensor([[11]]), 10)


def test_padding_is_little_where_lengths_vary() -> None:
    lengths = torch.randint(1, 40, (2000, 2), generator=torch.Generator().manual_seed(0))
    lengths[:, 1] = (lengths[:, 0] + lengths[:, 1] % 5).clamp(min=1)
    batches = ByLength(lengths, 1000).epoch(0, 0).batches
    padded = sum((stop - start) * sum(longest) for start, stop, longest, *_ in batches)
    assert int(lengths.sum()) / padded > 0.9


@pytest.mark.parametrize("stop", range(9))
def test_a_feed_goes_on_exactly_where_it_stopped(stop: int) -> None:
    plan = ByLength(torch.tensor([[1], [2], [2], [3], [1], [3]]), 4)
    whole = Feed(plan, 3, CPU)
    expected = [whole.next() for _ in range(12)]
    first, second = Feed(plan, 3, CPU), Feed(plan, 3, CPU)
    for _ in range(stop):
        first.next()
    second.cursor = json.loads(json.dumps(first.cursor))
    for rows in expected[stop:]:
        found = second.next()
        assert torch.equal(found.rows, rows.rows)
        assert found[1:] == rows[1:]


def test_rows_are_gathered_as_they_are() -> None:
    sequences = [[1, 2, 3], [], [4], [5, 6]]
    ragged = Ragged.of(sequences)
    found = ragged.gather(torch.tensor([3, 1, 0, 2]), longest=3, pad=9)
    assert found.tolist() == [[5, 6, 9], [9, 9, 9], [1, 2, 3], [4, 9, 9]]
    assert ragged.slices(torch.tensor([1, 3]), 3).tolist() == [[2, 3, 4], [4, 5, 6]]


def test_windows_cover_the_text_and_lanes_go_on() -> None:
    for number in range(5):
        rows, batches = Windows(103, 10, rows=1).epoch(0, number)
        starts = sorted(rows.tolist())
        assert all(later - start == 10 for start, later in pairwise(starts))
        assert starts[0] < 10
        assert 93 - 10 < starts[-1] <= 93
        assert len(batches) == len(starts)
    rows, batches = Lanes(103, 10, rows=2).epoch(0, 0)
    assert (rows - rows[0]).tolist() == [0, 51, 10, 61, 20, 71, 30, 81]
    assert {batch.stop - batch.start for batch in batches} == {2}
    assert [batch.first for batch in batches] == [True, False, False, False]
    again = Lanes(103, 10, rows=2, reset_every=2).epoch(0, 0).batches
    assert [batch.first for batch in again] == [True, False, True, False]
    assert Lanes(10, 10, rows=1).epoch(0, 0)[0].tolist() == [0]  # no room to shift


def test_windows_in_any_order_fill_their_batches_and_leave_out_others_each_time() -> None:
    plan, read = Windows(103, 10, rows=4), set()
    for number in range(50):
        rows, batches = plan.epoch(0, number)
        assert [batch.stop - batch.start for batch in batches] == [4, 4]
        read |= {place for start in rows.tolist() for place in range(start, start + 10)}
    assert read == set(range(103))
    rows, batches = Windows(103, 10, rows=4, shuffled=False).epoch(0, 0)
    assert [batch.stop - batch.start for batch in batches] == [4, 4, 2]  # all is measured
    rows, batches = Windows(33, 10, rows=4).epoch(0, 0)
    assert [batch.stop - batch.start for batch in batches] == [len(rows)]  # less than one batch


def test_a_cursor_behind_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    feed = Feed(Windows(103, 10, rows=4), 0, torch.device("cpu"))
    feed.cursor = {"epoch": 0, "batch": len(feed.batches) + 1}  # of a plan with one batch more
    feed.next()
    assert feed.cursor == {"epoch": 1, "batch": 1}


def test_windows_overlap_by_their_context() -> None:
    rows, batches = Windows(103, 10, rows=1, shuffled=False, context=7).epoch(0, 0)
    assert rows.tolist() == list(range(0, 94, 3))
    assert {batch.longest for batch in batches} == {(10,)}
    firsts = {
        min(Windows(103, 10, 1, context=7).epoch(0, number)[0].tolist()) for number in range(50)
    }
    assert firsts == {0, 1, 2}


@pytest.mark.parametrize(("lane", "count"), [(51, 4), (35, 2), (29, 2), (20, 2), (19, 1)])
def test_lanes_read_everything_in_some_epoch(lane: int, count: int) -> None:
    read = set()
    for number in range(200):
        rows, batches = Lanes(2 * lane, 10, rows=2).epoch(0, number)
        assert len(batches) == count  # two pieces wherever there is room: memory is of use
        assert (rows - rows[0]).tolist() == [r + 10 * at for at in range(count) for r in (0, lane)]
        read |= {place for start in rows.tolist() for place in range(start, start + 10)}
    assert read == set(range(2 * lane))


def test_texts_that_are_too_short_for_lanes_are_refused() -> None:
    with pytest.raises(InputError, match="has 21 tokens, but 5 rows of 5 need 26"):
        Lanes(20, 5, rows=5)
    with pytest.raises(InputError, match="has 21 tokens, but one piece needs 31"):
        Windows(20, 30, rows=1)
