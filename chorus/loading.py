"""One model at a time is loaded in a process."""

from __future__ import annotations

import threading

# Held by whoever makes a model's modules. The libraries load a model by telling torch, for all threads, to make modules
# without storage: what another thread makes meanwhile would have none either.
LOADING = threading.RLock()
