"""A quantized model on the first GPU, with torch tensors that stay there; on the CPU where there is no GPU.

python examples/gpu_session.py model.qdq.onnx
"""

import sys

import lowbit
import torch
from onnxruntime import OrtValue

device = next((each.name for each in lowbit.devices() if each.name == "cuda:0"), "cpu-ep")
session = lowbit.session(sys.argv[1], device=device)  # converts the model in memory
place = "cuda" if device == "cuda:0" else "cpu"

(source,) = session.get_inputs()
(result,) = session.get_outputs()
x = torch.rand([size if isinstance(size, int) else 1 for size in source.shape], device=place)
y = torch.empty([size if isinstance(size, int) else 1 for size in result.shape], device=place)

binding = session.io_binding()
binding.bind_ortvalue_input(source.name, OrtValue.from_dlpack(x))
binding.bind_ortvalue_output(result.name, OrtValue.from_dlpack(y))
if place == "cuda":
    torch.cuda.synchronize()  # x must be complete before another stream reads it
session.run_with_iobinding(binding)  # y is complete on return
print(f"{device}: {result.name} {list(y.shape)}, mean {y.mean().item():.4g}")
