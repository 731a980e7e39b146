"""Lowering: the output graph, into which regions write lowbit nodes."""
