"""Loss masks from chat templates, and conversations as training texts, with a tokenizer of characters."""

import json

import datasets
import pytest
import torch
from generation_helpers import character_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_hf.training import load_answers, load_conversations, render_chat, sample_id

START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + START
TOOLS = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{% if m.role == 'tool' %}user
<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}{%
for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
REWRITES = """{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{%
set last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > last.user %}<think>{{ m.reasoning_content }}</think>{%
endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ASKED = {"role": "user", "content": "2 + 2?"}
THOUGHT = {"role": "assistant", "content": "4.", "reasoning_content": "Two and two."}
SUMS = [ASKED, {"role": "assistant", "content": "4."}, {"role": "user", "content": "And 2 more?"},
        {"role": "assistant", "content": "6."}]  # fmt: skip


def chat_tokenizer(template: str):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<eot>")])
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", template
    return tokenizer


def supervised(tokenizer, sample) -> list[str]:
    """The stretches of text under the mask."""
    ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].tolist()
    assert sample["input_ids"].dtype == torch.long and sample["loss_mask"].dtype == torch.bool
    stretches = [[]]
    for token, on in zip(ids, mask, strict=True):
        stretches = stretches[:-1] + [stretches[-1] + [token]] if on else stretches + [[]]
    return [tokenizer.decode(stretch) for stretch in stretches if stretch]


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------------------------------------------------------- masks


def test_every_answer_through_its_end_token():
    tokenizer = chat_tokenizer(CHATML)
    messages = [{"role": "system", "content": "Be brief."}, *SUMS, {"role": "user", "content": "Bye."}]
    sample = render_chat(tokenizer, messages)
    assert supervised(tokenizer, sample) == ["4.<|im_end|>", "6.<|im_end|>"]
    assert sample["input_ids"].tolist() == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]


def test_answers_without_text_are_their_end_token():
    tokenizer = chat_tokenizer(CHATML)
    sample = render_chat(tokenizer, [ASKED, {"role": "assistant", "content": ""}])
    assert supervised(tokenizer, sample) == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("end", "end_ids", "wanted"),
    [
        ("<eot>\n", (), "4.<eot>"),  # not the tokenizer's end of sequence, but a special token
        ("#~\n", (ord("#"),), "4.#"),  # as the target says
        ("#~\n", (), "4.#~\n"),  # no telling
        ("", (), "4."),
    ],
)
def test_other_ends_of_turns(end, end_ids, wanted):
    tokenizer = chat_tokenizer(CHATML.replace("<|im_end|>\n", end))
    assert supervised(tokenizer, render_chat(tokenizer, SUMS[:2], end_ids=end_ids)) == [wanted]


def test_tools_and_thinking():
    """Thoughts and tool calls are generated; the tools, their results and the generation prompt's own text are not."""
    tokenizer = chat_tokenizer(TOOLS)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        ASKED,
        {"role": "assistant", "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        THOUGHT,
    ]
    sample = render_chat(tokenizer, messages, tools)
    assert supervised(tokenizer, sample) == [
        '<think>\nAsk.\n</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>',
        "<think>\nTwo and two.\n</think>\n\n4.<|im_end|>",
    ]
    assert '"name": "add", "parameters"' in tokenizer.decode(sample["input_ids"])
    with pytest.raises(ValueError, match="message 1 does not go on .*'<think>.*prompt_ids"):
        render_chat(tokenizer, SUMS, enable_thinking=False)  # the prompt has a block that this history drops


def test_rewritten_history_is_refused_and_can_be_split():
    tokenizer = chat_tokenizer(REWRITES)
    messages = [ASKED, THOUGHT, {"role": "user", "content": "Sure?"}, THOUGHT]
    with pytest.raises(ValueError, match=r"message 1 is rewritten .*'4\..*'<think>.*last_turn_only=True"):
        render_chat(tokenizer, messages)
    for count in (2, 4):
        sample = render_chat(tokenizer, messages[:count], last_turn_only=True)
        assert supervised(tokenizer, sample) == ["<think>Two and two.</think>4.<|im_end|>"]
    assert supervised(tokenizer, render_chat(tokenizer, messages[:2])) == supervised(tokenizer, sample)
    with pytest.raises(
        ValueError, match="message 1 is rewritten"
    ):  # also where the last answer is not the last message
        render_chat(tokenizer, messages[:3], last_turn_only=True)


def test_tokens_merged_across_the_boundary_are_refused():
    characters = {chr(i): i for i in range(128)} | {"\n\n": 128}
    core = Tokenizer(models.WordLevel(characters, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n\n|[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", eos_token="~")
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "~")
    fine = render_chat(tokenizer, [ASKED, {"role": "assistant", "content": "4\n\n."}])
    assert fine["input_ids"][fine["loss_mask"]].tolist() == [ord("4"), 128, ord("."), ord("~")]
    with pytest.raises(ValueError, match="message 1 does not go on .*merges"):
        render_chat(tokenizer, [ASKED, {"role": "assistant", "content": "\n4."}])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([ASKED], "no assistant message.*dspark regenerate"),
        ([THOUGHT, ASKED, THOUGHT], "message 0 is the assistant's.*expected"),
        ([ASKED, "4."], "message 1 is 4.*expected"),
        ([ASKED, {"content": "4."}], "message 1 is .*expected an object with role"),
        ([], "expected a list"),
        ("2 + 2?", "expected a list"),
        ([ASKED, ASKED, THOUGHT], "template fails on .*roles must alternate"),
        ([ASKED, {"role": "assistant", "content": [4]}], "template fails on"),
    ],
)
def test_refused_messages(messages, problem):
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    with pytest.raises(ValueError, match=problem):
        render_chat(chat_tokenizer(strict), messages)


# ------------------------------------------------------------------------------------------------------- training texts


def test_conversations_from_a_file(tmp_path):
    tokenizer = chat_tokenizer(CHATML)
    ids = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}
    silent = [ASKED, {"role": "assistant", "content": ""}, ASKED, {"role": "assistant", "content": ""}]
    path = write_lines(
        tmp_path / "chats.jsonl",
        {"messages": SUMS},
        {"turns": SUMS[:2]},
        {"messages": SUMS} | ids,
        {"messages": silent},
    )
    samples = load_conversations(path, tokenizer, max_length=200)
    assert [supervised(tokenizer, sample) for sample in samples[:2]] == [
        ["4.<|im_end|>", "6.<|im_end|>"],
        ["4.<|im_end|>"],
    ]
    assert len(samples) == 3  # two end tokens apart have no place for an anchor
    assert samples[2]["input_ids"].tolist() == [1, 2, 3, 4, 5]  # what the target wrote goes before
    assert samples[2]["loss_mask"].tolist() == [0, 0, 1, 1, 1]
    for sample in samples:
        assert sample["id"] == sample_id(sample["input_ids"], sample["loss_mask"])

    start = samples[0]["loss_mask"].nonzero()[0, 0].item()
    for room, count in ((1, 0), (2, 2)):
        cut = load_conversations(write_lines(tmp_path / "one.jsonl", {"messages": SUMS}), tokenizer, start + room)
        assert [sample["loss_mask"].sum() for sample in cut] == ([count] if count else [])
        assert all(len(sample["input_ids"]) == start + room for sample in cut)


