"""Sessions of ONNX Runtime that know the ``ai.lowbit`` ops, and the devices that they run on."""
