"""Attention, mixers and the convolutional networks that followed them."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ..graph import GraphBuilder
from .layers import (
    activation,
    attention,
    average_pool,
    classify,
    conv,
    depthwise,
    group_norm,
    integers,
    inverted_residual,
    layer_norm,
    linear,
    maps_of,
    mean,
    number,
    reshape,
    slices,
    tokens_of,
    transformer_block,
    transpose,
    view,
)


def _patches(g: GraphBuilder, image: int, patch: int, width: int) -> str:
    return tokens_of(g, conv(g, g.input([1, 3, image, image]), width, patch, stride=patch, pad=0))


def vit_tiny(g: GraphBuilder) -> list[str]:
    """ViT-Ti/16 (Dosovitskiy et al. 2020), 3 of 12 blocks, with a class token and LayerNormalization."""
    x = _patches(g, 112, 16, 192)
    token = g.constant(g.normal((1, 1, 192), 1), "class_token")
    x = g.node("Concat", [token, x], axis=1)
    x = g.add(x, g.constant(g.normal((1, g.shape(x)[1], 192), 0.5), "positions"))
    for _ in range(3):
        x = transformer_block(g, x, 3)
    x = g.node("Gather", [layer_norm(g, x), g.constant_node(np.array(0, np.int64))], axis=1)
    return [linear(g, x, 100)]


def deit_decomposed(g: GraphBuilder) -> list[str]:
    """DeiT-Ti (Touvron et al. 2020), 2 of 12 blocks, opset 13: LayerNorm as its formula, mean of tokens."""
    x = _patches(g, 96, 16, 192)
    x = g.add(x, g.constant(g.normal((1, g.shape(x)[1], 192), 0.5), "positions"))
    for _ in range(2):
        x = transformer_block(g, x, 3, decomposed=True)
    return [linear(g, mean(g, layer_norm(g, x, decomposed=True), [1], keep=False), 100)]


def _swin_block(g: GraphBuilder, x: str, height: int, window: int, heads: int, shift: int) -> str:
    n, tokens, c = g.shape(x)
    y = reshape(g, layer_norm(g, x), n, height, height, c)
    for axis in (1, 2) if shift else ():
        y = g.node("Concat", [slices(g, y, axis, shift, height), slices(g, y, axis, 0, shift)], axis=axis)
    per_side = height // window
    y = transpose(g, reshape(g, y, n, per_side, window, per_side, window, c), 0, 1, 3, 2, 4, 5)
    y = attention(g, reshape(g, y, n * per_side**2, window**2, c), heads)
    y = transpose(g, reshape(g, y, n, per_side, per_side, window, window, c), 0, 1, 3, 2, 4, 5)
    y = reshape(g, y, n, height, height, c)
    for axis in (1, 2) if shift else ():
        last = slices(g, y, axis, height - shift, height)
        y = g.node("Concat", [last, slices(g, y, axis, 0, height - shift)], axis=axis)
    x = g.add(x, reshape(g, y, n, tokens, c))
    y = linear(g, layer_norm(g, x), 4 * c, act="erf_gelu")
    return g.add(x, linear(g, y, c, gain=0.5))


def swin(g: GraphBuilder) -> list[str]:
    """Swin-T (Liu et al. 2021), width 48 of 96, windows of 4x4 by Reshape, cyclic shifts."""
    height = 16
    x = layer_norm(g, _patches(g, 64, 4, 48))
    for stage in range(2):
        for shift in (0, 2):
            x = _swin_block(g, x, height, 4, 3 * (stage + 1), shift)
        if stage == 0:
            c = g.shape(x)[2]
            x = reshape(g, x, 1, height, height, c)
            rows = [slices(g, x, 1, start, height, 2) for start in (0, 1)]
            parts = [slices(g, row, 2, start, height, 2) for start in (0, 1) for row in rows]
            height //= 2
            x = reshape(g, g.node("Concat", parts, axis=3), 1, height * height, 4 * c)
            x = linear(g, layer_norm(g, x), 2 * c, bias=False, gain=0.7)
    return [linear(g, mean(g, layer_norm(g, x), [1], keep=False), 100)]


def mlp_mixer(g: GraphBuilder) -> list[str]:
    """MLP-Mixer (Tolstikhin et al. 2021), width 128, 3 blocks: fully connected over tokens and channels."""
    x = _patches(g, 96, 16, 128)
    tokens = g.shape(x)[1]
    for _ in range(3):
        y = linear(g, transpose(g, layer_norm(g, x), 0, 2, 1), 64, act="gelu")
        x = g.add(x, transpose(g, linear(g, y, tokens, gain=0.5), 0, 2, 1))
        y = linear(g, layer_norm(g, x), 256, act="gelu")
        x = g.add(x, linear(g, y, 128, gain=0.5))
    return [linear(g, mean(g, layer_norm(g, x), [1], keep=False), 100)]


def mobilevit(g: GraphBuilder) -> list[str]:
    """MobileViT-XS (Mehta and Rastegari 2021), fewer blocks: unfolding by Reshape and Transpose."""
    x = conv(g, g.input([1, 3, 128, 128]), 16, stride=2, act="silu")
    x = inverted_residual(g, x, 64, 32, act="silu")
    x = inverted_residual(g, x, 128, 48, stride=2, act="silu")
    for width, out in ((96, 64), (120, 80)):
        x = inverted_residual(g, x, 4 * g.shape(x)[1], out, stride=2, act="silu")
        n, c, h, w = g.shape(x)
        y = conv(g, conv(g, x, c, act="silu"), width, 1, bias=False)
        y = transpose(g, reshape(g, y, n * width * (h // 2), 2, w // 2, 2), 0, 2, 1, 3)
        y = transpose(g, reshape(g, y, n, width, h * w // 4, 4), 0, 3, 2, 1)
        y = reshape(g, y, n * 4, h * w // 4, width)
        y = layer_norm(g, transformer_block(g, y, 4, ratio=2, act="silu"))
        y = transpose(g, reshape(g, y, n, 4, h * w // 4, width), 0, 3, 2, 1)
        y = transpose(g, reshape(g, y, n * width * (h // 2), w // 2, 2, 2), 0, 2, 1, 3)
        y = conv(g, reshape(g, y, n, width, h, w), c, 1, act="silu")
        x = conv(g, g.concat([x, y]), c, act="silu")
    return [classify(g, conv(g, x, 320, 1, act="silu"))]


def convnext(g: GraphBuilder) -> list[str]:
    """ConvNeXt-T (Liu et al. 2022), width 0.5, two blocks a stage: channels last between Transposes."""
    x = conv(g, g.input([1, 3, 96, 96]), 48, 4, stride=4, pad=0)

    def normalized(y: str) -> str:
        return transpose(g, layer_norm(g, transpose(g, y, 0, 2, 3, 1)), 0, 3, 1, 2)

    x = normalized(x)
    for stage, out in enumerate([48, 96, 192]):
        if stage:
            x = conv(g, normalized(x), out, 2, stride=2, pad=0)
        for _ in range(2):
            y = layer_norm(g, transpose(g, depthwise(g, x, 7), 0, 2, 3, 1))
            y = linear(g, linear(g, y, 4 * out, act="erf_gelu"), out)
            y = g.node("Mul", [g.constant(1 + g.normal((out,), 0.2), "layer_scale"), y])
            x = g.add(x, transpose(g, y, 0, 3, 1, 2))
    y = mean(g, x, [-2, -1])
    y = layer_norm(g, transpose(g, y, 0, 2, 3, 1))
    return [linear(g, g.node("Flatten", [y], axis=1), 100)]


def convnext_v2(g: GraphBuilder) -> list[str]:
    """ConvNeXt V2 (Woo et al. 2023), atto's widths, one block a stage: global response normalization."""
    x = conv(g, g.input([1, 3, 64, 64]), 40, 4, stride=4, pad=0)
    for stage, out in enumerate([40, 80, 160]):
        if stage:
            y = layer_norm(g, transpose(g, x, 0, 2, 3, 1))
            x = conv(g, transpose(g, y, 0, 3, 1, 2), out, 2, stride=2, pad=0)
        y = linear(g, layer_norm(g, transpose(g, depthwise(g, x, 7), 0, 2, 3, 1)), 4 * out, act="gelu")
        norm = g.node("ReduceL2", [y, g.constant_node(integers(1, 2))], keepdims=1)
        ratio = g.node("Div", [norm, g.node("Add", [mean(g, norm, [-1]), number(g, 1e-6)])])
        gamma = g.constant(g.normal((1, 1, 1, 4 * out), 0.3), "gamma")
        beta = g.constant(g.normal((1, 1, 1, 4 * out), 0.1), "beta")
        y = g.add(g.add(g.node("Mul", [gamma, g.node("Mul", [y, ratio])]), beta), y)
        x = g.add(x, transpose(g, linear(g, y, out), 0, 3, 1, 2))
    return [classify(g, x, form="mean")]


