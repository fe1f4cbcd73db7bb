"""Random models of transformers, with their logits and the gradients of a PPO loss."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tests.ppo import CLIP

CONFIGS = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}


def random_model(family: str, seed: int, **fields) -> PreTrainedModel:
    """A float32 model whose every parameter is random: norms around 1, biases around 0."""
    config = CONFIGS[family](**fields, attn_implementation="eager")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def logits(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """tokens int32[n] -> float32[n, V]."""
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)[None]).logits[0].float().numpy()


def ppo_gradients(
    model: PreTrainedModel, tokens: np.ndarray, advantage: np.ndarray, old_logp: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of `tests.ppo.ppo_loss` and its gradient by parameter name."""
    model.zero_grad()
    ids = torch.tensor(tokens, dtype=torch.long)
    log_probs = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), dim=-1)
    logp = log_probs.gather(1, ids[1:, None])[:, 0]
    ratio = torch.exp(logp - torch.tensor(old_logp))
    weight = torch.tensor(advantage)
    loss = -torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight).mean()
    loss.backward()
    return loss.item(), {name: p.grad.float().numpy() for name, p in model.named_parameters()}


def save(model: PreTrainedModel, folder: Path, **options) -> Path:
    """Writes the model as transformers does."""
    model.save_pretrained(folder, **options)
    return folder
