"""HfCheckpoint: a Hugging Face folder of any architecture, whose model transformers makes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from phonograph.engine.checkpoints import generation_config as sampling
from phonograph.engine.checkpoints.base import TensorInfo
from phonograph.engine.checkpoints.safetensors import described_tensor, stored_floats, weight_files
from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text.chat import ChatTemplate
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import CheckpointError
from phonograph.graphs.progress import Progress, silent
from phonograph.hf.adapter.loading import adapted, config_of, described, quiet, read_weights, routing_of
from phonograph.hf.adapter.outline import Outline, outline_of, without_reports
from phonograph.hf.adapter.sentences import refused

_CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class HfCheckpoint:
    """A folder whose files are checked; what the model is made of is found when it is first asked for."""

    folder: Path
    fields: Fields
    """Of config.json."""
    generation: Fields
    """Of generation_config.json."""
    trust_remote_code: bool = False
    layers: str | None = None
    """The name of the module that has the layers; None to ask the model."""
    not_native: str | None = None
    """What native layers of its architecture do not compute, where transformers' are taken for that."""

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        trust_remote_code: bool = False,
        layers: str | None = None,
        needs_weights: bool = True,
    ) -> HfCheckpoint:
        """Read and check the small files; nothing of the folder is run, and no weight is read.

        Unless it `needs_weights`, a folder may have its configuration alone.
        """
        if find_spec("transformers") is None:
            raise CheckpointError(
                f"opening {folder}: its architecture is not one of ours, and transformers, which could run it, is not "
                "installed. Run: pip install 'phonograph[hf]'"
            )
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"opening {folder}: it has no config.json. Give a folder with a Hugging Face checkpoint."
            )
        fields = Fields.from_json(path)
        refuse_strange(str(folder), fields, trust_remote_code=trust_remote_code)
        weight_files(folder, needed=needs_weights)
        path = folder / "generation_config.json"
        generation = Fields.from_json(path) if path.is_file() else Fields(str(path), {})
        return cls(folder, fields, generation, trust_remote_code, layers)

    @property
    def source(self) -> str:
        return str(self.folder)

    @property
    def sampling(self) -> SamplingParams:
        return sampling.from_hf(self.generation)

    @cached_property
    def hf_config(self) -> Any:
        """As transformers reads it."""
        from transformers import AutoConfig

        try:
            with quiet():
                config = AutoConfig.from_pretrained(
                    self.folder, trust_remote_code=self.trust_remote_code, local_files_only=True
                )
        except Exception as error:
            said = str(error).strip().splitlines()[0].rstrip(".")
            raise refused(
                self.source, f"its configuration can't be read ({said})", "Get a newer transformers."
            ) from error
        return without_reports(config)

    @cached_property
    def outline(self) -> Outline:
        """What the model computes; refuses what can't be served."""
        with quiet():
            found = outline_of(
                self.hf_config, self.source, trust_remote_code=self.trust_remote_code, decoder=self.layers
            )
        named = self.fields.texts("architectures")
        # transformers goes by model_type, others by architectures: what is run must not depend on the reader.
        if named and named[0].endswith(_CAUSAL) and named[0] != found.architecture:
            problem = f"architectures says {named[0]}, but model_type makes a {found.architecture}"
            raise refused(self.source, problem, "Correct one of them in config.json.")
        return found

    @cached_property
    def config(self) -> ModelConfig:
        return config_of(self.hf_config, self.outline, (self.fields, self.generation))

    @cached_property
    def names(self) -> dict[str, TensorInfo]:
        """As they are stored; transformers knows which part of the model each is."""
        files = weight_files(self.folder, needed=False)
        if not files:
            return {"all weights": described_tensor((1,), self.config)}
        return {name: info for path in files for name, info in stored_floats(path).items()}

    def tensors(self, device: torch.device | str = "cpu") -> Any:
        raise CheckpointError(f"reading {self.folder}: transformers loads its weights. Ask it for its model.")

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.folder, eos_ids=self.config.eos_ids)

    def chat_template(self) -> ChatTemplate:
        return ChatTemplate.from_folder(self.folder)

    def check(self, max_len: int) -> None:
        self.outline.refuse_beyond(self.source, max_len)

    def breaks(self) -> tuple[str, ...]:
        return self.outline.breaks

    def described(self, dtype: torch.dtype, device: torch.device) -> str:
        found = described(self.outline, routing_of(self.outline, dtype, device))
        return found if self.not_native is None else f"{found}; not native: {self.not_native}"

    def model(self, parts: ModelParts, dtype: torch.dtype, device: torch.device, progress: Progress = silent) -> Model:
        weight_files(self.folder)  # refuses a folder without them
        self.check(parts.max_len)
        progress("loading weights", 0, 1)
        routing = routing_of(self.outline, dtype, device)
        trust = self.trust_remote_code
        whole = read_weights(self.folder, self.hf_config, dtype, routing, trust_remote_code=trust).to(device)
        progress("loading weights", 1, 1)
        with quiet():
            return adapted(whole, self.outline, self.config, parts, self.source, progress)


def refuse_strange(source: str, fields: Fields, *, trust_remote_code: bool) -> None:
    """Refuse a folder's own code without --trust-remote-code, and quantised weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = fields.text("model_type", "")
    if model_type not in CONFIG_MAPPING_NAMES and not trust_remote_code:
        if "auto_map" in fields:
            raise refused(
                source,
                f"{model_type or 'its architecture'!r} is not part of transformers, and the folder's own Python code "
                "is not run unasked",
                "Read that code, then give --trust-remote-code.",
            )
        raise refused(source, f"transformers does not know the model_type {model_type!r}", "Get a newer transformers.")
    if "quantization_config" in fields:
        method = fields.section("quantization_config").text("quant_method", "quantised")
        raise refused(
            source,
            f"its weights are stored as {method}",
            "Use the original checkpoint, or a GGUF file of a native family.",
        )
