"""Networks for tests, benchmarks and the demo: seeded standard networks and a small trained one."""

from .networks import DETECTORS, FLOAT_NETWORKS, NETWORKS
from .seeded import build, save

__all__ = ["DETECTORS", "FLOAT_NETWORKS", "NETWORKS", "build", "save"]
