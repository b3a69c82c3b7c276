"""The weights of a layer's mixture of experts: those of all experts in one matrix, whichever way they are stored."""

from __future__ import annotations

from typing import Any

from .config import ExpertsConfig, ModelConfig
from .families import ExpertKeys
from .mxfp4 import GROUP, GROUP_BYTES
from .new_weights import NewWeights
from .tensor_copy import Place


def expert_weights(
    config: ModelConfig, mixture: ExpertsConfig, keys: ExpertKeys, at: str, new: NewWeights
) -> dict[str, Any]:
    """Make those of the layer whose tensors' names begin with `at`; by field of `LayerWeights`."""
    at = f"{at}{keys.module}."
    router, router_bias = new.module(at, {keys.router: mixture.count}, config.hidden_size, keys.biased)
    parts = (_stacked if keys.stacked else _one_by_one)(config, mixture.count, keys, at, new)
    return {"router": router, "router_bias": router_bias, **parts}


def _one_by_one(config: ModelConfig, count: int, keys: ExpertKeys, at: str, new: NewWeights) -> dict[str, Any]:
    """Each expert with modules of its own."""
    hidden, middle = config.hidden_size, config.intermediate_size
    gates_and_ups = {f"experts.{i}.{name}": middle for i in range(count) for name in keys.gate_up}
    gate_up, gate_up_bias = new.module(at, gates_and_ups, hidden, keys.biased)
    down, down_bias = new.module(at, {f"experts.{i}.{keys.down}": hidden for i in range(count)}, middle, keys.biased)
    return {"gate_up": gate_up, "gate_up_bias": gate_up_bias, "down": down, "down_bias": down_bias}


def _stacked(config: ModelConfig, count: int, keys: ExpertKeys, at: str, new: NewWeights) -> dict[str, Any]:
    """All experts in one tensor, with inputs before outputs, and gate and up in turns.

    In 4 bits outputs come before inputs there as well.
    """
    hidden, middle = config.hidden_size, config.intermediate_size
    gate_up, down = new.unplaced_matrix(count * 2 * middle, hidden), new.unplaced_matrix(count * hidden, middle)
    gates = gate_up.plain.view(count, 2, middle, hidden).transpose(1, 2)
    downs = down.plain.view(count, hidden, middle)
    name, other, places = f"{at}experts.gate_up_proj", f"{at}experts.{keys.down}", new.places
    if config.mxfp4:
        gates_shape, downs_shape = (count, 2 * middle, hidden // GROUP), (count, hidden, middle // GROUP)
        places[f"{name}_blocks"] = Place(gates, (*gates_shape, GROUP_BYTES), scales=f"{name}_scales")
        places[f"{other}_blocks"] = Place(downs, (*downs_shape, GROUP_BYTES), scales=f"{other}_scales")
    else:
        places[name] = Place(gates, (count, hidden, 2 * middle), transposed=True)
        places[other] = Place(downs, (count, middle, hidden), transposed=True)
    gate_up_bias, down_bias = new.unplaced_vector(count * 2 * middle), new.unplaced_vector(count * hidden)
    places[f"{name}_bias"] = Place(gate_up_bias.view(count, 2, middle).transpose(1, 2), (count, 2 * middle))
    places[f"{other}_bias"] = Place(down_bias.view(count, hidden), (count, hidden))
    return {"gate_up": gate_up, "gate_up_bias": gate_up_bias, "down": down, "down_bias": down_bias}
