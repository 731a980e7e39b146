"""The processes that tests start take lowbit from LOWBIT_SITE too: Python imports this file as it starts.

An editable install is found by a hook on sys.meta_path, which would win over any path.
"""

import os
import sys

SITE = os.environ.get("LOWBIT_SITE")
if SITE:
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if "ScikitBuildRedirecting" not in type(finder).__name__
    ]
    sys.path.insert(0, SITE)