def poolformer(g: GraphBuilder) -> list[str]:
    """PoolFormer-S12 (Yu et al. 2021), width 0.5, two stages: average pools for attention, GroupNorm."""
    x = conv(g, g.input([1, 3, 96, 96]), 32, 7, stride=4, pad=2)
    for stage, out in enumerate([32, 64]):
        if stage:
            x = conv(g, x, out, stride=2)
        for _ in range(2):
            y = group_norm(g, x, 1)
            y = g.node("Sub", [average_pool(g, y, 3, 1, 1, include_pad=False), y])
            x = g.add(x, g.node("Mul", [g.constant(g.normal((out, 1, 1), 0.7), "layer_scale"), y]))
            y = conv(g, conv(g, group_norm(g, x, 1), 4 * out, 1, act="erf_gelu"), out, 1)
            x = g.add(x, g.node("Mul", [g.constant(g.normal((out, 1, 1), 0.7), "layer_scale"), y]))
    return [classify(g, x)]


def efficientformer(g: GraphBuilder) -> list[str]:
    """EfficientFormer-L1 (Li et al. 2022), fewer blocks: pools, then attention with a bias of positions."""
    x = conv(g, g.input([1, 3, 96, 96]), 24, stride=2, act="relu")
    x = conv(g, x, 48, stride=2, act="relu")
    for out in (48, 96):
        if out != g.shape(x)[1]:
            x = conv(g, x, out, stride=2)
        x = g.add(x, g.node("Sub", [average_pool(g, x, 3, 1, 1, include_pad=False), x]))
        x = g.add(x, conv(g, conv(g, x, 4 * out, 1, act="gelu"), out, 1, gain=0.5))
    x = tokens_of(g, conv(g, x, 128, stride=2))
    n, tokens, c = g.shape(x)
    y = reshape(g, linear(g, layer_norm(g, x), 3 * c, gain=0.7), n, tokens, 4, 3 * c // 4)
    y = transpose(g, y, 0, 2, 1, 3)
    parts = g.nodes("Split", [y, g.constant_node(integers(32, 32, 32))], 3, axis=3)
    scores = g.node("MatMul", [parts[0], transpose(g, parts[1], 0, 1, 3, 2)])
    scores = g.node("Mul", [scores, number(g, 32**-0.5)])
    scores = g.add(scores, g.constant(g.normal((1, 4, tokens, tokens), 0.5), "positions"))
    y = g.node("MatMul", [g.node("Softmax", [scores], axis=-1), parts[2]])
    x = g.add(x, linear(g, reshape(g, transpose(g, y, 0, 2, 1, 3), n, tokens, c), c))
    x = g.add(x, linear(g, linear(g, layer_norm(g, x), 4 * c, act="gelu"), c, gain=0.5))
    return [linear(g, mean(g, x, [1], keep=False), 100)]


def bert_tiny(g: GraphBuilder) -> list[str]:
    """BERT-tiny (Turc et al. 2019), 2 layers of 128: token identifiers, a mask, free batch and length."""
    free = {0: "batch", 1: "length"}
    tokens = g.input([1, 32], "input_ids", TensorProto.INT64, free)
    mask = g.input([1, 32], "attention_mask", TensorProto.INT64, free)
    x = g.node("Gather", [g.constant(g.normal((1000, 128), 1), "words"), tokens], axis=0)
    positions = slices(g, g.constant(g.normal((512, 128), 0.5), "positions"), 0, 0, 512)
    count = g.node("Unsqueeze", [_length(g, tokens), g.constant_node(integers(0))])
    bounds = [g.constant_node(integers(0)), count, g.constant_node(integers(0))]
    positions = g.known(g.node("Slice", [positions, *bounds]), [32, 128])
    x = layer_norm(g, g.add(x, positions))
    hidden = g.node("Unsqueeze", [mask, g.constant_node(integers(1, 2))])
    hidden = g.node("Sub", [number(g, 1), g.node("Cast", [hidden], to=TensorProto.FLOAT)])
    hidden = g.node("Mul", [hidden, number(g, -10000)])
    for _ in range(2):
        heads = []
        for _ in range(3):
            heads.append(view(g, linear(g, x, 128, gain=0.7), "0", "1", 2, 64))
        query, values = (transpose(g, heads[index], 0, 2, 1, 3) for index in (0, 2))
        scores = g.node("MatMul", [query, transpose(g, heads[1], 0, 2, 3, 1)])
        scores = g.add(g.node("Div", [scores, number(g, 8)]), hidden)
        y = transpose(g, g.node("MatMul", [g.node("Softmax", [scores], axis=-1), values]), 0, 2, 1, 3)
        x = layer_norm(g, g.add(linear(g, view(g, y, "0", "1", 128), 128, gain=0.7), x))
        x = layer_norm(g, g.add(linear(g, linear(g, x, 512, act="erf_gelu"), 128), x))
    first = g.node("Gather", [x, g.constant_node(np.array(0, np.int64))], axis=1)
    return [linear(g, activation(g, linear(g, first, 128), "tanh"), 2)]


def _length(g: GraphBuilder, tokens: str) -> str:
    shape = g.node("Shape", [tokens])
    return g.node("Gather", [shape, g.constant_node(np.array(1, np.int64))], axis=0)


def gpt_block(g: GraphBuilder) -> list[str]:
    """Two decoder blocks of GPT-2's kind, width 128, 24 embedded tokens: causal mask by Where, tanh-Gelu."""
    x = g.input([1, 24, 128])
    n, tokens, c = g.shape(x)
    mask = g.constant(np.tril(np.ones((1, 1, tokens, tokens), bool)), "mask")
    for _ in range(2):
        y = linear(g, layer_norm(g, x), 3 * c, gain=0.7)
        parts = g.nodes("Split", [y, g.constant_node(integers(c, c, c))], 3, axis=2)
        query, key, values = (
            transpose(g, reshape(g, part, n, tokens, 4, c // 4), 0, 2, *perm)
            for part, perm in zip(parts, [(1, 3), (3, 1), (1, 3)], strict=True)
        )
        scores = g.node("Div", [g.node("MatMul", [query, key]), number(g, (c / 4) ** 0.5)])
        scores = g.node("Where", [mask, scores, number(g, -3.4e38)])
        y = g.node("MatMul", [g.node("Softmax", [scores], axis=-1), values])
        x = g.add(x, linear(g, reshape(g, transpose(g, y, 0, 2, 1, 3), n, tokens, c), c, gain=0.7))
        y = linear(g, layer_norm(g, x), 4 * c, gain=1.2)
        cube = g.node("Mul", [g.node("Pow", [y, number(g, 3)]), number(g, 0.044715)])
        inner = g.node("Tanh", [g.node("Mul", [g.add(y, cube), number(g, 0.7978846)])])
        y = g.node("Mul", [g.node("Mul", [y, number(g, 0.5)]), g.node("Add", [inner, number(g, 1)])])
        x = g.add(x, linear(g, y, c, gain=0.5))
    return [linear(g, layer_norm(g, x), 256, bias=False)]


def cvt(g: GraphBuilder) -> list[str]:
    """CvT-like (Wu et al. 2021), width 64: depthwise projections of queries, keys and values."""
    x = conv(g, g.input([1, 3, 64, 64]), 64, 7, stride=4)
    _n, c, h, w = g.shape(x)
    for _ in range(2):
        normalized = maps_of(g, layer_norm(g, tokens_of(g, x)), h, w)
        query = tokens_of(g, depthwise(g, normalized))
        key = tokens_of(g, depthwise(g, normalized, stride=2))
        x = g.add(x, maps_of(g, attention(g, query, 2, packed=False, key=key), h, w))
        y = linear(g, linear(g, layer_norm(g, tokens_of(g, x)), 4 * c, act="gelu"), c, gain=0.5)
        x = g.add(x, maps_of(g, y, h, w))
    return [classify(g, x, form="mean")]


NETWORKS = [
    vit_tiny, deit_decomposed, swin, mlp_mixer, mobilevit, convnext, convnext_v2, poolformer, efficientformer,
    bert_tiny, gpt_block, cvt,
]  # fmt: skip
