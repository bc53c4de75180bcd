# SPDX-License-Identifier: Apache-2.0
"""How alike the experts of neighbouring tokens are: what a cache of experts in fast memory could save.

Comes after a model that ran with its routers recorded. Two measures over every window of m consecutive tokens, from
"Not All Models Suit Expert Offloading" (arXiv 2505.16056), as the authors' published code computes them for the first
version of the paper (github.com/ljcleo/moe-lrc: SRP in src/30_srp_calc.py and 31_srp_refine.py, SCH in
src/40_sch_calc.py at commit 61c86cf5); docs/guides/routing.md has them as formulas.

* SRP: choose any experts for each window. A token-expert pair counts as predicted when the window holds the expert and
  as wanted when the router chose it; SRP is the largest F1 score over all choices.
* SCH: keep the C most used experts of each window; the share of wanted pairs they serve.

Choices are folded into counts pack by pack; memory does not grow with the data.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mindvl_model.config import MindVLConfig, TokenConfig
from mindvl_model.errors import ModelError
from mindvl_model.language_config import DeepSeekV3LanguageConfig, Qwen3MoELanguageConfig

Modality = Literal["visual", "text", "mixed"]
MODALITIES: tuple[Modality, ...] = ("visual", "text", "mixed")
ALL = "all"
_CHUNK = 1 << 24  # counts held at a time, two bytes each


class PackedSequences(Protocol):
    """One packed pack as the data package hands it over (mindvl_data.Batch)."""

    @property
    def samples(self) -> Sequence[Any]:
        """Each with `source` and `length`, without the padding."""
        ...

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerScore:
    """The measures of one layer alone: its own threshold, its own cache."""

    layer: int
    srp: float
    group_size: float
    hit_rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RoutingScore:
    """The measures of one group of windows over all layers: one threshold, one cache shared by the layers."""

    segment_length: int
    source: str  # or "all"
    modality: str  # of every token of the window; "mixed" has both; or "all"
    windows: int
    srp: float  # 0 to 1
    group_size: float  # experts chosen at that best, over experts a token wants
    cache_sizes: tuple[float, ...]  # in experts a token wants; of all layers together
    hit_rates: tuple[float, ...]  # SCH at these
    curve: tuple[tuple[float, float], ...]  # (cache size, SCH), from nothing to all experts
    layers: tuple[LayerScore, ...]


@dataclass
class _Tally:
    """Sums over the windows of one length, source and modality."""

    histogram: NDArray[np.int64]  # [L, m + 1]: how often an expert was wanted so many times by a window
    by_rank: NDArray[np.int64]  # [L, E]: wants of the most used expert, of the second, ...
    by_rank_of_model: NDArray[np.int64]  # [L * E]: the same with the experts of all layers side by side
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
    """Takes packs one by one, gives the measures at any time.

    Args:
        segment_lengths: Tokens of a window; it moves by one token and never leaves its sample.
    """

    num_experts: int
    experts_per_token: int
    layers: tuple[int, ...]  # numbers of the layers with experts
    segment_lengths: tuple[int, ...] = (16, 64, 256)
    num_packs: int = 0
    num_tokens: int = 0
    left_out: dict[int, int] = field(default_factory=dict)  # tokens in samples too short for a window, by its length
    _tallies: dict[tuple[int, str, Modality], _Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.segment_lengths or not all(1 <= length < 1 << 16 for length in self.segment_lengths):
            raise ModelError(f"segment_lengths={self.segment_lengths}: windows have 1 to 65535 tokens. Change them.")
        if not self.layers:
            raise ModelError("no layer has experts, so nothing is routed. Model. Name one of qwen3_moe or deepseek_v3.")
        self.left_out = dict.fromkeys(self.segment_lengths, 0)

    def add_row(
        self, choices: Mapping[int, NDArray[Any]], segments: Sequence[tuple[str, int]], visual: NDArray[np.bool_]
    ) -> None:
        """Fold in one packed pack.

        Args:
            choices: Experts [T, K] of each layer, distinct for each token.
            segments: Source and length of each sample of the pack, in order; what follows them is padding.
            visual: [T], whether a token stands for a part of an image or video.
        """
        total, wanted = sum(length for _, length in segments), (len(visual), self.experts_per_token)
        for layer in self.layers:
            if layer not in choices or choices[layer].shape != wanted or total > len(visual):
                shape = choices[layer].shape if layer in choices else None
                raise ModelError(
                    f"choices of layer {layer} have shape {shape}, {total} tokens in segments. Routing. "
                    f"Give {list(wanted)} for every layer, as record_routing does."
                )
        experts = np.stack([choices[layer] for layer in self.layers], axis=1)  # [T, L, K]
        if experts.min(initial=0) < 0 or experts.max(initial=0) >= self.num_experts:
            raise ModelError(f"expert {experts.max()} of {self.num_experts}. Routing. Check the model's configuration.")
        start = 0
        for source, length in segments:
            own = slice(start, start + length)
            for window in self.segment_lengths:
                self._add_segment(experts[own], visual[own], source, window)
            start += length
        self.num_packs += 1
        self.num_tokens += total

    def scores(self, cache_sizes: Sequence[float] = (1.0, 1.5, 2.0)) -> tuple[RoutingScore, ...]:
        """The measures of all windows, then by modality, by source and by both; groups without a window are left out.

        Args:
            cache_sizes: In multiples of the experts a token wants, rounded down to whole experts.
        """
        if not cache_sizes or min(cache_sizes) <= 0:
            raise ModelError(f"cache_sizes={tuple(cache_sizes)}: a cache holds something. Use sizes above 0.")
        found = []
        sources = sorted({source for _, source, _ in self._tallies})
        for source in (ALL, *sources):
            for modality in (ALL, *MODALITIES):
                for length in self.segment_lengths:
                    tallies = [
                        tally
                        for (its_length, its_source, its_modality), tally in self._tallies.items()
                        if its_length == length and source in (ALL, its_source) and modality in (ALL, its_modality)
                    ]
                    if tallies:
                        tally = sum(tallies[1:], start=tallies[0])
                        found.append(self._score(tally, length, source, modality, tuple(cache_sizes)))
        return tuple(found)

    def _add_segment(self, experts: NDArray[Any], visual: NDArray[np.bool_], source: str, length: int) -> None:
        if len(experts) < length:
            self.left_out[length] += len(experts)
            return
        seen = np.concatenate(([0], np.cumsum(visual)))
        num_visual = seen[length:] - seen[:-length]  # [W]
        kinds: dict[Modality, NDArray[np.bool_]] = {"visual": num_visual == length, "text": num_visual == 0}
        kinds["mixed"] = ~(kinds["visual"] | kinds["text"])
        for first, counts in self._counts(experts, length):
            for modality, chosen in kinds.items():
                own = counts[chosen[first : first + len(counts)]]
                if len(own):
                    self._fold(own, length, source, modality)

    def _counts(self, experts: NDArray[Any], length: int) -> Iterator[tuple[int, NDArray[np.uint16]]]:
        """First window and wants [W, L, E] of every window, some windows at a time."""
        num_windows, num_layers = len(experts) - length + 1, len(self.layers)
        step = max(1, _CHUNK // (num_layers * self.num_experts))
        for first in range(0, num_windows, step):
            last = min(first + step, num_windows)
            tokens = experts[first : last + length - 1].astype(np.int64)  # [S, L, K]
            sums = np.zeros((len(tokens) + 1, num_layers, self.num_experts), dtype=np.uint16)
            np.put_along_axis(sums[1:], tokens, 1, axis=2)
            np.cumsum(sums, axis=0, dtype=np.uint16, out=sums)  # may wrap; differences are right all the same
            yield first, sums[length:] - sums[:-length]

    def _fold(self, counts: NDArray[np.uint16], length: int, source: str, modality: Modality) -> None:
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
        for place, layer in enumerate(self.layers):
            layer_srp, layer_group = _best_f1(tally.histogram[place])
            hits = _hit_rates(tally.by_rank[place], per_layer, cache_sizes)
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
    """An empty analysis for a model.

    Raises:
        ModelError: The model has no experts.
    """
    language = config.language
    if not isinstance(language, Qwen3MoELanguageConfig | DeepSeekV3LanguageConfig):
        raise ModelError(f"a {language.kind} model has no experts. Model. Name one of qwen3_moe or deepseek_v3.")
    first = language.num_dense_layers if isinstance(language, DeepSeekV3LanguageConfig) else 0
    return RoutingAnalysis(
        num_experts=language.num_experts,
        experts_per_token=language.experts_per_token,
        layers=tuple(range(first, language.num_layers)),
        segment_lengths=tuple(segment_lengths),
    )


def run_packs(
    model: torch.nn.Module, packs: Iterable[PackedSequences], analysis: RoutingAnalysis, tokens: TokenConfig
) -> Iterator[int]:
    """Run packs through a whole model and fold their routing in; yields the number of packs done after each.

    Only the routing of the pack at hand is held.
    """
    from mindvl_model.megatron.router import record_routing

    for number, pack in enumerate(packs, start=1):
        inputs = pack.model_inputs()
        with torch.no_grad(), record_routing(model) as chosen:
            model.logits(**inputs)  # type: ignore[operator]
        choices = {layer: experts[0].cpu().numpy() for layer, experts in chosen.items()}
        ids = inputs["input_ids"]
        visual = ids == tokens.image
        if tokens.video is not None:
            visual = visual | (ids == tokens.video)
        analysis.add_row(choices, [(part.source, part.length) for part in pack.samples], visual.cpu().numpy())
        yield number


def _best_f1(histogram: NDArray[np.int64]) -> tuple[float, float]:
    """The largest F1 over all choices of experts, and how many are chosen there, in experts a token wants.

    An expert wanted c times by a window of m tokens adds c hits and m predictions. F1 = 2 * hits / (predictions + all
    wants) is a ratio of sums, so the best choice takes exactly the experts with c above some threshold.
    """
    wants = np.arange(len(histogram))
    hits = (histogram * wants)[::-1].cumsum()[::-1]  # of all that are wanted at least so often
    predictions = histogram[::-1].cumsum()[::-1] * (len(histogram) - 1)
    f1 = 2 * hits / (predictions + hits[0])
    best = int(f1.argmax())
    return float(f1[best]), float(predictions[best] / hits[0])


def _hit_rates(by_rank: NDArray[np.int64], wanted: int, cache_sizes: Sequence[float]) -> tuple[float, ...]:
    served = np.concatenate(([0], by_rank.cumsum()))
    places = [min(int(size * wanted + 1e-9), len(by_rank)) for size in cache_sizes]
    return tuple(float(served[place] / served[-1]) for place in places)
