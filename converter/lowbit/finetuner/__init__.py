"""``lowbit finetune``: codes, scales and biases of a quantized network, trained to do what the float one does."""
