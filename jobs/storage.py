"""Objects: videos, latents and cache entries in any S3 server, each written once and checked at every hop.

Only PUT, GET, HEAD, DELETE, LIST and presigned URLs are used: S3 servers differ in the rest. An object's sha256 travels
in its user metadata and is kept in the database too; ETags are not checksums on every server, so none is read.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import secrets
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import batched_or_islice
from pathlib import Path
from typing import Any, TypeVar
