"""The drafters that DSpark is measured against, behind the same interface."""

from .configuration_eagle3 import Eagle3Config
from .dflash import DFlashDrafterModel
from .eagle3 import Eagle3DrafterModel
from .methods import METHODS, new_drafter

__all__ = ["METHODS", "DFlashDrafterModel", "Eagle3Config", "Eagle3DrafterModel", "new_drafter"]
