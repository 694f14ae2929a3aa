"""The methods that are trained side by side, by the names that the commands know them by.

A recipe says how a DSpark drafter is made; the same settings serve another method, without what it has no
place for.
"""

from typing import Any

from transformers import PreTrainedConfig

from ..configuration_dspark import DSparkConfig
from ..drafter_dspark import DrafterModel
from ..modeling_dspark import DSparkDrafterModel
from .configuration_eagle3 import Eagle3Config
from .dflash import DFlashDrafterModel
from .eagle3 import Eagle3DrafterModel

_HEADLESS = {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False,
             "confidence_head_with_markov": None}  # fmt: skip
METHODS = {
    "dspark": (DSparkConfig, DSparkDrafterModel, {}),
    "dflash": (DSparkConfig, DFlashDrafterModel, _HEADLESS),
    "eagle3": (Eagle3Config, Eagle3DrafterModel, _HEADLESS | {"num_hidden_layers": 1}),
    # One token from one layer is what multi-token prediction comes to where a target has no module of its own for it.
    "mtp1": (Eagle3Config, Eagle3DrafterModel, _HEADLESS | {"num_hidden_layers": 1, "block_size": 1}),
}
"""Configuration, model and fixed settings of each method."""


def new_drafter(method: str, target_config: PreTrainedConfig, **settings: Any) -> DrafterModel:
    """An untrained drafter for a target.

    Args:
        method: one of `METHODS`.
        settings: of `DSparkConfig.for_target`.

    Raises:
        ValueError: for another method, and for settings that make no configuration.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {list(METHODS)}")
    config_class, model_class, fixed = METHODS[method]
    return model_class(config_class.for_target(target_config, **settings | fixed))
