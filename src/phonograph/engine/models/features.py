"""Features of a configuration: fields that the dense decoder can't express are refused, unknown ones reported."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection

from phonograph.engine.json_fields import Fields
from phonograph.errors import CheckpointError
from phonograph.numbers import is_number

log = logging.getLogger("phonograph")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HF_READ = _names(
    """
    architectures attention_bias bos_token_id dtype eos_token_id head_dim hidden_act hidden_size intermediate_size
    is_causal layer_types max_position_embeddings max_window_layers mlp_bias model_type num_attention_heads
    num_hidden_layers num_key_value_heads original_max_position_embeddings partial_rotary_factor per_layer_config
    rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings torch_dtype
    use_sliding_window vocab_size
    """
)
_HF_WITHOUT_EFFECT = _names(
    """
    _attn_implementation_autoset _commit_hash _from_model_config _name_or_path add_cross_attention attention_dropout
    auto_map bad_words_ids begin_suppress_tokens chunk_size_feed_forward classifier_dropout
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping embd_pdrop
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id hidden_dropout id2label initializer_factor initializer_range is_decoder is_encoder_decoder
    is_llama_config label2id length_penalty max_length max_sequence_length min_length model_max_length
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torchscript transformers.js_config transformers_version typical_p unsloth_fixed
    unsloth_version use_bfloat16 use_cache
    """
)
"""About training, tasks, classes and sampling; transformers takes sampling from generation_config.json alone."""
_HF_OFF = _names("gradient_checkpointing qk_layernorm rope_interleaved use_flash_attn use_mrope use_qk_norm")
"""Switches that are off by default: no warning for one that is explicitly off."""
_HF_QUANTISED = ("quantization_config", "compression_config")

_SCALES = re.compile(r"scal(e|ing|ar)|multiplier|soft_?cap|factor|clip|clamp")
"""What arithmetic that other decoders have is called, in the names of numbers."""
_BOUNDS = re.compile(r"soft_?cap|clip|clamp")
"""Of these no number but 0, in GGUF files, means that nothing is bounded."""
_FAR = 1e300
_ATTENTION_SCALES = ("attention_multiplier", "attention_scale", "attn_scale", "softmax_scale", "attention.scale")

_GGUF_READ = _names(
    """
    attention.causal attention.head_count attention.head_count_kv attention.key_length attention.layer_norm_rms_epsilon
    attention.sliding_window attention.value_length block_count context_length embedding_length expert_count
    feed_forward_length rope.dimension_count rope.freq_base rope.scale_linear vocab_size
    """
)
_ELSEWHERE = "Use another checkpoint of the model, or another model."
_GGUF_WITHOUT_EFFECT = frozenset(["expert_used_count", "pooling_type", "tensor_data_layout"])


class NotComputedError(CheckpointError):
    """A field asks for what transformers computes, and native layers do not."""

    def __init__(self, fields: Fields, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"reading {fields.source}: {problem}. Use another model, or transformers' layers of this one "
            "(--model-impl hf)."
        )

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return CheckpointError, (str(self),)


def check_hf(fields: Fields, head_dim: int, also_read: Collection[str] = ()) -> None:
    """Refuse what a config.json sets and the decoder does not do; report fields that are not known here."""
    for name in _HF_QUANTISED:
        if name in fields:
            method = fields.section(name).text("quant_method", "unknown")
            raise CheckpointError(
                f"reading {fields.source}: {name} says {method!r}; unquantised weights are expected "
                "in safetensors. Use the original checkpoint, or a GGUF file."
            )
    if fields.values.get("per_layer_config"):
        raise CheckpointError(
            f"reading {fields.source}: per_layer_config is set; expected layers that are alike. {_ELSEWHERE}"
        )
    if fields.values.get("is_causal", True) is not True:  # null too: to transformers it says no
        raise CheckpointError(
            f"reading {fields.source}: is_causal is {str(fields.values['is_causal'])[:80]}; only decoders are "
            f"supported, in which it is true or absent. {_ELSEWHERE}"
        )
    known = (_HF_READ | _HF_WITHOUT_EFFECT).union(also_read)
    unknown = [name for name, value in fields.values.items() if value is not None and name not in known]
    scales = [name for name in unknown if _SCALES.search(name) and is_number(fields.values[name])]
    for name in scales:
        _refuse_unless_neutral(fields, name, head_dim, {1.0})
    silent = {*scales, *(name for name in _HF_OFF if fields.values.get(name) is False)}
    if strange := [name for name in unknown if name not in silent]:
        log.warning(
            "%s has fields that are not known here and have no effect: %s", fields.source, ", ".join(sorted(strange))
        )
    # Last, since transformers' layers may be taken then, and what is refused above is wrong in these too.
    if (activation := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise NotComputedError(fields, f"hidden_act is {activation!r}; supported is silu")
    if (share := fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise NotComputedError(fields, f"partial_rotary_factor is {share}; supported is 1")


def check_gguf(fields: Fields, head_dim: int, max_len: int) -> None:
    """Refuse what the metadata set and the decoder does not do; there, unknown numbers are arithmetic."""
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        problem = f"rope.dimension_count is {rotated} of {head_dim}; only whole heads are rotated here"
    elif (value_dim := fields.integer("attention.value_length", head_dim)) != head_dim:
        problem = f"attention.value_length is {value_dim} but the keys have {head_dim}; both must be equal"
    elif experts := fields.integer("expert_count", 0):
        problem = f"expert_count is {experts}; a mixture of experts is not supported"
    elif 0 < (window := fields.integer("attention.sliding_window", 0)) < max_len:
        problem = f"attention.sliding_window is {window}, and no layers are named that it is for"
    elif (scale := fields.number("rope.scale_linear", 1.0)) != 1.0:
        problem = f"rope.scale_linear is {scale}; expected the newer rope.scaling.* fields"
    elif not fields.flag("attention.causal", True):
        problem = "attention.causal is False; only decoders are supported"
    else:
        known = _GGUF_READ | _GGUF_WITHOUT_EFFECT
        for name in fields.values:
            if name not in known and not name.startswith("rope.scaling."):
                _refuse_unless_neutral(fields, name, head_dim, {0.0, 1.0} if name.endswith("scale") else {0.0})
        return
    raise CheckpointError(f"reading {fields.source}: {problem}. {_ELSEWHERE}")


def _refuse_unless_neutral(fields: Fields, name: str, head_dim: int, neutral: set[float]) -> None:
    """Refuse a field whose value changes what a model computes, as all but a few values of it do."""
    value = fields.values[name]
    if name in _ATTENTION_SCALES:
        neutral = {max(head_dim, 1) ** -0.5, *(neutral - {1.0})}
    elif name == "query_pre_attn_scalar":
        neutral = {float(head_dim)}
    elif _BOUNDS.search(name):
        neutral = neutral - {1.0}
    if isinstance(value, str):
        log.warning("%s: %s is %r, which is not known here and has no effect", fields.source, name, value[:80])
        return
    given = value if isinstance(value, list) else [value]
    numbers = [max(min(item, _FAR), -_FAR) for item in given if isinstance(item, int | float)]
    is_neutral = all(any(math.isclose(number, one, rel_tol=1e-6) for one in neutral) for number in numbers)
    if is_neutral and len(numbers) == len(given):
        return
    expected = " or ".join([*(f"{one:g}" for one in sorted(neutral)), "no such field"])
    raise CheckpointError(
        f"reading {fields.source}: {name} is {str(value)[:80]}, which this decoder does not compute; "
        f"expected {expected}. Use an engine that supports it: without it the outputs would be wrong."
    )
