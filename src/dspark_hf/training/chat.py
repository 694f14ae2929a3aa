"""Loss masks of conversations, from the target's own chat template by comparing token ids.

The target generates, in the turn of assistant message i, the tokens by which the text that it was given grows to the
text with its answer. With ⊑ for "is a prefix of", on ids,

    given_i = ids(messages[:i] + generation prompt)  ⊑  turn_i = ids(messages[:i+1])  ⊑  ids(messages)

and the tokens of turn_i behind given_i are supervised. A template that breaks either relation (by dropping earlier
thinking, say) shows the target another text in training than it met when it answered: such turns are refused.
"""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

OTHERWISE_WORDED = (
    "Either the template words the answer otherwise than the target generates it, or the tokenizer merges text across "
    "the boundary; train on token ids instead, the prompt_ids and response_ids that `dspark regenerate` writes"
)
REWRITTEN = (
    "The template edits its history, as those that drop earlier thinking do; train on one turn at a time: split the "
    "conversation into its prefixes, each with last_turn_only=True (load_conversations: one_turn_per_sample=True)"
)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    end_ids: Iterable[int] = (),
    last_turn_only: bool = False,
    **template_kwargs,
) -> dict[str, torch.Tensor]:
    """A conversation as `input_ids` and `loss_mask`, (T,) each; the mask is true on what the target generates.

    Args:
        messages: role and content, and what else the template reads: `tool_calls`, `reasoning_content`, …
        tools: JSON schemas for the template.
        end_ids: tokens that end the target's answers, beside the tokenizer's end-of-sequence token.
        last_turn_only: only the last assistant message is supervised, and the template may rewrite those before it.
        template_kwargs: for the template, as `enable_thinking`.

    Raises:
        ValueError: without an assistant message, for one that opens the conversation, and for one that the template
            renders otherwise than it was generated; the message names it.
    """
    check_messages(messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("no assistant message, nothing to learn from; `dspark regenerate` answers prompts first")
    taught = turns[-1:] if last_turn_only else turns
    if taught[0] == 0:
        raise ValueError("message 0 is the assistant's: expected a system or user message that it answers")
    ends = {tokenizer.eos_token_id, *end_ids}
    whole = chat_ids(tokenizer, messages, tools=tools, **template_kwargs)
    mask = torch.zeros(len(whole), dtype=torch.bool)
    for i in taught:
        given = chat_ids(tokenizer, messages[:i], True, tools, **template_kwargs)
        turn = chat_ids(tokenizer, messages[: i + 1], tools=tools, **template_kwargs)
        _check_prefix(
            tokenizer, given, turn, f"message {i} does not go on from the generation prompt", OTHERWISE_WORDED
        )
        _check_prefix(tokenizer, turn, whole, f"message {i} is rewritten once others follow it", REWRITTEN)
        mask[len(given) : len(given) + _generated(tokenizer, turn[len(given) :], ends)] = True
    return {"input_ids": torch.tensor(whole), "loss_mask": mask}


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    **template_kwargs,
) -> list[int]:
    """Token ids of messages in the chat template.

    Raises:
        ValueError: the tokenizer has no template, or the template cannot take these messages.
    """
    from jinja2 import TemplateError  # here, as in transformers, where only templates need it

    try:
        encoded = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, return_dict=True, **template_kwargs
        )
    except (TemplateError, TypeError) as error:  # a TypeError comes from a content that is no text
        raise ValueError(f"the chat template fails on {str(messages)[:200]}: {error}") from error
    return encoded["input_ids"]


def check_messages(messages: Any) -> None:
    """
    Raises:
        ValueError: for anything but a list of objects with a role each.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {str(messages)[:80]}, expected a list of at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} is {str(message)[:80]}, expected an object with role and content")


def _check_prefix(tokenizer, start: list[int], text: list[int], problem: str, remedy: str) -> None:
    if text[: len(start)] == start:
        return
    at = next((n for n, (a, b) in enumerate(zip(start, text, strict=False)) if a != b), len(text))
    here, there = (tokenizer.decode(ids[at : at + 12]) for ids in (text, start))
    raise ValueError(f"{problem}: at token {at} it reads {here!r}, expected {there!r}. {remedy}")


def _generated(tokenizer, span: list[int], ends: set[int | None]) -> int:
    """How many tokens of a turn's `span` the target generates: through the first that ends an answer.

    Templates write more behind it, a newline in ChatML, that the target never generates: supervised, it would be
    learnt as what follows the end of every answer. Where none of `ends` occurs (Gemma's and others' end of turn is not
    the tokenizer's end of sequence, and only the target's generation settings tell), a special token with nothing but
    white space behind it is taken for the end. Else the whole span was generated, as far as can be known.
    """
    for count, token in enumerate(span, 1):
        if token in ends:
            return count
    count = len(span)
    while count and tokenizer.decode(span[count - 1 : count]).isspace():
        count -= 1
    added = tokenizer.added_tokens_decoder
    return count if count and span[count - 1] in added and added[span[count - 1]].special else len(span)
