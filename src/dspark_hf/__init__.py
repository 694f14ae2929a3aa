"""DSpark speculative decoding for transformers."""

from transformers import AutoConfig, AutoModel

from .baselines import DFlashDrafterModel, Eagle3Config, Eagle3DrafterModel
from .configuration_dspark import DSparkConfig
from .hook_dspark import install_hook, uninstall_hook
from .modeling_dspark import DSparkDrafterModel, DSparkDraftOutput, DSparkOutput
from .objective_dspark import Objective
from .profile_dspark import SPSProfile
from .scheduling_dspark import (
    ConfidenceThreshold,
    FixedLength,
    LookaheadScheduler,
    PrefixScheduler,
    StalePrefixScheduler,
)
from .telemetry_dspark import record_speculation
from .temperature_scaling import SequentialTemperatureScaling

AutoConfig.register("dspark", DSparkConfig)
AutoModel.register(DSparkConfig, DSparkDrafterModel)

__all__ = [
    "ConfidenceThreshold",
    "DFlashDrafterModel",
    "DSparkConfig",
    "DSparkDraftOutput",
    "DSparkDrafterModel",
    "DSparkOutput",
    "Eagle3Config",
    "Eagle3DrafterModel",
    "FixedLength",
    "LookaheadScheduler",
    "Objective",
    "PrefixScheduler",
    "SPSProfile",
    "SequentialTemperatureScaling",
    "StalePrefixScheduler",
    "install_hook",
    "record_speculation",
    "uninstall_hook",
]
