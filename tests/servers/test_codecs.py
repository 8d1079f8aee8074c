"""How gradients travel over slow links: nothing is lost for good, replicas decode alike, and nonsense is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError, DivergedError, ProtocolError
from holdfast.servers.codecs import BLOCK, codec_of
from holdfast.servers.compressing import Compressor
from holdfast.servers.cutting import Cutting
from holdfast.servers.parameter_slice import ParameterSlice, view_of
from holdfast.servers.port import Layout, initial_of, layout_of
from holdfast.servers.recipe import settings_of
from holdfast.servers.replicated import Answer, Author, Payload
from tests.servers.serving import in_memory, in_threads

NAMES = ("fp16", "bf16", "int8", "top-k:0.1")
AUTHOR = Author("w0", 1, 1)
names = st.sampled_from(NAMES)
lengths = st.sampled_from((1, 2, 17, BLOCK, BLOCK + 1, 1000))


def random(seed: int, elements: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(dtype) * scale


@given(name=names, elements=lengths, seed=st.integers(0, 10**6), power=st.integers(-20, 20))
def test_what_is_sent_has_the_announced_size_and_errs_by_little(
    name: str, elements: int, seed: int, power: int
) -> None:
    codec, values = codec_of(name), random(seed, elements, 10.0**power)
    pieces = codec.encode(values)
    assert [(one.dtype, one.numel()) for one in pieces] == codec.kinds(elements)
    assert all(one.is_contiguous() for one in pieces)
    decoded = codec.decode(pieces, elements)
    largest = float(values.abs().max())
    if name == "top-k:0.1":
        kept = decoded != 0
        assert torch.equal(decoded[kept], values[kept]), "what is sent is sent as it is"
        assert float(values[~kept].abs().max() if bool((~kept).any()) else 0.0) <= float(decoded[kept].abs().min())
    elif name != "fp16" or 1e-3 < largest < 6e4:  # its range is narrow
        assert float((decoded - values).abs().max()) <= largest / (127 if name == "int8" else 256)


@settings(max_examples=60)
@given(name=names, elements=lengths, seed=st.integers(0, 10**6), dtype=st.sampled_from((torch.float32, torch.float64)))
def test_updates_that_are_decoded_add_up_to_the_gradients_but_for_the_rest(
    name: str, elements: int, seed: int, dtype: torch.dtype
) -> None:
    """Whatever the gradients are: sum of decoded + rest = sum of gradients, and the rest stays small."""
    compressor, total, sent = Compressor(codec_of(name)), torch.zeros(elements).double(), torch.zeros(elements).double()
    for number in range(40):
        gradient = random(seed + number, elements, dtype=dtype)
        total += gradient.double()
        for start, stop in ((0, elements // 2), (elements // 2, elements)):  # two slices have a part each
            if start < stop:
                pieces = compressor.encode(0, gradient, start, stop)
                sent[start:stop] += compressor.codec.decode(pieces, stop - start).to(dtype).double()
    rest = compressor.rest(0, gradient).double()
    assert torch.allclose(sent + rest, total, atol=1e-3)
    assert float(rest.abs().max()) < {"fp16": 0.01, "bf16": 0.05, "int8": 0.1}.get(name, 60.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_decoded_updates_goes_to_the_gradient(name: str) -> None:
    """With the same gradient again and again, what each update leaves out is sent after all."""
    compressor, gradient = Compressor(codec_of(name)), random(1, 500)
    errors, sent = [], torch.zeros(500)
    for number in range(1, 401):
        sent += compressor.codec.decode(compressor.encode(0, gradient, 0, 500), 500)
        if number in (25, 400):
            errors.append(float((sent / number - gradient).abs().max()))
    assert errors[1] < errors[0] / 4, "it falls with the number of updates"


def test_without_the_rest_the_smallest_would_never_travel() -> None:
    """What error feedback is for: the same codec forgets 9 of 10 elements for ever."""
    codec, gradient = codec_of("top-k:0.1"), torch.linspace(0.1, 1.0, 100)
    forgetful = codec.decode(codec.encode(gradient), 100)
    assert int((forgetful == 0).sum()) == 90
    compressor = Compressor(codec)
    for _ in range(200):
        pieces = compressor.encode(0, gradient, 0, 100)
        forgetful += codec.decode(pieces, 100)
    assert int((forgetful == 0).sum()) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_numbers_stay_finite_and_poison_no_later_update(name: str, dtype: torch.dtype) -> None:
    compressor, gradient = Compressor(codec_of(name)), torch.full((10,), torch.finfo(dtype).max, dtype=dtype)
    assert compressor.takes([gradient, None])
    for _ in range(3):
        pieces = compressor.encode(0, gradient, 0, 10)
        assert bool(torch.isfinite(compressor.codec.decode(pieces, 10).to(dtype)).all())
    assert bool(torch.isfinite(compressor.rest(0, gradient)).all())


@pytest.mark.parametrize(
    "name", ["", "fp8", "top-k", "top-k:", "top-k:0", "top-k:2", "top-k:nan", "top-k:x", 3, "x" * 99]
)
def test_a_name_that_is_none_is_one_sentence(name: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        codec_of(name)
    assert "compress is" in refused.value.message
    assert refused.value.hint and "top-k:0.01" in refused.value.hint
    assert "\n" not in refused.value.message


# ---- in the servers


class Trained:
    """A model, and a slice with all of it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 3).to(torch.float64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5, momentum=0.5)
        self.values = [one.data for one in self.model.parameters()]
        self.settings = [settings_of(group) for group in self.optimizer.param_groups]
        self.cutting = Cutting(self.layout, 1)

    @property
    def layout(self) -> Layout:
        return layout_of(dict(self.model.named_parameters()), self.optimizer)

    def gradients(self, seed: int) -> list[torch.Tensor]:
        return [random(seed, one.numel(), dtype=one.dtype).reshape(one.shape) for one in self.values]

    def update(self, seed: int, compressor: Compressor | None) -> Answer:
        flat = [one.reshape(-1) for one in self.gradients(seed)]
        return self.cutting.update(self.cutting.slices[0], flat, self.settings, 1, compressor)

    def slice(self) -> ParameterSlice:
        state = ParameterSlice()
        state.apply(AUTHOR, payload(self.cutting.initial(self.cutting.slices[0], initial_of(self.values))))
        return state


