"""Every error says what is wrong, what was given, and what to do."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from regard import (
    Alibi,
    BackendError,
    Causal,
    InputError,
    Padding,
    Prefix,
    RegardError,
    RelativeBuckets,
    RelativeContent,
    See,
    Segments,
    Window,
    attention,
    why,
)
from regard.mechanism import biases, masks
from regard.mechanism.backends import sdpa
from regard.mechanism.call import check

X = torch.zeros(2, 4, 5, 3)
ANY = r"[\s\S]*"


def refused(*words: str, **arguments: Any) -> None:
    """The call is refused, and the message has these words in this order."""
    inputs = [arguments.pop(name, X) for name in ("query", "key", "value")]
    with pytest.raises(InputError, match=ANY.join(words)):
        attention(*inputs, **arguments)


def test_kinds_of_errors() -> None:
    assert issubclass(InputError, RegardError)
    assert issubclass(InputError, ValueError)
    assert issubclass(BackendError, RuntimeError)


def test_shapes() -> None:
    refused("one layout of", r"\[2, 4, 5, 3\]", r"\[5, 3\]", key=X[0, 0])
    refused("one layout of", query=X[None], key=X[None], value=X[None])
    refused("the same batch", r"\[1, 4, 5, 3\]", key=X[:1])
    refused("the same batch and dim", r"\[2, 4, 5, 2\]", query=X[..., :2])
    refused("key and value", r"\[2, 4, 4, 3\]", value=X[:, :, :4])
    refused("at least 1", query=X[..., :0], key=X[..., :0])
    refused("4 query heads", "3 key heads", "multiple", key=X[:, :3], value=X[:, :3])
    refused("4 query heads", "0 key heads", key=X[:, :0], value=X[:, :0])


def test_dtypes_and_devices() -> None:
    refused("floating-point dtype", "float64", r"\.to\(dtype\)", key=X.double())
    for dtype in (torch.long, torch.complex64, torch.float8_e4m3fn):
        x = X.to(dtype)
        refused("floating-point dtype", str(dtype), query=x, key=x, value=x)
    refused("one device", "meta", r"\.to\(device\)", key=X.to("meta"))


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("given", [X.numpy(), X.tolist(), None], ids=["numpy", "list", "none"])
def test_inputs_are_tensors(name: str, given: Any) -> None:
    refused(
        f"{name} must be a torch.Tensor", type(given).__name__, "torch.as_tensor", **{name: given}
    )
    everything = dict.fromkeys(("query", "key", "value"), given)
    refused("query must be a torch.Tensor", "torch.as_tensor", **everything)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "reference"])
@pytest.mark.parametrize("name", ["scale", "softcap", "dropout"])
@pytest.mark.parametrize(
    "given",
    [
        torch.tensor(0.5),
        torch.tensor(0.5, requires_grad=True),
        torch.tensor([0.5, 0.5]),
        numpy.array(0.5),
        "0.5",
        0.5j,
    ],
    ids=repr,
)
def test_numbers_are_not_tensors(name: str, given: Any, backend: str) -> None:
    refused(f"{name} must be a Python number", r"\.item\(\)", backend=backend, **{name: given})


def test_numbers_may_be_those_of_numpy() -> None:
    scale, softcap, dropout = numpy.float32(0.5), numpy.float16(2), numpy.float64(0.1)
    call = check(X, X, X, None, None, scale, softcap, dropout, None)
    assert (call.scale, call.softcap, call.dropout) == (0.5, 2, 0.1)
    assert {type(call.scale), type(call.softcap)} == {float}


def test_numbers() -> None:
    refused("scale", "finite", "nan", scale=float("nan"))
    refused("softcap", "above 0", "-1", softcap=-1.0)
    refused("softcap", "above 0", "0", softcap=0.0)
    refused("dropout", "probability", "1.5", dropout=1.5)
    refused("dropout", "probability", "1", dropout=1.0)


def test_mask_arguments() -> None:
    refused("boolean, True where a query may attend", "float32", "bias=tensor", mask=X[0, 0])
    refused(r"\[4, 4\]", "does not broadcast", r"\[2, 4, 5, 5\]", mask=torch.ones(4, 4).bool())
    refused("mask", r"Causal\(\)", "got 'causal'", mask="causal")
    refused("mask", r"Causal\(\)", "class.*Causal", mask=Causal)
    refused("3 entries for a batch of 2", "one length per sequence", mask=Padding([1, 2, 3]))
    refused("length of 9", "only 5 keys", mask=Padding([9, 1]))
    refused("length of 6", "only 5 keys", mask=Prefix(6))
    refused("add up to 5", r"\[2, 2\] is 4", mask=Segments([2, 2]))
    refused("packs 3 rows for a batch of 2", mask=Segments([[5]] * 3))
    refused("only 5 keys", mask=Causal() & ~Padding(9))


@pytest.mark.parametrize("make", [Padding, lambda given: Padding(given, "left"), Prefix])
def test_lengths_in_a_tensor_are_checked_like_numbers(make: Any) -> None:
    refused("length of 9", "only 5 keys", mask=make(torch.tensor([9, 9])))
    refused("from 0 on", "-1", mask=Causal() & make(torch.tensor([2, -1])))


@pytest.mark.parametrize("make", [Padding, lambda given: Padding(given, "left"), Prefix])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "reference"])
@pytest.mark.parametrize(("given", "meant"), [(9, 5), (-9, 0)])
def test_lengths_that_cannot_be_read_are_clamped(
    make: Any, backend: str, given: int, meant: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn_like(X)
    expected = attention(x, x, x, mask=make(meant), backend="reference")
    monkeypatch.setattr(masks, "can_read", lambda tensor: False)  # as on a GPU
    for dtype in (torch.int8, torch.int64):
        mask = make(torch.tensor([given], dtype=dtype))
        torch.testing.assert_close(attention(x, x, x, mask=mask, backend=backend), expected)


def test_lengths_in_a_small_dtype_do_not_overflow() -> None:
    x = torch.randn(300, 2)
    mask, same = (Padding(n, "left") for n in (torch.tensor([100], dtype=torch.int8), 100))
    torch.testing.assert_close(attention(x, x, x, mask=mask), attention(x, x, x, mask=same))


@pytest.mark.parametrize("name", ["padding", "prefix", "query_start"])
def test_numbers_under_vmap_are_not_read(name: str) -> None:
    def run(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        mask = {"padding": Padding, "prefix": Prefix}.get(name, lambda _: Causal())(numbers)
        start = numbers if name == "query_start" else None
        return attention(x, x, x, mask=mask, query_start=start, backend="reference")

    x, numbers = torch.randn(3, 1, 4, 2), torch.tensor([[1], [2], [4]])
    output = torch.func.vmap(run)(x, numbers)
    torch.testing.assert_close(output[:, 0], run(x[:, 0], numbers[:, 0]))


def test_masks_that_mean_nothing() -> None:
    causal: Any = Causal()
    for make, words in (
        (lambda: Window(-1), r"left.*-1"),
        (lambda: Window(1, 1.5), r"right.*1\.5"),  # type: ignore[arg-type]
        (lambda: Padding([-1]), r"lengths.*from 0 on.*-1"),
        (lambda: Padding([torch.tensor(1.5)]), r"lengths.*from 0 on.*1\.5"),
        (lambda: Padding(torch.ones(2)), r"whole number.*float32"),
        (lambda: Padding(torch.ones(2, 3).bool()), r"torch\.bool.*masks\.Dense"),
        (lambda: Padding(2, "middle"), r'"left" or "right".*middle'),
        (lambda: Segments([-1, 2]), r"from 0 on.*-1"),
        (lambda: Segments([1, 2], [3]), r"different numbers of sequences"),
        (lambda: Segments.from_ids(torch.zeros(1, 1, 1)), r"\[length\].*\[1, 1, 1\]"),
        (lambda: causal & torch.ones(2, 2).bool(), r"'&' combines two masks.*masks\.Dense"),
        (lambda: causal | None, r"'\|' combines two masks.*NoneType"),
        (lambda: masks.Dense(numpy.ones((2, 2))), r"torch\.Tensor.*ndarray.*as_tensor"),  # type: ignore[arg-type]
        (lambda: Segments.from_ids([1, 1]), r"torch\.Tensor.*list.*as_tensor"),  # type: ignore[arg-type]
        (lambda: masks.Dense(torch.ones(2, 2)), r"boolean.*float32.*mask\.bool\(\)"),
    ):
        with pytest.raises(InputError, match=words):
            make()


def test_bias_arguments() -> None:
    refused("bias", r"Alibi\(slopes\)", "got 1.0", bias=1.0)
    refused("numbers to add", "bool", "mask=tensor", bias=torch.ones(5, 5).bool())
    refused("bias", r"\[6, 5\]", "does not broadcast", bias=torch.zeros(6, 5))
    refused("one slope per head", r"\[4\]", r"\[3\]", "standard", bias=Alibi(torch.ones(3)))
    refused("table for 3 heads", "4", bias=RelativeBuckets(torch.ones(32, 3)))
    content = RelativeContent(torch.ones(1, 4, 5, 3), torch.ones(1, 2, 3))
    refused("query", r"\[2, 4, 5, 3\]", r"\[1, 4, 5, 3\]", bias=content)
    content = RelativeContent(X, torch.ones(3, 2, 3))
    refused("relative", "4 or 1, distances, 3", r"\[3, 2, 3\]", bias=content)
    refused("relative", bias=RelativeContent(X, torch.ones(1, 0, 3)))


@pytest.mark.parametrize(
    "make",
    [
        biases.Dense,
        Alibi,
        RelativeBuckets,
        lambda given: RelativeContent(given, X),
        lambda given: RelativeContent(X, given),
    ],
)
@pytest.mark.parametrize("given", [numpy.ones(2), [1.0]], ids=["numpy", "list"])
def test_biases_hold_tensors(make: Any, given: Any) -> None:
    with pytest.raises(InputError, match=rf"torch\.Tensor.*{type(given).__name__}.*as_tensor"):
        make(given)


def test_biases_that_mean_nothing() -> None:
    with pytest.raises(InputError, match=r"at least one head.*0"):
        Alibi.standard(0)
    with pytest.raises(InputError, match=r"even number.*\[5, 2\]"):
        RelativeBuckets(torch.ones(5, 2))
    with pytest.raises(InputError, match=r"at least 2 buckets.*\[1, 2\]"):
        RelativeBuckets(torch.ones(1, 2), bidirectional=False)
    with pytest.raises(InputError, match=r"max_distance=8.*8 distances"):
        RelativeBuckets(torch.ones(32, 2), max_distance=8)
    with pytest.raises(InputError, match="buckets, heads"):
        RelativeBuckets(torch.ones(()))
    with pytest.raises(InputError, match="numbers to add"):
        biases.Dense(torch.ones(2, 2, dtype=torch.long))


def test_seeing_arguments() -> None:
    refused(r"See\(entropy=True\)", "got 'entropy'", see="entropy")
    refused(r"See\(entropy=True\)", "got True", see=True)


def test_backends() -> None:
    refused("no backend 'flash'", "'auto'", "'tiled'", backend="flash")
    with pytest.raises(BackendError, match=r"'sdpa' cannot run.*do not show their weights"):
        attention(X, X, X, see=See(entropy=True), backend="sdpa")
    with pytest.raises(BackendError, match=r"'sdpa' cannot run.*softcap"):
        attention(X, X, X, softcap=1.0, backend="sdpa")
    long, slopes = torch.zeros(1, 1, sdpa.MAX_BIAS_KEYS + 1, 4), torch.ones(1, requires_grad=True)
    with pytest.raises(BackendError, match=r"'sdpa' cannot run.*gradient of a bias"):
        attention(long, long, long, bias=Alibi(slopes), backend="sdpa")


def test_why_lists_every_backend_with_its_answer() -> None:
    answer = why(X, X, X, see=See(entropy=True))
    assert answer.chosen == "tiled"
    assert answer.answers["sdpa"] == "PyTorch's fused kernels do not show their weights."
    lines = repr(answer).splitlines()
    assert len(lines) == len(answer.answers)
    (chosen,) = (line for line in lines if line.startswith("->"))
    assert "tiled" in chosen
    assert "can run it" in chosen
    assert why(X, X, X).chosen == "sdpa"


def test_shapes_are_told_as_they_were_given():
    query, key = torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)
    with pytest.raises(InputError, match=r"query \[2, 3, 4\], key \[2, 3, 5\] and value"):
        attention(query, key, key)
