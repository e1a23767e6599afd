"""Side files of a tokenizer.json: tokens with a role, and tokens that are only added there.

They are read as `transformers` reads them: where tokenizer_config.json lists `added_tokens_decoder`, that file says
all; otherwise special_tokens_map.json overrules its roles, and added_tokens.json adds further tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from phonograph.engine.json_fields import Fields
from phonograph.errors import CheckpointError

log = logging.getLogger("phonograph")

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""The present name and the old one: a list of tokens, or an object of named ones."""
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens")
_SPACES = ("▁", "Ġ")
"""A space, as vocabularies write it."""
_FLAGS = ("single_word", "lstrip", "rstrip")


@dataclass(frozen=True)
class SideFiles:
    """Tokens that the files of a folder name besides the tokenizer.json."""

    roles: Mapping[str, AddedToken]
    """bos_token, eos_token, …, and names of the model's own such as image_token."""
    extra: tuple[AddedToken, ...]
    """Special tokens without a role."""
    added: Mapping[int, AddedToken]
    """By the id that `added_in` gives them."""
    added_in: str
    overrules: bool
    """Whether the flags in `added` hold for tokens that tokenizer.json has too."""
    source: str
    switches: Mapping[str, bool]
    """What tokenizer_config.json says of itself that the tokenizer.json does, or does not."""

    @classmethod
    def read(cls, folder: Path) -> SideFiles:
        """From tokenizer_config.json, special_tokens_map.json and added_tokens.json; any of them may be missing."""
        config = _fields(folder / "tokenizer_config.json")
        if "added_tokens_decoder" in config:
            listed = config.section("added_tokens_decoder")
            added = {_id_in(listed, key): _token(listed.section(key), special=None) for key in listed.values}
            roles, extra = _roles(config), tuple(_extra(config))
            return cls(roles, extra, added, listed.source, True, config.source, _switches(config))
        named = _fields(folder / "special_tokens_map.json")
        merged = Fields(named.source if named.values else config.source, {**config.values, **named.values})
        roles, others = _roles(merged), {token.content: token for fields in (config, named) for token in _extra(fields)}
        special = {token.content for token in roles.values()} | others.keys()
        more = _fields(folder / "added_tokens.json")
        added = {
            more.integer(name): AddedToken(name, normalized=name not in special, special=name in special)
            for name in more.values
        }
        return cls(roles, tuple(others.values()), added, more.source, False, config.source, _switches(config))

    @property
    def special_tokens(self) -> dict[str, str]:
        """The tokens with a role, as texts."""
        return {role: token.content for role, token in self.roles.items()}

    def warn_of_switches(self, backend: Tokenizer) -> None:
        """Name the switches that say something else than what the tokenizer.json does: they have no effect."""
        whole, plain = backend.encode("x"), backend.encode("x", add_special_tokens=False)
        done = {
            "add_bos_token": self._is_role(whole.tokens[:1], "bos_token"),
            "add_eos_token": self._is_role(whole.tokens[-1:], "eos_token"),
            "add_prefix_space": bool(plain.tokens) and plain.tokens[0].startswith(_SPACES),
            "split_special_tokens": False,
        }
        if wrong := [f"{name} {str(wanted).lower()}" for name, wanted in self.switches.items() if done[name] != wanted]:
            names = ", ".join(wrong)
            log.warning(
                "%s: without effect, as the tokenizer.json of the same folder does otherwise: %s", self.source, names
            )

    def _is_role(self, tokens: list[str], role: str) -> bool:
        return role in self.roles and tokens == [self.roles[role].content]

    def add_to(self, backend: Tokenizer) -> None:
        """Add what the vocabulary lacks; refuses a token that can't have the id that its file gives it."""
        known = backend.get_added_tokens_decoder()
        listed = {**known, **self.added} if self.overrules else {**self.added, **known}
        named = {token.content for token in self.roles.values()}
        for _, token in sorted(listed.items()):
            token.special = token.special or token.content in named
        backend.add_tokens([token for _, token in sorted(listed.items())])
        for token_id, token in self.added.items():
            found = backend.token_to_id(token.content)
            if found != token_id:
                raise CheckpointError(
                    f"reading {self.added_in}: the token {token.content[:80]!r} should have the id {token_id}, but the "
                    f"tokenizer.json of the folder makes it {found}. The files are of different models: get both again."
                )
        present = {token.content for token in backend.get_added_tokens_decoder().values()}
        others = {token.content: token for token in (*self.roles.values(), *self.extra) if token.content not in present}
        backend.add_tokens(list(others.values()))


def _switches(config: Fields) -> dict[str, bool]:
    found = {name: config.values.get(name) for name in _SWITCHES}
    return {name: value for name, value in found.items() if isinstance(value, bool)}


def _fields(path: Path) -> Fields:
    return Fields.from_json(path) if path.is_file() else Fields(str(path), {})


def _id_in(listed: Fields, key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 19):
        raise CheckpointError(
            f"reading {listed.source}: {key[:80]!r} is no token id; expected a whole number. Get the file again."
        )
    return int(key)


def _roles(fields: Fields) -> dict[str, AddedToken]:
    """The tokens with a role; of the names that only this model has, those whose value is a text."""
    own = [name for name, value in fields.values.items() if name.endswith("_token") and isinstance(value, str)]
    found = {name: _token_under(fields, name) for name in dict.fromkeys((*_ROLES, *own)) if name in fields}
    for name in _EXTRA:
        if isinstance(fields.values.get(name), dict):
            section = fields.section(name)
            found |= {role: _token_under(section, role) for role in section.values}
    return found


def _extra(fields: Fields) -> Iterator[AddedToken]:
    name = next((name for name in _EXTRA if fields.values.get(name)), _EXTRA[0])
    value = fields.values.get(name)
    if isinstance(value, list):
        items = Fields(f"{fields.source}, {name}", {str(index): item for index, item in enumerate(value)})
        yield from (_token_under(items, index) for index in items.values)
    elif value is not None:
        fields.section(name)  # named tokens, which are roles


def _token_under(fields: Fields, name: str) -> AddedToken:
    if isinstance(fields.values.get(name), dict):
        return _token(fields.section(name), special=True)
    return AddedToken(fields.text(name), special=True)


def _token(fields: Fields, *, special: bool | None) -> AddedToken:
    """A token with its flags; `special` overrules what they say of it."""
    special = fields.flag("special", False) if special is None else special
    flags = {flag: fields.flag(flag, False) for flag in _FLAGS}
    return AddedToken(
        fields.text("content"), special=special, normalized=fields.flag("normalized", not special), **flags
    )
