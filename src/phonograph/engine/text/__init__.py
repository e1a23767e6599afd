"""Text: to token ids and back, one token at a time, with stop strings and chat templates."""

from phonograph.engine.text.chat import ChatTemplate
from phonograph.engine.text.detokenizer import Detokenizer, TextReader
from phonograph.engine.text.stops import StopStrings
from phonograph.engine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "TextReader", "Tokenizer"]
