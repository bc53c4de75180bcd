# SPDX-License-Identifier: Apache-2.0
"""A section of a transformers directory's config.json, of which every key must be accounted for.

Comes before directory_config.py and families.py take what they know. A key is taken, without effect on what is computed,
or of the only value we can compute; anything else is refused by name.
"""

from pathlib import Path
from typing import Any

from mindvl_model.errors import ModelError, WeightError
from mindvl_model.weights.json_file import read_json

MAX_NUMBER = 2**40
MAX_LAYERS = 1000
MAX_EXPERTS = 1024  # of one layer

_NEEDED = object()
_BOOKKEEPING = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
}
_TRAINING_AND_OUTPUT = {
    "_attn_implementation_autoset",
    "_experts_implementation_autoset",
    "aux_loss_alpha",
    "chunk_size_feed_forward",
    "ep_size",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "seq_aux",
    "use_cache",
}
_OF_GENERATION = {  # and of other tasks; older versions of transformers wrote them into every section
    *("bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample"),
    *("early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task"),
    *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "prefix"),
    *("remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens"),
    *("task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "typical_p"),
    *("torchscript", "use_bfloat16", "gradient_checkpointing", "unsloth_fixed", "unsloth_version"),
    *("_attn_implementation", "tie_encoder_decoder", "classifier_dropout"),
}
_TOKENS = {  # read from the first section that has them
    "bos_token_id",
    "eos_token_id",
    "image_token_id",
    "pad_token_id",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
}
_OF_SLIDING_WINDOWS = {"max_window_layers", "sliding_window"}  # use_sliding_window itself is refused
_WITHOUT_EFFECT = (
    _BOOKKEEPING | _TRAINING_AND_OUTPUT | _OF_GENERATION | _TOKENS | _OF_SLIDING_WINDOWS | {"spatial_patch_size"}
)
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "attention_bias": (False, None),
    "attention_dropout": (0, None),  # False and 0.0 are equal to 0
    "hidden_act": ("silu",),
    "is_decoder": (False, None),
    "mlp_bias": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
    "use_sliding_window": (False, None),
}


class Keys:
    """One section of a config.json, which knows which of its keys were asked for."""

    def __init__(self, values: Any, place: str) -> None:
        if not isinstance(values, dict):
            raise WeightError(f"{place}: not a section of keys but {values!r:.60}. Name another directory.")
        self.values, self.place = values, place
        self._asked: set[str] = set()

    def take(self, name: str, default: Any = _NEEDED) -> Any:
        """The value of a key.

        Raises:
            WeightError: There is none, and no default.
        """
        self._asked.add(name)
        value = self.values.get(name, default)
        if value is _NEEDED:
            raise WeightError(f"{self.place}: {name} is missing. Fetch the file again, or name another directory.")
        return value

    def number(
        self, name: str, default: Any = _NEEDED, *, whole: bool = True, least: int | None = None, most: int = MAX_NUMBER
    ) -> Any:
        """The value of a key that is a positive number, or one from `least` on.

        Raises:
            WeightError: It is none, or one that no model of ours has.
        """
        value = self.take(name, default)
        kinds = int if whole else (int, float)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or not (0 < value <= most if least is None else least <= value <= most):
            what = f"a {'whole ' if whole else ''}number {'above 0' if least is None else f'from {least} on'}"
            raise self.unsupported(name, value, what if most == MAX_NUMBER else f"{what}, at most {most}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """The value of a key that is true or false; null means its default.

        Raises:
            WeightError: It is neither.
        """
        value = self.take(name, default)
        if value is not None and not isinstance(value, bool):
            raise self.unsupported(name, value, "true or false")
        return default if value is None else value

    def numbers(self, name: str, default: Any = _NEEDED, *, count: int | None = None, whole: bool = True) -> Any:
        """The value of a key that is a list of numbers from 0 on, as a tuple.

        Args:
            count: How many; any number of them where None.

        Raises:
            WeightError: It is none.
        """
        value = self.take(name, default)
        kinds = int if whole else (int, float)
        is_list = isinstance(value, list | tuple) and (count is None or len(value) == count)
        if not is_list or not all(isinstance(n, kinds) and type(n) is not bool and 0 <= n <= MAX_NUMBER for n in value):
            raise self.unsupported(name, value, f"a list of {count or ''} {'whole ' * whole}numbers".replace("  ", " "))
        return tuple(value)

    def only(self, name: str, *values: Any) -> None:
        """Refuse any other value of a key; the first of them is what its absence means."""
        value = self.take(name, values[0])
        if value not in values:
            raise WeightError(
                f"{self.place}: {name}={value!r:.60} is not supported, only {values[0]!r} is. "
                "Name a directory of a model that has this value."
            )

    def unsupported(self, name: str, value: Any, needed: str) -> WeightError:
        """The error for a value that a config.json may well have, but that we cannot compute with."""
        return WeightError(
            f"{self.place}: {name}={value!r:.60} is not supported; it must be {needed}. "
            "Name a directory of a model that has such a value."
        )

    def section(self, name: str) -> "Keys":
        """A section inside of this one."""
        return Keys(self.take(name), f"{self.place}: {name}")

    def refuse_the_rest(self) -> None:
        """Every key that was not taken must be known to change nothing.

        Raises:
            WeightError: One is not.
        """
        for name in sorted(set(self.values) - self._asked - _WITHOUT_EFFECT):
            value = self.values[name]
            if value is None:
                continue  # not set
            if name == "layer_types" and isinstance(value, list) and all(one == "full_attention" for one in value):
                continue
            if name == "quantization_config" and isinstance(value, dict) and value.get("quant_method") == "fp8":
                continue  # WeightDirectory gives such weights out as bfloat16
            if name not in _ONLY_VALUES:
                raise WeightError(
                    f"{self.place}: key {name!r:.60} ({value!r:.60}) is not known to this version, so the model may "
                    "compute something that is not supported. Name a directory of a supported model."
                )
            self.only(name, *_ONLY_VALUES[name])


def unsupported_model(error: ModelError, place: str) -> WeightError:
    """What a configuration of ours refuses, said of a directory: its values belong together, so none may be changed."""
    what = (str(error).rpartition(". ")[0] or str(error)).rstrip(".")
    return WeightError(f"{place}: {what}. Such a model is not supported. Name another directory.")


def read_keys(path: Path) -> Keys:
    """The config.json of a directory.

    Raises:
        WeightError: There is none, or it is damaged.
    """
    file = path / "config.json"
    return Keys(read_json(file), str(file))
