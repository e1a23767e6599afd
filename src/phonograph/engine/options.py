"""EngineOptions: size and precision of the engine; the graph plan has settings of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from phonograph.errors import PlanError
from phonograph.numbers import expect_finite, expect_whole, shown

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a model can compute in."""
KernelsName = Literal["reference", "cpu", "triton"]
"""In torch's ops, in C++, or in Triton."""
AttentionName = Literal[KernelsName, "flashinfer"]
"""As for kernels; or FlashInfer for prompts, which it plans on the host, and Triton for decode steps."""
ModelImplementation = Literal["auto", "native", "hf"]
"""Layers of our own, those of transformers, or ours where they compute what the model asks for."""
HfOps = Literal["fused", "own"]
"""One launch for each norm and rotation of a transformers model for which a trial allows it; or transformers' ops."""
VerifyMode = Literal["fast", "all", "off"]
"""A few recordings of each phase and product of axes, every recording, or none."""
MAX_DEPTH = 15
"""Tokens that are drafted for a sequence in a round, at most."""
_DEPTH = 3
"""Four tokens of a row fill the rows of a tile of attention where four heads share keys; five need twice as many."""
SamplingSource = Literal["model", "neutral"]
"""What the model's publishers recommend, or values that change nothing."""


SpeculateName = Literal["off", "ngram", "eagle", "ngram+eagle", "mtp", "auto"]
"""The drafter: none; n-gram lookup in the sequence itself; an EAGLE-3 head; n-gram lookup where it finds something and
a head elsewhere; MTP modules; or a head or modules where there are some, else n-gram lookup."""


SpeculateWhen = Literal["always", "pays"]
"""Wherever something is drafted; or only while recent rounds gain more in tokens than they cost in time."""


def path_from(name: str, given: object) -> Path:
    """A path, or a text as one. An empty text, which would be the current folder, and anything else are refused."""
    if isinstance(given, str | Path) and given != "":
        return Path(given)
    raise PlanError(f"{name} is the path of a folder, as a Path or a text that isn't empty; found {shown(given)}.")


