"""Every error says what is wrong, what was given, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import (
    Alibi,
    BackendError,
    Causal,
    Dilated,
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
def test_layouts(backend: str) -> None:
    flat = X[0, 0]
    for sparse in (flat.to_sparse(), flat.to_sparse_csr(), flat.to_mkldnn()):
        rest: dict[str, Any] = {"key": flat, "backend": backend}
        refused("query must be a dense", r"\.to_dense\(\)", query=sparse, value=flat, **rest)
        refused("value must be a dense", r"\.to_dense\(\)", query=flat, value=sparse, **rest)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([X[0], X[1]], layout=layout)
        refused(
            "nested tensor", "to_padded_tensor", r"Padding\(lengths\)", backend=backend,
            query=nested, key=nested, value=nested,
        )  # fmt: skip
    ones, two = torch.ones(5, 5), torch.tensor([1, 2])
    makers: list[Callable[[], dict[str, Any]]] = [
        lambda: {"mask": ones.bool().to_sparse()},
        lambda: {"bias": ones.to_sparse()},
        lambda: {"bias": Alibi(ones[0, :4].to_sparse())},
        lambda: {"sinks": ones[0, :4].to_sparse()},
        lambda: {"query_start": two.to_sparse()},
        lambda: {"mask": Padding(two.to_sparse())},
        lambda: {"mask": Segments([[3, 2]], query_starts=two[None].to_sparse())},
    ]
    for make in makers:
        with pytest.raises(InputError, match=r"has the layout torch\.sparse_coo"):
            attention(X, X, X, backend=backend, **make())


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
def test_tensors_without_values(backend: str) -> None:
    ones, two = torch.ones(5, 5, device="meta"), torch.tensor([1, 2], device="meta")
    every: list[dict[str, Any]] = [
        {"mask": ones.bool()},
        {"bias": ones},
        {"bias": Alibi(ones[0, :4])},
        {"bias": RelativeBuckets(torch.ones(32, 4, device="meta"))},
        {"sinks": ones[0, :4]},
        {"query_start": two},
        {"mask": Padding(two)},
        {"mask": Prefix(two)},
    ]
    for given in every:
        refused("on meta", "the query is on cpu", backend=backend, **given)


@pytest.mark.parametrize("see", [None, See(entropy=True, top=2, rows=[1], pairs=[(1, 0)], map=2)])
@pytest.mark.parametrize(
    "mask",
    [None, Causal(), Padding([5, 2]), Padding(torch.tensor([5, 2])), Dilated(2) & Window(3)],
)
@pytest.mark.parametrize("where", ["meta", "fake"])
def test_sizes_of_a_call_without_values(where: str, mask: Any, see: See | None) -> None:
    if where == "fake":
        see = None if see is None else replace(see, pairs=None)
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    else:
        mode = torch.device("meta")
    with mode:
        x = torch.empty(2, 4, 5, 3)
        result = attention(x, x, x, mask=mask, see=see, query_start=[1, 2])
        assert "without values" in str(why(x, x, x, mask=mask).answers["tiled"])
    output = result if isinstance(result, Tensor) else result[0]
    assert output.shape == x.shape
    assert not isinstance(result, tuple) or result[1].entropy.shape == (2, 4, 5)
    # What a mode computed is not used outside of it.
    x = torch.randn_like(X)
    real = attention(x, x, x, mask=mask, query_start=[1, 2], backend="tiled")
    expected = attention(x, x, x, mask=mask, query_start=[1, 2], backend="reference")
    torch.testing.assert_close(real, expected)


def test_pairs_under_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 4, 5, 3)
        for see in (See(pairs=[(1, 0)]), See(scores=[(1, 0)])):
            refused("FakeTensorMode", "Leave them out", query=x, key=x, value=x, see=see)


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**70])
@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
def test_numbers_beyond_those_of_tensors(number: int, backend: str) -> None:
    x = torch.randn_like(X)

    def run(mask: Any) -> Tensor:
        return attention(x, x, x, mask=mask, backend=backend)

    for mask, meant in (
        (Window(number), Window(None)),
        (Window(1, number), Window(1, None)),
        (Window(number, number) & Causal(), Causal()),
        (~Window(number), ~Window(None)),
        (Dilated(number), Window(0)),
        (Dilated(number) & Causal(), Window(0)),
        (Dilated(2) & Window(number), Dilated(2) & Window(None)),
        (Segments([3, 2], within=Window(number)), Segments([3, 2], within=Causal())),
    ):
        torch.testing.assert_close(run(mask), run(meant), rtol=0, atol=0)
    refused(str(number), "only 5 keys", mask=Padding([number, 1]), backend=backend)
    refused(str(number), "only 5 keys", mask=Prefix(number), backend=backend)
    refused("add up to 5", mask=Segments([number]), backend=backend)
    refused("query_start", "at most", query_start=-number, backend=backend)
    refused("query_start", "at most", query_start=[0, number], backend=backend)
    for starts in (number, [0, -number]):
        with pytest.raises(InputError, match=r"query_starts=.* at most 1,073,741,824 from 0"):
            Segments([3, 2], query_starts=starts)
    with pytest.raises(InputError, match=r"max_distance=.* at most"):
        RelativeBuckets(torch.ones(32, 4), max_distance=number)
    with pytest.raises(InputError, match=r"first=.* at most"):
        RelativeContent(X, X, first=number)
    refused("top", "would keep", see=See(top=number), backend=backend)
    refused("rows", "names query", see=See(rows=[number]), backend=backend)
    with pytest.raises(InputError, match=r"See\(pairs=...\)"):
        attention(X, X, X, see=See(pairs=[(number, 0)]), backend=backend)


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
    for given in (1e39, 10**400, float("inf")):
        refused("scale", "finite", scale=given)
        refused("softcap", "finite", softcap=given)
        refused("dropout", "probability", dropout=given)
        with pytest.raises(InputError, match=r"RelativeContent\(scale=...\) must be a finite"):
            RelativeContent(X, X, scale=given)
    x = torch.randn_like(X)
    for scale in (2**70, -(2**70)):
        large = attention(x, x, x, scale=scale, backend="reference")
        expected = attention(x, x, x, scale=float(scale), backend="reference")
        torch.testing.assert_close(large, expected)
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


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_dropout_under_vmap(backend: str) -> None:
    x = torch.randn(3, *X.shape)

    def run(scale: Tensor, query: Tensor) -> Tensor:
        shared = x[0]
        return scale * attention(query, shared, shared, dropout=0.5, backend=backend)

    ones = torch.ones(3)
    for each in (0, None):  # a query of each call, or one for all calls
        queries = x if each == 0 else x[0]
        with pytest.raises(InputError, match=r"randomness='error'[\s\S]*Pass randomness="):
            torch.func.vmap(run, (0, each))(ones, queries)
        same = torch.func.vmap(run, (0, each), randomness="same")(ones, queries)
        assert same.shape == x.shape
        if backend == "sdpa":
            with pytest.raises(BackendError, match="dropout under vmap"):
                torch.func.vmap(run, (0, each), randomness="different")(ones, queries)
            continue
        different = torch.func.vmap(run, (0, each), randomness="different")(ones, queries)
        assert not torch.equal(different[0], different[1])
