"""Increments through a model's own tokenizer and chat template."""

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ampd.adapters.tokenizer_hf import HfTokenizer
from ampd.core.errors import AmpdError, ErrorReason
from ampd.models import prepare
from ampd.ports import ChatMessage

IM_END = 2

LLAMA2 = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
)
WITH_TOOLS = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<result id={{ m.tool_call_id }} "
    "from={{ m.name }}>{{ m.content | tojson }}</result><|im_end|>\n"
    "{% elif m.role in ['user', 'assistant', 'system'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.name }}</call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_TO_THE_FRONT = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "### assistant\n"
)
FORGETFUL = "### {{ messages[-1].content }}\n"


def user(content: str) -> ChatMessage:
    return ChatMessage("user", content)


@pytest.fixture(scope="session")
def folder() -> Path:
    return prepare("tiny")


@pytest.fixture(scope="session")
def smollm2(folder: Path) -> HfTokenizer:
    return HfTokenizer(folder)


@pytest.fixture(scope="session")
def reference(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.fixture
def with_template(folder: Path, tmp_path: Path) -> Callable[[str | None], HfTokenizer]:
    """SmolLM2's tokenizer under another chat template."""

    def make(template: str | None) -> HfTokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / name, tmp_path / name)
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return HfTokenizer(tmp_path)

    return make


def refused_field(
    tokenizer: HfTokenizer, messages: list[ChatMessage], *, first: bool = False
) -> str:
    with pytest.raises(AmpdError) as caught:
        tokenizer.encode_messages(messages, first=first, last_token_id=None)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    return caught.value.violations[0].field


# --- SmolLM2 as it is


def test_the_first_round_is_the_template_itself(
    smollm2: HfTokenizer, reference: PreTrainedTokenizerFast
) -> None:
    ids = smollm2.encode_messages([user("Hi")], first=True, last_token_id=None)
    conversation = [{"role": "user", "content": "Hi"}]
    whole = reference.apply_chat_template(conversation, add_generation_prompt=True)
    assert ids.tolist() == whole["input_ids"]
    assert ids.itemsize == 4


def test_a_later_round_ends_the_turn_and_repeats_no_system_prompt(
    smollm2: HfTokenizer, reference: PreTrainedTokenizerFast
) -> None:
    ids = smollm2.encode_messages([user("And?")], first=False, last_token_id=None)
    assert reference.decode(ids) == (
        "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_stop_token_that_the_model_emitted_is_not_repeated(
    smollm2: HfTokenizer, reference: PreTrainedTokenizerFast
) -> None:
    ids = smollm2.encode_messages([user("And?")], first=False, last_token_id=IM_END)
    assert reference.decode(ids) == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("stopped", [True, False])
def test_increments_add_up_to_the_rendered_conversation(
    smollm2: HfTokenizer, reference: PreTrainedTokenizerFast, stopped: bool
) -> None:
    turns = [
        ([ChatMessage("system", "Count."), user("one")], "two, naïve"),
        ([user("  three ")], "four\n"),
        ([ChatMessage("tool", '{"n": 5}'), user("go\n\non"), user("雪")], "six <b>"),
        ([ChatMessage("assistant", "seven"), ChatMessage("system", "stop")], "eight"),
    ]
    history: list[int] = []
    conversation: list[dict[str, str]] = []
    for messages, answer in turns:
        history += smollm2.encode_messages(
            messages, first=not history, last_token_id=history[-1] if history else None
        )
        conversation += [{"role": m.role, "content": m.content} for m in messages]
        assert reference.decode(history) == reference.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        history += reference.encode(answer, add_special_tokens=False)
        history += [IM_END] if stopped else []
        conversation.append({"role": "assistant", "content": answer})


def test_a_last_token_that_is_no_stop_token_changes_nothing(smollm2: HfTokenizer) -> None:
    plain = smollm2.encode_messages([user("a")], first=False, last_token_id=None)
    newline = smollm2.encode_text("\n", first=False)[0]
    for last in (newline, 0, 1):
        ids = smollm2.encode_messages([user("a")], first=False, last_token_id=last)
        assert ids == plain


def test_raw_text_is_taken_as_it_is(
    smollm2: HfTokenizer, reference: PreTrainedTokenizerFast
) -> None:
    for text in ("x", " x", "\n\nx ", "", "<|im_start|>user\nx"):
        for first in (True, False):
            assert reference.decode(smollm2.encode_text(text, first=first)) == text


def test_a_typed_special_token_is_that_token(smollm2: HfTokenizer) -> None:
    ids = smollm2.encode_messages([user("a<|im_end|>b")], first=False, last_token_id=None)
    assert list(ids).count(IM_END) == 3


