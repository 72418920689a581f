"""Sharpen a few-step student by distribution matching: `python -m chorus_batch.chorus.tiny.match --help`.

Regression on the teacher (`distill`) leaves means: over the long last stretch edges and textures blur. Here a critic
learns, all the while, to denoise the student's own videos, and what the student's last step arrives at moves to where
the guided teacher finds it likelier than the critic does (DMD2, arXiv 2405.14867, without its adversarial part). The
steps before the last go on regressing on the teacher, one of them in each walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from .checkpoint import load_transformer
from .distill import Distillation, Distiller
from .flow import guided, noised, predict, shifted, spread
from .learner import Learner
from .processes import Processes
from .train import command, learning_rate_fall


@dataclass(frozen=True)
class Matching(Distillation):
    """`student` is where the student starts, `initial` the teacher, which the critic starts from."""

    student: str = ""  # empty: the teacher
    noise_shift: float = 3.0  # of the noise that videos are judged in
    critic_draws: int = 2  # noise levels of each video that the critic learns from
    critic_muon_lr: float = 0.004
    critic_adam_lr: float = 4e-4
    muon_lr: float = 0.0015
    adam_lr: float = 1.5e-4
    average: float = 0.98


class Matcher(Distiller):
    """A distiller with a critic."""

    training: Matching

    def __init__(self, matching: Matching, processes: Processes) -> None:
        """The student, its teacher and its critic."""
        super().__init__(matching, processes)
        if matching.student:
            weights = load_transformer(Path(matching.student), matching.device).state_dict()
            self.learner.model.load_state_dict(weights)
            self.average.load_state_dict(weights)
        self.critic = Learner(
            load_transformer(Path(matching.initial), matching.device),
            matching.critic_muon_lr,
            matching.critic_adam_lr,
            compiled=matching.compile,
        )

    def state(self) -> dict[str, Any]:
        """With the critic's."""
        return super().state() | {"critic": self.critic.state()}

    def load(self, state: dict[str, Any]) -> None:
        """With the critic's."""
        super().load(state)
        self.critic.load(state["critic"])

    def backward(self, size: int, canvas: int, seed: tuple[int, ...]) -> float:
        """Gradients of the student and of the critic along one walk; returns the student's loss."""
        x, text, generator = self.draw(size, canvas, seed)
        *stretches, (last, _) = pairwise(self.sigmas())
        loss = torch.zeros((), device=x.device)
        chosen = int(torch.randint(len(stretches), (), generator=generator)) if stretches else None
        for i, (now, then) in enumerate(stretches):
            if i == chosen:
                loss, v = self.regress(x, now, then, text)
            else:
                with torch.no_grad(), self.precision():
                    v = predict(self.learner.forward, x, now.expand(size), text)
            x = x + (then - now) * v
        with self.precision():
            video = x - last * predict(self.learner.forward, x, last.expand(size), text)
        loss = loss + (video - self.likelier(video.detach(), text, generator)).square().mean() / 2
        loss.backward()
        for _ in range(self.training.critic_draws):
            self.criticize(video.detach(), text, generator)
        return float(loss.detach())

    @torch.no_grad()
    def likelier(self, video: torch.Tensor, text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """`video` [n, 16, t, h, w] moved by as much as the teacher's and the critic's guesses of it differ when noise
        hides it, in units of how far off the teacher's is (DMD, arXiv 2311.18828, equations 7 and 8)."""
        noisy, sigma, _ = self.hide(video, generator)
        with self.precision():
            real = guided(self.teacher, noisy, sigma, text, self.empty, self.training.guidance)
            fake = predict(self.critic.forward, noisy, sigma, text)
        wide = spread(sigma)
        distance = (video - (noisy - wide * real)).abs().mean(dim=(1, 2, 3, 4), keepdim=True)
        return video - wide * (real - fake) / distance.clamp_min(1e-3)

    def criticize(self, video: torch.Tensor, text: torch.Tensor, generator: torch.Generator) -> None:
        """The critic's gradients of the flow-matching loss on the student's `video`."""
        noisy, sigma, noise = self.hide(video, generator)
        with self.precision():
            v = predict(self.critic.forward, noisy, sigma, text)
        loss = (v - (noise - video)).square().mean() / self.training.critic_draws
        loss.backward()  # type: ignore[no-untyped-call]

    def hide(self, video: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`video` in noise, its sigmas [n] and the noise."""
        # Not to either end: there is nothing to tell.
        u = 0.02 + 0.96 * torch.rand(len(video), generator=generator)
        sigma = shifted(u, self.training.noise_shift).to(video.device)
        noise = torch.randn(video.shape, generator=generator).to(video.device)
        return noised(video, noise, sigma), sigma, noise

    def update(self) -> None:
        """The critic's, at its full rate from the first step on, while the student's rises; then the student's."""
        self.processes.average_gradients(self.critic.model.parameters())
        self.critic.update(learning_rate_fall(self.step, self.training))
        super().update()


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    command(Matcher, Matching, "Sharpen a few-step student (--student) of a teacher (--initial).", arguments)


if __name__ == "__main__":
    main()
