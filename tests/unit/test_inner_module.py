"""An inner module as pieces, in models of transformers in bfloat16: logits and embeddings are as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
import transformers as hf

from phonograph import Buckets, Device, Extent, Graphed, Pad, Replay, Slot, graphed, open_device
from phonograph.devices import EmulatedDevice
from phonograph.graphs.progress import silent

VOCAB, LENGTH = 256, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MOST = 1e-2
"""Graphs on and off: root mean square of the difference over the spread of the values."""
RUNS = [
    pytest.param("emulated", "eager"),
    pytest.param("cuda", "eager", marks=pytest.mark.gpu),
    pytest.param("cuda", "inductor", marks=pytest.mark.gpu),
]


class Embedder(torch.nn.Module):
    """Texts to vectors: the mean of their tokens' states, on the live batch and with a look at it from the host."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        lengths = attention_mask.sum(-1).tolist()
        pooled = torch.stack([rows[:length].mean(0) for rows, length in zip(states, lengths, strict=True)])
        return torch.nn.functional.normalize(pooled.float(), dim=-1)


def opened(device: str) -> Device:
    return EmulatedDevice(poison=True) if device == "emulated" else open_device(device)


def causal_lm(device: Device) -> tuple[Any, Any]:
    """A model, and its layers."""
    torch.manual_seed(1)
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=2)
    model = hf.LlamaForCausalLM(config).to(device.torch_device, torch.bfloat16).eval()
    return model, model.model


def embedder(device: Device) -> tuple[Any, Any]:
    torch.manual_seed(2)
    model = Embedder(hf.BertModel(hf.BertConfig(**SIZES), add_pooling_layer=False))
    model = model.to(device.torch_device, torch.bfloat16).eval()
    return model, model.encoder


def prompts(num_tokens: int, device: Device) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, VOCAB, (1, num_tokens), generator=numbers)
    return {"input_ids": ids.to(device.torch_device), "use_cache": False}


def texts(num_seqs: int, device: Device) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(num_seqs)
    ids = torch.randint(0, VOCAB, (num_seqs, LENGTH), generator=numbers)
    lengths = torch.randint(1, LENGTH + 1, (num_seqs, 1), generator=numbers)
    given = {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < lengths).long()}
    return {name: value.to(device.torch_device) for name, value in given.items()}


def graphed_lm(layers: Any, device: Device, compiler: str) -> Graphed:
    slots = [Slot("input_ids", (1, "tokens"), torch.int64, pad=Pad.fill(0), valid=(0, VOCAB - 1))]

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        given = prompts(extent.used["tokens"], device)
        others = ("attention_mask", "position_ids", "past_key_values", "inputs_embeds")
        return {**given, **dict.fromkeys(others)}

    sizes = Buckets.of(4, 16, 32)
    return graphed(
        layers,
        slots=slots,
        bucketed="tokens",
        buckets=sizes,
        backend="tc_piecewise",
        tc_compiler=compiler,
        device=device,
        sample=sample,
    )


def graphed_encoder(encoder: Any, device: Device, compiler: str) -> Graphed:
    slots = [
        Slot("input_ids", ("seqs", LENGTH), torch.int64, pad=Pad.fill(0), valid=(0, VOCAB - 1)),
        Slot("attention_mask", ("seqs", LENGTH), torch.int64, pad=Pad.fill(1), valid=(0, 1)),
    ]
    sizes = Buckets.of(2, 8)
    return graphed(
        encoder,
        slots=slots,
        bucketed="seqs",
        buckets=sizes,
        backend="tc_piecewise",
        tc_compiler=compiler,
        device=device,
    )


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).square().mean().sqrt() / wanted.float().std())


Changes = Callable[[torch.Tensor], torch.Tensor]
WRONG: dict[str, Changes] = {
    "nothing": torch.zeros_like,
    "half": lambda states: states * torch.tensor([1.0, 0.0]).repeat(states.shape[-1] // 2).to(states),
    "swapped": lambda states: states.flip(0) if states.shape[0] > 1 else states.flip(1),
    "one row turned": lambda states: torch.cat(
        [states.flatten(0, 1)[:1].roll(1, -1), states.flatten(0, 1)[1:]]
    ).view_as(states),
}


def check(model: Any, inner: Any, run: Graphed, given: dict[str, Any]) -> None:
    """Graphs on and off give the same; an inner module that gives something else does not."""

    def result() -> torch.Tensor:
        found = model(**given)
        return found if isinstance(found, torch.Tensor) else found.logits

    with torch.no_grad():
        wanted = result()
        with run.installed():
            found = result()
        assert isinstance(run.runner.last, Replay), run.runner.last
        assert torch.equal(result(), wanted)
        assert apart(found, wanted) <= MOST
        assert float(wanted.float().std(-1).min()) > 0.01
        for change in WRONG.values() if given["input_ids"].numel() > LENGTH else ():

            def changed(module: Any, args: Any, output: Any, change: Changes = change) -> Any:
                output.last_hidden_state = change(output.last_hidden_state)
                return output

            hook = inner.register_forward_hook(changed)
            try:
                assert apart(result(), wanted) > 3 * MOST
            finally:
                hook.remove()


@pytest.mark.parametrize(("device", "compiler"), RUNS)
def test_the_layers_of_a_causal_lm(device: str, compiler: str) -> None:
    on = opened(device)
    model, layers = causal_lm(on)
    run = graphed_lm(layers, on, compiler)
    assert not run.capture(silent, verify=True).failures
    for num_tokens in (1, 7, 16, 32):
        check(model, layers, run, prompts(num_tokens, on))


@pytest.mark.parametrize(("device", "compiler"), RUNS)
def test_the_encoder_of_a_pooling_model(device: str, compiler: str) -> None:
    on = opened(device)
    model, encoder = embedder(on)
    run = graphed_encoder(encoder, on, compiler)
    assert not run.capture(silent, verify=True).failures
    for num_seqs in (1, 2, 5, 8):
        check(model, encoder, run, texts(num_seqs, on))
