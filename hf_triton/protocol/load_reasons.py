# SPDX-License-Identifier: Apache-2.0
"""Our sentence in the reason that Triton gives for a folder that it does not serve."""

from __future__ import annotations

import re
from typing import Final

OURS: Final = re.compile("(?:TritonModelException|MissingExtraError): ")
NOT_HEALTHY: Final = re.compile(r"(Internal: )?Stub process '[^']*' is not healthy\.?")
STOOD_STILL: Final = "its process died or stood still while it loaded: give it memory and processor time; load it again"


def first_sentence(reason: str) -> str:
    """Our sentence in a reason of Triton's, which may go on with a traceback; one that says what to do of Triton's."""
    message = OURS.split(reason, 1)[-1]
    return NOT_HEALTHY.sub(STOOD_STILL, message.partition("\n")[0].strip())
