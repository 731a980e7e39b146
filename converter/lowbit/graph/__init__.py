"""The graph side of the converter: loading, the normal form, and the lowering of regions to lowbit nodes."""
