"""Frontends: one file per dialect; each leads to the normal form of :mod:`lowbit.graph.normal_form`."""
