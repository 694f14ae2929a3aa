"""`dspark generate`: one prompt, plain and drafted, with the accepted draft tokens coloured."""

import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from ..evaluation.benchmark import parse_policy
from ..evaluation.comparison import first_difference
from ..evaluation.loading import chat_inputs, load_pair
from ..telemetry_dspark import SpeculationStats, record_speculation

ACCEPTED = "bold green"


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    target: Annotated[str, typer.Option(help="Folder or Hub id of the target.")],
    drafter: Annotated[str, typer.Option(help="Folder or Hub id of the drafter.")],
    policy: Annotated[str, typer.Option(help="fixed:N or threshold:T.")] = "fixed",
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    pack: Annotated[bool, typer.Option(help="Pack linear layers for the CPU.")] = True,
) -> None:
    """Answers a prompt with TARGET, plain and drafted by DRAFTER, and compares the speed."""
    compare(target, drafter, prompt, policy, max_new_tokens, temperature, seed, threads, pack)


def compare(
    target_name: str,
    drafter_name: str,
    prompt: str,
    policy: str = "fixed",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    threads: int | None = None,
    pack: bool = True,
) -> None:
    """Streams both answers and prints the figures."""
    console = Console(highlight=False)
    if threads:
        torch.set_num_threads(threads)
    target, tokenizer, drafter = load_pair(target_name, drafter_name, pack)
    drafter.verify_policy = parse_policy(policy)
    inputs = chat_inputs(tokenizer, prompt, target.device)
    sampling = {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature > 0 else {})
    options = {"max_new_tokens": max_new_tokens, **sampling}
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=8, do_sample=False)  # warms up both models
    length = inputs["input_ids"].shape[1]

    texts, speeds = [], []
    for title, assistant in (("plain", None), ("drafted", drafter)):
        console.rule(title)
        torch.manual_seed(seed)
        with record_speculation() as stats:
            streamer = ColourStreamer(tokenizer, console, stats if assistant is not None else None)
            start = time.perf_counter()
            texts.append(target.generate(**inputs, assistant_model=assistant, streamer=streamer, **options)[0, length:])
            speeds.append(len(texts[-1]) / (time.perf_counter() - start))

    console.rule()
    table = Table(box=None, show_header=False)
    table.add_row("plain", f"{speeds[0]:.1f} tokens/s")
    table.add_row("drafted", f"{speeds[1]:.1f} tokens/s")
    table.add_row("speed-up", f"{speeds[1] / speeds[0]:.2f}")
    table.add_row("τ (tokens per verification)", f"{stats.acceptance_length:.2f}")
    table.add_row("acceptance by position", " ".join(f"{a:.2f}" for a in stats.acceptance_by_position))
    table.add_row("machine", f"{target.device}, {target.dtype}, {torch.get_num_threads()} threads")
    if temperature == 0:
        difference = first_difference(target, inputs["input_ids"][0], texts[0], texts[1])
        table.add_row("texts", "the same" if difference is None else str(difference))
    console.print(table)


class ColourStreamer(BaseStreamer):
    """Prints text as it comes, tokens that the drafter guessed right in colour.

    Args:
        stats: open recorder of a drafted call, whose rounds tell how tokens came about: a round's tokens are printed
            when it has ended. None for plain generation, where each token is printed at once.
    """

    def __init__(self, tokenizer, console: Console, stats: SpeculationStats | None = None):
        self.tokenizer, self.console, self.stats = tokenizer, console, stats
        self.prompt_seen, self.rounds, self.undrafted = False, 0, 1  # the first token comes from the prefill
        self.pending: list[int] = []
        self.ids: list[int] = []
        self.printed = ""

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        if self.stats is None or len(self.stats.accepted_lengths) > self.rounds:
            self._flush()
        self.pending += value.tolist()

    def end(self) -> None:
        self._flush()
        self.console.print()

    def _flush(self) -> None:
        """Prints the tokens of the round that ended, and those before it."""
        accepted = self.stats.accepted_lengths[self.rounds :][:1] if self.stats else []
        drafted = range(self.undrafted, self.undrafted + sum(accepted))
        for i, token in enumerate(self.pending):
            self.ids.append(token)
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # else in the middle of a character
                style = ACCEPTED if i in drafted else ""
                self.console.print(Text(text[len(self.printed) :], style=style), end="", soft_wrap=True)
                self.printed = text
        if self.pending:
            self.rounds, self.undrafted, self.pending = self.rounds + len(accepted), 0, []
