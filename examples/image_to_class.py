"""A JPEG or PNG in, class scores out: pre-processing and a quantized network in one lowbit model.

python examples/image_to_class.py resnet.qdq.onnx photo.jpg

onnxruntime-extensions puts decoding, resizing, cropping and normalization in front of the network;
`lowbit.convert` takes the whole. Both custom-op libraries then serve one session. Needs
`pip install lowbit[extensions]`.
"""

import sys
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime_extensions import get_library_path
from onnxruntime_extensions.tools.pre_post_processing import (
    CenterCrop,
    ChannelsLastToChannelsFirst,
    ConvertImageToBGR,
    ImageBytesToFloat,
    Normalize,
    PrePostProcessor,
    Resize,
    ReverseAxis,
    Softmax,
    Unsqueeze,
    create_named_value,
)

IMAGENET = [(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]  # mean and deviation of red, green, blue
MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # of JPEG and PNG


def with_preprocessing(model: onnx.ModelProto) -> onnx.ModelProto:
    """The network behind image decoding, resizing and normalization, with Softmax behind it."""
    size = model.graph.input[0].type.tensor_type.shape.dim[2].dim_value
    image = create_named_value("image", onnx.TensorProto.UINT8, ["bytes"])
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    pipeline = PrePostProcessor([image], max(opset, 16))
    pipeline.add_pre_processing(
        [
            ConvertImageToBGR(),
            ReverseAxis(axis=2, dim_value=3, name="BGR_to_RGB"),
            Resize(size * 8 // 7),
            CenterCrop(size, size),
            ChannelsLastToChannelsFirst(),
            ImageBytesToFloat(),
            Normalize(IMAGENET, layout="CHW"),
            Unsqueeze([0]),
        ]
    )
    pipeline.add_post_processing([Softmax()])
    return pipeline.run(model)


def open_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """One session with both libraries; the order of registration does not matter."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    return lowbit.session(model, sess_options=options)


def classify(session: ort.InferenceSession, image: bytes) -> np.ndarray:
    """Class scores [classes] of an encoded image."""
    if not image.startswith(MAGIC):  # the decoder must not see anything else: it ends the process
        raise ValueError("the image is neither JPEG nor PNG")
    (scores,) = session.run(None, {"image": np.frombuffer(image, np.uint8)})
    return scores.reshape(-1)


def main() -> None:
    """Converts, runs, prints the five best classes."""
    network, photo = sys.argv[1:3]
    # Before the conversion: the helper's checker does not know the ai.lowbit ops.
    result = lowbit.convert(with_preprocessing(onnx.load(network)))
    print(f"{len(result.report.converted)} nodes converted, {len(result.report.kept)} kept")
    scores = classify(open_session(result.model), Path(photo).read_bytes())
    for index in np.argsort(-scores)[:5]:
        print(f"class {index}: {scores[index]:.3f}")


if __name__ == "__main__":
    main()
