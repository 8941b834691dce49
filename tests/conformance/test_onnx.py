"""The test cases of the operator Attention of ONNX, operator sets 23 to 25.

The package brings inputs and expected outputs. Each case is also there as a graph of simpler
operators, ``*_expanded``, with the same numbers, which this file leaves out.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
from onnx.helper import get_node_attr_value
from torch import Tensor
from torch.nn.functional import pad

from regard import Causal, Padding, See, Window, attention
from regard.mechanism import masks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # cases of other operators overflow on purpose
    from onnx.backend.test.case import node
    from onnx.backend.test.case.node import attention as _  # noqa: F401 - fills the list of cases

CASES = {
    case.name.removeprefix("test_attention_"): case
    for case in node._NodeTestCases
    if case.model.graph.node[0].op_type == "Attention"
}
assert len(CASES) == 93  # of version 1.23; all can be expressed


def run_node(inputs: dict[str, Tensor], options: dict[str, Any], backend: str) -> dict[str, Tensor]:
    """The outputs of a node Attention with these inputs and attributes."""

    def split(name: str, heads: str) -> Tensor:
        x = inputs[name]
        return x if x.dim() == 4 else x.unflatten(-1, (options[heads], -1)).transpose(1, 2)

    def side(name: str) -> int | None:
        size = options.get(name, -1)
        return None if size < 0 else size

    query = split("Q", "q_num_heads")
    key, value = (split(name, "kv_num_heads") for name in "KV")
    queries, start = query.shape[2], 0
    mask, bias = Window(side("left_window_size"), side("right_window_size")), None
    if "past_key" in inputs:
        start = inputs["past_key"].shape[2]
        key = torch.cat([inputs["past_key"], key], 2)
        value = torch.cat([inputs["past_value"], value], 2)
    if "nonpad_kv_seqlen" in inputs:
        start = inputs["nonpad_kv_seqlen"] - queries
        mask = mask & Padding(inputs["nonpad_kv_seqlen"])
    if options.get("is_causal"):
        mask = mask & Causal()
    if "attn_mask" in inputs:
        given = inputs["attn_mask"]
        missing = (0, key.shape[2] - given.shape[-1])  # those keys are hidden
        if given.dtype == torch.bool:
            mask = mask & masks.Dense(pad(given, missing, value=False))
        else:
            bias = pad(given, missing, value=-torch.inf)

    mode = options.get("qk_matmul_output_mode", 0)
    scored = {"scale": options.get("scale"), "backend": backend}
    capped = scored | {"softcap": options.get("softcap") or None}
    whole = capped | {"mask": mask, "bias": bias, "query_start": start}
    see = See(weights=True) if mode == 3 else See(scores=range(queries))
    output, _ = attention(query, key, value, **whole, see=See(lse=True))
    _, seen = attention(query, key, value, **(scored, capped, whole, whole)[mode], see=see)
    if inputs["Q"].dim() == 3:
        output = output.transpose(1, 2).flatten(2)
    products = seen.weights if mode == 3 else seen.scores
    return {"Y": output, "present_key": key, "present_value": value, "qk_matmul_output": products}


def tensor(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":  # of ml_dtypes
        return torch.tensor(array.astype(numpy.float32)).bfloat16()
    return torch.tensor(array)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    operator = CASES[name].model.graph.node[0]
    options = {
        field.name: get_node_attr_value(operator, field.name) for field in operator.attribute
    }
    arrays, expected = CASES[name].data_sets[0]
    inputs = dict(zip(filter(None, operator.input), map(tensor, arrays), strict=True))
    for backend in ("auto", "tiled", "reference"):
        outputs = run_node(inputs, options, backend)
        for output, array in zip(filter(None, operator.output), expected, strict=True):
            other = tensor(array)
            torch.testing.assert_close(
                outputs[output].to(other.dtype),
                other,
                msg=lambda m, at=(output, backend): f"{at}: {m}",
            )
