"""Converts a quantized model and runs it; five lines without the arguments.

python examples/convert_and_run.py model.qdq.onnx model.lowbit.onnx
"""

import sys

import lowbit
import numpy as np

source, target = sys.argv[1:3]
result = lowbit.convert(source, target)
print(len(result.report.converted), "nodes converted")
for node in result.report.kept:
    print(f"kept {node.name} ({node.op_type}): {node.reason}")

session = lowbit.session(target)  # a plain onnxruntime.InferenceSession
feeds = {
    value.name: np.zeros([size if isinstance(size, int) else 1 for size in value.shape], np.float32)
    for value in session.get_inputs()
}
for value, array in zip(session.get_outputs(), session.run(None, feeds), strict=True):
    print(value.name, array.shape, array.dtype)
