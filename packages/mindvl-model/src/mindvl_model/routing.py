# SPDX-License-Identifier: Apache-2.0
"""Local routing consistency: how similar the experts of neighbouring tokens are, which limits expert offloading.

Computed from the recorded routing of a model. Two metrics over every window of m consecutive tokens, from "Not All
Models Suit Expert Offloading" (arXiv 2505.16056), as in the code of the authors for the first version of the paper
(github.com/ljcleo/moe-lrc: SRP in src/30_srp_calc.py and 31_srp_refine.py, SCH in src/40_sch_calc.py at commit
61c86cf5). docs/guides/routing.md has the formulas.

* SRP (segment routing best performance): select any experts for each window. A token-expert pair is predicted if the
  window has the expert, and positive if the router selected it; SRP is the largest F1 score over all selections.
* SCH (segment cache best hit rate): cache the C most used experts of each window; the share of selected pairs that hit
  the cache.

Selections are accumulated into counts pack by pack, so that memory does not grow with the data.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mindvl_model.config import MindVLConfig, TokenConfig
from mindvl_model.errors import ModelError

Modality = Literal["visual", "text", "mixed"]
MODALITIES: tuple[Modality, ...] = ("visual", "text", "mixed")
ALL = "all"
_CHUNK = 1 << 24  # number of counts in memory at a time, two bytes each


class PackedBatch(Protocol):
    """A packed sequence of the data package (mindvl_data.Batch)."""

    @property
    def samples(self) -> Sequence[Any]:
        """The samples of the pack, each with `source` and `length`; padding is not a sample."""

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model."""


@dataclass(frozen=True, kw_only=True)
class LayerScore:
    """The metrics of one layer, with its own threshold and its own cache."""

    layer: int
    srp: float
    group_size: float
    hit_rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RoutingScore:
    """The metrics of one group of windows over all layers, with one threshold and one cache shared by the layers."""

    segment_length: int  # tokens per window
    source: str  # name of the data source, or "all"
    modality: str  # "visual", "text", "mixed" (windows with both), or "all"
    windows: int  # number of windows
    srp: float  # between 0 and 1
    group_size: float  # experts selected at the best F1 score, divided by experts per token
    cache_sizes: tuple[float, ...]  # of all layers together, in multiples of experts per token
    hit_rates: tuple[float, ...]  # SCH at each cache size
    curve: tuple[tuple[float, float], ...]  # (cache size, SCH) from 0 to all experts
    layers: tuple[LayerScore, ...]


@dataclass
class _Tally:
    """Sums over the windows of one length, source and modality."""

    histogram: NDArray[np.int64]  # [L, m + 1]: number of (window, expert) pairs by number of selections in the window
    by_rank: NDArray[np.int64]  # [L, E]: selections of the most used expert of each window, of the second, ...
    by_rank_of_model: NDArray[np.int64]  # [L * E]: the same over the experts of all layers
    windows: int = 0

    def __add__(self, other: "_Tally") -> "_Tally":
        return _Tally(
            self.histogram + other.histogram,
            self.by_rank + other.by_rank,
            self.by_rank_of_model + other.by_rank_of_model,
            self.windows + other.windows,
        )


