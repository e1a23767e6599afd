"""Text: to token ids and back, one token at a time, with stop strings and chat templates."""

from phonograph.engine.text.chat import ChatTemplate
from phonograph.engine.text.content import ContentGuard
from phonograph.engine.text.detokenizer import Detokenizer
from phonograph.engine.text.reader import TextReader
from phonograph.engine.text.stops import StopStrings
from phonograph.engine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "ContentGuard", "Detokenizer", "StopStrings", "TextReader", "Tokenizer"]