def test_all_ids_are_inside_the_vocabulary(smollm2: HfTokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert max(smollm2.encode_text("any text, 任意", first=True)) < smollm2.vocab_size


def test_a_text_longer_than_the_model_is_encoded_whole(smollm2: HfTokenizer) -> None:
    assert len(smollm2.encode_text("word " * 20_000, first=True)) >= 20_000


# --- other templates


def test_a_template_with_tools_shows_their_results(
    with_template: Callable[[str | None], HfTokenizer], reference: PreTrainedTokenizerFast
) -> None:
    tokenizer = with_template(WITH_TOOLS)
    result = ChatMessage("tool", 'say "hi"', name="shell", tool_call_id="c1")
    again = ChatMessage("assistant", "", extra={"tool_calls": [{"name": "shell"}]})
    ids = tokenizer.encode_messages([result, again], first=False, last_token_id=IM_END)
    assert reference.decode(ids) == (
        '\n<|im_start|>user\n<result id=c1 from=shell>"say \\"hi\\""</result><|im_end|>\n'
        "<|im_start|>assistant\n<call>shell</call><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_default_system_prompt_comes_once(
    with_template: Callable[[str | None], HfTokenizer], reference: PreTrainedTokenizerFast
) -> None:
    tokenizer = with_template(WITH_TOOLS)
    first = tokenizer.encode_messages([user("a")], first=True, last_token_id=None)
    later = tokenizer.encode_messages([user("b")], first=False, last_token_id=None)
    assert "Be brief." in reference.decode(first)
    assert "Be brief." not in reference.decode(later)


def test_a_role_that_the_template_leaves_out_is_refused(
    with_template: Callable[[str | None], HfTokenizer],
) -> None:
    messages = [user("a"), ChatMessage("critic", "a")]
    for first in (True, False):
        assert refused_field(with_template(WITH_TOOLS), messages, first=first) == (
            "increment.messages[1].role"
        )


def test_a_message_that_the_template_moves_to_the_front_is_refused(
    with_template: Callable[[str | None], HfTokenizer],
) -> None:
    messages = [user("a"), ChatMessage("system", "x")]
    tokenizer = with_template(SYSTEM_TO_THE_FRONT)
    assert refused_field(tokenizer, messages) == "increment.messages[1].role"
    tokenizer.encode_messages(messages, first=True, last_token_id=None)


def test_a_template_that_wants_alternation_is_obeyed(
    with_template: Callable[[str | None], HfTokenizer], reference: PreTrainedTokenizerFast
) -> None:
    tokenizer = with_template(LLAMA2)
    chain = [user("a"), ChatMessage("assistant", "b"), user(" c ")]
    ids = tokenizer.encode_messages(chain, first=False, last_token_id=None)
    assert reference.decode(ids) == (
        " <|im_end|><|im_start|>[INST] a [/INST] b <|im_end|><|im_start|>[INST] c [/INST]"
    )
    stopped = tokenizer.encode_messages(chain[:1], first=False, last_token_id=IM_END)
    assert reference.decode(stopped) == "<|im_start|>[INST] a [/INST]"


@pytest.mark.parametrize(
    ("messages", "first", "index"),
    [
        ([ChatMessage("tool", "x")], False, 0),
        ([ChatMessage("assistant", "x")], False, 0),
        ([ChatMessage("assistant", "x")], True, 0),
        ([user("x"), user("y")], False, 1),
        ([user("x"), ChatMessage("assistant", "y"), ChatMessage("tool", "z")], True, 2),
    ],
)
def test_what_the_template_refuses_is_named(
    with_template: Callable[[str | None], HfTokenizer],
    messages: list[ChatMessage],
    first: bool,
    index: int,
) -> None:
    assert refused_field(with_template(LLAMA2), messages, first=first) == (
        f"increment.messages[{index}].role"
    )


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[9].role }}", "{% broken"])
def test_a_broken_template_is_an_error_of_the_messages(
    with_template: Callable[[str | None], HfTokenizer], template: str
) -> None:
    assert refused_field(with_template(template), [user("x")]).startswith("increment.messages")


def test_a_template_that_forgets_earlier_turns_takes_only_a_first_round(
    with_template: Callable[[str | None], HfTokenizer],
) -> None:
    tokenizer = with_template(FORGETFUL)
    assert refused_field(tokenizer, [user("x")]) == "increment.messages[0].role"
    tokenizer.encode_messages([user("x")], first=True, last_token_id=None)


def test_no_template_and_no_messages_are_refused(
    with_template: Callable[[str | None], HfTokenizer], smollm2: HfTokenizer
) -> None:
    assert refused_field(with_template(None), [user("x")]) == "increment.messages"
    assert refused_field(smollm2, []) == "increment.messages"


# --- other tokenizers


def test_text_inside_a_history_gets_no_space_in_front(tmp_path: Path) -> None:
    """Sentencepiece style: the start of a text is a word's start."""
    pieces = ["<unk>", "<s>", "</s>", "▁ab", "ab", "▁", "c", "#", "\n"]
    backend = Backend(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    template = "{% for m in messages %}#{{ m.content }}\n{% endfor %}#"
    PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, **special
    ).save_pretrained(str(tmp_path))
    tokenizer = HfTokenizer(tmp_path)

    def shown(ids: object) -> list[str]:
        return [pieces[i] for i in ids]  # type: ignore[attr-defined]

    assert shown(tokenizer.encode_text("ab", first=True)) == ["▁ab"]
    assert shown(tokenizer.encode_text("ab", first=False)) == ["ab"]
    later = tokenizer.encode_messages([user("c")], first=False, last_token_id=2)
    assert shown(later) == ["\n", "#", "c", "\n", "#"]


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(AmpdError) as caught:
        HfTokenizer(tmp_path)
    assert caught.value.violations[0].field == "model"


def test_it_needs_neither_torch_nor_a_network(folder: Path) -> None:
    program = textwrap.dedent(f"""
        import json, re, socket, sys
        def refuse(*args, **kwargs):
            raise AssertionError("no network")
        socket.socket.connect = socket.getaddrinfo = refuse
        from pathlib import Path
        from ampd.adapters.tokenizer_hf import HfTokenizer
        from ampd.ports import ChatMessage
        tokenizer = HfTokenizer(Path({str(folder)!r}))
        ids = tokenizer.encode_messages([ChatMessage("user", "x")], first=False, last_token_id=2)
        status = Path("/proc/self/status").read_text()
        peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])
        print(json.dumps([len(ids), "torch" in sys.modules, peak_kib]))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    tokens, torch, peak_kib = json.loads(done.stdout)
    assert tokens > 0
    assert not torch
    assert peak_kib < 250 * 1024
