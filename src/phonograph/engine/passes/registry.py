"""PASSES: the engine's forward passes as plans, flags, sizes and the scheduler know them; a pass is a line here.

It needs no torch: what a pass computes is in its own file, which is imported when the pass is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from phonograph.errors import DeclarationError
from phonograph.graphs.planning.settings import KNOWN_PHASES, AbsentPhase, PhaseDefaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phonograph.engine.cache.groups import Kept
    from phonograph.engine.models.interface import Model
    from phonograph.engine.passes.base import Pass, PassParts
    from phonograph.engine.requests.step import Chunk
    from phonograph.engine.state.column import Column


class StepSize(Protocol):
    """How much a step holds at most."""

    @property
    def max_seqs(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...


def _nothing() -> Sequence[Column]:
    return ()


@dataclass(frozen=True)
class PassDeclaration:
    """All that is known of a forward pass before a model is."""

    defaults: PhaseDefaults
    """Its name, and how it is recorded unless another backend is asked for."""
    limit: Callable[[StepSize], int]
    """The largest size of its bucketed dim."""
    make: Callable[[PassParts, str], Pass]
    """The pass itself, for one engine and the backend that it will have."""
    is_ragged: bool = False
    """Whether rows differ in their number of tokens, as those of prompts do: some attention plans such a step on the
    host, outside of graphs."""
    serves: bool = True
    """Whether requests are served by it. Only such a pass needs a graph for every batch where coverage is strict."""
    pools: bool = False
    """Whether it sums hidden states, for requests that want a vector."""
    gives_states: bool = False
    """Whether it gives hidden states, for requests that want them: with recordings of its own, if it picks tokens in
    them."""
    columns: Callable[[], Sequence[Column]] = _nothing
    """Request state of its own, besides what every engine has."""
    keeps: Callable[[Model], Sequence[Kept]] | None = None
    """What layers of its own keep in the pages of the engine: a further cache group on the same page numbers."""

    @property
    def name(self) -> str:
        return self.defaults.name


def _decode(parts: PassParts, backend: str) -> Pass:
    from phonograph.engine.passes.decode import decode_pass

    return decode_pass(parts, backend)


def _prefill(parts: PassParts, backend: str) -> Pass:
    from phonograph.engine.passes.prefill import prefill_pass

    return prefill_pass(parts, backend)


def _embed(parts: PassParts, backend: str) -> Pass:
    from phonograph.engine.passes.embed import embed_pass

    return embed_pass(parts, backend)


def _heartbeat(parts: PassParts, backend: str) -> Pass:
    from phonograph.engine.passes.heartbeat import heartbeat_pass

    return heartbeat_pass(parts, backend)


def _without_drafter(parts: PassParts, backend: str) -> Pass:
    raise DeclarationError(
        f"the passes {TARGET_VERIFY.name!r}, {DRAFT_EXTEND.name!r} and {DRAFT.name!r} need a drafter, and have none. "
        "Take those of `speculating_passes`."
    )


DECODE = PassDeclaration(KNOWN_PHASES["decode"], limit=lambda size: size.max_seqs, make=_decode)
PREFILL = PassDeclaration(KNOWN_PHASES["prefill"], limit=lambda size: size.max_tokens, make=_prefill, is_ragged=True)
HEARTBEAT = PassDeclaration(KNOWN_PHASES["idle"], limit=lambda size: 1, make=_heartbeat, serves=False)
EMBED = PassDeclaration(
    KNOWN_PHASES["embed"], limit=lambda size: size.max_tokens, make=_embed, is_ragged=True, pools=True
)
TARGET_VERIFY = PassDeclaration(KNOWN_PHASES["target_verify"], limit=lambda size: size.max_seqs, make=_without_drafter)
"""As plans know it; `target_verify.speculating_passes` gives it a drafter."""
DRAFT = PassDeclaration(KNOWN_PHASES["draft"], limit=lambda size: size.max_seqs, make=_without_drafter)
"""What is drafted after a mixed step; no step names it. The same holds."""
DRAFT_EXTEND = PassDeclaration(KNOWN_PHASES["draft_extend"], limit=lambda size: size.max_seqs, make=_without_drafter)
"""What a drafter does before a step for the ones before that. The same holds."""
PASSES = (DECODE, PREFILL, HEARTBEAT)
"""Those that every engine has, unless it drafts."""
SPECULATING = (TARGET_VERIFY, PREFILL, DRAFT_EXTEND, DRAFT, HEARTBEAT)
"""Of an engine that drafts tokens and verifies them: rows decode in rounds, alone and among prompts."""


def passes_for(*, embeddings: bool, speculates: bool = False) -> tuple[PassDeclaration, ...]:
    """The passes of an engine, as its plan knows them; with that for embeddings only where they are asked for: it has
    as many recordings as prefill."""
    passes = SPECULATING if speculates else PASSES
    return (*passes, EMBED) if embeddings else passes


def absent_phases(*, embeddings: bool, speculates: bool = False) -> tuple[AbsentPhase, ...]:
    """Those of other engines, for who names one."""
    there = passes_for(embeddings=embeddings, speculates=speculates)
    decoding = tuple(one.name for one in there if one.name not in (PREFILL.name, HEARTBEAT.name, EMBED.name))
    because = "rows decode in rounds (`speculate`)" if speculates else "nothing is drafted (`speculate` is off)"
    others = dict.fromkeys(one for one in (*PASSES, *SPECULATING) if one not in there)
    stand_ins = decoding if speculates else ()
    found = [
        AbsentPhase(one.defaults, _sentence(one.name, because, f"Name {decoding[0]}."), stand_ins) for one in others
    ]
    if not embeddings:
        found.append(AbsentPhase(EMBED.defaults, _sentence(EMBED.name, "embeddings are off", "Add `embeddings`.")))
    return tuple(found)


def _sentence(name: str, because: str, instead: str) -> str:
    return f"this engine has no phase {name!r}, since {because}. {instead}"


def phases_of(passes: Iterable[PassDeclaration]) -> tuple[PhaseDefaults, ...]:
    """As a plan takes them."""
    return tuple(declared.defaults for declared in passes)


PHASES = phases_of(PASSES)
ALL_PHASES = phases_of(dict.fromkeys((*passes_for(embeddings=True), *SPECULATING)))
"""Those of every pass that an engine may have: as flags are made for them."""


def kept_by(model: Model, passes: Sequence[PassDeclaration] = PASSES) -> list[Kept]:
    """What a page holds, over the layers of the model and of all groups beside it."""
    return [*model.keeps, *(kept for one in passes if one.keeps is not None for kept in one.keeps(model))]


@dataclass(frozen=True)
class StepPasses:
    """Which pass runs a step, by what the scheduler put into it."""

    decodes: str = DECODE.name
    """Decodes alone."""
    mixed: str = PREFILL.name
    """Prefills, and decodes among them."""
    embeds: str | None = None
    """As mixed, with a chunk among them that is pooled; None where no request may be."""

    def with_prefills(self, chunks: Iterable[Chunk]) -> str:
        """The pass of a step with these prefills."""
        if self.embeds is not None and any(chunk.pooled is not None for chunk in chunks):
            return self.embeds
        return self.mixed


def step_passes_for(*, embeddings: bool = False, speculates: bool = False) -> StepPasses:
    """Which passes of an engine run its steps."""
    decodes = TARGET_VERIFY if speculates else DECODE
    return StepPasses(decodes.name, embeds=EMBED.name if embeddings else None)
