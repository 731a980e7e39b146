"""Conversion: reading, frontends, passes, rewrites and the check of the result, in their order."""
