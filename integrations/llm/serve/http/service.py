"""What all routes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time

from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.serve.guides import Guides
from hostring.integrations.llm.serve.head import Cluster
from hostring.integrations.llm.serve.http.token_texts import TokenTexts
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.scheduler import Scheduler


@dataclass
class Service:
    """The server's parts, as routes see them. `started`: seconds since 1970."""

    options: ServeOptions
    scheduler: Scheduler
    cluster: Cluster
    tokenizer: ChatTokenizer
    vocab_size: int
    started: int = field(default_factory=lambda: int(time()))
    texts: TokenTexts = field(init=False)
    guides: Guides = field(init=False)

    def __post_init__(self) -> None:
        self.texts, self.guides = TokenTexts(self.tokenizer), Guides(self.tokenizer)
