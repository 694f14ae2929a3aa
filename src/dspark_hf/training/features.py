"""Target states computed on the fly by a frozen target, and kept in a ring for several anchor draws.

Most of a small machine's time goes into the target's forward, and a step learns more from few anchors of many texts
than from many anchors of few: so texts stay in a ring, a step draws its batch from it, and only every `reuse`-th
sample costs a new forward.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..target_dspark import target_states
from ..vocabulary_dspark import target_logsumexp


class ReplayStream(IterableDataset):
    """Endless samples with target states, drawn from a ring of the texts last seen.

    Args:
        samples: texts with `input_ids` and `loss_mask`, (T,) each.
        target: a frozen model in eval mode.
        layer_ids: layers whose states the drafter reads.
        reuse: draws per new text.
        ring_size: texts kept, per worker of the data loader.
        seed: of the order and the draws; every worker has its own on top.
        with_logsumexp: also keep the target's normaliser, needed with a reduced draft vocabulary.
        softcap: the target's cap on its logits, if any.
    """

    def __init__(self, samples, target, layer_ids, reuse=8, ring_size=768, seed=0, with_logsumexp=False, softcap=None):
        if reuse < 1 or ring_size < 1 or not samples:
            raise ValueError(
                f"reuse is {reuse}, ring_size {ring_size}, {len(samples)} samples; expected at least 1 each"
            )
        self.samples, self.target, self.layer_ids = samples, target, layer_ids
        self.reuse, self.ring_size, self.seed = reuse, ring_size, seed
        self.with_logsumexp, self.softcap = with_logsumexp, softcap

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(self.seed + (worker.id if worker else 0))
        ring, count = [], 0
        while True:
            for index in torch.randperm(len(self.samples), generator=generator).tolist():
                features = self.features(self.samples[index])
                if len(ring) < self.ring_size:
                    ring.append(features)
                else:
                    ring[count % self.ring_size] = features
                count += 1
                for _ in range(self.reuse):
                    yield ring[torch.randint(len(ring), (), generator=generator)]

    @torch.no_grad()
    def features(self, sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One text with its states, on the CPU: `target_hidden_states` (T, L·H), `target_last_hidden_states` (T, H)
        and, where asked for, `target_logsumexp` (T,)."""
        ids = sample["input_ids"][None].to(self.target.device)
        (context,), (last,) = target_states(self.target, ids, None, self.layer_ids)
        result = dict(sample, target_hidden_states=context.cpu(), target_last_hidden_states=last.cpu())
        if self.with_logsumexp:
            taught = sample["loss_mask"].roll(-1).nonzero()[:, 0]  # positions that teach: their next token is learnt
            normaliser = target_logsumexp(self.target, last, taught.to(last.device), self.softcap)
            result["target_logsumexp"] = normaliser.cpu()
        return result
