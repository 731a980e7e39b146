"""Measurements on this machine: models side by side, and kernels for the nodes of one."""