@dataclass(frozen=True)
class EngineOptions:
    """What a user may set; None leaves it to the model and the memory of the device."""

    max_seqs: int | None = None
    """Sequences that run at the same time; default: by the device's memory, 16 on the CPU, 4 emulated."""
    max_tokens: int | None = None
    """Tokens of one step (those of an answer are `SamplingParams.max_tokens`); default: by the device's memory, 512 on
    the CPU, 64 emulated. It is raised where all sequences could not decode in one step, drafts included."""
    max_len: int | None = None
    """The longest sequence; default: the model's context, at most 8192."""
    page_size: int = 16
    """Tokens of one page of the KV cache."""
    cache_tokens: int | None = None
    """Tokens that the KV cache holds; default: what weights and graphs leave of `memory`."""
    memory: float = 0.9
    """The share of the device's memory that weights, graphs and KV cache may take together."""
    prefix_cache: bool = True
    """Whether prompts reuse the cached KV pages of a common prefix."""
    mixed: bool = True
    """Whether prefill chunks and decodes may share a step."""
    max_ahead: int = 1
    """Steps that may be launched before their predecessor is committed."""
    dtype: torch.dtype | None = None
    """Default: float32 on the CPU; elsewhere as the checkpoint stores it, and float16 for one that is quantised."""
    residual_dtype: torch.dtype | None = None
    """Of the residual stream: float32 or `dtype`. Default: float32 with float16 and for quantised checkpoints."""
    attention: AttentionName | None = None
    """Default: triton on a GPU; on a CPU where nothing is recorded, in C++ if it compiles; else the torch reference."""
    kernels: KernelsName | None = None
    """Default: as for attention."""
    eager_copies: bool = False
    """Whether eager passes copy their inputs into buffers, as replays do; otherwise they use them where they are."""

    speculate: SpeculateName = "off"
    """The drafter, whose tokens the model verifies several at a time; outputs don't depend on it."""
    speculate_depth: int | None = None
    """Tokens that are drafted for a sequence in each round, at most 15; default: 3."""
    speculate_when: SpeculateWhen | None = None
    """Whether rounds are launched wherever something is drafted, or only where they pay. Default: where they pay;
    always on a CPU, emulated or not."""
    draft: Path | None = None
    """The folder of the EAGLE-3 head, or of the MTP modules; default: the head that comes with the model, if any."""

    verify: VerifyMode = "fast"
    """Which recordings are checked against eager before the first request; a failure refuses to start."""
    shadow_verify: float = 0.0
    """The share of steps that run a second time, eagerly; a replay that differs in a bit is discarded."""
    shadow_dir: Path | None = None
    """A folder for reproducers: batches that a recording computed wrongly, with the state that they started from."""
    shadow_tokens: bool = False
    """Whether reproducers may contain token ids."""

    embeddings: bool = False
    """Whether prompts can be embedded: a pass of its own, with as many recordings as prefill has."""

    return_hidden_states: bool = False
    """Whether requests may ask for hidden states: decode steps have recordings with and without them."""

    model_impl: ModelImplementation = "auto"
    """The model implementation: native layers, those of transformers, or native where these compute it (auto)."""
    trust_remote_code: bool = False
    """Whether Python code from a checkpoint's folder may be run."""
    hf_layers: str | None = None
    """The name of the module that has the layers of a transformers model; default: what the model says."""
    hf_ops: HfOps = "fused"
    """Whether norms and rotations of a transformers model are one launch each, on a GPU, or transformers' own ops."""
    sampling: SamplingSource = "model"
    """The source of defaults for temperature, top_k, top_p, min_p, repetition_penalty: the model, or neutral values."""

    @property
    def speculates(self) -> bool:
        return self.speculate != "off"

    @property
    def draft_depth(self) -> int:
        """Tokens that are drafted for a sequence in each round; 0 where nobody drafts."""
        return 0 if not self.speculates else self.speculate_depth or _DEPTH

    def __post_init__(self) -> None:
        for name in ("max_seqs", "max_tokens", "max_len", "page_size", "cache_tokens"):
            value = getattr(self, name)
            if value is not None:
                expect_whole(name, value, PlanError, least=1)
        for name, names, is_optional in (
            ("attention", AttentionName, True),
            ("kernels", KernelsName, True),
            ("model_impl", ModelImplementation, False),
            ("hf_ops", HfOps, False),
            ("sampling", SamplingSource, False),
            ("speculate", SpeculateName, False),
            ("speculate_when", SpeculateWhen, True),
            ("verify", VerifyMode, False),
        ):
            known = get_args(names)
            if getattr(self, name) not in ((None, *known) if is_optional else known):
                raise PlanError(f"{name} is one of {', '.join(known)}; found {getattr(self, name)!r}.")
        for name in ("draft", "shadow_dir"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, path_from(name, given))
        self._check_speculation()
        for name, dtype in (("dtype", self.dtype), ("residual_dtype", self.residual_dtype)):
            if dtype not in (None, *DTYPES):
                raise PlanError(f"{name} is one of {', '.join(map(str, DTYPES))}; found {dtype!r}.")
        expect_finite("shadow_verify, a share of the steps,", self.shadow_verify, PlanError, least=0, most=1)
        if self.shadow_dir is not None and not self.shadow_verify:
            raise PlanError(
                "shadow_dir saves what shadow_verify finds, and that checks no step. Give --shadow-verify a share of "
                "the steps (0.001), or leave --shadow-dir out."
            )
        expect_finite("memory, a share of the device's,", self.memory, PlanError, least=0, most=1, open_below=True)

    def _check_speculation(self) -> None:
        if self.speculate == "mtp" and self.draft is None:
            raise PlanError("speculate='mtp' drafts by modules, and draft says where these are. Give --draft PATH.")
        if self.draft is not None and self.speculate in ("off", "ngram"):
            raise PlanError(
                f"draft names a head or modules, and speculate={self.speculate!r} drafts without. Give --draft "
                "together with --speculate eagle, ngram+eagle, mtp or auto, or neither."
            )
        if self.speculate_depth is not None:
            expect_whole("speculate_depth", self.speculate_depth, PlanError, least=1, most=MAX_DEPTH)
        for name in ("speculate_depth", "speculate_when"):
            if getattr(self, name) is not None and not self.speculates:
                flag = f"--{name.replace('_', '-')}"
                raise PlanError(
                    f"{name} says how much is drafted or when, and nothing is. Give --speculate a drafter (ngram), or "
                    f"leave {flag} out."
                )
