"""A hand-written pipeline under the stepwise contract: rectified flow, Euler steps, guidance."""

import torch
from torch import nn

from omni_engine import StepBatch, StepRequestState

FACTOR = 8  # pixels per latent position and side


class TinyFlow(nn.Module):
    """Small modules with random weights, which stand in for a model."""

    supports_step_execution = True
    defaults = {"height": 64, "width": 64, "num_inference_steps": 8, "guidance_scale": 3.0}
    size_multiple = FACTOR
    sampling_fields = {"height", "width", "num_inference_steps", "guidance_scale"}
    per_request = {"guidance_scale"}  # may differ among requests that share forwards

    def __init__(self):
        super().__init__()
        self.encoder = nn.EmbeddingBag(256, 16)
        self.enter = nn.Conv2d(4, 32, 3, padding=1)
        self.condition = nn.Linear(16 + 1, 32)
        self.leave = nn.Conv2d(32, 4, 3, padding=1)
        self.decoder = nn.Conv2d(4, 3 * FACTOR**2, 1)

    @classmethod
    def load(cls, context):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = cls()  # a real one reads its weights from context.model
        return model.to(context.device, getattr(torch, context.dtype)).requires_grad_(False)

    def prepare_encode(self, state: StepRequestState) -> None:
        """Everything that belongs to one picture goes into its state, nothing onto self."""
        params, like = state.request.sampling_params, self.encoder.weight
        generator = torch.Generator().manual_seed(state.seed)
        shape = (1, 4, params.height // FACTOR, params.width // FACTOR)
        state.latents = torch.randn(shape, generator=generator).to(like)
        state.num_steps = params.num_inference_steps
        sigmas = torch.linspace(1, 0, state.num_steps + 1).to(like)
        state.timesteps, state.extra["sigmas"] = sigmas[:-1], sigmas
        state.extra["guidance"] = params.guidance_scale
        state.extra["prompt"] = self.encode(state.request.prompt)

    def encode(self, prompt):
        tokens = torch.tensor([list(prompt.encode())], device=self.encoder.weight.device)
        return self.encoder(tokens)

    def denoise_step(self, batch: StepBatch, states: list[StepRequestState]) -> torch.Tensor:
        """Run all states in one forward; those with guidance take a second row in it."""
        guided = [i for i, state in enumerate(states) if state.extra["guidance"] != 1]
        rows = [*range(len(states)), *guided]
        prompts = [state.extra["prompt"] for state in states]
        prompts += [torch.zeros_like(prompts[i]) for i in guided]
        velocity = self.denoise(batch.latents[rows], batch.timesteps[rows], torch.cat(prompts))
        with_prompt, without = velocity[: len(states)].clone(), velocity[len(states) :]
        for i, unguided in zip(guided, without, strict=True):
            scale = states[i].extra["guidance"]
            with_prompt[i] = unguided + scale * (with_prompt[i] - unguided)
        return with_prompt

    def denoise(self, latents, timesteps, prompts):
        given = self.condition(torch.cat([prompts, timesteps[:, None]], dim=1))
        return self.leave(torch.tanh(self.enter(latents) + given[:, :, None, None]))

    def step_scheduler(self, state: StepRequestState, noise_pred: torch.Tensor) -> None:
        sigmas, i = state.extra["sigmas"], state.step_index
        state.latents = state.latents + (sigmas[i + 1] - sigmas[i]) * noise_pred
        state.step_index += 1

    def post_decode(self, state: StepRequestState):
        if state.request.sampling_params.output_type == "latent":
            return state.latents[0]
        pixels = nn.functional.pixel_shuffle(self.decoder(state.latents), FACTOR)
        return torch.sigmoid(pixels[0]).permute(1, 2, 0).float().cpu().numpy()
