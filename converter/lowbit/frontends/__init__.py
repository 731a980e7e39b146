"""Frontends: one file per dialect, each brings a model into the normal form of :mod:`lowbit.graph.normal_form`."""
