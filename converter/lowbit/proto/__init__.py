"""A model outside of the converter: its file, its tensors, what it is fed, where it came from."""
