"""Ways to round the weights of one layer, given the sums of :mod:`lowbit.quantizer.gram`."""
