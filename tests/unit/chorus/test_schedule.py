import pytest
import torch

from chorus_batch.chorus.errors import UnsupportedSettings
from chorus_batch.chorus.schedule import make_scheduler, noise_levels


@pytest.mark.parametrize("steps", [1, 4, 20, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
def test_euler_walks_the_levels(steps: int, shift: float) -> None:
    scheduler = make_scheduler("euler", shift)
    scheduler.set_timesteps(steps)
    expected = torch.tensor(noise_levels(steps, shift), dtype=torch.float64)
    torch.testing.assert_close(scheduler.sigmas.double(), expected, rtol=0, atol=2e-7)
    assert torch.equal(scheduler.timesteps, scheduler.sigmas[:-1] * 1000)
    assert scheduler.sigmas[0] == 1
    assert scheduler.sigmas[-1] == 0


def test_the_distilled_wan_schedule_comes_out() -> None:
    """The four levels of LightX2V's 4-step Wan2.1 at shift 5."""
    levels = noise_levels(4, 5.0)
    assert levels == (1.0, 0.9375, pytest.approx(5 / 6, abs=1e-15), 0.625, 0.0)
    scheduler = make_scheduler("euler", 5.0)
    scheduler.set_timesteps(4)
    assert torch.equal(scheduler.sigmas, torch.tensor(levels))
    assert scheduler.timesteps.tolist() == pytest.approx([1000, 937.5, 833.3333, 625], abs=1e-4)


def test_a_distilled_step_is_lightx2vs() -> None:
    """Its update, x0 = x - sigma[i]*v and then x0 + sigma[i+1]*v, is the Euler step; the last returns x0."""
    scheduler = make_scheduler("euler", 5.0)
    scheduler.set_timesteps(4)
    scheduler.set_begin_index(0)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 16, 3, 4, 4, generator=generator)
    levels = noise_levels(4, 5.0)
    for timestep, now, after in zip(scheduler.timesteps, levels, levels[1:], strict=False):
        v = torch.randn(x.shape, generator=generator)
        expected = x - now * v + after * v
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["unipc", "dpm++"])
def test_the_multistep_schedulers_walk_nearly_the_same_levels(name: str) -> None:
    """So that boundaries by noise level mean the same for them."""
    scheduler = make_scheduler(name, 5.0)
    scheduler.set_timesteps(50)
    assert scheduler.sigmas.tolist() == pytest.approx(noise_levels(50, 5.0), abs=5e-3)
    assert scheduler.sigmas[-1] == 0


def test_one_euler_step_is_the_formula() -> None:
    scheduler = make_scheduler("euler", 3.0)
    scheduler.set_timesteps(4)
    scheduler.set_begin_index(2)
    x, v = torch.randn(2, 1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(5))
    after = scheduler.step(v, scheduler.timesteps[2], x, return_dict=False)[0]
    assert torch.equal(after, x + (scheduler.sigmas[3] - scheduler.sigmas[2]) * v)


def test_explicit_sigmas_stay_diffusers_own() -> None:
    scheduler = make_scheduler("euler", 1.0)
    scheduler.set_timesteps(sigmas=[0.9, 0.5])
    assert scheduler.sigmas.tolist() == pytest.approx([0.9, 0.5, 0.0])


def test_an_unknown_scheduler_is_refused() -> None:
    with pytest.raises(UnsupportedSettings, match="ddim"):
        make_scheduler("ddim", 3.0)
