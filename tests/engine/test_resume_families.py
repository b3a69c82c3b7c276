"""Every architecture after its worker is gone: another engine goes on from what was settled, beside other requests."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.config import ModelConfig
from headrace.engine.load import load_runner, read_config
from headrace.engine.types import EngineConfig
from tests.support import families, foreign_families
from tests.support.torch_rig import TorchRig, backend, prompt

CONFIG = EngineConfig(
    max_num_seqs=6, max_num_batched_tokens=13, block_size=4, num_kv_blocks=120, max_model_len=families.ORIGINAL
)
TOKENS = 12
SETTLED = {"5": 1, "30": 7, "45": 11}  # prompt's length → tokens that the first engine gives
NEIGHBOURS = ("3", "26", "50")
NATIVE, FOREIGN = tuple(families.MODELS), tuple(foreign_families.FAMILIES)


def new_rig(name: str) -> TorchRig:
    """An engine of its own, which reads a prompt of 26 in three chunks."""
    native = name in NATIVE
    folder = families.family_checkpoint(name) if native else foreign_families.family_checkpoint(name)
    model = read_config(folder)
    assert isinstance(model, ModelConfig) == native
    return TorchRig(load_runner(folder, model, CONFIG, torch.float32, backend("cpu")), CONFIG)


def ids_of(request_id: str) -> list[int]:
    return prompt(int(request_id), families.VOCAB, salt=int(request_id))


def alone(name: str, request_id: str) -> list[int]:
    """What transformers generates greedily after this prompt by itself."""
    model = families.family_reference(name) if name in NATIVE else foreign_families.family_model(name)
    ids = torch.tensor([ids_of(request_id)])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": families.VOCAB + 1}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", [*NATIVE, *FOREIGN])
def test_another_engine_goes_on_where_the_first_one_ended(name: str) -> None:
    first, settled = new_rig(name), dict[str, tuple[int, ...]]()
    for request_id in SETTLED:
        first.add(request_id, ids_of(request_id), max_tokens=TOKENS)
    while len(settled) < len(SETTLED):
        first.step()
        settled |= {
            request_id: tuple(first.tokens[request_id, 0][:wanted])
            for request_id, wanted in SETTLED.items()
            if len(first.tokens[request_id, 0]) >= wanted
        }
    assert any((request_id, 0) not in first.finishes for request_id in SETTLED), "some are cut off"
    second = new_rig(name)
    for request_id in NEIGHBOURS:
        second.add(request_id, ids_of(request_id), max_tokens=TOKENS)
    second.step()
    for request_id, tokens in settled.items():
        second.add(request_id, ids_of(request_id), max_tokens=TOKENS, settled=(tokens,))
    second.run()
    for request_id in (*SETTLED, *NEIGHBOURS):
        begun = settled.get(request_id, ())
        assert second.outputs[request_id, 0][0].index == len(begun)
        assert [*begun, *second.tokens[request_id, 0]] == alone(name, request_id), request_id
