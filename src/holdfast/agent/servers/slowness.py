"""Which servers are slow, by what the others measure of them. Pure; the time is passed in.

Every server tells now and then how long each of the others takes to confirm what it sent. A server is slow when its
confirmations take many times as long as those of the others, and noticeably longer, for a while; and no longer slow
when they have been near the others' for longer than that. Each time that it is found slow again it has to be quick for
twice as long, so that slices do not wander to and fro.

The measures of a server that is slow itself are long for all others alike, so they accuse nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, kw_only=True)
class SlowRules:
    times: float = 4.0  # as long as the others
    more_s: float = 0.05  # and so much longer
    after_s: float = 8.0  # for so long
    back_times: float = 2.0
    back_after_s: float = 30.0
    back_after_s_max: float = 3600.0
    fresh_s: float = 6.0  # older measures do not count


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`times`: as long as the others."""

    server: str
    slow: bool
    times: float
    reason: str


@dataclass
class _Known:
    slow: bool = False
    found: int = 0  # how often it was found slow
    since: float | None = None  # it looks otherwise than it is held to be


@dataclass
class SlownessJudge:
    rules: SlowRules = field(default_factory=SlowRules)
    _measures: dict[str, tuple[float, dict[str, float]]] = field(default_factory=dict)  # by whom -> when, lags
    _known: dict[str, _Known] = field(default_factory=dict)

    def measured(self, by: str, lags_s: Mapping[str, float], now: float) -> None:
        self._measures[by] = (now, dict(lags_s))

    def gone(self, server: str) -> None:
        self._measures.pop(server, None)
        self._known.pop(server, None)

    def look(self, now: float) -> list[Finding]:
        """What has changed."""
        self._measures = {by: one for by, one in self._measures.items() if now - one[0] <= self.rules.fresh_s}
        found = []
        measured = {one for _, lags_s in self._measures.values() for one in lags_s}
        for server in sorted(measured | self._known.keys()):
            known, compared = self._known.setdefault(server, _Known()), self._compared(server)
            if compared is None:
                known.since = None
                continue
            times, more_s = compared
            if known.slow:
                otherwise = times < self.rules.back_times or more_s < self.rules.more_s / 2
                patience_s = min(self.rules.back_after_s * 2 ** (known.found - 1), self.rules.back_after_s_max)
            else:
                otherwise = times >= self.rules.times and more_s >= self.rules.more_s
                patience_s = self.rules.after_s
            if not otherwise:
                known.since = None
            elif known.since is None:
                known.since = now
            elif now - known.since >= patience_s:
                known.slow, known.since = not known.slow, None
                known.found += known.slow
                found.append(self._finding(server, known, times, patience_s))
        return found

    def _finding(self, server: str, known: _Known, times: float, patience_s: float) -> Finding:
        if known.slow:
            reason = f"its confirmations took {times:.1f} times as long as the others' for {patience_s:.0f} s"
        else:
            reason = f"its confirmations were as quick as the others' for {patience_s:.0f} s"
        return Finding(server=server, slow=known.slow, times=round(times, 1), reason=reason)

    def _compared(self, server: str) -> tuple[float, float] | None:
        """How many times as long as the others it takes, and how much longer: the median of those who can compare."""
        seen = []
        for lags_s in (lags_s for _, lags_s in self._measures.values() if server in lags_s):
            others = [lag_s for one, lag_s in lags_s.items() if one != server and not self._is_slow(one)]
            if others:
                usual_s = max(median(others), 1e-6)
                seen.append((lags_s[server] / usual_s, lags_s[server] - usual_s))
        if not seen:
            return None
        return median(times for times, _ in seen), median(more_s for _, more_s in seen)

    def _is_slow(self, server: str) -> bool:
        return server in self._known and self._known[server].slow