def test_one_turn_per_sample_and_settings_of_the_template(tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", {"messages": [ASKED, THOUGHT, ASKED, THOUGHT, ASKED]})
    tokenizer = chat_tokenizer(REWRITES)
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 1: message 1 is rewritten .*one_turn_per_sample"):
        load_conversations(path, tokenizer, 500)
    samples = load_conversations(path, tokenizer, 500, one_turn_per_sample=True)
    assert [supervised(tokenizer, sample) for sample in samples] == [["<think>Two and two.</think>4.<|im_end|>"]] * 2
    assert samples[0]["id"] != samples[1]["id"]

    tokenizer = chat_tokenizer(CHATML.replace("<|im_end|>\n", "{{ mark }}~\n"))
    path = write_lines(tmp_path / "sums.jsonl", {"messages": SUMS[:2]})
    (sample,) = load_conversations(path, tokenizer, 500, end_ids=[ord("~")], mark="!")
    assert supervised(tokenizer, sample) == ["4.!~"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"turns": ["2 + 2?", "And 2 more?"]}, "prompts without answers.*dspark regenerate"),
        ({"turns": [ASKED]}, "no assistant message"),
        ({"text": "4"}, "messages is None, expected"),
        ([ASKED, THOUGHT], "expected an object"),
        ({"response_ids": [1, 2]}, "prompt_ids is None, expected"),
        ({"messages": SUMS, "prompt_ids": [1], "response_ids": "4"}, "response_ids is 4, expected"),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_bad_rows_are_named(tmp_path, row, problem, split):
    path = write_lines(tmp_path / "chats.jsonl", {"messages": SUMS}, row)
    with pytest.raises(ValueError, match=rf"chats\.jsonl, line 2: .*{problem}"):
        load_conversations(path, chat_tokenizer(CHATML), 100, one_turn_per_sample=split)
    if isinstance(row, dict):
        with pytest.raises(ValueError, match=f"list, row 0: .*{problem}"):
            load_conversations([row], chat_tokenizer(CHATML), 100, one_turn_per_sample=split)


