# SPDX-License-Identifier: Apache-2.0
"""Forward passes of encoders, packed or padded, in a thread of their own. Knows neither text, tasks nor Triton."""
