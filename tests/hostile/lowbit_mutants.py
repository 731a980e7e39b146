"""Mutated lowbit models on a device beside others: equal in every element, or refused by all.

A kind of tests.hostile.campaign: `Fuzzer(device).case(seed)` tries one mutant, sound graphs of
tests.hostile.lowbit_graphs with one to three things changed, fed what fits or wild codes.
"""

from __future__ import annotations

import ctypes
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from tests.hostile.lowbit_graphs import Feeds, definition, draw

Ended = list[np.ndarray] | str
Mutation = Callable[[onnx.ModelProto, random.Random], str]

BASES = 256  # sound graphs that one block of seeds is made of
BLOCK = 50_000
LARGEST = 1 << 22
"""Elements of an output; the definitions, in numpy, would take long for more."""

_SMALL = [0, -1, 1, 2, 3, 4, 5, 7, 8, 9]
_LARGE = [16, 255, 256, 2**15, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, -(2**63)]
_FLOATS = [0.0, -1.0, float("nan"), float("inf"), 1e-45, 3e38, 1.0, 0.5, 2.0**-30]
_TEXTS = ["unsigned", "signed", "bipolar", "requantize", "float", "thresholds", "tail", "DCR", "CRD",
          "half_pixel", "asymmetric", "align_corners", "floor", "ceil", "bias", "affine,bias",
          "residual", "relu,clip", "", "signed,unsigned", "signed,signed"]  # fmt: skip
_OPS = ["LowBitConv", "APConv", "LowBitConvTranspose", "LowBitGemm", "APGemm", "LowBitAffine", "LowBitLookup",
        "LowBitAdd", "LowBitMul", "LowBitMaxPool", "LowBitAveragePool", "LowBitGlobalAveragePool",
        "LowBitConcat", "LowBitResize", "LowBitDepthToSpace", "LowBitRequantize", "LowBitQuantize",
        "LowBitThreshold", "LowBitDequantize", "LowBitMatMul", "LowBitImage"]  # fmt: skip


def _number(rng: random.Random, near: int | None = None) -> int:
    if near is not None and rng.random() < 0.4:
        return min(max(near + rng.choice([-1, 1]), -(2**63)), 2**63 - 1)
    return rng.choice(_SMALL if rng.random() < 0.8 else _LARGE)


def _attributes(model: onnx.ModelProto, *kinds: int) -> list[tuple[onnx.NodeProto, onnx.AttributeProto]]:
    return [(n, a) for n in model.graph.node for a in n.attribute if a.type in kinds]


def change_integer(model: onnx.ModelProto, rng: random.Random) -> str:
    found = _attributes(model, onnx.AttributeProto.INT, onnx.AttributeProto.INTS)
    if not found:
        return "nothing"
    node, attribute = rng.choice(found)
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = _number(rng, attribute.i)
    elif attribute.ints and rng.random() < 0.8:
        place = rng.randrange(len(attribute.ints))
        attribute.ints[place] = _number(rng, attribute.ints[place])
    else:
        attribute.ints.append(_number(rng))
    return f"{node.op_type}.{attribute.name} changed"


def change_bits(model: onnx.ModelProto, rng: random.Random) -> str:
    """The bits that a node states for the codes that it reads or makes."""
    found = [(n, a) for n, a in _attributes(model, onnx.AttributeProto.INT) if a.name in ("x_bits", "y_bits")]
    if not found:
        return "nothing"
    node, attribute = rng.choice(found)
    attribute.i = rng.randint(1, 8)
    return f"{node.op_type}.{attribute.name} = {attribute.i}"


def change_text(model: onnx.ModelProto, rng: random.Random) -> str:
    found = _attributes(model, onnx.AttributeProto.STRING)
    if not found:
        return "nothing"
    node, attribute = rng.choice(found)
    attribute.s = rng.choice(_TEXTS).encode()
    return f"{node.op_type}.{attribute.name} = {attribute.s!r}"


def change_float(model: onnx.ModelProto, rng: random.Random) -> str:
    found = _attributes(model, onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS)
    if not found:
        return "nothing"
    node, attribute = rng.choice(found)
    if attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice(_FLOATS)
    else:
        attribute.floats[rng.randrange(len(attribute.floats))] = rng.choice([*_FLOATS, 3.0, 0.3])
    return f"{node.op_type}.{attribute.name} changed"


def drop_attribute(model: onnx.ModelProto, rng: random.Random) -> str:
    nodes = [n for n in model.graph.node if n.attribute]
    if not nodes:
        return "nothing"
    node = rng.choice(nodes)
    del node.attribute[rng.randrange(len(node.attribute))]
    return f"an attribute of {node.op_type} dropped"


