"""Random nodes of every op: attributes and inputs, tie-rich half of the time.

`make(op_type, rng)` draws a node. Power-of-two scales put many results exactly on a rounding tie, where a
wrong formula shows; decimal ones do not. Sizes are small, but cross the edges that kernels have: fewer
channels than a vector, a tail behind the last full one, one pixel, all padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from lowbit.ops import pack
from lowbit.ops.image import resized_size
from lowbit.ops.softmax import softmax_table

MATMULS = ("LowBitConv", "APConv", "LowBitConvTranspose", "LowBitGemm", "APGemm")
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65)


@dataclass
class Node:
    op_type: str
    attrs: dict[str, Any]
    inputs: list[np.ndarray | None]

    def __repr__(self) -> str:
        shapes = [None if i is None else f"{i.dtype}{list(i.shape)}" for i in self.inputs]
        return f"{self.op_type} {self.attrs} on {shapes}"


def make(op_type: str, rng: np.random.Generator, **fixed: Any) -> Node:
    """A random node; `fixed` sets x_bits, w_bits, kind ("dense", "depthwise", "3x3", ...) or epilogue."""
    if op_type in MATMULS:
        return _matmul(op_type, rng, **fixed)
    return _MAKERS[op_type](rng)


def scale(rng: np.random.Generator, ties: bool, low: int = -8, high: int = 0, shape: Any = ()) -> np.ndarray:
    if ties:
        return np.asarray(2.0 ** rng.integers(low, high + 1, shape), np.float32)
    return np.asarray(2.0 ** rng.uniform(low, high, shape), np.float32)


def code_range(bits: int, encoding: str) -> tuple[int, int]:
    if encoding == "signed":
        return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return 0, 2**bits - 1


def codes(rng: np.random.Generator, shape: Any, bits: int = 8, encoding: str = "unsigned") -> np.ndarray:
    """Codes over the whole range; sometimes only its ends, which makes the largest sums."""
    low, high = code_range(bits, encoding)
    extreme = rng.random() < 0.15
    drawn = rng.choice([low, high], shape) if extreme else rng.integers(low, high + 1, shape)
    return np.asarray(drawn).astype(np.int8 if encoding == "signed" else np.uint8)


def zero_point(rng: np.random.Generator, bits: int, encoding: str, shape: Any = ()) -> np.ndarray:
    if encoding == "bipolar":
        return np.zeros(shape, np.int32)
    low, high = code_range(bits, encoding)
    if rng.random() < 0.3:
        return np.full(shape, 0 if encoding == "signed" else low, np.int32)
    return np.asarray(rng.integers(low, high + 1, shape), np.int32)


def output(rng: np.random.Generator, *, narrow: bool = True) -> tuple[dict[str, Any], np.ndarray]:
    """The attributes of an output quantizer, and its zero point."""
    bits = int(rng.integers(1, 9)) if rng.random() < 0.5 else 8
    encoding = str(rng.choice(["unsigned", "signed"]))
    attrs: dict[str, Any] = {"y_bits": bits, "y_encoding": encoding}
    low, high = code_range(bits, encoding)
    if narrow and rng.random() < 0.4:
        attrs["y_min"] = [int(rng.integers(low, high + 1))]
        attrs["y_max"] = [int(rng.integers(attrs["y_min"][0], high + 1))]
    return attrs, zero_point(rng, bits, encoding)


def _ints(rng: np.random.Generator, count: int, low: int, high: int) -> list[int]:
    return [int(v) for v in rng.integers(low, high + 1, count)]


def _matmul(
    op_type: str,
    rng: np.random.Generator,
    x_bits: int | None = None,
    w_bits: int | None = None,
    kind: str | None = None,
    epilogue: str | None = None,
    bipolar: bool | None = None,
) -> Node:
    ties = bool(rng.random() < 0.5)
    ap = op_type.startswith("AP")
    x_encoding, w_encoding = str(rng.choice(["unsigned", "signed"])), str(rng.choice(["signed", "unsigned"]))
    x_bits_given, w_bits_given = x_bits not in (None, 1), w_bits not in (None, 1)
    x_bits, w_bits = x_bits or int(rng.integers(1, 9)), w_bits or int(rng.integers(1, 9))
    if bipolar:
        if w_bits == 1:
            w_encoding = "bipolar"
        if x_bits == 1 and rng.random() < 0.5:
            x_encoding = "bipolar"
    elif bipolar is None and (ap or op_type == "LowBitConvTranspose") and rng.random() < 0.5:
        which = rng.integers(3)
        if which != 0 and not w_bits_given:
            w_encoding, w_bits = "bipolar", 1
        if which != 1 and not x_bits_given:
            x_encoding, x_bits = "bipolar", 1

    attrs: dict[str, Any] = {
        "x_bits": x_bits,
        "x_encoding": x_encoding,
        "w_bits": w_bits,
        "w_encoding": w_encoding,
    }
    gemm = op_type.endswith("Gemm")
    if gemm:
        k, out = int(rng.choice([*CHANNELS, 100, 130])), int(rng.choice(CHANNELS))
        if rng.random() < 0.3:
            shape = [int(rng.integers(1, 4)), 2, 2, k]
            attrs |= {"in_features": 4 * k, "axis": 1}
            k *= 4
        else:
            shape = [*_ints(rng, int(rng.integers(1, 3)), 1, 4), k]
            attrs["in_features"] = k
        attrs["out_features"] = out
        rows = k
    else:
        kinds = ["dense", "pointwise", "grouped", "depthwise", "stem", "one_d"]
        if op_type != "LowBitConvTranspose":
            kinds += ["volume", "planes", "columns"]
        kind = kind or str(rng.choice(kinds))
        spatial = {"one_d": 1, "volume": 3, "planes": 3, "columns": 3}.get(kind, 2)
        group = 1
        cin, out = int(rng.choice(CHANNELS)), int(rng.choice(CHANNELS))
        if kind == "grouped":
            group = int(rng.choice([2, 3, 4]))
            cin, out = group * int(rng.integers(1, 18)), group * int(rng.integers(1, 18))
        if kind == "depthwise":
            group = cin = out = int(rng.choice(CHANNELS))
        if kind == "stem":
            cin = int(rng.choice([1, 3]))
        if kind == "wide":  # several blocks of a kernel in both dims of the weights
            cin, out = int(rng.choice([130, 256, 520])), int(rng.choice([63, 129, 200]))
        largest = {"pointwise": 1, "stem": 7, "wide": 3}.get(kind, 4)
        kernel = _ints(rng, spatial, 1, largest)
        attrs |= {"in_channels": cin, "out_channels": out, "kernel_shape": kernel, "group": group}
        attrs["strides"] = _ints(rng, spatial, 1, 3)
        attrs["dilations"] = _ints(rng, spatial, 1, 2)
        if kind == "volume" and rng.random() < 0.4:
            group = int(rng.choice([2, 3, 4]))
            cin, out = group * int(rng.integers(1, 10)), group * int(rng.integers(1, 10))
            if rng.random() < 0.5:
                group = cin = out = int(rng.choice(CHANNELS))
            attrs |= {"in_channels": cin, "out_channels": out, "group": group}
        if kind == "planes":  # the window is one plane deep
            kernel[0], attrs["strides"][0] = 1, 1
        if kind == "columns":  # the window is one pixel of every plane
            kernel[1:], attrs["strides"][1:] = [1, 1], [1, 1]
        if kind == "3x3":  # of stride 1
            kernel[:], attrs["strides"], attrs["dilations"] = [3, 3], [1, 1], [1, 1]
        reach = [d * (k - 1) for d, k in zip(attrs["dilations"], kernel, strict=True)]
        if op_type == "LowBitConvTranspose":
            attrs["output_padding"] = [int(rng.integers(0, s)) for s in attrs["strides"]]
            attrs["pads"] = [int(rng.integers(0, min(r, 2) + 1)) for r in (*reach, *reach)]
            sizes = _ints(rng, spatial, 1, 6)
            full = [
                (size - 1) * s + r + 1 + o - b - e
                for size, s, r, o, b, e in zip(sizes, attrs["strides"], reach, attrs["output_padding"],
                                               attrs["pads"][:spatial], attrs["pads"][spatial:], strict=True)
            ]  # fmt: skip
            if min(full) < 1:
                attrs["pads"] = [0] * (2 * spatial)
        else:
            attrs["pads"] = _ints(rng, 2 * spatial, 0, 3)
            flat = {"planes": (0,), "columns": (1, 2)}.get(kind, ())
            for d in flat:
                attrs["pads"][d] = attrs["pads"][spatial + d] = 0
            more = _ints(rng, spatial, 0, 7 if spatial < 3 else 3)
            least = [r + 1 - attrs["pads"][d] - attrs["pads"][spatial + d] for d, r in enumerate(reach)]
            sizes = [max(1, size) + extra for size, extra in zip(least, more, strict=True)]
        shape = [int(rng.integers(1, 3)), *sizes, cin]
        rows = int(np.prod(kernel)) * (cin // group)

    per_channel = rng.random() < 0.6
    channel = (out,) if per_channel else ()
    x_scale, w_scale = scale(rng, ties, -6, -1), scale(rng, ties, -8, -2, channel)
    zero_per_channel = (out,) if rng.random() < 0.2 else ()
    w_zero = (
        zero_point(rng, w_bits, w_encoding, zero_per_channel)
        if rng.random() < 0.4
        else np.zeros((), np.int32)
    )
    inputs: dict[str, np.ndarray | None] = {
        "x": codes(rng, shape, x_bits, x_encoding),
        "w": pack(
            codes(rng, (out, rows), w_bits, "signed" if w_encoding == "signed" else "unsigned"), w_bits
        ),
        "x_scale": x_scale,
        "x_zero_point": zero_point(rng, x_bits, x_encoding),
        "w_scale": w_scale,
        "w_zero_point": w_zero,
        "bias": rng.integers(-5000, 5001, out).astype(np.int32) if rng.random() < 0.7 else None,
    }
    # A y_scale that spreads the sums over the codes: the typical sum is sqrt(rows) * 2^(bits - 1) each.
    spread = float(np.sqrt(rows)) * 2.0 ** (x_bits + w_bits - 2) * float(x_scale) * float(w_scale.mean()) / 32
    y_scale = np.float32(2.0 ** np.round(np.log2(spread))) if ties else np.float32(spread)
    _add_epilogue(rng, attrs, inputs, op_type, shape, out, np.asarray(y_scale), ties, epilogue)
    names = [
        *("x", "w", "x_scale", "x_zero_point", "w_scale", "w_zero_point", "bias", "y_scale", "y_zero_point"),
        *("thresholds", "threshold_base", "threshold_dir", "tail_bias", "tail_scale", "tail_shift"),
        *("residual", "residual_scale", "residual_zero_point", "inner_scale", "inner_zero_point"),
    ]
    return Node(op_type, attrs, [inputs.get(name) for name in names])


def _add_epilogue(
    rng: np.random.Generator,
    attrs: dict[str, Any],
    inputs: dict[str, np.ndarray | None],
    op_type: str,
    shape: list[int],
    out: int,
    y_scale: np.ndarray,
    ties: bool,
    kind: str | None,
) -> None:
    kind = kind or str(rng.choice(["requantize", "requantize", "residual", "float", "thresholds", "tail"]))
    attrs["epilogue"] = "requantize" if kind == "residual" else kind
    if kind == "float":
        return
    quantizer, y_zero = output(rng)
    if kind == "thresholds":
        bits, encoding = int(rng.choice([1, 2, 3, 4, 8])), str(rng.choice(["unsigned", "signed"]))
        low, high = code_range(bits, encoding)
        count = high - low if rng.random() < 0.7 else int(rng.integers(1, high - low + 1))
        attrs |= {"y_bits": bits, "y_encoding": encoding}
        direction = rng.choice([[-1, 1], [1, 1], [-1, -1]][rng.integers(3)], out)
        # Few different values: many thresholds are equal, and accumulators meet them.
        reach = int(rng.choice([3, 40, 3000, 100000]))
        sums = rng.integers(-reach, reach + 1, (out, count))
        # Thresholds that every accumulator reaches, and some that none does.
        sums[rng.random(sums.shape) < 0.1] = rng.choice([-(2**31), -(2**31) + 1, 2**31 - 1])
        inputs["thresholds"] = np.where(
            direction[:, None] > 0, np.sort(sums, axis=1), np.sort(sums, axis=1)[:, ::-1]
        ).astype(np.int32)
        inputs["threshold_dir"] = direction.astype(np.int32)
        inputs["threshold_base"] = rng.integers(low, high - count + 1, out).astype(np.int32)
        return
    if kind == "requantize":
        attrs |= quantizer
        inputs |= {"y_scale": y_scale, "y_zero_point": y_zero}
        return

    residual_encoding = str(rng.choice(["unsigned", "signed"]))
    residual = {
        "residual": codes(rng, _output_shape(op_type, attrs, shape, out), 8, residual_encoding),
        "residual_scale": np.asarray(y_scale * scale(rng, ties, -2, 1)),
        "residual_zero_point": zero_point(rng, 8, residual_encoding),
    }
    if kind == "residual":
        inner = str(rng.choice(["unsigned", "signed"]))
        attrs |= {**quantizer, "residual_encoding": residual_encoding, "inner_encoding": inner}
        if rng.random() < 0.4:
            low, high = code_range(8, inner)
            attrs |= {"inner_min": [int(rng.integers(low, 1))], "inner_max": [int(rng.integers(1, high + 1))]}
        inputs |= residual
        inputs |= {
            "y_scale": np.asarray(y_scale * scale(rng, ties, -1, 1)),
            "y_zero_point": y_zero,
            "inner_scale": y_scale,
            "inner_zero_point": zero_point(rng, 8, inner),
        }
        return

    steps = [s for s in ("bias", "affine", "residual", "relu", "clip") if rng.random() < 0.5]
    steps += [s for s in ("silu", "hardswish") if rng.random() < 0.25]
    rng.shuffle(steps)
    attrs["tail"] = ",".join(steps)
    if "bias" in steps:
        inputs["tail_bias"] = (rng.standard_normal(out) * float(y_scale) * 8).astype(np.float32)
    if "affine" in steps:
        inputs["tail_scale"] = rng.uniform(-1.5, 1.5, out).astype(np.float32)
        inputs["tail_shift"] = (rng.standard_normal(out) * float(y_scale) * 8).astype(np.float32)
    if "residual" in steps:
        inputs |= residual
        attrs["residual_encoding"] = residual_encoding
    if "clip" in steps:
        attrs |= {
            "clip_min": float(np.float32(-float(y_scale) * 9)),
            "clip_max": float(np.float32(float(y_scale) * 40.3)),
        }
    if rng.random() < 0.7:
        attrs |= quantizer
        inputs |= {"y_scale": y_scale, "y_zero_point": y_zero}


def _output_shape(op_type: str, attrs: dict[str, Any], shape: list[int], out: int) -> list[int]:
    if op_type.endswith("Gemm"):
        axis = attrs.get("axis", -1)
        return [*(shape[:axis] if axis >= 0 else shape[: len(shape) + axis]), out]
    spatial, sizes = len(attrs["kernel_shape"]), []
    for d in range(spatial):
        reach = attrs["dilations"][d] * (attrs["kernel_shape"][d] - 1) + 1
        pads = attrs["pads"][d] + attrs["pads"][spatial + d]
        if op_type == "LowBitConvTranspose":
            step = (shape[1 + d] - 1) * attrs["strides"][d]
            sizes.append(step + reach + attrs["output_padding"][d] - pads)
        else:
            sizes.append((shape[1 + d] + pads - reach) // attrs["strides"][d] + 1)
    return [shape[0], *sizes, out]


def _image(rng: np.random.Generator, least: int = 1, most_dims: int = 2) -> list[int]:
    batch, dims = int(rng.integers(1, 3)), int(rng.integers(1, most_dims + 1))
    return [
        batch,
        *_ints(rng, dims, least, 9 if dims < 3 else 5),
        int(rng.choice(CHANNELS)),
    ]


def _encoding(rng: np.random.Generator) -> str:
    return str(rng.choice(["unsigned", "signed"]))


def _quantized(rng: np.random.Generator, ties: bool) -> tuple[str, np.ndarray, np.ndarray]:
    encoding = _encoding(rng)
    return encoding, scale(rng, ties, -5, -2), zero_point(rng, 8, encoding)


def _maybe_float(rng: np.random.Generator, ties: bool) -> tuple[dict[str, Any], list[np.ndarray]]:
    if rng.random() < 0.25:
        return {}, []
    attrs, zero = output(rng)
    return attrs, [scale(rng, ties, -4, -1), zero]


def _affine(rng: np.random.Generator) -> Node:
    ties, shape = bool(rng.random() < 0.5), _image(rng)
    encoding, x_scale, x_zero = _quantized(rng, ties)
    attrs, quantizer = _maybe_float(rng, ties)
    c = shape[-1]
    factors = [scale(rng, ties, -1, 1, c) * rng.choice([-1, 1], c), rng.integers(-8, 9, c) * 0.25]
    factors = [np.asarray(f, np.float32) for f in factors]
    inputs = [codes(rng, shape, 8, encoding), x_scale, x_zero, *factors, *quantizer]
    return Node("LowBitAffine", {"x_encoding": encoding, **attrs}, inputs)


def _lookup(rng: np.random.Generator) -> Node:
    shape, attrs = _image(rng), {"x_encoding": _encoding(rng), "y_encoding": _encoding(rng)}
    table_shape = (256,) if rng.random() < 0.5 else (shape[-1], 256)
    table = rng.integers(0, 256, table_shape).astype(np.uint8)
    return Node("LowBitLookup", attrs, [codes(rng, shape, 8, attrs["x_encoding"]), table])


def _binary(op_type: str, rng: np.random.Generator) -> Node:
    ties, shape = bool(rng.random() < 0.5), _image(rng)
    (a_encoding, *a), (b_encoding, *b) = _quantized(rng, ties), _quantized(rng, ties)
    other = list(shape)
    if rng.random() < 0.3:
        other = [1 if rng.random() < 0.5 else s for s in shape] if rng.random() < 0.5 else [shape[-1]]
    first, second = (shape, other) if rng.random() < 0.7 else (other, shape)
    attrs, quantizer = _maybe_float(rng, ties)
    inputs = [codes(rng, first, 8, a_encoding), *a, codes(rng, second, 8, b_encoding), *b, *quantizer]
    if op_type == "LowBitAdd" and rng.random() < 0.3:
        table = rng.integers(-300, 300, 256).astype(np.float32) * b[0]
        inputs += [None] * (8 - len(inputs)) + [table if ties else table * np.float32(1.1)]
    return Node(op_type, {"a_encoding": a_encoding, "b_encoding": b_encoding, **attrs}, inputs)


def mat_mul(rng: np.random.Generator, m: int, k: int, n: int, lead: Any = (), ties: bool = True) -> Node:
    """[*lead, m, k] x [*lead, k, n], a leading dim perhaps broadcast, stored in any order of axes."""
    attrs, quantizer = _maybe_float(rng, ties)
    if quantizer:
        quantizer[0] = quantizer[0] * np.float32(2 ** (k.bit_length() // 2))
    operands: list[np.ndarray | None] = []
    for side, matrix in (("a", (m, k)), ("b", (k, n))):
        encoding, *grid = _quantized(rng, ties)
        batch = list(lead)
        if batch and rng.random() < 0.3:
            batch[int(rng.integers(len(batch)))] = 1
        if batch and rng.random() < 0.2:
            del batch[0]
        shape = (*batch, *matrix)
        attrs[f"{side}_encoding"] = encoding
        stored = codes(rng, shape, 8, encoding)
        if rng.random() < 0.6:
            order = [int(axis) for axis in rng.permutation(len(shape))]
            stored, attrs[f"{side}_perm"] = (
                np.ascontiguousarray(stored.transpose(order)),
                [order.index(axis) for axis in range(len(shape))],
            )
        operands += [stored, *grid]
    return Node("LowBitMatMul", attrs, [*operands, *quantizer])


def _random_mat_mul(rng: np.random.Generator) -> Node:
    m, k, n = (int(rng.choice([*CHANNELS, 66, 130])) for _ in range(3))
    lead = _ints(rng, int(rng.integers(0, 3)), 1, 3)
    return mat_mul(rng, m, k, n, lead, ties=bool(rng.random() < 0.5))


def normalization(rng: np.random.Generator, shape: Any, axis: int, groups: int, ties: bool = True) -> Node:
    """Normalized values lie around 0 with a deviation of 1, times gamma."""
    encoding, x_scale, x_zero = _quantized(rng, ties)
    attrs, quantizer = _maybe_float(rng, ties)
    first = axis % len(shape)
    lengths = [1, shape[-1], *([int(np.prod(shape[first:]))] if groups == 1 else [])]
    factors = [
        np.asarray(rng.integers(-8, 9, max(int(rng.choice(lengths)), 1)) * 0.25, np.float32) for _ in range(2)
    ]
    if len(factors[0]) != len(factors[1]):  # one of them may be a scalar, else they are alike
        factors[int(rng.integers(2))] = np.asarray(1.5, np.float32)
    attrs |= {"x_encoding": encoding, "axis": axis, "groups": groups}
    if rng.random() < 0.5:
        attrs["epsilon"] = float(10.0 ** rng.integers(-12, 1))
    x = codes(rng, shape, 8, encoding)
    if rng.random() < 0.1:
        x[...] = x.reshape(-1)[0] if x.size else 0  # no variance
    return Node("LowBitNormalization", attrs, [x, x_scale, x_zero, *factors, *quantizer])


def _random_normalization(rng: np.random.Generator) -> Node:
    shape = _image(rng)
    axis = int(rng.integers(-len(shape), len(shape)))
    groups = int(rng.choice([g for g in range(1, shape[-1] + 1) if shape[-1] % g == 0]))
    return normalization(rng, shape, axis, groups, ties=bool(rng.random() < 0.5))


def _window(rng: np.random.Generator, dilated: bool) -> tuple[list[int], dict[str, Any]]:
    shape = _image(rng, least=3, most_dims=3)
    spatial = len(shape) - 2
    kernel = [int(rng.integers(1, min(3, size) + 1)) for size in shape[1:-1]]
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": _ints(rng, spatial, 1, 3)}
    attrs["pads"] = [int(rng.integers(0, k)) for k in (*kernel, *kernel)]
    if dilated and all(2 * (k - 1) < s for k, s in zip(kernel, shape[1:-1], strict=True)):
        attrs["dilations"] = _ints(rng, spatial, 1, 2)
    attrs["ceil_mode"] = int(rng.integers(0, 2))
    return shape, attrs


def _max_pool(rng: np.random.Generator) -> Node:
    shape, attrs = _window(rng, dilated=True)
    attrs["x_encoding"] = _encoding(rng)
    return Node("LowBitMaxPool", attrs, [codes(rng, shape, 8, attrs["x_encoding"])])


def _average_pool(rng: np.random.Generator) -> Node:
    shape, attrs = _window(rng, dilated=False)
    ties = bool(rng.random() < 0.5)
    encoding, x_scale, x_zero = _quantized(rng, ties)
    quantizer_attrs, quantizer = _maybe_float(rng, ties)
    attrs |= {"count_include_pad": int(rng.integers(0, 2)), "x_encoding": encoding, **quantizer_attrs}
    return Node("LowBitAveragePool", attrs, [codes(rng, shape, 8, encoding), x_scale, x_zero, *quantizer])


def _global_average_pool(rng: np.random.Generator) -> Node:
    ties, shape = bool(rng.random() < 0.5), _image(rng, most_dims=3)
    encoding, x_scale, x_zero = _quantized(rng, ties)
    attrs, quantizer = _maybe_float(rng, ties)
    attrs |= {"x_encoding": encoding, "keepdims": int(rng.integers(0, 2))}
    return Node(
        "LowBitGlobalAveragePool", attrs, [codes(rng, shape, 8, encoding), x_scale, x_zero, *quantizer]
    )


def _concat(rng: np.random.Generator) -> Node:
    ties, shape, count = bool(rng.random() < 0.5), _image(rng), int(rng.integers(1, 5))
    axis = int(rng.integers(1, len(shape))) - (len(shape) if rng.random() < 0.5 else 0)
    attrs, y_zero = output(rng, narrow=False)
    y_scale = scale(rng, ties, -4, -2)
    encodings, scales, zeros, parts = [], [], [], []
    for _ in range(count):
        encoding, x_scale, x_zero = _quantized(rng, ties)
        part = list(shape)
        part[axis] = int(rng.choice(CHANNELS))
        bits = 8
        if rng.random() < 0.3:  # the output's own parameters: copied
            encoding, x_scale, x_zero = attrs["y_encoding"], y_scale, y_zero
        if (encoding, x_scale, x_zero) == (attrs["y_encoding"], y_scale, y_zero):  # by chance, too
            bits = attrs["y_bits"]
        encodings.append(encoding)
        scales.append(x_scale)
        zeros.append(x_zero)
        parts.append(codes(rng, part, bits, encoding))
    attrs |= {"axis": axis, "x_encodings": ",".join(encodings)}
    return Node("LowBitConcat", attrs, [np.stack(scales), np.stack(zeros), y_scale, y_zero, *parts])


def _resize(rng: np.random.Generator) -> Node:
    shape, ties = _image(rng), bool(rng.random() < 0.5)
    coordinates = [
        *("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"),
        "half_pixel_symmetric",
    ]
    attrs: dict[str, Any] = {
        "x_encoding": _encoding(rng),
        "coordinate_transformation_mode": str(rng.choice(coordinates)),
        "nearest_mode": str(rng.choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])),
        "mode": str(rng.choice(["nearest", "linear", "cubic"])),
    }
    if attrs["mode"] == "cubic":
        attrs |= {
            "cubic_coeff_a": float(rng.choice([-0.75, -0.5])),
            "exclude_outside": int(rng.integers(0, 2)),
        }
    spatial = len(shape) - 2
    if rng.random() < 0.5:
        attrs["scales"] = [float(rng.choice([1.0, 1.5, 2.0, 3.0])) for _ in range(spatial)]
    else:
        attrs["sizes"] = _ints(rng, spatial, 1, 17)
    x = codes(rng, shape, 8, attrs["x_encoding"])
    if attrs["mode"] == "nearest":
        return Node("LowBitResize", attrs, [x])
    range_attrs, y_zero = output(rng)
    zero = zero_point(rng, 8, attrs["x_encoding"])
    grids = [scale(rng, ties, -5, -2), zero, scale(rng, ties, -5, -2), y_zero]
    return Node("LowBitResize", attrs | range_attrs, [x, *grids])


def _softmax(rng: np.random.Generator) -> Node:
    ties, encoding = bool(rng.random() < 0.5), _encoding(rng)
    shape = _ints(rng, int(rng.integers(1, 5)), 1, 9)
    axis = int(rng.integers(-len(shape), len(shape)))
    if rng.random() < 0.2:  # beyond the rows whose entries are kept
        shape[axis] = int(rng.integers(1000, 1200))
    attrs, y_zero = output(rng)
    x_scale = scale(rng, ties, -7, 1)
    inputs = [
        codes(rng, shape, 8, encoding),
        x_scale,
        zero_point(rng, 8, encoding),
        softmax_table(float(x_scale)),
        scale(rng, ties, -11, -6),
        y_zero,
    ]
    return Node("LowBitSoftmax", attrs | {"axis": axis, "x_encoding": encoding}, inputs)


def _depth_to_space(rng: np.random.Generator) -> Node:
    block, encoding = int(rng.integers(1, 4)), _encoding(rng)
    shape = [*_ints(rng, 3, 1, 6), int(rng.integers(1, 6)) * block**2]
    attrs = {"blocksize": block, "mode": str(rng.choice(["DCR", "CRD"])), "x_encoding": encoding}
    return Node("LowBitDepthToSpace", attrs, [codes(rng, shape, 8, encoding)])


def random_image(rng: np.random.Generator, largest: int = 60) -> Node:
    """A LowBitImage that makes pictures larger or smaller, crops them or puts them into letterboxes."""
    encoding, order = _encoding(rng), str(rng.choice(["rgb", "bgr", "gray"]))
    attrs: dict[str, Any] = {"order": order, "y_encoding": encoding}
    attrs["interpolation"] = str(rng.choice(["bilinear", "bicubic", "nearest"]))
    size = [int(side) for side in np.exp(rng.uniform(0, np.log(largest), 2))]
    shape = [int(rng.integers(1, 3)), *_ints(rng, 2, 1, largest), int(rng.choice([1, 3]))]
    match rng.integers(0, 4):
        case 0:
            attrs["resize"] = size
        case 1:
            attrs["resize"] = [min(size[0], largest // 2)]
        case 2:
            attrs |= {"letterbox": size, "centered": int(rng.integers(2)), "fill": int(rng.integers(256))}
    if "letterbox" not in attrs and rng.random() < 0.5:
        resized = resized_size(shape[1], shape[2], attrs.get("resize", ()))
        attrs["crop"] = [int(rng.integers(1, min(side, largest) + 1)) for side in resized]
    rows = [(256,), (3 if order != "gray" else 1, 256)][int(rng.integers(2))]
    x = rng.integers(0, 256, shape) if rng.random() < 0.7 else 255 * rng.integers(0, 2, shape)
    table = rng.integers(0, 256, rows).astype(np.uint8)
    return Node("LowBitImage", attrs, [x.astype(np.uint8), table])


def _requantize(rng: np.random.Generator) -> Node:
    ties, shape = bool(rng.random() < 0.5), _image(rng)
    attrs, y_zero = output(rng)
    attrs["x_encoding"] = encoding = _encoding(rng)
    c = (shape[-1],) if rng.random() < 0.4 else ()
    inputs = [
        codes(rng, shape, 8, encoding),
        scale(rng, ties, -5, -2, c),
        zero_point(rng, 8, encoding, c),
        scale(rng, ties, -5, -2, c),
        np.broadcast_to(y_zero, c).copy(),
    ]
    return Node("LowBitRequantize", attrs, inputs)


def _quantize(rng: np.random.Generator) -> Node:
    ties, shape = bool(rng.random() < 0.5), _image(rng)
    attrs, y_zero = output(rng)
    c = (shape[-1],) if rng.random() < 0.3 else ()
    y_scale = scale(rng, ties, -4, -1, c)
    # Multiples of half a step sit on ties; a few values no integer can hold.
    real = (rng.integers(-600, 601, shape) * 0.5 * y_scale).astype(np.float32)
    wild = rng.random(shape) < 0.05
    real[wild] = rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e30, -0.0], int(wild.sum()))
    attrs["to_channels_last"] = last = int(rng.integers(0, 2))
    x = np.ascontiguousarray(np.moveaxis(real, -1, 1)) if last else real
    return Node("LowBitQuantize", attrs, [x, y_scale, np.broadcast_to(y_zero, c).copy()])


def _threshold(rng: np.random.Generator) -> Node:
    shape, encoding, bits = _image(rng), _encoding(rng), int(rng.integers(1, 9))
    low, high = code_range(bits, encoding)
    count = int(rng.integers(1, high - low + 1))
    c = shape[-1] if rng.random() < 0.7 else 1
    dirs = rng.choice([-1, 1], c)
    base = rng.integers(low, high - count + 1, c)
    # A grid of halves, where x meets thresholds exactly; infinities are reached always or never.
    rows = (rng.integers(-40, 41, (c, count)) * 0.5).astype(np.float32)
    rows[rng.random(rows.shape) < 0.05] = rng.choice([np.inf, -np.inf])
    rows = np.sort(rows * dirs[:, None], axis=1) * dirs[:, None]
    real = (rng.integers(-50, 51, shape) * 0.5).astype(np.float32)
    wild = rng.random(shape) < 0.05
    real[wild] = rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e30, -0.0], int(wild.sum()))
    attrs = {"y_bits": bits, "y_encoding": encoding, "to_channels_last": int(rng.integers(0, 2))}
    x = np.ascontiguousarray(np.moveaxis(real, -1, 1)) if attrs["to_channels_last"] else real
    return Node(
        "LowBitThreshold", attrs, [x, rows.astype(np.float32), base.astype(np.int32), dirs.astype(np.int32)]
    )


def _dequantize(rng: np.random.Generator) -> Node:
    shape, encoding = _image(rng), _encoding(rng)
    c = (shape[-1],) if rng.random() < 0.3 else ()
    attrs = {"x_encoding": encoding, "to_channels_first": int(rng.integers(0, 2))}
    inputs = [codes(rng, shape, 8, encoding), scale(rng, False, -4, -1, c), zero_point(rng, 8, encoding, c)]
    return Node("LowBitDequantize", attrs, inputs)


_MAKERS = {
    "LowBitAffine": _affine,
    "LowBitLookup": _lookup,
    "LowBitAdd": lambda rng: _binary("LowBitAdd", rng),
    "LowBitMul": lambda rng: _binary("LowBitMul", rng),
    "LowBitMatMul": _random_mat_mul,
    "LowBitMaxPool": _max_pool,
    "LowBitAveragePool": _average_pool,
    "LowBitGlobalAveragePool": _global_average_pool,
    "LowBitConcat": _concat,
    "LowBitNormalization": _random_normalization,
    "LowBitResize": _resize,
    "LowBitImage": random_image,
    "LowBitDepthToSpace": _depth_to_space,
    "LowBitSoftmax": _softmax,
    "LowBitRequantize": _requantize,
    "LowBitQuantize": _quantize,
    "LowBitThreshold": _threshold,
    "LowBitDequantize": _dequantize,
}
