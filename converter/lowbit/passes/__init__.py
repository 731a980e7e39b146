"""Passes: steps on the normal form that change how it is written, and no number."""