def test_conversations_from_datasets(tmp_path, monkeypatch):
    """Arrow gives every row and message the keys of all others: a template must not see them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = chat_tokenizer(TOOLS.replace("m.reasoning_content %}", "m.reasoning_content is defined %}"))
    rows = [
        {"messages": [ASKED, THOUGHT]},
        {"messages": SUMS},
        {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}]},
        {"prompt_ids": [1], "response_ids": [2, 3]},
    ]
    (tmp_path / "sums").mkdir()
    path = write_lines(tmp_path / "sums" / "train.jsonl", *rows)
    wanted = [sample["id"] for sample in load_conversations(path, tokenizer, 500)]
    assert len(set(wanted)) == 4
    keys = {key for row in rows for key in row}
    table = datasets.Dataset.from_list([dict.fromkeys(keys) | row for row in rows])
    assert table[1]["messages"][1]["reasoning_content"] is None and table[1]["prompt_ids"] is None
    for source in (table, f"{tmp_path / 'sums'}:train"):
        assert [sample["id"] for sample in load_conversations(source, tokenizer, 500)] == wanted
    first = load_conversations(f"{tmp_path / 'sums'}:train[:2]", tokenizer, 500)
    assert [sample["id"] for sample in first] == wanted[:2]
    with pytest.raises(ValueError, match=r"no file '.*nowhere.jsonl', expected .*org/name:split"):
        load_conversations(tmp_path / "nowhere.jsonl", tokenizer, 500)


def test_sample_ids_are_of_the_content(tmp_path):
    ids, mask = torch.tensor([1, 2, 3]), torch.tensor([False, True, True])
    name = sample_id(ids, mask)
    assert name == "67612eb45ba7c34f"  # caches on disk are named so: a change makes them useless
    assert name == sample_id(ids.int(), mask.long())
    others = [(ids + 1, mask), (ids, ~mask), (ids[:2], mask[:2]), (torch.tensor([12, 3]), mask[:2])]
    assert len({name, *(sample_id(*other) for other in others)}) == 5
    rows = [{"prompt_ids": [1], "response_ids": [2, 3, 4]}]
    (sample,) = load_answers([write_lines(tmp_path / "answers.jsonl", *rows)], max_length=3)
    assert sample["id"] == name
