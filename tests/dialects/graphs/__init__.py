"""Small, realistic quantized graphs, one function per exporter dialect and per construct.

`CASES` maps a name to its `Case`; importing this package fills it.
"""

from tests.dialects.graphs import (
    brevitas,
    constructs,
    exporters,
    left_alone,
    narrow_types,
    ort_quantizer,
    qoperator,
)
from tests.dialects.graphs.builder import CASES, Built, Case

__all__ = [
    "CASES", "Built", "Case", "brevitas", "constructs", "exporters", "left_alone", "narrow_types",
    "ort_quantizer", "qoperator",
]  # fmt: skip
