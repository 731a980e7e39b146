r"""How many faces a quantized YuNet keeps, and how many it adds, against the float model.

lowbit eval yunet_w4a8.onnx --against yunet.onnx --data photos --preprocess resize=320x320,order=bgr \
    --metric examples/face_metric.py:faces

A metric of `lowbit eval` is a function of one sample. This one takes the outputs of both models, decodes
them, and counts; eval adds up.
"""

import numpy as np

SIZE = 320
STRIDES = (8, 16, 32)
SCORE, OVERLAP, SAME = 0.6, 0.45, 0.5  # of a face; of two boxes for one; of a face found by both models


def faces(outputs, reference):
    """Faces that both models find, and those that only the first or only the second does."""
    ours, theirs = decode(outputs), decode(reference)
    kept = matches(ours, theirs)
    return {"kept": kept, "lost": len(theirs) - kept, "added": len(ours) - kept}


def decode(outputs):
    """The boxes [n, 4] (left, top, right, bottom) of the faces, best first, one per face."""
    boxes, scores = [], []
    for stride in STRIDES:
        rows, columns = np.divmod(np.arange((SIZE // stride) ** 2), SIZE // stride)
        x, y, width, height = outputs[f"bbox_{stride}"].T
        x, y = (columns + x) * stride, (rows + y) * stride
        width, height = np.exp(width) * stride, np.exp(height) * stride
        boxes.append(np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1))
        sure = (np.clip(outputs[f"{kind}_{stride}"][:, 0], 0, 1) for kind in ("cls", "obj"))
        scores.append(np.sqrt(np.prod(list(sure), axis=0)))
    boxes, scores = np.concatenate(boxes), np.concatenate(scores)
    order = np.flatnonzero(scores > SCORE)
    order = order[np.argsort(-scores[order], kind="stable")]
    chosen = []
    for i in order:
        if not chosen or overlaps(boxes[i], boxes[chosen]).max() <= OVERLAP:
            chosen.append(i)
    return boxes[chosen]


def overlaps(box, boxes):
    """Intersection over union of a box with each of others."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    common = np.prod(np.maximum(sides, 0), axis=1)
    return common / (np.prod(box[2:] - box[:2]) + np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) - common)


def matches(ours, theirs):
    """How many of our boxes have a partner of their own among theirs, best first."""
    left = list(range(len(theirs)))
    for box in ours:
        if left:
            overlap = overlaps(box, theirs[left])
            if overlap.max() >= SAME:
                del left[int(overlap.argmax())]
    return len(theirs) - len(left)
