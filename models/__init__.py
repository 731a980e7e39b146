"""Networks for tests, benchmarks and the demo: seeded standard classifiers and a small trained one."""

from .networks import NETWORKS
from .seeded import build, save

__all__ = ["NETWORKS", "build", "save"]
