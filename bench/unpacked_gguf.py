"""Writes a GGUF file whose tensors are those of another, unpacked to float32; all else is carried over."""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

ARCHITECTURE = "general.architecture"
FILE_TYPE = "general.file_type"
_WRITTEN_BY_ITSELF = {ARCHITECTURE, FILE_TYPE, "general.quantization_version"}


def write_unpacked(source: Path, target: Path) -> None:
    """Rows stay in the order of the file, which is the one that llama.cpp rotates queries and keys in."""
    reader = GGUFReader(source)
    architecture = reader.get_field(ARCHITECTURE)
    assert architecture is not None
    writer = GGUFWriter(target, architecture.contents())
    writer.add_file_type(LlamaFileType.ALL_F32)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _WRITTEN_BY_ITSELF:
            continue
        items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], items)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