def add_attribute(model: onnx.ModelProto, rng: random.Random) -> str:
    node = rng.choice(model.graph.node)
    name, value = rng.choice(
        [("y_min", [_number(rng)]), ("y_max", [_number(rng)]), ("needs_version", rng.choice([1, 2])),
         ("x_bits", rng.randint(0, 9)), ("unheard_of", 1), ("group", _number(rng)), ("axis", _number(rng)),
         ("dilations", [2, 2]), ("ceil_mode", 1), ("keepdims", 0), ("x_encoding", rng.choice(_TEXTS)),
         ("y_encoding", rng.choice(_TEXTS)), ("sizes", [3, 4]), ("output_padding", [1, 0])]
    )  # fmt: skip
    if all(a.name != name for a in node.attribute):
        node.attribute.append(helper.make_attribute(name, value))
    return f"{node.op_type}.{name} = {value}"


def _constants(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Those that still hold what their dims and type say."""
    sizes = {
        TensorProto.FLOAT: 4,
        TensorProto.INT32: 4,
        TensorProto.INT64: 8,
        TensorProto.UINT8: 1,
        TensorProto.INT8: 1,
    }
    return [
        t
        for t in model.graph.initializer
        if t.raw_data and math.prod(t.dims) * sizes.get(t.data_type, -1) == len(t.raw_data)
    ]


def change_element(model: onnx.ModelProto, rng: random.Random) -> str:
    constants = _constants(model)
    if not constants:
        return "nothing"
    tensor = rng.choice(constants)
    array = numpy_helper.to_array(tensor).copy().reshape(-1)
    place = rng.randrange(array.size)
    if array.dtype == np.float32:
        array[place] = rng.choice(_FLOATS)
    else:
        info = np.iinfo(array.dtype)
        array[place] = min(max(_number(rng, int(array[place])), int(info.min)), int(info.max))
    tensor.raw_data = array.tobytes()
    return f"{tensor.name}[{place}] = {array[place]}"


def resize_constant(model: onnx.ModelProto, rng: random.Random) -> str:
    """Another number of elements, or other dims for the same."""
    constants = _constants(model)
    if not constants:
        return "nothing"
    tensor = rng.choice(constants)
    array = numpy_helper.to_array(tensor)
    flat = array.reshape(-1)
    kind = rng.randrange(5)
    if kind == 0:
        changed = np.resize(flat, (rng.choice([0, 1, 2, flat.size + 1, max(flat.size - 1, 0)]),))
    elif kind == 1:
        changed = flat.reshape(1, -1)
    elif kind == 2:
        changed = flat.reshape(-1, 1)
    elif kind == 3:
        changed = flat[:1].reshape(())
    else:
        changed = np.resize(flat, (2, flat.size))
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed), tensor.name))
    return f"{tensor.name}: dims {list(changed.shape)}"


def break_constant(model: onnx.ModelProto, rng: random.Random) -> str:
    constants = _constants(model)
    if not constants:
        return "nothing"
    tensor = rng.choice(constants)
    kind = rng.randrange(3)
    if kind == 0:
        tensor.data_type = rng.choice([1, 2, 3, 5, 6, 7, 10, 11, 16])
    elif kind == 1 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = _number(rng)
    else:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    return f"{tensor.name}: broken"


def drop_input(model: onnx.ModelProto, rng: random.Random) -> str:
    nodes = [n for n in model.graph.node if n.input]
    if not nodes:
        return "nothing"
    node = rng.choice(nodes)
    index = rng.randrange(len(node.input))
    if rng.random() < 0.6:
        node.input[index] = ""
    else:
        del node.input[index]
    return f"input {index} of {node.op_type} dropped"


def rewire(model: onnx.ModelProto, rng: random.Random) -> str:
    """An input reads another tensor of the graph, made before or behind it."""
    graph = model.graph
    nodes = [n for n in graph.node if n.input]
    if not nodes:
        return "nothing"
    node = rng.choice(nodes)
    tensors = [v.name for v in graph.input] + [name for n in graph.node for name in n.output]
    if rng.random() < 0.15:
        tensors = [t.name for t in graph.initializer] or tensors
    index = rng.randrange(len(node.input)) if rng.random() < 0.3 else 0
    node.input[index] = rng.choice(tensors)
    return f"input {index} of {node.op_type} reads {node.input[index]}"


def swap_inputs(model: onnx.ModelProto, rng: random.Random) -> str:
    nodes = [n for n in model.graph.node if n.input]
    if not nodes:
        return "nothing"
    first, second = rng.choice(nodes), rng.choice(nodes)
    i, j = rng.randrange(len(first.input)), rng.randrange(len(second.input))
    first.input[i], second.input[j] = second.input[j], first.input[i]
    return f"inputs of {first.op_type} and {second.op_type} swapped"


def change_op(model: onnx.ModelProto, rng: random.Random) -> str:
    node = rng.choice(model.graph.node)
    before, node.domain, node.op_type = node.op_type, "ai.lowbit", rng.choice(_OPS)
    return f"{before} became {node.op_type}"


def copy_node(model: onnx.ModelProto, rng: random.Random) -> str:
    """Once more at the end, and nobody reads it; changed, it may not even run."""
    copied = onnx.NodeProto()
    copied.CopyFrom(rng.choice(model.graph.node))
    copied.name += "_copy"
    del copied.output[:]
    copied.output.append(f"copied_{len(model.graph.node)}")
    model.graph.node.append(copied)
    told = ""
    if rng.random() < 0.8:
        alone = onnx.ModelProto()
        alone.graph.node.append(copied)
        told = rng.choice([change_integer, change_bits, change_text, drop_attribute])(alone, rng)
        copied = alone.graph.node[0]
        if rng.random() < 0.4 and copied.input:
            copied.input[0] = rng.choice([v.name for v in model.graph.input])
        model.graph.node[-1].CopyFrom(copied)
    return f"a copy of {copied.op_type}: {told}"


def insert_standard(model: onnx.ModelProto, rng: random.Random) -> str:
    """A standard node on the way into another one, right or wrong for what passes there."""
    graph = model.graph
    places = [(i, n) for i, n in enumerate(graph.node) if n.input and n.input[0]]
    if not places:
        return "nothing"
    index, reader = rng.choice(places)
    x, y = reader.input[0], f"inserted_{len(graph.node)}"
    made = None
    constants: list[onnx.TensorProto] = []

    def const(value: Any) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value), f"{y}_{len(constants)}"))
        return constants[-1].name

    kind = rng.randrange(8)
    if kind == 0:
        shape = rng.choice([[0, -1], [[0, -1]], [-1, 3], [0, 0, 0, 0], [1, -1, 1, 2], [0, 0, -1], []])
        made = helper.make_node("Reshape", [x, const(np.array(shape, np.int64))], [y])
    elif kind == 1:
        made = helper.make_node("Transpose", [x], [y], perm=rng.choice([[0, 2, 3, 1], [0, 3, 1, 2], [1, 0]]))
    elif kind == 2:
        pool = rng.choice(["MaxPool", "AveragePool"])
        made = helper.make_node(pool, [x], [y], kernel_shape=rng.choice([[2, 2], [3, 3], [9, 9], [2]]),
                                pads=rng.choice([[0] * 4, [1] * 4, [2] * 4]))  # fmt: skip
    elif kind == 3:
        shape = rng.choice([[], [1], [3], [2, 1], [1, 1, 1, 2], [4]])
        made = helper.make_node(rng.choice(["Add", "Mul"]), [x, const(np.ones(shape, np.float32))], [y])
    elif kind == 4:
        made = helper.make_node("Relu", [x], [y])
    elif kind == 5:
        pads = np.array(rng.choice([[0] * 4 + [1] * 4, [1] * 8, [0] * 6]), np.int64)
        made = helper.make_node("Pad", [x, const(pads)], [y])
    elif kind == 6:
        made = helper.make_node(
            rng.choice(["Squeeze", "Unsqueeze"]), [x, const(np.array([1], np.int64))], [y]
        )
    else:
        made = helper.make_node("Identity", [x], [y])
    reader.input[0] = y
    nodes = list(graph.node)
    nodes.insert(index, made)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(constants)
    return f"{made.op_type} before {reader.op_type}"


def change_interface(model: onnx.ModelProto, rng: random.Random) -> str:
    graph = model.graph
    kind = rng.randrange(4)
    if kind == 0:
        tensors = [name for n in graph.node for name in n.output if name]
        name = rng.choice(tensors)
        if all(value.name != name for value in graph.output):
            elements = rng.choice([TensorProto.UINT8, TensorProto.INT8, TensorProto.FLOAT])
            graph.output.append(helper.make_tensor_value_info(name, elements, None))
        return f"output {name}"
    value = rng.choice(graph.input if kind < 3 else graph.output)
    tensor = value.type.tensor_type
    if kind == 1 and tensor.shape.dim:
        tensor.shape.dim[rng.randrange(len(tensor.shape.dim))].dim_value = _number(rng)
    elif kind == 2:
        tensor.ClearField("shape")
    else:
        tensor.elem_type = rng.choice([TensorProto.UINT8, TensorProto.INT8, TensorProto.FLOAT, 7])
    return f"{value.name}: another type"


MUTATIONS: list[Mutation] = [
    change_integer, change_integer, change_bits, change_bits, change_text, change_float, drop_attribute,
    add_attribute, change_element, resize_constant, break_constant, drop_input, rewire, rewire, swap_inputs,
    change_op, copy_node, copy_node, insert_standard, insert_standard, change_interface,
]  # fmt: skip


def flip_bytes(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def change_feeds(feeds: Feeds, rng: random.Random) -> tuple[str, Feeds]:
    """Codes of any byte, or another size."""
    name = rng.choice(list(feeds))
    array, arrays = feeds[name], np.random.default_rng(rng.getrandbits(32))
    if rng.random() < 0.7 and array.dtype != np.float32:
        wild = arrays.integers(0, 256, array.shape).astype(np.uint8).view(array.dtype)
        return f"{name}: wild codes", {**feeds, name: wild}
    shape = list(array.shape)
    place = rng.randrange(len(shape))
    shape[place] = rng.choice([0, 1, shape[place] + 1, 5])
    values = arrays.integers(-9, 9, shape).astype(array.dtype)
    return f"{name}: shape {shape}", {**feeds, name: values}


@functools.lru_cache(maxsize=2 * BASES)
def _base(seed: int) -> tuple[bytes, Feeds]:
    model, feeds = draw(seed)
    return model.SerializeToString(), feeds


def mutant(seed: int) -> tuple[str, bytes, Feeds, onnx.ModelProto | None]:
    """What was done, the model, what it is fed, and the model as a proto where its bytes are of one."""
    rng = random.Random(seed)
    base = seed // BLOCK * BASES + rng.randrange(BASES)
    raw, feeds = _base(base)
    told = [f"graph {base}"]
    if rng.random() < 0.35:
        what, feeds = change_feeds(feeds, rng)
        told.append(what)
    if rng.random() < 0.04:
        return "; ".join([*told, "bytes flipped"]), flip_bytes(raw, rng), feeds, None
    model = onnx.ModelProto.FromString(raw)
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 3])):
        told.append(rng.choice(MUTATIONS)(model, rng))
    return "; ".join(told), model.SerializeToString(), feeds, model


class Sessions:
    """ONNX Runtime on a device of the provider, or with custom ops alone (device "cpu")."""

    def __init__(self, device: str, options: dict[str, str] | None = None) -> None:
        # Held: the last session of a library unloads it, and to load it again takes longer than most cases.
        self._library = ctypes.CDLL(lowbit.get_library_path())
        self._device = device
        self._options = options or {}
        self._made = {
            level: self._make(level)
            for level in (
                ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
            )
        }  # fmt: skip

    def _make(self, level: ort.GraphOptimizationLevel) -> ort.SessionOptions:
        made = ort.SessionOptions()
        made.log_severity_level = 4
        made.intra_op_num_threads = made.inter_op_num_threads = 1
        made.graph_optimization_level = level
        if self._device == "cpu":
            made.register_custom_ops_library(lowbit.get_library_path())
        else:
            made.add_provider_for_devices([provider_device(self._device)], self._options)
        return made

    def ended(self, model: bytes, feeds: Feeds, optimized: bool) -> tuple[str, Ended]:
        """Where a run of the model ended ("load", "run" or "end") and how: with its outputs, or a reason."""
        levels = ort.GraphOptimizationLevel
        level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
        try:
            session = ort.InferenceSession(model, self._made[level], enable_fallback=0)
        except Exception as error:  # every exception of ONNX Runtime has its own class
            return "load", " ".join(str(error).split())
        try:
            # A feed that the model no longer has is left out: what it is declared as is what counts.
            names = {value.name for value in session.get_inputs()}
            return "end", session.run(None, {k: v for k, v in feeds.items() if k in names})
        except Exception as error:
            return "run", " ".join(str(error).split())


@functools.cache
def _register_provider() -> None:
    ort.register_execution_provider_library("lowbit_fuzzed", lowbit.get_library_path())


def _offered() -> dict[str | None, ort.OrtEpDevice]:
    mine = [each for each in ort.get_ep_devices() if each.ep_name == "LowBitExecutionProvider"]
    return {each.ep_metadata.get("device"): each for each in mine}


def provider_device(name: str) -> ort.OrtEpDevice:
    """The provider's device: "cpu" of its metadata for "cpu-ep", else as named ("cuda:0", "fake:0").

    Whoever has registered the provider with a device offers it; a second registration would share its state.
    """
    wanted = {"cpu-ep": "cpu", "cuda": "cuda:0"}.get(name, name)
    found = _offered()
    if wanted not in found:
        _register_provider()
        found = _offered()
    if wanted not in found:
        raise SystemExit(f"no device {wanted}; the provider offers {sorted(filter(None, found))}")
    return found[wanted]


_OUT_OF_MEMORY = (
    "bad allocation",
    "bad_alloc",
    "out of memory",
    "Failed to allocate",
    "no memory",
    "memory left",
)
_BROKEN = ("illegal", "unspecified launch failure", "misaligned", "device-side")


def verdict_of(ours: tuple[str, Ended], expected: tuple[str, Ended]) -> str:
    """One of "equal", "refused ...", "out of memory"; "FAILED: ..." where two runs of a case differ."""
    (stage, got), (expected_stage, value) = ours, expected
    texts = [text for text in (got, value) if isinstance(text, str)]
    if any(mark in text for text in texts for mark in _BROKEN):
        return f"FAILED: the device broke: {texts}"
    if any(mark in text for text in texts for mark in _OUT_OF_MEMORY):
        return "out of memory"
    if isinstance(got, str) and isinstance(value, str):
        return f"refused ({expected_stage}, {stage})" if stage != expected_stage else f"refused ({stage})"
    if isinstance(got, str) or isinstance(value, str):
        return f"FAILED: {stage}: {_told(got)}; expected {expected_stage}: {_told(value)}"
    for i, (a, b) in enumerate(zip(got, value, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"FAILED: output {i} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
        if not np.array_equal(a, b, equal_nan=a.dtype == np.float32):
            return f"FAILED: {np.count_nonzero(a != b)} of {a.size} elements of output {i} differ"
    return "equal"


def _follows_order(model: onnx.ModelProto | None, feeds: Feeds) -> bool:
    """Whether a standard node gives what follows from the order that its kernel takes elements in.

    Sums of floats do: even ONNX Runtime's own have another order once it optimizes. The maximum of elements
    with a NaN among them does too: ONNX Runtime compares as many at once as the machine's registers hold, and
    which of two a comparison with a NaN keeps depends on which comes first.
    """
    standard = {n.op_type for n in model.graph.node if not n.domain} if model is not None else set()
    any_nan = any(x.dtype == np.float32 and bool(np.isnan(x).any()) for x in feeds.values())
    return "AveragePool" in standard or ("MaxPool" in standard and any_nan)


def _told(ended: Ended) -> str:
    return ended if isinstance(ended, str) else "it ran"


class Fuzzer:
    """One process's part of a campaign."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._cpu = Sessions("cpu")
        self._sessions = None if device == "cpu" else Sessions(device, options_of(device))

    def case(self, seed: int) -> tuple[str, str]:
        """What mutant `seed` is, and its verdict."""
        what, raw, feeds, model = mutant(seed)
        optimized = seed % 2 == 0
        expected = self._cpu.ended(raw, feeds, optimized)
        verdict = "refused" if isinstance(expected[1], str) else "equal"
        if self._sessions is not None:
            verdict = verdict_of(self._sessions.ended(raw, feeds, optimized), expected)
            differ = "elements of output" in verdict and self._device.startswith("cuda")
            if differ and _follows_order(model, feeds):
                verdict = "not compared: elements in another order"
        elif isinstance(expected[1], str):
            verdict = verdict_of(expected, expected)
        if model is None or verdict.startswith("FAILED") or isinstance(expected[1], str):
            return what, verdict
        if self._device.startswith("cuda") or max(a.size for a in expected[1]) > LARGEST:
            return what, verdict
        return what, self._beside_definition(model, feeds, expected, verdict)

    def _beside_definition(
        self, model: onnx.ModelProto, feeds: Feeds, expected: tuple[str, Ended], verdict: str
    ) -> str:
        try:
            defined = definition(model, feeds)
        except Exception as error:
            return f"FAILED: the definition raises {type(error).__name__}: {error}"[:400]
        if defined is None:
            return verdict
        beside = verdict_of(expected, ("end", list(defined.values())))
        return "equal, to the definition too" if beside == "equal" else f"{beside} from the definition"


def options_of(device: str) -> dict[str, str]:
    """Provider options: no time for tuning."""
    return {"tuning": "off"} if device.startswith("cuda") else {}
