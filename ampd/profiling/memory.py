"""How many tokens of KV a worker of a built-in profile has room for.

What the engine may use of the GPU's memory, less activations, less the weights (bf16). Profiles
of other devices or models do not say: their engine knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ampd.profiling.profile_file import Profile
from ampd.profiling.roofline import BYTES_PER_VALUE, MODELS

HBM_BYTES: Final[Mapping[str, float]] = {
    "a100_sxm": 80e9,
    "h100_sxm": 80e9,
    "h200_sxm": 141e9,
    "h20": 96e9,
    "h20_3e": 141e9,
}
"""By the device's name in the profiles, from data sheets."""
MEMORY_SHARE: Final = 0.9
"""What an engine takes of it: vLLM's default."""
ACTIVATION_BYTES: Final = 3e9
"""Of each GPU."""


def kv_capacity_tokens(profile: Profile) -> int | None:
    """The tokens; 0 where the weights alone are too large; None where nobody knows."""
    hbm_bytes = HBM_BYTES.get(profile.device)
    model = next((model for model in MODELS if model.name.endswith(profile.model)), None)
    if hbm_bytes is None or model is None or not profile.kv_bytes_per_token:
        return None
    weights = BYTES_PER_VALUE * (model.parameters(model.experts) + model.hidden * model.vocab)
    usable = profile.tp * (hbm_bytes * MEMORY_SHARE - ACTIVATION_BYTES)
    return max(0, int((usable - weights) / profile.kv_bytes_per_token))