@dataclass(kw_only=True)
class RoutingAnalysis:
    """Accumulates the routing of packs; the metrics can be computed at any time.

    Raises:
        ModelError: A window length is not supported, or no layer has experts.
    """

    num_experts: int
    experts_per_token: int
    layers: tuple[int, ...]  # indices of the layers with experts
    segment_lengths: tuple[int, ...] = (16, 64, 256)  # tokens per window; windows overlap and stay inside a sample
    num_packs: int = 0
    num_tokens: int = 0
    tokens_in_short_samples: dict[int, int] = field(default_factory=dict)  # by window length, in samples without one
    _tallies: dict[tuple[int, str, Modality], _Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.segment_lengths or not all(1 <= length < 1 << 16 for length in self.segment_lengths):
            raise ModelError(
                f"segment_lengths: must be between 1 and 65535 tokens, got {self.segment_lengths}. Change them."
            )
        if not self.layers:
            raise ModelError("model: no layer has experts. Use a model with experts.")
        self.tokens_in_short_samples = dict.fromkeys(self.segment_lengths, 0)

    def add_pack(
        self, choices: Mapping[int, NDArray[Any]], segments: Sequence[tuple[str, int]], visual: NDArray[np.bool_]
    ) -> None:
        """Accumulate the routing of one packed sequence.

        Args:
            choices: Selected experts [T, K] of each layer, distinct for each token.
            segments: Source and length of each sample of the pack, in order; tokens after them are padding.
            visual: [T], whether a token is a visual token.

        Raises:
            ModelError: The arrays do not match each other or the number of experts.
        """
        total, expected = sum(length for _, length in segments), (len(visual), self.experts_per_token)
        for layer in self.layers:
            if layer not in choices or choices[layer].shape != expected or total > len(visual):
                shape = choices[layer].shape if layer in choices else None
                raise ModelError(
                    f"routing of layer {layer}: must have shape {list(expected)} and at most {len(visual)} tokens in "
                    f"segments, got {shape} and {total}. Record it with record_routing."
                )
        experts = np.stack([choices[layer] for layer in self.layers], axis=1)  # [T, L, K]
        if experts.min(initial=0) < 0 or experts.max(initial=0) >= self.num_experts:
            raise ModelError(
                f"routing: expert {experts.max()} does not exist in a model with {self.num_experts} experts. Check the "
                "configuration of the model."
            )
        start = 0
        for source, length in segments:
            own = slice(start, start + length)
            for window in self.segment_lengths:
                self._add_segment(experts[own], visual[own], source, window)
            start += length
        self.num_packs += 1
        self.num_tokens += total

    def scores(self, cache_sizes: Sequence[float] = (1.0, 1.5, 2.0)) -> tuple[RoutingScore, ...]:
        """Compute the metrics over all windows, by modality, by source and by both; groups without windows are omitted.

        Args:
            cache_sizes: In multiples of experts per token, rounded down to whole experts.

        Raises:
            ModelError: There is no cache size, or one is not above 0.
        """
        if not cache_sizes or min(cache_sizes) <= 0:
            raise ModelError(f"cache_sizes: must be above 0, got {tuple(cache_sizes)}. Use positive sizes.")
        found = []
        sources = sorted({source for _, source, _ in self._tallies})
        for source in (ALL, *sources):
            for modality in (ALL, *MODALITIES):
                for length in self.segment_lengths:
                    tallies = [
                        tally
                        for (length_of, source_of, modality_of), tally in self._tallies.items()
                        if length_of == length and source in (ALL, source_of) and modality in (ALL, modality_of)
                    ]
                    if tallies:
                        tally = sum(tallies[1:], start=tallies[0])
                        found.append(self._score(tally, length, source, modality, tuple(cache_sizes)))
        return tuple(found)

    def _add_segment(self, experts: NDArray[Any], visual: NDArray[np.bool_], source: str, length: int) -> None:
        if len(experts) < length:
            self.tokens_in_short_samples[length] += len(experts)
            return
        sums = np.concatenate(([0], np.cumsum(visual)))
        num_visual = sums[length:] - sums[:-length]  # [W]
        kinds: dict[Modality, NDArray[np.bool_]] = {"visual": num_visual == length, "text": num_visual == 0}
        kinds["mixed"] = ~(kinds["visual"] | kinds["text"])
        for first, counts in self._counts(experts, length):
            for modality, selected in kinds.items():
                own = counts[selected[first : first + len(counts)]]
                if len(own):
                    self._accumulate(own, length, source, modality)

    def _counts(self, experts: NDArray[Any], length: int) -> Iterator[tuple[int, NDArray[np.uint16]]]:
        """Yield the index of the first window and the selections per expert [W, L, E] for chunks of windows."""
        num_windows, num_layers = len(experts) - length + 1, len(self.layers)
        step = max(1, _CHUNK // (num_layers * self.num_experts))
        for first in range(0, num_windows, step):
            last = min(first + step, num_windows)
            tokens = experts[first : last + length - 1].astype(np.int64)  # [S, L, K]
            sums = np.zeros((len(tokens) + 1, num_layers, self.num_experts), dtype=np.uint16)
            np.put_along_axis(sums[1:], tokens, 1, axis=2)
            np.cumsum(sums, axis=0, dtype=np.uint16, out=sums)  # may overflow; differences are still correct
            yield first, sums[length:] - sums[:-length]

    def _accumulate(self, counts: NDArray[np.uint16], length: int, source: str, modality: Modality) -> None:
        num_layers = len(self.layers)
        ordered = np.sort(counts, axis=2, kind="stable")
        of_model = np.sort(counts.reshape(len(counts), -1), axis=1, kind="stable")
        histogram = [np.bincount(counts[:, layer].ravel(), minlength=length + 1) for layer in range(num_layers)]
        tally = _Tally(
            np.stack(histogram),
            ordered.sum(axis=0, dtype=np.int64)[:, ::-1],
            of_model.sum(axis=0, dtype=np.int64)[::-1],
            len(counts),
        )
        key = (length, source, modality)
        self._tallies[key] = self._tallies[key] + tally if key in self._tallies else tally

    def _score(
        self, tally: _Tally, length: int, source: str, modality: str, cache_sizes: tuple[float, ...]
    ) -> RoutingScore:
        per_layer, num_layers = self.experts_per_token, len(self.layers)
        srp, group_size = _best_f1(tally.histogram.sum(axis=0))
        whole = per_layer * num_layers
        layers = []
        for index, layer in enumerate(self.layers):
            layer_srp, layer_group = _best_f1(tally.histogram[index])
            hits = _hit_rates(tally.by_rank[index], per_layer, cache_sizes)
            layers.append(LayerScore(layer=layer, srp=layer_srp, group_size=layer_group, hit_rates=hits))
        num_points = min(len(tally.by_rank_of_model), 64)
        curve_sizes = tuple(
            float(size) / whole for size in np.linspace(0, len(tally.by_rank_of_model), num_points + 1).astype(int)
        )
        return RoutingScore(
            segment_length=length,
            source=source,
            modality=modality,
            windows=tally.windows,
            srp=srp,
            group_size=group_size,
            cache_sizes=cache_sizes,
            hit_rates=_hit_rates(tally.by_rank_of_model, whole, cache_sizes),
            curve=tuple(zip(curve_sizes, _hit_rates(tally.by_rank_of_model, whole, curve_sizes), strict=True)),
            layers=tuple(layers),
        )


def analysis_of(config: MindVLConfig, segment_lengths: Sequence[int] = (16, 64, 256)) -> RoutingAnalysis:
    """Create an empty analysis for a model.

    Raises:
        ModelError: The model has no experts.
    """
    language = config.language
    experts = language.experts
    if experts is None:
        raise ModelError(f"model: a model with a {language.family} decoder has no experts. Use a model with experts.")
    return RoutingAnalysis(
        num_experts=experts.num_experts,
        experts_per_token=experts.experts_per_token,
        layers=tuple(range(experts.num_dense_layers, language.num_layers)),
        segment_lengths=tuple(segment_lengths),
    )


def run_packs(
    model: torch.nn.Module, packs: Iterable[PackedBatch], analysis: RoutingAnalysis, tokens: TokenConfig
) -> Iterator[int]:
    """Run packs through a whole model and accumulate their routing; yields the number of packs after each pack.

    Only the routing of one pack is in memory.
    """
    from mindvl_model.megatron.router import record_routing

    for number, pack in enumerate(packs, start=1):
        inputs = pack.model_inputs()
        with torch.no_grad(), record_routing(model) as selected:
            model.logits(**inputs)  # type: ignore[operator]
        choices = {layer: experts[0].cpu().numpy() for layer, experts in selected.items()}
        ids = inputs["input_ids"]
        visual = ids == tokens.image
        if tokens.video is not None:
            visual = visual | (ids == tokens.video)
        analysis.add_pack(choices, [(part.source, part.length) for part in pack.samples], visual.cpu().numpy())
        yield number


def _best_f1(histogram: NDArray[np.int64]) -> tuple[float, float]:
    """Return the largest F1 score over all selections of experts, and its selection size in experts per token.

    An expert that the router selects c times in a window of m tokens adds c hits and m predictions. F1 = 2 * hits /
    (predictions + positives) is a ratio of sums, so the best selection has exactly the experts with c above a threshold.
    """
    selections = np.arange(len(histogram))
    hits = (histogram * selections)[::-1].cumsum()[::-1]  # of all experts with at least this number of selections
    predictions = histogram[::-1].cumsum()[::-1] * (len(histogram) - 1)
    f1 = 2 * hits / (predictions + hits[0])
    best = int(f1.argmax())
    return float(f1[best]), float(predictions[best] / hits[0])


def _hit_rates(by_rank: NDArray[np.int64], per_token: int, cache_sizes: Sequence[float]) -> tuple[float, ...]:
    hits = np.concatenate(([0], by_rank.cumsum()))
    capacities = [min(int(size * per_token + 1e-9), len(by_rank)) for size in cache_sizes]
    return tuple(float(hits[capacity] / hits[-1]) for capacity in capacities)
