"""When a worker asks for its next unit while it computes one. Pure.

Asked for early, the unit lies with a worker that has not begun it, and counts as unfinished for all others. Asked for
late, the worker has nothing to do until unit and parameters have come. So it is asked for when the unit under way is as
far from its end as asking usually takes, twice over. Nothing is known of the first unit, which is computed to its end.
"""

from __future__ import annotations

import math

LEADS = 2.0  # how much earlier than is usually needed
FADING = 0.8  # of what asking took at most: so much of it is left after the next time


def prepare_after_s(took_s: float, lead_s: float) -> float:
    """After the beginning of a unit. `took_s`: the unit before (infinite: there was none); `lead_s`: asking for one."""
    return took_s if math.isinf(took_s) else max(0.0, took_s - LEADS * lead_s)


def usual_lead_s(before_s: float, now_s: float) -> float:
    """How long to count on, when asking took `now_s` this time: rather too long than too short."""
    return max(now_s, FADING * before_s)