def payload(answer: Answer) -> Payload:
    return Payload(answer.head, memoryview(bytearray(b"".join(answer.views))))


@pytest.mark.parametrize("name", NAMES)
def test_replicas_decode_alike_and_a_restored_one_goes_on_alike(name: str) -> None:
    trained, compressor = Trained(), Compressor(codec_of(name))
    one, two = trained.slice(), trained.slice()
    for seed in range(4):
        update = payload(trained.update(seed, compressor))
        for state in (one, two):
            state.check(AUTHOR, update)
            state.apply(AUTHOR, update)
        if seed == 1:
            captured = payload(two.capture())
            two = ParameterSlice()
            two.restore(captured)
    assert one.digest() == two.digest()
    assert one.version == 4


def test_an_update_is_smaller_by_what_the_codec_promises() -> None:
    trained = Trained()
    plain = trained.update(0, None).nbytes
    sizes = {name: trained.update(0, Compressor(codec_of(name))).nbytes / plain for name in NAMES}
    assert sizes["fp16"] == sizes["bf16"] < 0.55
    assert sizes["int8"] < 0.35
    assert sizes["top-k:0.1"] < 0.35  # of small tensors; padding counts


def spoiled(update: Answer, spoil: Any) -> Payload:
    """The update with another head, or with other bytes from some place on."""
    if isinstance(spoil, dict):
        return payload(Answer({**update.head, **spoil}, update.views))
    found = payload(update)
    found.body[: len(spoil)] = spoil
    return found


NAN, INFINITE = (view_of(torch.tensor([value], dtype=torch.float32)) for value in (float("nan"), float("inf")))


@pytest.mark.parametrize(
    ("name", "spoil", "error"),
    [
        ("bf16", {"codec": "int8"}, ProtocolError),  # another size
        ("bf16", {"codec": "fp8"}, ProtocolError),
        ("bf16", {"codec": ["bf16"]}, ProtocolError),
        ("bf16", {"codec": 7}, ProtocolError),
        ("top-k:0.1", {"codec": "top-k:1e-9"}, ProtocolError),
        ("top-k:0.1", b"\xff\xff\xff\xff", ProtocolError),  # a place below 0
        ("top-k:0.1", b"\xff\xff\xff\x7f", ProtocolError),  # and one beyond the end
        ("int8", NAN, DivergedError),
        ("int8", INFINITE, DivergedError),
        ("fp16", b"\x00\x7c", DivergedError),  # infinite
        ("bf16", b"\xc0\x7f", DivergedError),  # not a number
    ],
)
def test_what_is_malformed_or_not_finite_does_not_enter_the_log(name: str, spoil: Any, error: type[Exception]) -> None:
    trained = Trained()
    state = trained.slice()
    before = state.digest()
    with pytest.raises(error):
        state.check(AUTHOR, spoiled(trained.update(0, Compressor(codec_of(name))), spoil))
    assert state.digest() == before


@settings(max_examples=25)
@given(name=names, body=st.binary(max_size=600), seed=st.integers(0, 50))
def test_any_bytes_are_taken_or_refused_and_nothing_else(name: str, body: bytes, seed: int) -> None:
    trained = Trained()
    state, update = trained.slice(), payload(trained.update(seed, Compressor(codec_of(name))))
    update.body[: len(body)] = body[: update.nbytes]
    try:
        state.check(AUTHOR, update)
    except (ProtocolError, DivergedError):
        return
    state.apply(AUTHOR, update)
    assert all(bool(torch.isfinite(value).all()) for value in state._state.values)  # type: ignore[union-attr]


@pytest.mark.parametrize("servers", [in_memory, in_threads])
def test_a_worker_trains_through_a_codec_and_a_gradient_that_is_not_finite_is_still_named(servers: Any) -> None:
    trained, compressor = Trained(), Compressor(codec_of("bf16"))
    with servers(2) as connect:
        line = connect("w0")
        line.open(trained.layout, initial_of(trained.values), timeout_s=20)
        exact = [one.clone() for one in trained.values]
        for clock in range(1, 21):
            gradients = trained.gradients(clock % 3)
            line.push(gradients, trained.settings, clock=clock, compressor=compressor).wait(20)
            for parameter, gradient in zip(trained.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            trained.optimizer.step()
        into = [torch.empty_like(one) for one in exact]
        line.pull(into).wait(20)
        moved = max(float((was - now).abs().max()) for was, now in zip(exact, trained.values, strict=True))
        apart = max(float((mine - theirs).abs().max()) for mine, theirs in zip(trained.values, into, strict=True))
        assert 0 < apart < moved / 200, "as the optimizer would have done, but for the last roundings"
        rests = [compressor.rest(number, one).clone() for number, one in enumerate(trained.values)]
        gradients[0][0, 0] = float("nan")
        with pytest.raises(DivergedError, match="not finite"):
            line.push(gradients, trained.settings, clock=21, compressor=compressor).wait(20)
        for number, (rest, one) in enumerate(zip(rests, trained.values, strict=True)):
            assert torch.equal(compressor.rest(number, one), rest), "what was refused leaves nothing behind"
