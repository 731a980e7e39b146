"""Tables of codes that a model gathers from, as `lowbit export` writes them: one node, or a reason."""

from __future__ import annotations

import lowbit
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support import lowbit_session, require_native, stock_run

SHAPE = (2, 4, 5, 3)
OFFSETS = 256 * np.arange(4, dtype=np.int32).reshape(4, 1, 1)


def model(
    entries: np.ndarray, *summands: np.ndarray, shape=SHAPE, also_read: bool = False, to=TensorProto.INT32
):
    """``entries[codes + summands]``, then a real number on a grid."""
    constants = {"entries": entries, "s": np.float32(0.1), "z": np.uint8(9)}
    constants |= {f"c{i}": array for i, array in enumerate(summands)}
    nodes, index = [helper.make_node("Cast", ["x"], ["cast"], "cast", to=to)], "cast"
    for i in range(len(summands)):
        nodes.append(helper.make_node("Add", [index, f"c{i}"], [f"sum{i}"], f"add{i}"))
        index = f"sum{i}"
    nodes += [helper.make_node("Gather", ["entries", index], ["codes"], "gather", axis=0),
              helper.make_node("DequantizeLinear", ["codes", "s", "z"], ["y"], "real")]  # fmt: skip
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    if also_read:
        outputs.append(helper.make_tensor_value_info("cast", to, None))
    graph = helper.make_graph(
        nodes, "tables", [helper.make_tensor_value_info("x", TensorProto.UINT8, shape)], outputs,
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def entries(tables: int) -> np.ndarray:
    return np.random.default_rng(tables).integers(0, 256, 256 * tables).astype(np.uint8)


def converted(source, shape=SHAPE, most: int = 256):
    """The conversion, whose outputs are those of stock ONNX Runtime."""
    require_native()
    result = lowbit.convert(source, all_regions=True)
    feeds = {"x": np.random.default_rng(1).integers(0, most, shape).astype(np.uint8)}
    for ours, meant in zip(
        lowbit_session(result.model).run(None, feeds), stock_run(source, feeds), strict=True
    ):
        np.testing.assert_array_equal(ours, meant)
    return result, [node.op_type for node in result.model.graph.node]


@pytest.mark.parametrize("to", [TensorProto.INT32, TensorProto.INT64])
def test_one_table(to: int) -> None:
    _, ops = converted(model(entries(1), to=to))
    assert ops.count("LowBitLookup") == 1
    assert "Gather" not in ops


@pytest.mark.parametrize("also_read", [False, True])
def test_a_table_for_each_channel(also_read: bool) -> None:
    halves = OFFSETS // 2
    _, ops = converted(model(entries(4), halves, halves, also_read=also_read))
    assert ops.count("LowBitLookup") == 1
    assert ("Cast" in ops) == also_read


@pytest.mark.parametrize("case", ["pixels", "channel", "short"])
def test_what_is_no_table_of_codes_stays(case: str) -> None:
    """Tables for more than channels, more tables than channels, and one that some codes would leave."""
    pixels = 256 * np.arange(20, dtype=np.int32).reshape(4, 5, 1)
    one_channel = (2, 1, 5, 3)
    source, shape = {
        "pixels": (model(entries(20), pixels), SHAPE),
        "channel": (model(entries(4), OFFSETS, shape=one_channel), one_channel),
        "short": (model(entries(1)[:200]), SHAPE),
    }[case]
    _, ops = converted(source, shape, most=200)
    assert "Gather" in ops
    assert "LowBitLookup" not in ops


def test_tables_of_numbers_or_of_rows_stay() -> None:
    for array in (entries(1).reshape(256, 1), entries(1).astype(np.int32)):
        source = model(array)
        if array.dtype == np.int32:
            source.graph.node[-1].input[2] = ""
            source.graph.node[-1].input.pop()
        _, ops = converted(source)
        assert "Gather" in ops
