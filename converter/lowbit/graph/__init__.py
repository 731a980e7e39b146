"""The normal form: a graph whose tensors carry quantization facts, and what can be read from it."""
