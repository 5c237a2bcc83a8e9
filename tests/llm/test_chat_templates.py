"""Rendered text is what `transformers.apply_chat_template` gives, over the features that real templates use."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from llm_models import byte_tokenizer

from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.checkpoint.gguf_tokenizer import tokenizer_from_fields
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "<é & 'so'>", "parameters": {"b": 1, "a": 2}},
}
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": 'hi <b> é 東京 "q"'}],
    [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "hm", "tool_calls": None},
        {"role": "user", "content": "three"},
    ],
    [
        {"role": "user", "content": "w?"},
        {
            "role": "assistant",
            "thinking": "call it",
            "tool_calls": [{"function": {"name": "weather", "arguments": {}}}],
        },
        {"role": "tool", "content": "sun"},
    ],
]
LOOP = "{% for m in messages %}"
TEMPLATES = {
    "chatml": LOOP + "{{'<|im_start|>' + m['role'] + '\\n' + (m.content or '') + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "tojson": "{{ messages | tojson }}",
    "tojson ascii": "{{ messages | tojson(ensure_ascii=true) }}",
    "tojson not ascii": "{{ messages | tojson(ensure_ascii=False) }}",
    "tojson indent": "{{ messages | tojson(indent=4) }}{{ tools | tojson(indent=2, sort_keys=true) }}",
    "tojson separators": "{{ messages | tojson(separators=(',', ':')) }}{{ messages | tojson(true) }}",
    "break": LOOP + "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "continue": LOOP + "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": LOOP + "{{ m.role }}{% generation %}{{ m.content }}!{% endgeneration %}\n{% endfor %}",
    "tools none": "{% if tools is not none %}T{{ tools | tojson }}{% else %}none{% endif %}",
    "tools defined": "{% if tools is defined %}defined{{ tools }}{% endif %}",
    "tools falsy": "{% if not tools %}no{% endif %}{% if tools %}{{ tools[0].function.name }}{% endif %}",
    "documents none": "{% if documents is none %}none{% else %}{{ documents[0].title }}{% endif %}",
    "documents defined": "{{ documents is defined }}",
    "null keys are left out": LOOP + "{{ 'tool_calls' in m }}{{ m.tool_calls is defined }}{% endfor %}",
    "reasoning": LOOP + "[{{ m.reasoning_content }}|{{ m.thinking }}]{% endfor %}",
    "strftime": "{{ strftime_now('%Y') }}",
    "specials": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ unk_token is defined }}",
    "blocks are trimmed": "{% if true %}\n  x\n  {% endif %}\ny  \n",
    "namespace": "{% set ns = namespace(n=0) %}" + LOOP + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro w(x) %}<{{ x }}>{% endmacro %}" + LOOP + "{{ w(m.role) }}{% endfor %}",
    "slices and filters": "{{ messages[::-1] | length }}{{ messages[-1].role | upper }}{{ (messages | first).role }}",
    "strings": LOOP + "{{ (m.content or '').strip().split(' ')[0] }}{{ 'x'.startswith('x') }}{% endfor %}",
    "dict": "{% set d = dict(a=1) %}{{ d.a }}{{ {'b': 2}.items() | list }}",
    "own variable": "{{ enable_thinking is defined and enable_thinking }}",
    "nothing is escaped": LOOP + "{{ m.content }}{% endfor %}",
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tools": [TOOL]},
    {"documents": [{"title": "T", "text": "x"}], "enable_thinking": True},
    {"add_generation_prompt": False},
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(400), bos_token="<start>", eos_token="<end>"
    )


def ours(templates: Any) -> ChatTokenizer:
    specials = {"bos_token": "<start>", "eos_token": "<end>"}
    return ChatTokenizer(byte_tokenizer(400), frozenset(), templates, specials)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str, theirs: Any) -> None:
    mine = ours(TEMPLATES[name])
    for messages in MESSAGES:
        for options in OPTIONS:
            said = {"add_generation_prompt": True, **options}
            want = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **said)
            assert mine.templates.render(messages, **said) == want
            ids = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], return_dict=False, **said)
            assert mine.chat(messages, **said) == ids


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{% if %}", "refused the messages: "),
        ("{{ nothing.at.all }}", "refused the messages: "),
        ("{{ messages[0].role + 1 }}", "failed: TypeError"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ messages[0]['content'].no_such() }}", "refused the messages: "),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: "),
    ],
)
def test_whatever_a_template_raises_is_one_error(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ours(template).chat(MESSAGES[0])


NAMED = {
    "default": "D{{ messages[0].content }}",
    "tool_use": "T{{ tools | length }}",
    "rag": "R{{ documents | length }}",
}


@pytest.mark.parametrize("form", ["dict", "list", "files"])
def test_named_templates_are_chosen_as_transformers_chooses(form: str, tmp_path: Path) -> None:
    byte_tokenizer(400).save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {}
    if form == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        for name, source in NAMED.items():
            file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            (tmp_path / file).write_text(source, encoding="utf-8")
    else:
        listed = [{"name": name, "template": source} for name, source in NAMED.items()]
        settings["chat_template"] = NAMED if form == "dict" else listed
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    render = load_tokenizer(tmp_path).templates.render
    messages = [{"role": "user", "content": "x"}]
    assert render(messages) == "Dx"
    assert render(messages, tools=[TOOL]) == "T1"
    assert render(messages, name="rag", documents=[{}, {}]) == "R2"
    with pytest.raises(ValueError, match="no chat template 'other'; it has default, rag, tool_use"):
        render(messages, name="other")


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    tokenizer = ours({"tool_use": "x", "rag": "y"})
    with pytest.raises(ValueError, match="no chat template 'default'; it has rag, tool_use"):
        tokenizer.chat(MESSAGES[0])
    byte_tokenizer(400).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template is a int"):
        load_tokenizer(tmp_path)


def test_gguf_files_have_named_templates_too() -> None:
    model = json.loads(byte_tokenizer(400).to_str())["model"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [t for t, _ in sorted(model["vocab"].items(), key=lambda kv: kv[1])],
        "tokenizer.ggml.merges": [" ".join(m) for m in model["merges"]],
        "tokenizer.chat_template": "D",
        "tokenizer.chat_template.tool_use": "T{{ tools | length }}",
    }
    tokenizer = tokenizer_from_fields(fields)
    assert tokenizer.template == "D"
    assert tokenizer.templates.render([], tools=[TOOL]) == "T1"
    for missing in ("tokens", "merges"):
        less = {key: value for key, value in fields.items() if key != f"tokenizer.ggml.{missing}"}
        with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.{missing} is None; expected a list of texts"):
            tokenizer_from_fields(less)
    with pytest.raises(ValueError, match=r"m\.gguf: tokenizer\.ggml\.eos_token_id is 999; expected the id of one of"):
        tokenizer_from_fields({**fields, "tokenizer.ggml.eos_token_id": 999}, "m.gguf")


@pytest.mark.parametrize("text", ["a\ud83d", "\udcff"])
def test_half_a_character_is_refused(text: str) -> None:
    tokenizer = ours("{{ messages[0].content }}")
    for encode in (tokenizer.encode, lambda t: tokenizer.chat([{"role": "user", "content": t}])):
        with pytest.raises(ValueError, match=r"the text holds U\+D[8C][3F][DF] at position"):
            encode(text)


def test_the_date_is_today() -> None:
    assert ours("{{ strftime_now('%d %m %Y') }}").templates.render([]) == datetime.now().strftime("%d %m %Y")
