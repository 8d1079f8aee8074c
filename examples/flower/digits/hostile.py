"""What a hostile client sends in place of its honest reply: for drills. `attack` in a node's config names it."""

from __future__ import annotations

import time

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord

HOURS_S = 3600.0


def honest(asked: Message, made: Message) -> Message:
    return made


def sign_flip(asked: Message, honest: Message) -> Message:
    """Four times as far, in the other direction."""
    return _changed(asked, honest, lambda sent, made: sent - 4.0 * (made - sent))


def noise(asked: Message, honest: Message) -> Message:
    generator = np.random.default_rng(1)
    return _changed(asked, honest, lambda sent, made: sent + generator.normal(0.0, 10.0, sent.shape).astype(sent.dtype))


def nan(asked: Message, honest: Message) -> Message:
    return _changed(asked, honest, lambda sent, made: np.full_like(sent, np.nan))


def extra_key(asked: Message, honest: Message) -> Message:
    honest.content["arrays"]["one more"] = Array(np.zeros(3, dtype=np.float32))
    return honest


def wrong_shape(asked: Message, honest: Message) -> Message:
    return _changed(asked, honest, lambda sent, made: made.reshape(-1)[:-1])


def many_examples(asked: Message, honest: Message) -> Message:
    """The most that a message can say."""
    honest.content["metrics"] = MetricRecord({"train-loss": 0.0, "num-examples": 2**63 - 1})
    return honest


def crash(asked: Message, honest: Message) -> Message:
    raise RuntimeError("this client has no wish to take part")


def sleep(asked: Message, honest: Message) -> Message:
    time.sleep(HOURS_S)
    return honest


ATTACKS = {
    "none": honest,
    "sign-flip": sign_flip,
    "noise": noise,
    "nan": nan,
    "extra-key": extra_key,
    "wrong-shape": wrong_shape,
    "many-examples": many_examples,
    "crash": crash,
    "sleep": sleep,
    "shout": honest,  # these two do what they do under masks: masking.py
    "babble": honest,
}


def _changed(asked: Message, honest: Message, change) -> Message:
    sent, made = asked.content["arrays"], honest.content["arrays"]
    honest.content["arrays"] = ArrayRecord(
        {name: Array(np.ascontiguousarray(change(sent[name].numpy(), made[name].numpy()))) for name in made}
    )
    return honest
