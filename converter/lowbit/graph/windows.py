"""The geometry of convolutions, pools and resizes, with every default resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from lowbit.graph.attributes import get_float, get_int, get_ints, get_string
from lowbit.graph.constants import constant, integers
from lowbit.graph.normal_form import dims_of, is_op
from lowbit.graph.reasons import Refusal

_COORDINATES = (
    *("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"),
    "half_pixel_symmetric",
)
_LARGEST_COEFFICIENT = 16


@dataclass(frozen=True)
class Window:
    """One number per spatial dim; pads are begins, then ends, as in ONNX."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]

    def attributes(self, *, dilations: bool = True) -> dict[str, list[int]]:
        """The window as attributes of a lowbit node; strides and dilations 1 and no pads are defaults."""
        out = {"kernel_shape": list(self.kernel)}
        if any(stride != 1 for stride in self.strides):
            out["strides"] = list(self.strides)
        if any(self.pads):
            out["pads"] = list(self.pads)
        if dilations and any(dilation != 1 for dilation in self.dilations):
            out["dilations"] = list(self.dilations)
        return out


def read_window(node: ir.Node, kernel: Sequence[int], spatial: Sequence[int | None]) -> Window | Refusal:
    """Reads the window of a Conv, ConvTranspose or pool.

    Args:
        node: the node.
        kernel: its kernel shape.
        spatial: sizes of the input's spatial dims, None where dynamic.

    Returns:
        The window with explicit pads.
    """
    dims = len(kernel)
    if dims not in (1, 2, 3):
        return Refusal(f"it has {dims} spatial dims; lowbit has 1 to 3")
    declared = get_ints(node, "kernel_shape")
    if declared is not None and declared != list(kernel):
        return Refusal(f"its kernel_shape is {declared}, but its weights have {list(kernel)}")
    strides = get_ints(node, "strides") or [1] * dims
    dilations = get_ints(node, "dilations") or [1] * dims
    pads = get_ints(node, "pads") or [0] * (2 * dims)
    if len(spatial) != dims:
        return Refusal(f"its window has {dims} dims, its input has rank {2 + len(spatial)}")
    if len(strides) != dims or len(dilations) != dims or len(pads) != 2 * dims:
        return Refusal("its strides, dilations or pads do not fit its kernel_shape")
    if any(number < 1 for number in (*kernel, *strides, *dilations)):
        return Refusal(
            f"its kernel {list(kernel)}, strides {strides} and dilations {dilations} must be positive"
        )
    if any(pad < 0 for pad in pads):
        return Refusal(f"negative pads {pads} are not supported")
    auto_pad = get_string(node, "auto_pad", "NOTSET")
    if auto_pad == "VALID":
        pads = [0] * (2 * dims)
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        for i in range(dims):
            extent = (kernel[i] - 1) * dilations[i] + 1
            size = spatial[i]
            if strides[i] == 1:
                total = extent - 1
            elif size is None:
                return Refusal(f"auto_pad {auto_pad} with stride {strides[i]} on an image of dynamic size")
            else:
                total = max(0, (-(-size // strides[i]) - 1) * strides[i] + extent - size)
            before = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            pads[i], pads[dims + i] = before, total - before
    elif auto_pad not in ("NOTSET", ""):
        return Refusal(f"auto_pad {auto_pad} is not known")
    for i, size in enumerate(spatial if node.op_type != "ConvTranspose" else ()):
        extent = (kernel[i] - 1) * dilations[i] + 1
        if size is not None and extent > size + pads[i] + pads[dims + i]:
            return Refusal(f"its window of {extent} pixels does not fit into {size} and their padding")
    return Window(tuple(kernel), tuple(strides), tuple(pads), tuple(dilations))


def read_transposed_window(
    node: ir.Node, kernel: Sequence[int], spatial: Sequence[int | None]
) -> Window | Refusal:
    """The window of a ConvTranspose; where its output size is given, the pads follow from that.

    Args:
        node: the node.
        kernel: its kernel shape.
        spatial: sizes of the input's spatial dims, None where dynamic.
    """
    window = read_window(_without_auto_pad(node), kernel, spatial)
    if isinstance(window, Refusal):
        return window
    auto_pad = get_string(node, "auto_pad", "NOTSET")
    sizes = get_ints(node, "output_shape")
    if sizes is None and auto_pad in ("NOTSET", "", "VALID"):
        return window if auto_pad != "VALID" else replace(window, pads=(0,) * len(window.pads))
    dims = len(kernel)
    extra = get_ints(node, "output_padding") or [0] * dims
    begins, ends = [], []
    for i in range(dims):
        size = spatial[i]
        # total = stride * (size - 1) + output_padding + extent - output size; for SAME, whose output size is
        # size * stride, the input's own size cancels.
        extent = (kernel[i] - 1) * window.dilations[i] + 1
        if sizes is None:
            total = extra[i] + extent - window.strides[i]
        elif size is None:
            return Refusal("it gives an output_shape for an image of dynamic size")
        else:
            total = window.strides[i] * (size - 1) + extra[i] + extent - sizes[-dims + i]
        if total < 0:
            return Refusal(f"its output is larger than its window reaches (pads would be {total})")
        smaller = total // 2
        begins.append(smaller if auto_pad == "SAME_UPPER" else total - smaller)
        ends.append(total - begins[-1])
    return replace(window, pads=(*begins, *ends))


def _without_auto_pad(node: ir.Node) -> ir.Node:
    attributes = {k: v for k, v in node.attributes.items() if k != "auto_pad"}
    return ir.Node(node.domain, node.op_type, [], attributes, num_outputs=0)


def read_max_pool(node: ir.Node) -> Window | Refusal:
    """The window of a MaxPool whose only output is the maximum."""
    if len(node.outputs) > 1 and node.outputs[1].name:
        return Refusal("it also returns the indices of the maxima")
    kernel = get_ints(node, "kernel_shape", ())
    source = node.inputs[0]
    assert kernel is not None
    if source is None or source.shape is None:
        return Refusal("the rank of its input is unknown")
    return read_window(node, kernel, dims_of(source)[2:])


def read_resize(node: ir.Node) -> dict[str, Any] | Refusal:
    """The attributes of LowBitResize for a Resize of the spatial dims, whatever its mode."""
    kind = get_string(node, "mode", "nearest")
    if kind not in ("nearest", "linear", "cubic"):
        return Refusal(f"mode {kind} is not supported")
    ranks = (3, 4) if kind == "nearest" else (3, 4, 5)
    source = node.inputs[0]
    if source is None or source.shape is None or len(source.shape) not in ranks:
        return Refusal(f"its input must have the rank {' or '.join(map(str, ranks))}")
    rank = len(source.shape)
    old = len(node.inputs) == 2 and node.version is not None and node.version < 11
    mode = get_string(node, "coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    nearest = get_string(node, "nearest_mode", "floor" if old else "round_prefer_floor")
    if mode not in _COORDINATES:
        return Refusal(f"coordinate_transformation_mode {mode} is not supported")
    if get_string(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        return Refusal("keep_aspect_ratio_policy is not supported")
    if get_int(node, "antialias", 0) or get_float(node, "extrapolation_value", 0.0):
        return Refusal("antialias and extrapolation are not supported")
    exclude = int(get_int(node, "exclude_outside", 0) != 0)
    if exclude and kind != "cubic":
        return Refusal(f"exclude_outside is not supported in mode {kind}")
    axes = [axis % rank for axis in get_ints(node, "axes", range(rank)) or []]
    out: dict[str, Any] = {"mode": kind, "coordinate_transformation_mode": mode}
    if kind == "nearest":
        out["nearest_mode"] = nearest
    if kind == "cubic":
        out |= {"cubic_coeff_a": get_float(node, "cubic_coeff_a", -0.75), "exclude_outside": exclude}
        if not abs(out["cubic_coeff_a"]) <= _LARGEST_COEFFICIENT:
            return Refusal(f"its cubic_coeff_a {out['cubic_coeff_a']} is beyond {_LARGEST_COEFFICIENT}")

    scales_input = node.inputs[1 if old else 2] if len(node.inputs) > (1 if old else 2) else None
    scales = constant(scales_input)
    if scales is not None and scales.size:
        by_axis = dict(zip(axes, (float(s) for s in scales.reshape(-1)), strict=False))
        if by_axis.get(0, 1.0) != 1.0 or by_axis.get(1, 1.0) != 1.0:
            return Refusal("it resizes the batch or the channels")
        return out | {"scales": [by_axis.get(axis, 1.0) for axis in range(2, rank)]}
    sizes = integers(node.inputs[3]) if len(node.inputs) > 3 else None
    if sizes is None:
        return Refusal("its scales or sizes are computed at run time")
    by_axis_size = dict(zip(axes, sizes, strict=False))
    for axis in (0, 1):
        if axis in by_axis_size and by_axis_size[axis] != source.shape[axis]:
            return Refusal("it resizes the batch or the channels")
    if any(axis not in by_axis_size for axis in range(2, rank)):
        return Refusal("it gives sizes for some of the spatial dims only")
    return out | {"sizes": [by_axis_size[axis] for axis in range(2, rank)]}


def resizes_in_any_layout(node: ir.Node) -> bool:
    """Whether a Resize of real numbers does the same to an image channels last, and fast.

    ONNX Runtime's CPU provider tells by the scales where the spatial dims are, in linear mode, of an image
    whose channels do not change.
    """
    source = node.inputs[0] if is_op(node, "Resize") and len(node.inputs) > 2 else None
    if source is None or source.shape is None or len(source.shape) != 4:
        return False
    if get_string(node, "mode", "nearest") != "linear" or get_int(node, "antialias", 0):
        return False
    if get_string(node, "coordinate_transformation_mode", "half_pixel") not in _COORDINATES:
        return False
    if get_string(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        return False
    before, after = dims_of(source), dims_of(node.outputs[0])
    return len(after) == 4 and before[1] is not None and before[1] == after[1]


def read_space_to_depth(node: ir.Node) -> int | Refusal:
    """The block size of a SpaceToDepth that can be written as Reshape, Transpose, Reshape.

    ONNX Runtime has no kernel of the op itself for codes in all of its versions.
    """
    source, block = node.inputs[0], get_int(node, "blocksize", 0)
    if source is None or source.shape is None or len(source.shape) != 4:
        return Refusal("its input must have the rank 4")
    _, channels, height, width = dims_of(source)
    if [channels, height, width].count(None) > 1:
        return Refusal("more than one of its channels, height and width are dynamic")
    if block < 1 or any(size is not None and size % block for size in (height, width)):
        return Refusal(f"its block size {block} does not divide its input {[height, width]}")
    return block
