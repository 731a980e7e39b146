"""The kernels of another machine, or of an emulated one, behind the functions of `lowbit._native`."""
