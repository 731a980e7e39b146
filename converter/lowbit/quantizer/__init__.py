"""``lowbit.quantize``: post-training quantization of a float32 network to 1 to 8 bits, one step per file."""
