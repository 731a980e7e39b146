"""Exporters: one file per dialect that a lowbit model can be written in."""
