"""The texts of a batch while they grow by different numbers of tokens, and what `generate()` keeps per token.

Tokens are committed one by one, as plain `generate()` would: a stopping criterion that fires inside a block ends the
text there, streamers see each token, scores come per token. n rows are still decoding, B were asked for; a row's place
is its index among the B.
"""

import torch
from transformers import Cache, GenerationConfig, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from .processing_dspark import PositionLogits, ends_text
from .target_dspark import CACHE_NAME, key_columns


class Texts:
    """The rows that are still decoding, right-padded, and the texts of those that have ended.

    Args:
        prompt: (B, P), left-padded.
        stopping_criteria: asked about rows of the same length together, (m, T); a row that ends leaves, whatever the
            others do, and is filled up with padding.
        streamer: shown step i of all rows, (B,), once each has got that far or has ended.
    """

    def __init__(
        self, prompt: torch.Tensor, config: GenerationConfig, stopping_criteria: StoppingCriteriaList, streamer
    ):
        self.ids = prompt  # (n, widest)
        self.lengths = [prompt.shape[1]] * len(prompt)
        self.places = list(range(len(prompt)))
        self.ended = [False] * len(prompt)
        self.config, self.stopping_criteria, self.streamer = config, stopping_criteria, streamer
        pad = config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.done: dict[int, torch.Tensor] = {}  # texts of rows that have left, by place
        self.shown = prompt.shape[1]

    def newest(self) -> torch.Tensor:
        """The last token of each row, (n,)."""
        last = torch.tensor(self.lengths, device=self.ids.device) - 1
        return self.ids.gather(1, last[:, None])[:, 0]

    def with_candidates(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows with further tokens (n, q) behind the end of each, (n, widest)."""
        count = token_ids.shape[1]
        if not count:
            return self.ids
        ids = torch.nn.functional.pad(self.ids, (0, count), value=self.pad)
        ends = torch.tensor(self.lengths, device=ids.device)
        return ids.scatter(1, ends[:, None] + torch.arange(count, device=ids.device), token_ids.to(ids.dtype))

    def append(self, tokens: torch.Tensor, counts: list[int], steps: "StepRecord", logits: PositionLogits) -> list[int]:
        """Commits the first `counts` tokens of each row of `tokens` (n, q), as far as no criterion ends its text.

        Returns:
            How many were committed, (n,).
        """
        before = self.lengths
        self.ids, self.lengths = self.with_candidates(tokens), list(before)
        for step in range(max(counts)):
            rows = [i for i, count in enumerate(counts) if step < count and not self.ended[i]]
            if not rows:
                break
            for i in rows:
                steps.add_scores(logits, step, i, self.places[i])
                self.lengths[i] += 1
            self._ask(rows, steps)
            self._show()
        self.ids = self.ids[:, : max(self.lengths)]
        return [length - old for length, old in zip(self.lengths, before, strict=True)]

    def cut_short(self, row: int) -> bool:
        """Whether the row was ended by something else than the maximum length, or by an end token there."""
        last = self.ids[row, self.lengths[row] - 1]
        return self.ended[row] and (self.lengths[row] < self.config.max_length or bool(ends_text(last, self.config)))

    def keep(self, rows: list[int]) -> None:
        """Lets all rows but these leave."""
        for i in set(range(len(self.places))) - set(rows):
            self.done[self.places[i]] = self.ids[i, : self.lengths[i]]
        self.places, self.lengths = [self.places[i] for i in rows], [self.lengths[i] for i in rows]
        self.ended = [False] * len(rows)
        self.ids = self.ids[rows, : max(self.lengths, default=0)]

    def sequences(self) -> torch.Tensor:
        """All texts, (B, T'), once every row has left."""
        longest = max(len(text) for text in self.done.values())
        padded = [
            torch.nn.functional.pad(t, (0, longest - len(t)), value=self.pad) for _, t in sorted(self.done.items())
        ]
        return torch.stack(padded)

    def _ask(self, rows: list[int], steps: "StepRecord") -> None:
        """Asks the criteria about rows that have just got a token."""
        by_length: dict[int, list[int]] = {}
        for i in rows:
            by_length.setdefault(self.lengths[i], []).append(i)
        for length, members in by_length.items():
            scores = steps.scores_of([self.places[i] for i in members])
            verdict = self.stopping_criteria(self.ids[members, :length], scores)
            for i, ended in zip(members, verdict.tolist(), strict=True):
                self.ended[i] = ended

    def _show(self) -> None:
        """Shows the streamer what all rows have."""
        if self.streamer is None:
            return
        going = [length for length, ended in zip(self.lengths, self.ended, strict=True) if not ended]
        rows = {p: self.ids[i, :n] for i, (p, n) in enumerate(zip(self.places, self.lengths, strict=True))} | self.done
        end = min(going) if going else max(len(row) for row in rows.values())
        while self.shown < end:
            tokens = [rows[p][self.shown] if self.shown < len(rows[p]) else self.pad for p in sorted(rows)]
            self.streamer.put(torch.tensor([int(token) for token in tokens]))
            self.shown += 1


class StepRecord:
    """What `return_dict_in_generate` asks for, one entry per token of each place."""

    def __init__(self, config: GenerationConfig, batch_size: int):
        wanted = config.return_dict_in_generate
        flags = {
            "scores": config.output_scores,
            "logits": config.output_logits,
            "hidden_states": config.output_hidden_states,
            "attentions": config.output_attentions,
        }
        self.entries = {name: [[] for _ in range(batch_size)] for name, flag in flags.items() if wanted and flag}
        self.prefill: dict[str, tuple] = {}  # states of the prompt, all rows together

    def add_scores(self, logits: PositionLogits, position: int, row: int, place: int) -> None:
        if "scores" in self.entries:
            self.entries["scores"][place].append(logits.processed_row(position, row))
        if "logits" in self.entries:
            self.entries["logits"][place].append(logits.raw_logits(position, torch.tensor([row])))

    def scores_of(self, places: list[int]) -> tuple[torch.Tensor, ...] | None:
        """The scores so far of rows of the same length, (m, V) per step, as a criterion gets them."""
        if "scores" not in self.entries:
            return None
        return self._steps("scores", places)

    def add_states(self, outputs: ModelOutput, cache: Cache, width: int, counts: list[int], places: list[int]) -> None:
        """The states of a pass over width + 1 tokens, cut into those of each row's first tokens: (1, 1, H) per layer,
        and attentions (1, heads, 1, keys that it could see). Those of the prefill stay whole."""
        for name in {"hidden_states", "attentions"} & set(self.entries):
            layers = getattr(outputs, name)
            if name not in self.prefill:
                self.prefill[name] = layers
                continue
            for row, (place, count) in enumerate(zip(places, counts, strict=True)):
                for i in range(count):
                    if name == "hidden_states":
                        step = tuple(layer[row : row + 1, i : i + 1] for layer in layers)
                    elif width == 0:
                        step = layers
                    else:
                        step = tuple(
                            layer[:, :, i : i + 1, key_columns(cache, j, layer.shape[-1], width - i)]
                            for j, layer in enumerate(layers)
                        )
                    self.entries[name][place].append(step)

    def output(self, sequences: torch.Tensor, cache: Cache | None) -> GenerateDecoderOnlyOutput:
        """As of plain `generate()`; rows that ended before a step have zeros there."""
        places = list(range(len(sequences)))
        collected = {}
        for name in self.entries:
            steps = self._steps(name, places)
            collected[name] = steps if name not in self.prefill else (self.prefill[name], *steps)
        return GenerateDecoderOnlyOutput(sequences=sequences, **collected, **{CACHE_NAME: cache})

    def _steps(self, name: str, places: list[int]) -> tuple:
        """Entries of these places side by side, step by step."""
        rows = [self.entries[name][place] for place in places]
        if len(rows) == 1:
            return tuple(rows[0])
        longest = max(rows, key=len)
        steps = []
        for i, like in enumerate(longest):
            entries = [row[i] if i < len(row) else _zeros_like(like) for row in rows]
            steps.append(
                torch.cat(entries) if torch.is_tensor(like) else tuple(map(torch.cat, zip(*entries, strict=True)))
            )
        return tuple(steps)


def _zeros_like(entry):
    return torch.zeros_like(entry) if torch.is_tensor(entry) else tuple(map(torch.zeros_like, entry))
