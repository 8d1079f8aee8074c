"""Schedulers, the settings they make, and whatever else travels with the state, as text: for workers that come later.

The parameters are the servers', but these are each worker's own. Belongs to the training thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.events import EventLog
from holdfast.servers.recipe import settings_of, settled
from holdfast.servers.units_state import EXTRAS_CHARACTERS_MAX
from holdfast.state.extras import Stateful, capture_extra, restore_extra
from holdfast.state.objects import pack_object, unpack_object


class TravellingExtras:
    def __init__(
        self, extras: Mapping[str, Stateful], optimizers: Sequence[torch.optim.Optimizer], events: EventLog
    ) -> None:
        self._extras = extras
        self._optimizers = optimizers
        self._events = events

    def text(self) -> str:
        """As they are now; empty where they are too large to travel."""
        extras = {name: capture_extra(extra) for name, extra in self._extras.items()}
        settings = [settings_of(group, keep_notes=True) for group in self._groups()]
        try:
            return pack_object({"extras": extras, "settings": settings}, path="extras", bytes_max=EXTRAS_CHARACTERS_MAX)
        except ConfigError as error:
            why = "the extras do not travel to workers that join, which begin with their own"
            self._events.write("warning", text=f"{why}: {error.message}")
            return ""

    def load(self, text: str) -> None:
        """ProtocolError for what no worker would send."""
        taken = unpack_object(text)
        if not isinstance(taken, dict) or not isinstance(taken.get("extras"), dict):
            raise ProtocolError("extras that are none")
        for name, extra in self._extras.items():
            if name in taken["extras"]:
                restore_extra(name, extra, taken["extras"][name])
        for group, settings in zip(self._groups(), taken.get("settings", ()), strict=False):
            group.update(settled(settings))

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]
