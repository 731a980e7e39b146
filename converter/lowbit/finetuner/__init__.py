"""``lowbit finetune``: a quantized network, trained to do what its float model does."""
