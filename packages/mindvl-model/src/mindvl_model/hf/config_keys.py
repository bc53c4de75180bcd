# SPDX-License-Identifier: Apache-2.0
"""Strict reading of a section of config.json of a transformers directory.

directory_config.py and families.py read their keys through it. Every other key must have no effect on the computation
or have the only supported value; otherwise an error names the key.
"""

from pathlib import Path
from typing import Any

from mindvl_model.errors import ModelError, WeightError
from mindvl_model.weights.json_file import read_json

MAX_NUMBER = 2**40
MAX_LAYERS = 1000
MAX_EXPERTS = 1024  # per layer

_REQUIRED = object()
_BOOKKEEPING = {
    "_model_name_or_path",  # of models that transformers read from a GGUF file
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
_GENERATION = {  # and other tasks; older versions of transformers wrote these keys into every section
    *("bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample"),
    *("early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task"),
    *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "prefix"),
    *("remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens"),
    *("task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "typical_p"),
    *("torchscript", "use_bfloat16", "gradient_checkpointing", "unsloth_fixed", "unsloth_version"),
    "transformers.js_config",
    *("_attn_implementation", "tie_encoder_decoder", "classifier_dropout", "unk_token_id"),
    *("cache_implementation", "_commit_hash", "keys_to_ignore_at_inference", "max_new_tokens", "min_new_tokens"),
}
_TOKENS = {  # read from the first section that contains them
    "bos_token_id",
    "eos_token_id",
    "image_token_id",
    "pad_token_id",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
}
# max_window_layers selects the layers of a window, and a window that has an effect is refused.
_WITHOUT_EFFECT = (
    _BOOKKEEPING | _TRAINING_AND_OUTPUT | _GENERATION | _TOKENS | {"max_window_layers", "spatial_patch_size"}
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
    """One section of a config.json; records which keys were read.

    Args:
        values: The JSON object.
        where: File and section for messages, such as "model/config.json: vision_config".

    Raises:
        WeightError: `values` is not an object.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise WeightError(f"{where}: must be a JSON object, got {values!r:.60}. Use another directory.")
        self.values, self.where = values, where
        self._read: set[str] = set()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a key.

        Raises:
            WeightError: The key is missing and there is no default.
        """
        self._read.add(name)
        value = self.values.get(name, default)
        if value is _REQUIRED:
            raise WeightError(f"{self.where}: {name} is missing. Download the file again, or use another directory.")
        return value

    def number(
        self,
        name: str,
        default: Any = _REQUIRED,
        *,
        whole: bool = True,
        least: int | None = None,
        most: int = MAX_NUMBER,
    ) -> Any:
        """Return the value of a numeric key.

        Args:
            name: The key.
            default: The value of a missing key; without a default the key is required.
            whole: Require an integer.
            least: Smallest valid value; None: any number above 0.
            most: Largest valid value.

        Raises:
            WeightError: The value is not such a number.
        """
        value = self.take(name, default)
        kinds = int if whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not (0 < value <= most if least is None else least <= value <= most):
            required = f"{'an integer' if whole else 'a number'} {'above 0' if least is None else f'>= {least}'}"
            raise self.unsupported(name, value, required if most == MAX_NUMBER else f"{required}, at most {most}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return the value of a boolean key; null means the default.

        Raises:
            WeightError: The value is not a boolean.
        """
        value = self.take(name, default)
        if value is not None and not isinstance(value, bool):
            raise self.unsupported(name, value, "true or false")
        return default if value is None else value

    def numbers(self, name: str, default: Any = _REQUIRED, *, count: int | None = None, whole: bool = True) -> Any:
        """Return the value of a key that is a list of numbers >= 0, as a tuple.

        Args:
            name: The key.
            default: The value of a missing key; without a default the key is required.
            count: Required length; None: any length.
            whole: Require integers.

        Raises:
            WeightError: The value is not such a list.
        """
        value = self.take(name, default)
        kinds = int if whole else (int, float)
        is_list = isinstance(value, list | tuple) and (count is None or len(value) == count)
        if not is_list or not all(isinstance(n, kinds) and type(n) is not bool and 0 <= n <= MAX_NUMBER for n in value):
            kind = "integers" if whole else "numbers"
            raise self.unsupported(name, value, f"a list of {f'{count} ' if count else ''}{kind} >= 0")
        return tuple(value)

    def only(self, name: str, *values: Any) -> None:
        """Check that a key has one of these values; the first is the default of a missing key.

        Raises:
            WeightError: The key has another value.
        """
        value = self.take(name, values[0])
        if value not in values:
            raise WeightError(
                f"{self.where}: {name}={value!r:.60} is not supported, only {values[0]!r} is. "
                "Use a model with this value."
            )

    def check_window(self, window: Any) -> None:
        """Check that a sliding window has no effect.

        Raises:
            WeightError: It hides positions of sequences of the maximum length.
        """
        most = self.values.get("max_position_embeddings")
        if window is not None and not (type(window) is type(most) is int and window >= most):
            raise WeightError(
                f"{self.where}: sliding_window={window!r:.60} is not supported, because it is narrower than "
                f"max_position_embeddings={most!r:.60}. Use a model without sliding windows."
            )

    def unsupported(self, name: str, value: Any, required: str) -> WeightError:
        """Return the error for a value that is valid in a config.json but not supported by mindvl."""
        return WeightError(
            f"{self.where}: {name}={value!r:.60} is not supported; it must be {required}. "
            "Use a model with a supported value."
        )

    def section(self, name: str) -> "Keys":
        """Return a nested section."""
        return Keys(self.take(name), f"{self.where}: {name}")

    def check_remaining(self) -> None:
        """Check that the keys that were not read have no effect on the computation.

        Raises:
            WeightError: A key is unknown or has an unsupported value.
        """
        for name in sorted(set(self.values) - self._read - _WITHOUT_EFFECT):
            value = self.values[name]
            if value is None:
                continue  # null means not set
            if name == "layer_types":
                if isinstance(value, list) and all(one == "full_attention" for one in value):
                    continue
                raise self.unsupported(name, value, "a list of full_attention")
            if name == "sliding_window":  # read by families whose code in transformers has windows
                if self.values.get("use_sliding_window") is not False:
                    self.check_window(value)
                continue
            if name == "quantization_config" and isinstance(value, dict) and value.get("quant_method") == "fp8":
                continue  # WeightDirectory dequantizes such weights to bfloat16
            if name not in _ONLY_VALUES:
                raise WeightError(
                    f"{self.where}: key {name!r:.60} ({value!r:.60}) is unknown, so the model may need a computation "
                    "that is not supported. Use a supported model."
                )
            self.only(name, *_ONLY_VALUES[name])


def unsupported_model(error: ModelError, where: str) -> WeightError:
    """Turn the error of a configuration class into that of a directory, whose values should not be changed."""
    what = (str(error).rpartition(". ")[0] or str(error)).rstrip(".")
    return WeightError(f"{where}: {what}. Use another model directory; this model is not supported.")


def read_keys(path: Path) -> Keys:
    """Read the config.json of a directory.

    Raises:
        WeightError: The file is missing or damaged.
    """
    file = path / "config.json"
    return Keys(read_json(file), str(file))
