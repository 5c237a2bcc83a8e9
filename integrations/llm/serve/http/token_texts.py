"""What single tokens stand for, as text and as bytes."""

from __future__ import annotations

from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer


def _byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte, as in GPT-2's encoder.py."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()


class TokenTexts:
    """Text and bytes of single tokens. A token may hold part of a character; its text then has U+FFFD."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        self._added = {i: token.content for i, token in self._tokenizer.get_added_tokens_decoder().items()}

    def bytes(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token]).encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level and all(character in _BYTES for character in text):
            return bytes(_BYTES[character] for character in text)
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()

    def text(self, token: int) -> str:
        return self.bytes(token).decode("utf-8", "replace")
